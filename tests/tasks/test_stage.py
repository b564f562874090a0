"""Pins with which variables a stage's process starts, its GPUs, keys and allocator, and which GPUs it waits for.

Without it a stage would compute on another's GPU, train a fifth slower, or wait, without anybody noticing.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rollouts.infra.jobs import FIRST_GPU, job_status, start_or_attach
from rollouts.infra.node import Node
from rollouts.infra.session import LocalSession
from rollouts.infra.supervisor.gpu_slots import GPU_LOCKS_VARIABLE
from rollouts.tasks.node_job import (
    COUNTED_BY_BUS,
    gpus_of,
    gpus_of_engines,
    job_environment,
    job_spec,
    variables_of_place,
)
from rollouts.tasks.progress import StageProgress
from rollouts.tasks.records import Outcome, RunScope, Stage
from rollouts.tasks.stage import follow_until_finished, label_models, run_until_it_fits
from rollouts_core.backends.allocator import KEPT_MEMORY
from rollouts_core.keys import OWN_KEY_VARIABLE
from tests.infra.shell_jobs import shell_spec
from tests.kit.waiting import wait_until


def stage(kind: str, *, engine: str = "embedded", data: str = "/data.jsonl", **deployment: tuple[int, ...]) -> Stage:
    ranks = {"trainer_gpu_ranks": (), "engine_gpu_ranks": (), **deployment}
    return Stage(
        name=kind,
        fingerprint="f",
        run_dir="/nowhere",
        job={"kind": kind, "deployment": ranks, "engine": {"kind": engine}, "data": [{"path": data}]},
        num_steps=1,
        timeout_s=1,
    )


@pytest.mark.parametrize(
    ("kind", "engine", "gpus"),
    [
        ("sft", "", "0,1"),
        ("rl", "vllm", "0,1"),
        ("eval", "embedded", "0,1"),  # where a loss, or a reward by a classifier, is computed
        ("eval", "vllm", "2"),
        ("serve", "vllm", "2"),
    ],
)
def test_a_stage_sees_its_own_gpus(kind: str, engine: str, gpus: str) -> None:
    placed, anywhere = stage(kind, trainer_gpu_ranks=(0, 1), engine_gpu_ranks=(2,)), stage(kind)
    for each in (placed, anywhere):
        each.job["rollout"] = {"engine": {"kind": engine}}
    assert job_environment(placed)["CUDA_VISIBLE_DEVICES"] == gpus
    assert "CUDA_VISIBLE_DEVICES" not in job_environment(anywhere)
    for each in (placed, anywhere):  # else the first GPU is another than the one whose lock was taken
        assert job_environment(each)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize(("path", "is_given"), [("team/gated", True), ("/models/own", False)])
def test_the_hubs_token_goes_to_a_job_whose_model_is_of_the_hub(
    path: str, is_given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "token")
    model = {"name": "base", "model": {"path": path}}
    trained, scored = stage("rl"), stage("eval")
    trained.job.update(model=model, node_rank=1)  # each machine loads it
    scored.job.update(checkpoints=[model], rollout={"engine": {"kind": "embedded"}})
    for each in (trained, scored):
        assert ("HF_TOKEN" in job_environment(each)) is is_given


def test_models_of_the_hub_lie_below_the_root_of_another_machine() -> None:
    found = variables_of_place("/volume/rollouts/code/0123456789abcdef")
    assert found == {
        "PYTHONPATH": "/volume/rollouts/code/0123456789abcdef",
        "ROLLOUTS_HUB_HOME": "/volume/rollouts/cache/huggingface",
    }
    assert variables_of_place("") == {}


def test_the_hubs_token_goes_only_to_a_job_that_reads_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "token")
    assert job_environment(stage("sft", data="team/private"))["HF_TOKEN"] == "token"
    assert "HF_TOKEN" not in job_environment(stage("sft")) | job_environment(stage("rl"))
    follower = stage("sft", data="team/private")
    follower.job["node_rank"] = 1  # the leader reads the data
    assert "HF_TOKEN" not in job_environment(follower)
    monkeypatch.delenv("HF_TOKEN")
    assert "HF_TOKEN" not in job_environment(stage("sft", data="team/private"))


def with_ranks(kind: str, trainer: tuple[int, ...], engines: tuple[int, ...], **job: object) -> Stage:
    """A stage with what decides which GPUs it waits for."""
    made = stage(kind, trainer_gpu_ranks=trainer, engine_gpu_ranks=engines)
    deployment = {**made.job["deployment"], "trainer_processes": job.pop("trainer_processes", 0)}
    rollout = {"engine": {"kind": job.pop("engine", "vllm")}}
    return made.model_copy(
        update={"job": {**made.job, "deployment": deployment, "rollout": rollout, "rollouts": None, **job}}
    )


ALONE = Node(name="here", kind="local", root="/nowhere", python="python")
WITH_ENGINES_ELSEWHERE = replace(ALONE, engine_nodes=(replace(ALONE, name="there"),))


@pytest.mark.parametrize(
    ("waiting", "gpus"),
    [
        (with_ranks("sft", (0, 1), (2,)), ("0", "1")),
        (with_ranks("eval", (0, 1), (2,), engine="embedded"), ("0", "1")),
        (with_ranks("eval", (0, 1), (2, 3)), ("2", "3")),
        (with_ranks("eval", (0, 1), ()), (FIRST_GPU,)),
        (with_ranks("sft", (), (2,)), (FIRST_GPU,)),
        (with_ranks("sft", (), (), trainer_processes=1), (FIRST_GPU,)),
        (with_ranks("sft", (), (), trainer_processes=2), ()),
        (with_ranks("rl", (0, 1), (2,)), ("0", "1", "2")),
        (with_ranks("rl", (0, 1), (0, 1)), ("0", "1")),
        (with_ranks("rl", (), ()), (FIRST_GPU,)),
        (with_ranks("rl", (1,), ()), ("1", FIRST_GPU)),
        (with_ranks("rl", (1,), (2,), engine="embedded"), ("1",)),
        (with_ranks("rl", (1,), (2,), rollouts={"path": "recorded"}), ("1",)),
    ],
)
def test_a_stage_waits_for_the_gpus_that_it_uses_and_an_rl_for_those_of_its_engines_too(
    waiting: Stage, gpus: tuple[str, ...]
) -> None:
    assert gpus_of(waiting, ALONE) == gpus


def test_a_further_machine_of_a_training_waits_for_its_trainers_gpus_alone() -> None:
    assert gpus_of(with_ranks("rl", (0, 1), (2,), node_rank=1), ALONE) == ("0", "1")


def test_a_further_machine_of_a_training_has_the_units_key_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", "secret")
    rl = with_ranks("rl", (), ())
    rollout = {"engine": {"kind": "sglang", "api_key_variable": "ENGINE_KEY"}}
    together = {**rl.job, "rollout": rollout, "further_trainers": [{}]}
    del together["engine"]
    for rank, keys in ((0, {"ENGINE_KEY", OWN_KEY_VARIABLE}), (1, {OWN_KEY_VARIABLE})):
        placed = rl.model_copy(update={"job": {**together, "node_rank": rank}})
        found = job_environment(placed, {OWN_KEY_VARIABLE: "ours"}).keys()
        assert found - (KEPT_MEMORY | COUNTED_BY_BUS).keys() == keys


def test_engines_on_machines_of_their_own_hold_gpus_there() -> None:
    rl = with_ranks("rl", (0, 1), (2,))
    assert gpus_of(rl, WITH_ENGINES_ELSEWHERE) == ("0", "1") and gpus_of_engines(rl) == ("2",)
    assert gpus_of_engines(with_ranks("rl", (0,), ())) == (FIRST_GPU,)
    assert gpus_of_engines(with_ranks("rl", (0,), (1,), engine="embedded")) == ()


@pytest.mark.slow
def test_the_progress_of_a_stage_says_for_whom_it_waits_and_when_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPU_LOCKS_VARIABLE, str(tmp_path / "locks"))
    session, said = LocalSession(sys.executable), io.StringIO()
    script = "while [ ! -e ../end ]; do sleep 0.02; done; echo '{}' > result.json"
    first, second = (shell_spec(tmp_path / each, script, gpus=("0",), run_name=each) for each in ("first", "second"))
    start_or_attach(session, first)
    status = start_or_attach(session, second)
    with StageProgress("sft", num_steps=1, console=Console(file=said, width=200)) as progress:
        following = threading.Thread(
            target=follow_until_finished, args=(session, status, progress), kwargs={"store": ""}
        )
        following.start()
        try:
            wait_until(lambda: f"waits for GPU 0, held by run first (job {first.run_dir})" in said.getvalue())
            assert "got its GPUs" not in said.getvalue()
        finally:
            (tmp_path / "end").touch()
            following.join()
    assert said.getvalue().splitlines()[1].startswith("sft            got its GPUs after")


def test_the_progress_of_a_stage_has_the_warnings_of_its_attempt(tmp_path: Path) -> None:
    session, said = LocalSession(sys.executable), io.StringIO()
    lines = [json.dumps({"event": "warning", "attempt": n, "message": f"warning of {n}"}) for n in (0, 1)]
    script = f"printf '%s\\n' {shlex.join(lines)} >> events.jsonl; echo '{{}}' > result.json"
    status = start_or_attach(session, shell_spec(tmp_path / "sft", script))
    with StageProgress("sft", num_steps=1, console=Console(file=said, width=200)) as progress:
        follow_until_finished(session, status, progress, store="")
    assert said.getvalue().split() == ["sft", "warning", "of", "1"]


def test_scored_models_are_named_by_what_they_are(tmp_path: Path) -> None:
    session, said = LocalSession(sys.executable), io.StringIO()
    evaluated = stage("eval").model_copy(update={"name": "evaluate"})
    evaluated.job.update(checkpoints=[{"name": "base", "step": 0}, {"name": "sft", "step": 1000}])
    events = [{"event": "scored", "attempt": 1, "name": name, "score": 0.5} for name in ("base", "sft", "other")]
    lines = shlex.join(json.dumps(event) for event in events)
    script = f"printf '%s\\n' {lines} >> events.jsonl; echo '{{}}' > result.json"
    status = start_or_attach(session, shell_spec(tmp_path / "evaluate", script))
    with StageProgress("evaluate", console=Console(file=said, width=200)) as progress:
        follow_until_finished(session, status, progress, store="", labels=label_models(evaluated))
    named = [" ".join(line.split()[1:-3]) for line in said.getvalue().splitlines()]
    assert named == ["Base", "SFT step 1000", "other"]


def test_a_stage_says_what_was_lowered_and_starts_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On several machines, whose jobs can only start together. On one machine the supervisor restarts the job."""
    session, said = LocalSession(sys.executable), io.StringIO()
    line = json.dumps({"event": "less_memory", "attempt": 1, "message": "micro_batch_size = 2"})
    first = f"echo {shlex.quote(line)} > events.jsonl; exit 76"
    script = f"if [ -e events.jsonl ]; then echo '{{}}' > result.json; else {first}; fi"

    def follow(stage: Stage, scope: RunScope, node: Node, progress: StageProgress) -> Outcome:
        status = start_or_attach(session, shell_spec(tmp_path / "sft", script))
        follow_until_finished(session, status, progress, store="")
        return "ran"

    monkeypatch.setattr("rollouts.tasks.stage.run_on_node", follow)
    scope = RunScope(run_id="0" * 32, run_name="small", store=str(tmp_path))
    with StageProgress("sft", num_steps=1, console=Console(file=said, width=200)) as progress:
        assert run_until_it_fits(stage("sft"), scope, ALONE, progress) == "ran"
    assert said.getvalue().split() == ["sft", "micro_batch_size", "=", "2"]
    assert job_status(session, str(tmp_path / "sft")).attempt == 2


