"""Pins the command lines by which SGLang and vLLM are started, without starting them (tests/engines does).

Without it a setting of the form would not reach the server, or vLLM would give log-probs of another distribution.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import uuid
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError
from safetensors.torch import save_file

from rollouts_core.config import Config, DeploymentConfig, EngineConfig, EngineKind, ModelConfig
from rollouts_core.engine_kinds import ENGINES
from rollouts_core.engines.launch import MAX_SOCKET_PATH, check_host, exec_engine, render_launch
from rollouts_core.engines.transfer.checksums import write_untied
from rollouts_core.errors import CheckpointError, ConfigError
from rollouts_core.job import InputModel, ServeJob
from tests.kit.waiting import wait_until


def job_of(engine: dict[str, Any], **deployment: Any) -> ServeJob:  # Any: settings of every type
    return ServeJob(
        model=InputModel(name="base", model=ModelConfig(path="/models/m"), digest=""),
        port=30000,
        context_length=900,
        engine=EngineConfig.model_validate(engine),
        deployment=DeploymentConfig.model_validate(deployment),
    )


def option(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


@pytest.mark.parametrize(
    ("kind", "context", "gpus", "running"),
    [
        ("sglang", "--context-length", "--tp-size", "--max-running-requests"),
        ("vllm", "--max-model-len", "--tensor-parallel-size", "--max-num-seqs"),
    ],
)
@pytest.mark.parametrize("on_gpu", [True, False])
def test_every_setting_reaches_the_servers_command_line(
    kind: str, context: str, gpus: str, running: str, on_gpu: bool
) -> None:
    engine = {"kind": kind, "python": "/opt/e/bin/python", "dtype": "bfloat16", "extra_args": ["--seed", "3"]}
    job = job_of(engine, engine_gpu_ranks=[2, 3], max_running_requests=7)
    argv = render_launch(job, Path("/models/m"), on_gpu=on_gpu).argv
    assert argv[0] == "/opt/e/bin/python"
    assert "/models/m" in argv
    assert option(argv, "--port") == "30000"
    assert option(argv, "--dtype") == "bfloat16"
    assert (option(argv, context), option(argv, gpus), option(argv, running)) == ("900", "2", "7")
    assert argv[-2:] == ("--seed", "3")


def test_servers_are_started_for_adapters_of_models_that_they_are_known_to_adapt(tmp_path: Path) -> None:
    def arguments(kind: str, architecture: str, *, on_gpu: bool = True) -> tuple[str, ...]:
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "dtype": "bfloat16"}))
        job = job_of({"kind": kind}).model_copy(update={"adapter_rank": 20})
        return render_launch(job, tmp_path, on_gpu=on_gpu).argv

    for kind in ("sglang", "vllm"):
        assert "--enable-lora" not in arguments(kind, "MixtralForCausalLM")
        assert option(arguments(kind, "Qwen3ForCausalLM"), "--max-lora-rank") == "32"
    assert "--enable-lora" in arguments("vllm", "Qwen3ForCausalLM", on_gpu=False)
    assert "--enable-lora" not in arguments("sglang", "Qwen3ForCausalLM", on_gpu=False)


def test_vllm_gives_the_logprobs_of_what_it_samples_from_and_takes_updates() -> None:
    command = render_launch(job_of({"kind": "vllm", "dtype": "float16"}), Path("/models/m"), on_gpu=True)
    assert option(command.argv, "--logprobs-mode") == "processed_logprobs"
    assert command.env["VLLM_SERVER_DEV_MODE"] == "1"


def test_a_server_for_people_takes_texts_and_no_weights() -> None:
    for kind in ("sglang", "vllm"):
        job = job_of({"kind": kind, "dtype": "float16"}).model_copy(update={"served_name": "mine", "context_length": 0})
        command = render_launch(job, Path("/models/m"), on_gpu=False)
        assert option(command.argv, "--served-model-name") == "mine"
        assert not {"--skip-tokenizer-init", "--context-length", "--max-total-tokens"} & {*command.argv}
        assert "VLLM_SERVER_DEV_MODE" not in command.env
        check_host(job.model_copy(update={"host": "0.0.0.0"}), "sesame")


def test_only_on_a_cpu_are_the_engines_told_to_use_one() -> None:
    job = job_of({"kind": "sglang", "dtype": "float32"}, engine_threads=3)
    on_gpu, on_cpu = (render_launch(job, Path("/models/m"), on_gpu=on_gpu) for on_gpu in (True, False))
    assert "--device" not in on_gpu.argv and on_gpu.env == {}
    assert option(on_cpu.argv, "--device") == "cpu" and on_cpu.env["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("config", "dtype"),
    [({"dtype": "bfloat16"}, "bfloat16"), ({"torch_dtype": "torch.float16"}, "float16"), ({}, "bfloat16")],
)
def test_an_automatic_dtype_is_spelled_out_from_the_models_configuration(
    tmp_path: Path, config: dict[str, str], dtype: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = render_launch(job_of({"kind": "vllm"}), tmp_path, on_gpu=True).argv
    assert option(argv, "--dtype") == dtype


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_on_a_gpu_a_checkpoint_in_float32_is_served_in_bfloat16_unless_float32_is_asked_for(
    tmp_path: Path, kind: EngineKind
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32"}))
    auto, asked = job_of({"kind": kind}), job_of({"kind": kind, "dtype": "float32"})
    assert option(render_launch(auto, tmp_path, on_gpu=True).argv, "--dtype") == "bfloat16"
    assert option(render_launch(auto, tmp_path, on_gpu=False).argv, "--dtype") == "float32"
    assert option(render_launch(asked, tmp_path, on_gpu=True).argv, "--dtype") == "float32"


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_no_list_of_processes_shows_the_key(tmp_path: Path, kind: EngineKind) -> None:
    key = 'it\'s \\ "secret"'
    render_key = ENGINES[kind].render_key
    assert render_key
    secret = render_key(key, tmp_path)
    assert not any("secret" in argument for argument in secret.arguments)
    if kind == "vllm":
        assert secret.env == {"VLLM_API_KEY": key}
        return
    file = Path(option(secret.arguments, "--config"))
    assert yaml.safe_load(file.read_text()) == {"api-key": key}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("kind", "api_key", "message"),
    [
        ("sglang", "", "0.0.0.0 is reachable from other machines, so the server needs an API key"),
        ("vllm", "k", "the development endpoints of vLLM replace weights and run code without a key"),
        ("sglang", "k", ""),
    ],
)
def test_beyond_this_machine_no_engine_runs_without_protection(kind: str, api_key: str, message: str) -> None:
    job = job_of({"kind": kind}).model_copy(update={"host": "0.0.0.0"})
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_host(job, api_key)
    check_host(job_of({"kind": kind}), "")


@pytest.mark.parametrize(("kind", "flag"), [("sglang", "--enable-memory-saver"), ("vllm", "--enable-sleep-mode")])
def test_an_engine_on_the_trainers_gpus_is_started_so_that_it_can_hand_memory_over(kind: str, flag: str) -> None:
    engine = {"kind": kind, "dtype": "bfloat16"}
    assert flag in render_launch(job_of(engine, colocated=True), Path("/models/m"), on_gpu=True).argv
    assert flag not in render_launch(job_of(engine), Path("/models/m"), on_gpu=True).argv
    with pytest.raises(ConfigError, match=r"deployment\.colocated: this machine has no GPU"):
        render_launch(job_of(engine, colocated=True), Path("/models/m"), on_gpu=False)


@pytest.mark.parametrize(("kind", "name"), [("sglang", "--mem-fraction-static"), ("vllm", "--gpu-memory-utilization")])
def test_an_engines_share_of_the_memory_reaches_the_server_and_an_argument_of_the_user_comes_last(
    kind: str, name: str
) -> None:
    engine = {"kind": kind, "dtype": "bfloat16", "extra_args": [name, "0.5"]}
    job = job_of(engine, engine_memory_share=0.62)
    argv = render_launch(job, Path("/models/m"), on_gpu=True).argv
    assert option(argv, name) == "0.62" and argv[-2:] == (name, "0.5")
    assert name not in render_launch(job_of({"kind": kind, "dtype": "bfloat16"}), Path("/models/m"), on_gpu=True).argv


@pytest.mark.parametrize(("kind", "way"), [("embedded", "nccl"), ("embedded", "tensors"), ("vllm", "tensors")])
def test_weights_are_sent_only_in_ways_that_the_engine_has(kind: EngineKind, way: str) -> None:
    for other in ENGINES[kind].transfers:
        assert EngineConfig(kind=kind, weight_transfer=other).weight_transfer == other
    with pytest.raises(ValidationError, match=rf'"{way}" is not supported by engines of the kind {kind}'):
        EngineConfig.model_validate({"kind": kind, "weight_transfer": way})


def test_vllm_has_the_receiver_where_it_is_sent_weights() -> None:
    engine = {"kind": "vllm", "dtype": "bfloat16"}
    auto = render_launch(job_of(engine), Path("/models/m"), on_gpu=True)
    sent = render_launch(job_of({**engine, "weight_transfer": "nccl"}), Path("/models/m"), on_gpu=True)
    assert "--worker-extension-cls" not in auto.argv
    module, _, _ = option(sent.argv, "--worker-extension-cls").partition(".")
    assert Path(sent.env["PYTHONPATH"], f"{module}.py").is_file()


def test_a_router_is_one_of_sglang() -> None:
    assert EngineConfig(router_url="http://127.0.0.1:30100").router_url == "http://127.0.0.1:30100"
    with pytest.raises(ValidationError, match=r"router_url is a setting of SGLang's router, but the engine is vllm"):
        EngineConfig(kind="vllm", router_url="http://127.0.0.1:30100")
    with pytest.raises(ValidationError, match="router_url"):
        EngineConfig(router_url="127.0.0.1:30100")
    with pytest.raises(ValidationError, match=r"router_python is a setting of SGLang's router, but the engine is vllm"):
        EngineConfig(kind="vllm", router_python="/router/bin/python")
    with pytest.raises(ValidationError, match="remove one of them"):
        EngineConfig(router_url="http://127.0.0.1:30100", router_python="/router/bin/python")


def test_nccl_is_refused_where_engine_and_trainer_share_a_gpu() -> None:
    settings = {
        "model": {"path": "/m"},
        "data": {"prompts": "p", "selection": "s", "heldout": "h"},
        "mode": "rl",
        "deployment": {"colocated": True},
    }
    sglang = {"kind": "sglang", "weight_transfer": "tensors"}
    assert Config.model_validate({**settings, "rollout": {"engine": sglang}}).deployment.colocated
    for kind, other in (("sglang", "tensors"), ("vllm", "auto")):
        with pytest.raises(ValidationError, match=rf'share GPUs.*set rollout\.engine\.weight_transfer = "{other}"'):
            Config.model_validate({**settings, "rollout": {"engine": {"kind": kind, "weight_transfer": "nccl"}}})


def test_a_key_among_the_arguments_is_refused() -> None:
    for extra_args in (["--api-key", "k"], ["--api-key=k"], ["--api_key", "k"], ["--api-k=k"], ["--admin-api-key=k"]):
        with pytest.raises(ValidationError, match=r"set engine\.api_key_variable to the variable"):
            EngineConfig(kind="vllm", extra_args=tuple(extra_args))


def test_a_password_in_the_address_of_a_router_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"(?s)router_url.*contains a user or password"):
        EngineConfig(kind="sglang", router_url="http://me:secret@router:30100")


def test_an_interpreter_that_cannot_be_run_is_named_with_the_setting(quickstart_dir: Path, tmp_path: Path) -> None:
    job = job_of({"kind": "sglang", "python": "/nowhere/python"})
    model = job.model.model_copy(update={"model": ModelConfig(path=str(quickstart_dir / "base_model"))})
    with pytest.raises(ConfigError, match=r"rollout\.engine\.python: /nowhere/python cannot be started"):
        exec_engine(job.model_copy(update={"model": model}), tmp_path)


def test_vllm_serves_a_tied_model_whose_embedding_has_another_name_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2", "tie_word_embeddings": true}')
    save_file({"transformer.wte.weight": torch.zeros(4, 2)}, tmp_path / "gpt2" / "model.safetensors")
    job = job_of({"kind": "vllm", "python": "/nowhere/python"})
    model = job.model.model_copy(update={"model": ModelConfig(path=str(tmp_path / "gpt2"))})
    with pytest.raises(ConfigError, match="/nowhere/python cannot be started"):  # the command was made
        exec_engine(job.model_copy(update={"model": model}), tmp_path)
    assert not (tmp_path / "served_model").exists()
    with pytest.raises(CheckpointError, match=r"has no model\.embed_tokens\.weight, so no separate head"):
        write_untied(tmp_path / "gpt2", tmp_path / "copy")


FAKE_ENGINE = """#!/bin/sh
touch "$TMPDIR/socket"
(echo "$TMPDIR" > "$FOLDER/scratch"; exec sleep 60) &
exec sleep 60
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_temporary_folder_long", [False, True])
def test_a_killed_engine_leaves_no_sockets_behind(
    quickstart_dir: Path, tmp_path: Path, is_temporary_folder_long: bool
) -> None:
    """Those of vLLM and SGLang have other names at each start: in the end they would fill the folder of the system."""
    python, base = tmp_path / "python", tmp_path / ("long" * 20 if is_temporary_folder_long else "t")
    python.write_text(FAKE_ENGINE)
    python.chmod(0o755)
    base.mkdir()
    job = job_of({"kind": "vllm", "python": str(python)})
    model = job.model.model_copy(update={"model": ModelConfig(path=str(quickstart_dir / "base_model"))})
    (tmp_path / "job.json").write_text(job.model_copy(update={"model": model}).model_dump_json())
    process = subprocess.Popen(
        [sys.executable, "-m", "rollouts_core", "serve", str(tmp_path / "job.json")],
        env={**os.environ, "TMPDIR": str(base), "FOLDER": str(tmp_path)},
        start_new_session=True,
    )
    try:
        wait_until(lambda: (tmp_path / "scratch").exists() and (tmp_path / "scratch").read_text() != "", timeout_s=120)
        scratch = Path((tmp_path / "scratch").read_text().strip())
        assert len(f"{scratch}/") + len(str(uuid.uuid4())) <= MAX_SOCKET_PATH
        assert (scratch / "socket").exists()
        assert scratch.stat().st_mode & 0o777 == 0o700
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert (scratch / "socket").exists(), "another of its processes still uses it"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
    wait_until(lambda: not scratch.exists(), timeout_s=120)


@pytest.mark.parametrize("setting", [{"python": "/x"}, {"extra_args": ["-x"]}, {"dtype": "bfloat16"}])
def test_the_embedded_engine_refuses_what_it_would_ignore(setting: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match='is a setting for the kinds "sglang" and "vllm": remove it'):
        EngineConfig.model_validate({"kind": "embedded", **setting})