@pytest.mark.parametrize(
    ("kind", "others", "expected"), [("sft", [], 76), ("rl", [], 76), ("evaluate", [], 0), ("sft", [{}], 0)]
)
def test_a_training_of_one_machine_is_restarted_by_its_supervisor_if_it_asks_for_it(
    kind: str, others: list[dict[str, str]], expected: int, tmp_path: Path
) -> None:
    placed = stage(kind)
    placed.job["further_trainers"] = others
    scope = RunScope(run_id="0" * 32, run_name="small", store=str(tmp_path))
    spec = job_spec(placed, LocalSession(sys.executable), scope, gpus=(), known_keys={OWN_KEY_VARIABLE: "ours"})
    assert spec.restart_code == expected


@pytest.mark.parametrize(("kind", "expected"), [("sft", True), ("rl", True), ("evaluate", False), ("serve", True)])
def test_trainers_and_the_embedded_engine_keep_freed_memory(kind: str, expected: bool) -> None:
    assert (job_environment(stage(kind)).items() >= KEPT_MEMORY.items()) is expected


def test_an_engine_of_others_gets_memory_as_it_is_used_to() -> None:
    assert job_environment(stage("serve", engine="vllm")) == COUNTED_BY_BUS


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists() or os.confstr("CS_GNU_LIBC_VERSION") is None, reason="glibc")
def test_glibc_understands_the_allocator_settings() -> None:
    program = (
        "import torch, re; torch.set_num_threads(1)\n"
        "resident = lambda: int(re.search(r'VmRSS:\\s+(\\d+)', open('/proc/self/status').read())[1]) // 1024\n"
        "before = resident(); pieces = [torch.zeros(1 << 20) for _ in range(64)]; del pieces\n"
        "print(resident() - before)"
    )
    kept = [
        int(subprocess.check_output([sys.executable, "-c", program], env={**os.environ, **variables}))
        for variables in ({}, KEPT_MEMORY)
    ]
    assert kept[0] < 64 < 200 < kept[1]
