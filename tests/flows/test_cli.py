"""Pins the `rollouts` command as a person meets it: its commands, their options and help, and what the short ones do.

Without it an option could vanish from the help, a configuration mean something else in JSON than in TOML, or a misspelt
key take ten seconds to be found because torch was loaded first.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from rollouts.flows.cli import app, explain_server, run_pipeline
from rollouts.flows.commands.status import LIVE_FILE
from rollouts.flows.deployments import PRESETS
from rollouts.flows.form import Pipeline, load_pipeline
from rollouts.flows.live import STATE_FILE
from rollouts.flows.overview import create_overview
from rollouts.flows.own_server.lend import ServerAddress
from rollouts.flows.pipeline import PipelineResult
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.ledger_file import LedgerFile
from rollouts.infra.node import SSHNode
from rollouts_core.errors import ConfigError
from rollouts_core.fingerprint import SEMANTICS_VERSION, fingerprint_job
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages.planning import base_model, sft_job
from tests.kit.commands import clean_environment, processes_of
from tests.kit.small_pipeline import small_settings, write_small_pipeline
from tests.kit.waiting import wait_until

SURFACE = {
    "run": ["CONFIG [KEY=VALUE]...", "--store", "--preset", "--deployment", "--name", "--fresh", "--port", "--json"],
    "evaluate": [
        *("CONFIG|RUN", "[MODEL] [KEY=VALUE]...", "--against", "--data", "--store", "--name", "--fresh", "--port"),
        *("--lm-eval", "--limit", "--include-path", "--lm-eval-args", "--harness-python", "--harness-wheels"),
        *("--engine", "--gpus", "--engine-python", "--engine-args", "--json"),
    ],
    "quickstart": ["--store", "--seed", "--port", "--json"],
    "init": [
        *("[CONFIG]", "--model", "--goal", "--sft", "--prompts", "--selection", "--heldout", "--reward", "--machine"),
        *("--python", "--gpu", "--max-usd", "--convert", "--force", "--store", "--json"),
    ],
    "preset": ["[NAME]", "--json"],
    "explain": ["[NAME]", "--json"],
    "completion": ["SHELL", "--json"],
    "validate": ["CONFIG [KEY=VALUE]...", "--store", "--preset", "--show", "--json"],
    "ui": ["--store", "--port", "--json"],
    "serve": [
        "MODEL",
        "--engine",
        "--host",
        "--port",
        "--threads",
        "--max-running-requests",
        "--context-length",
        "--gpus",
        "--engine-python",
        "--engine-install",
        "--engine-args",
        "--api-key",
        "--store",
        "--json",
    ],
    "chat": [
        *("MODEL", "[OTHER]", "--system", "--temperature", "--top-p", "--max-tokens", "--seed", "--threads", "--store"),
        "--json",
    ],
    "gpus": [
        *("--gpu", "--count", "--min-vram", "--max-price", "--disk", "--region"),
        *("--community", "--spot", "--min-cuda", "--provider", "--limit", "--credentials", "--store", "--json"),
    ],
    "nodes": ["--store", "--all", "--json"],
    "reap": ["--store", "--spare", "--other-store", "--json"],
    "finish": ["RUN", "--store", "--json"],
    "cancel": ["RUN", "--store", "--json"],
    "notify": ["[NAME]", "--url-variable", "--on", "--remove", "--store", "--json"],
    "credentials": ["[NAME]", "[VARIABLE]...", "--remove", "--store", "--json"],
    "prefect-yaml": ["CONFIG", "--pool", "--store", "--queue", "--job-variable", "--json"],
    "pull": ["URL", "DIR", "--json"],
    "up": ["[CONFIG]...", "--store", "--port", "--gpu-slots", "--keep-days", "--json"],
    "watch": ["--store", "--silent-after", "--json"],
    "down": ["--store", "--json"],
    "status": ["--store", "--json"],
    "prune": ["--store", "--days", "--max-gb", "--yes", "--json"],
    "plugins": ["--json"],
    "models": ["--store", "--json"],
    "runs": ["--store", "--limit", "--json"],
    "show": ["RUN|CONFIG", "[KEY=VALUE]...", "--store", "--all", "--json"],
    "samples": [
        *("RUN", "--store", "--step", "--model", "--reward", "--grep", "--prompt", "--limit", "--json"),
    ],
    "logs": ["RUN", "[STAGE]", "--store", "--follow", "--json"],
    "report": ["RUN", "--store", "--open", "--json"],
    "compare": ["RUN...", "--store", "--open", "--json"],
}
"""Every command with its arguments and options: other scripts depend on them, so they change only on purpose."""

URL = re.compile(r"http://127\.0\.0\.1:\d+[^\s]*")
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
PYTHON_CONFIG = """
from rollouts_core.config import Config, DataConfig, ModelConfig
from rollouts.flows.form import LocalNode, Pipeline, RunOptions

config = {content}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the small pipeline."""
    folder = tmp_path_factory.mktemp("cli") / "small"
    write_small_pipeline(folder)
    return folder


def help_of(*arguments: str) -> str:
    """What --help prints, on a wide terminal and without colours, with single spaces."""
    outcome = CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).invoke(app, [*arguments, "--help"])
    assert outcome.exit_code == 0, outcome.output
    return " ".join(ESCAPE.sub("", outcome.output).split())


def command_group() -> TyperGroup:
    """`rollouts`, with all its commands."""
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    return group


def test_every_command_gives_its_results_as_json() -> None:
    commands = command_group().commands.items()
    assert [name for name, each in commands if "as_json" not in {option.name for option in each.params}] == []


def test_what_a_command_prints_comes_as_an_object() -> None:
    listed = CliRunner().invoke(app, ["preset", "--json"])
    names = [json.loads(line)["name"] for line in listed.stdout.splitlines()]
    assert names == sorted(path.stem for path in PRESETS.glob("*.toml"))
    [shown] = CliRunner().invoke(app, ["preset", "quickstart", "--json"]).stdout.splitlines()
    assert json.loads(shown)["text"] == (PRESETS / "quickstart.toml").read_text()
    [script] = CliRunner().invoke(app, ["completion", "fish", "--json"]).stdout.splitlines()
    assert json.loads(script) == {"kind": "text", "text": CliRunner().invoke(app, ["completion", "fish"]).stdout}


def test_the_commands_and_their_options_are_these() -> None:
    found = {
        name: [option.opts[0] if option.opts[0].startswith("-") else option.metavar for option in command.params]
        for name, command in command_group().commands.items()
    }
    assert found == SURFACE


def test_the_help_names_every_command_with_what_it_does() -> None:
    shown = help_of()
    for name in SURFACE:
        assert re.search(rf" {name} [A-Z]\w+", shown), f"{name} is not explained in {shown}"


@pytest.mark.parametrize("name", SURFACE)
def test_the_help_of_a_command_names_every_option(name: str) -> None:
    shown = help_of(name)
    for option in SURFACE[name]:
        assert option in shown


@pytest.mark.parametrize("name", SURFACE)
def test_every_option_has_a_sentence(name: str) -> None:
    for option in command_group().commands[name].params:
        assert (getattr(option, "help", None) or "").endswith("."), f"{name} {option.name}"


def test_without_a_command_the_help_is_shown() -> None:
    outcome = CliRunner().invoke(app, [])
    assert outcome.exit_code == 2
    assert "Usage: " in outcome.output
    assert "quickstart" in outcome.output


def test_validate_says_what_it_checked_and_trains_nothing(folder: Path, tmp_path: Path) -> None:
    outcome = CliRunner().invoke(app, ["validate", str(folder / "small.toml"), "--store", str(tmp_path / "store")])
    assert outcome.exit_code == 0, outcome.output
    lines = outcome.stderr.splitlines()
    assert all(line.startswith("ok  ") for line in lines)
    for words in (
        "base_model: tokenizer with 29 tokens",
        "sft.jsonl: 300 demonstrations, 3384 trained tokens",
        "prompts.jsonl: 100 prompts",
        "selection.jsonl: 20 prompts",
        "heldout.jsonl: 20 prompts",
    ):
        assert sum(words in line for line in lines) == 1, f"{words} in {lines}"
    assert list((tmp_path / "store").iterdir()) == []


def test_checks_that_take_long_say_how_far_they_are(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollouts_core.checks.demonstrations.PROGRESS_INTERVAL_S", 0.0)
    outcome = CliRunner().invoke(app, ["validate", str(folder / "small.toml"), "--store", str(tmp_path / "store")])
    lines = [line for line in outcome.stderr.splitlines() if line.endswith("sft.jsonl: 299 of 300 rows read")]
    assert [line[:6] for line in lines] == ["ok    "], outcome.output


def test_what_somebody_should_look_at_is_said_last_and_is_no_refusal(folder: Path, tmp_path: Path) -> None:
    """Between thirty lines that begin with "ok" nobody reads that nothing will be learned."""
    settings = small_settings(training__sft__optim__lr=0.0, training__sft__policy={"lora": {"alpha": 8.0}})
    (folder / "doubtful.json").write_text(json.dumps(settings))
    outcome = CliRunner().invoke(app, ["validate", str(folder / "doubtful.json"), "--store", str(tmp_path / "store")])
    assert outcome.exit_code == 0, outcome.output
    assert [line.partition("  ")[2] for line in outcome.stderr.splitlines() if not line.startswith("ok  ")] == [
        "training.sft.optim.lr is 0, so the model does not change",
        "training.sft.policy.lora.alpha does nothing without lora.rank: all weights are trained",
        "2 warnings in all; warnings do not stop a run",
    ]
    assert [line.startswith("warn  ") for line in outcome.stderr.splitlines()[-4:]] == [False, True, True, True]


def test_validate_warns_of_a_training_that_older_code_finished(folder: Path, tmp_path: Path) -> None:
    config = load_pipeline(folder / "small.toml").config
    job = sft_job(base_model(config), config)
    name = f"sft-{fingerprint_job('sft', job, semantics=SEMANTICS_VERSION - 1)}"
    result = RunDirectory(tmp_path / "store" / "stages" / name).result
    result.parent.mkdir(parents=True)
    result.write_text("{}")
    outcome = CliRunner().invoke(app, ["validate", str(folder / "small.toml"), "--store", str(tmp_path / "store")])
    assert outcome.exit_code == 0, outcome.output
    assert next(line for line in outcome.stderr.splitlines() if line.startswith("warn  ")) == (
        f"warn  sft: {name} has the same settings and data, but an older version of rollouts trained it: the "
        "current version gives other results, so the run trains again"
    )


def test_the_store_of_the_configuration_is_used_unless_the_command_names_one(folder: Path, tmp_path: Path) -> None:
    config = folder / "with_store.json"
    config.write_text(json.dumps(small_settings(run__store=str(tmp_path / "configured"))))
    assert CliRunner().invoke(app, ["validate", str(config)]).exit_code == 0
    assert (tmp_path / "configured").is_dir()
    assert CliRunner().invoke(app, ["validate", str(config), "--store", str(tmp_path / "given")]).exit_code == 0
    assert (tmp_path / "given").is_dir()


@pytest.mark.parametrize("form", ["json", "dict", "pipeline"])
def test_a_configuration_means_the_same_in_every_form(folder: Path, form: str) -> None:
    expected = load_pipeline(folder / "small.toml")
    path = folder / ("same.json" if form == "json" else f"same_{form}.py")
    if form == "json":
        path.write_text(json.dumps(small_settings()))
    elif form == "dict":
        path.write_text(PYTHON_CONFIG.format(content=repr(small_settings())))
    else:
        settings = {key: value for key, value in small_settings().items() if key not in ("node", "run")}
        parts = f"config=Config(**{settings!r}), node=LocalNode(min_free_gb=0.1)"
        content = f"Pipeline({parts}, run=RunOptions(name='small', restarts=0))"
        path.write_text(PYTHON_CONFIG.format(content=content))
    assert load_pipeline(path) == expected


def test_a_python_file_may_define_only_the_core_settings(folder: Path) -> None:
    path = folder / "of my own.py"
    settings = {key: value for key, value in small_settings().items() if key not in ("node", "run")}
    path.write_text(PYTHON_CONFIG.format(content=f"Config(**{settings!r})"))
    pipeline = load_pipeline(path)
    assert pipeline.config == load_pipeline(folder / "small.toml").config
    assert pipeline.run.name == "of-my-own"


def test_what_a_record_in_a_python_file_refuses_is_said_in_the_words_of_its_check(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from rollouts_core.config import SFTTrainingConfig\n"
        "config = SFTTrainingConfig(num_steps=3, batch_size=7, micro_batch_size=2)\n"
    )
    with pytest.raises(ConfigError, match=r"mine\.py: SFTTrainingConfig: batch_size 7 is not a multiple of"):
        load_pipeline(path)


def test_paths_are_relative_to_the_configuration(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def paths_of(pipeline: Pipeline) -> list[str]:
        data = pipeline.config.data
        return [pipeline.config.model.path, str(data.sft), data.prompts, data.selection, data.heldout]

    monkeypatch.chdir(folder.parent)
    expected = [str(folder / name) for name in ("base_model", "sft.jsonl", "prompts.jsonl", "selection.jsonl")]
    assert paths_of(load_pipeline(Path("small/small.toml"))) == [*expected, str(folder / "heldout.jsonl")]


def test_every_path_of_a_python_file_is_relative_to_it(folder: Path) -> None:
    """Jobs run in folders of their own, where a path that stays relative names nothing."""
    changes = {
        "training__sft__resume_from": "stages/sft-1",
        "training__rl__resume_from": "stages/rl-1",
        "rollout__rewards": [{"name": "last_number"}, {"kind": "classifier", "model": "./grader"}],
    }
    settings = {key: value for key, value in small_settings(**changes).items() if key not in ("node", "run")}
    (folder / "paths.json").write_text(json.dumps(settings))
    (folder / "paths.py").write_text(PYTHON_CONFIG.format(content=f"Config(**{settings!r})"))
    config = load_pipeline(folder / "paths.py").config
    assert config == load_pipeline(folder / "paths.json").config
    assert config.training.rl.resume_from == str(folder / "stages" / "rl-1")
    assert config.rollout.rewards[1].model == str(folder / "grader")


def test_the_files_of_a_node_of_a_python_file_are_relative_to_it(folder: Path) -> None:
    """Who serves or calls it is in another folder."""
    settings = {key: value for key, value in small_settings().items() if key not in ("node", "run")}
    further = "({'host': 'b', 'python': '/venv/python', 'key_file': '~/second', 'address': '10.0.0.2'},)"
    parts = "host='a', address='10.0.0.1', python='/venv/python', key_file='keys/first', requirements='own.txt'"
    node = f"SSHNode({parts}, trainer_nodes={further})"
    content = f"Pipeline(config=Config(**{settings!r}), node={node}, run=RunOptions(name='small'))"
    path = folder / "node.py"
    path.write_text("from rollouts.infra.node import SSHNode\n" + PYTHON_CONFIG.format(content=content))
    loaded = load_pipeline(path).node
    assert isinstance(loaded, SSHNode)
    assert loaded.key_file == str(folder / "keys/first")
    assert loaded.requirements == str(folder / "own.txt")
    assert loaded.trainer_nodes[0].key_file == "~/second"


def test_a_python_file_that_imports_a_former_name_is_told_the_new_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [each for each in sys.path if not (Path(each) / "infra").is_dir()])  # the checkout
    monkeypatch.delenv("ROLLOUTS_CODE_PATH", raising=False)
    monkeypatch.chdir(folder)  # modules in the current folder may be imported, too
    path = folder / "former.py"
    path.write_text("from infra.node import SSHNode\n")
    with pytest.raises(ConfigError, match=r"former.py .*No module named 'infra'.*: import from rollouts.infra instead"):
        load_pipeline(path)


def test_the_help_without_commands_is_the_help_of_the_commands() -> None:
    """`rollouts --help` shows the first, which needs no imports."""
    wide = {"COLUMNS": "120", "TERMINAL_WIDTH": "120"}
    shown = [CliRunner(env=wide).invoke(each, ["--help"]).output for each in (create_overview(), app)]
    assert shown[0] == shown[1]


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_the_help_and_the_version_import_no_settings_and_no_commands(argument: str) -> None:
    """Importing them takes a second."""
    program = (
        "import atexit, sys\n"
        "atexit.register(lambda: sys.stderr.write(' '.join(sys.modules)))\n"
        f"sys.argv = ['rollouts', {argument!r}]\n"
        "from rollouts.flows.command import main; main()\n"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    modules = ended.stderr.split()
    own = {name for name in modules if name.startswith(("rollouts.", "rollouts_core."))}
    assert {name for name in own if name.count(".") == 2} <= {"rollouts.flows.command", "rollouts.flows.overview"} | {
        name for name in own if name.startswith("rollouts_core.system.")
    }
    assert not {"pydantic", "numpy", "httpx", "torch", "prefect", "yaml", "jinja2"} & set(modules)


def test_the_status_of_a_store_without_work_imports_no_settings_and_no_pages(tmp_path: Path) -> None:
    """Importing them takes a second."""
    with Ledger(tmp_path / LEDGER_FILE) as ledger:
        ledger.note_use("rl-aaaa", "1" * 32, run="small-11111111", num_steps=2)
    program = (
        "import atexit, sys\n"
        "atexit.register(lambda: sys.stderr.write(' '.join(sys.modules)))\n"
        f"sys.argv = ['rollouts', 'status', '--store', {str(tmp_path)!r}]\n"
        "from rollouts.flows.command import main; main()\n"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "server       none: rollouts up starts one" in ended.stdout
    heavy = {"rollouts_core.config", "rollouts.flows.form", "rollouts.flows.cli", "rollouts_core.report.live"}
    heavy |= {
        "rollouts.infra.node",
        "rollouts.infra.providers",
        "httpx",
        "numpy",
        "jinja2",
        "fsspec",
        "torch",
        "prefect",
    }
    assert not heavy & set(ended.stderr.split())
    assert Path(LIVE_FILE).name == STATE_FILE


@pytest.mark.slow
def test_a_misspelt_key_is_found_before_torch_or_prefect_is_loaded(folder: Path) -> None:
    config = folder / "misspelt.json"
    config.write_text(json.dumps(small_settings(training__sft__num_stepz=3)))
    program = (
        "import sys\nfrom typer.testing import CliRunner\nfrom rollouts.flows.cli import app\n"
        f"outcome = CliRunner().invoke(app, ['run', {str(config)!r}])\n"
        "assert outcome.exit_code == 2 and 'did you mean num_steps?' in outcome.stderr, outcome.output\n"
        "heavy = {'torch', 'transformers', 'datasets', 'prefect'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_names_and_texts_are_utf8_whatever_the_locale_says(tmp_path: Path) -> None:
    folder = tmp_path / "Ünïcode ü"
    write_small_pipeline(folder, data__prompts="prömpts.jsonl")
    rows = (folder / "prompts.jsonl").read_text(encoding="utf-8").replace('"id": "', '"id": "größer als ')
    (folder / "prömpts.jsonl").write_text(rows, encoding="utf-8")
    command = [sys.executable, "-m", "rollouts.flows.cli", "validate", str(folder / "small.toml")]
    environment = {**clean_environment(), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
    said = ended.stdout.decode()
    assert ended.returncode == 0, said
    assert f"{folder / 'prömpts.jsonl'}: 100 prompts" in said


@contextmanager
def running(*arguments: str) -> Iterator[str]:
    """The command in a process of its own; yields the URL that it prints, then interrupts it, as Ctrl-C does."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rollouts.flows.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=clean_environment(),
        )
        try:
            yield wait_for_url(process, output.fileno())
            process.send_signal(signal.SIGINT)
            process.wait(120)
        finally:
            process.kill()
            process.wait()
            output.seek(0)
            said = output.read()
        assert "Traceback" not in said, said
        assert process.returncode in (0, 130), said


def wait_for_url(process: subprocess.Popen[bytes], output: int) -> str:
    """The first URL in what a process prints."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if found := URL.search(os.pread(output, 10_000, 0).decode()):
            return found[0]
        time.sleep(0.1)
    raise AssertionError(f"no URL came: {os.pread(output, 10_000, 0).decode()}")


@pytest.mark.slow
def test_serve_answers_until_it_is_interrupted(folder: Path) -> None:
    request = {"text": "1+1=?", "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}}
    with running("serve", str(folder / "base_model"), "--port", "0") as url:
        answer = httpx.post(f"{url}/generate", json=request, timeout=30).json()
    assert answer["meta_info"]["completion_tokens"] == 4
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


@pytest.mark.slow
def test_a_key_is_asked_for_on_every_request(folder: Path) -> None:
    with running("serve", str(folder / "base_model"), "--port", "0", "--api-key", "sesame") as url:
        assert httpx.get(f"{url}/model_info", timeout=30).status_code == 401
        assert httpx.get(f"{url}/health", headers={"Authorization": "Bearer other"}, timeout=30).status_code == 401
        assert httpx.get(f"{url}/health", headers={"Authorization": "Bearer sesame"}, timeout=30).status_code == 200


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], r"nowhere is not a folder, nor a finished run or a registered model of the store \.rollouts"),
        (["empty"], r"empty has no config\.json: give the folder of a Hugging Face checkpoint"),
        (["run"], r"run/checkpoint: config\.json is not a complete config of a model"),
        (["gpt2"], r"does not support architecture GPT2LMHeadModel; it supports LlamaForCausalLM"),
        (["gpt2", "--port", "TAKEN"], r"port \d+ on 127\.0\.0\.1 is in use by another process"),
        (["gpt2", "--host", "0.0.0.0"], r"needs an API key: set ROLLOUTS_API_KEY, or listen on 127\.0\.0\.1"),
        (["gpt2", "--host", "no.such.host.invalid", "--api-key", "k"], r"cannot listen on no\.such\.host\.invalid"),
        (["gpt2", "--engine", "tgi"], r"--engine tgi: expected embedded, sglang, vllm"),
        (["gpt2", "--engine-args", "--seed 3"], r"--engine-args is not an option of the embedded engine: remove it"),
        (["gpt2", "--engine", "vllm", "--gpus", "0"], r"--gpus needs a GPU, and torch finds none on this machine"),
        (["gpt2", "--engine", "vllm"], r"gpt2 has no tokenizer, which vllm needs: add it, or remove --engine"),
        (["chat", "--engine", "vllm", "--port", "TAKEN"], r"port \d+ on 127\.0\.0\.1 is in use by another process"),
        (["chat", "--engine", "vllm", "--host", "0.0.0.0"], r"needs an API key: set ROLLOUTS_API_KEY, or listen on"),
        (["chat", "--engine", "sglang"], r"has no sglang, which this --engine needs: .* as --engine-python$"),
        (["chat", "--engine", "vllm", "--engine-install", "never"], r"has no vllm, which this --engine needs"),
        (["chat", "--engine", "vllm", "--engine-install", "conda"], r"--engine vllm: install.*auto.*never"),
        (["chat", "--engine", "vllm", "--engine-python", "python9"], r"--engine-python is '/\S+/python9', which"),
        (["chat", "--engine", "vllm", "--engine-args", "'--a"], r"--engine-args is not a valid shell command line"),
        (["chat", "--engine", "vllm", "--engine-args", "--api-key k"], r"--engine-args contains a key, .*: set ROLL"),
        (["chat", "--engine", "vllm", "--engine-args", "--port 9"], r"--engine-args contains --port, .*use --host and"),
        (["gpt2", "--host", ""], r"--host is empty: give an address"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("run/checkpoint").mkdir(parents=True)
    Path("run/checkpoint/config.json").write_text("{}")
    for folder in ("gpt2", "chat"):
        Path(folder).mkdir()
        Path(folder, "config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}')
    Path("chat/tokenizer_config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = str(listener.getsockname()[1])
        given = [taken if word == "TAKEN" else word for word in arguments]
        given += [] if "--port" in given else ["--port", "0"]
        outcome = CliRunner().invoke(app, ["serve", *given])
    assert outcome.exit_code == 2, outcome.output
    assert re.search(words, outcome.stderr)
    assert len(outcome.stderr.splitlines()) == 1


@pytest.mark.slow
def test_ui_serves_the_pages_and_the_api_until_it_is_interrupted(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with running("ui", "--store", str(store)) as url:
        assert "<html" in httpx.get(url, timeout=30, follow_redirects=True).text.lower()
        assert httpx.get(f"{url.removesuffix('/v2')}/api/health", timeout=30).json() is True
    wait_until(lambda: not processes_of(store), what="the end of the Prefect server", timeout_s=30.0)


def test_what_somebody_may_not_read_or_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is made up: these tests may run as root, which may do everything."""

    def refused(self: LedgerFile) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self.path))

    (tmp_path / "ledger.db").touch()
    monkeypatch.setattr(LedgerFile, "_opened", refused)
    outcome = CliRunner().invoke(app, ["models", "--store", str(tmp_path)])
    ledger = tmp_path / "ledger.db"
    assert outcome.exit_code == 2
    assert f"rollouts: no permission for {ledger} (Permission denied): change" in outcome.output.replace("\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("validate", "{long}"),
        ("evaluate", "small.toml", "{long}"),
        ("evaluate", "small.toml", "base", "--data", "{long}"),
        ("models", "--store", "{long}"),
    ],
)
def test_a_text_that_is_too_long_for_a_path_is_one_sentence(
    arguments: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = 300 * "x"
    write_small_pipeline(tmp_path)
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(app, [each.format(long=long) for each in arguments])
    assert outcome.exit_code == 2, outcome.output
    said = r"rollouts: .*\.\.\. is too long for a path or a name: it has 3\d\d characters: shorten it\n"
    assert re.fullmatch(said, outcome.stderr), outcome.stderr


def test_a_server_that_is_gone_is_named_in_one_sentence_and_other_services_are_not_taken_for_it() -> None:
    """The run ended with the traceback of a client, 60 lines long."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/api"
    with pytest.raises(httpx.ConnectError) as refused:
        httpx.get(f"{url}/health")
    explained = explain_server(refused.value, ServerAddress(api_url=url, ui_url=""))
    assert str(explained).startswith(f"the Prefect server at {url} no longer answers, and the run ended (")
    assert explain_server(refused.value, ServerAddress(api_url="http://elsewhere/api", ui_url="")) is None
    assert explain_server(ValueError("a bug"), ServerAddress(api_url=url, ui_url="")) is None


def test_the_text_of_a_help_is_broken_by_the_terminal_alone() -> None:
    """It was broken where the source is, too: a word stood alone on every other line."""
    outcome = CliRunner().invoke(app, ["cancel", "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert "keeps its machine. A new run with the same settings resumes from the checkpoint." in outcome.output


def test_asking_about_a_store_that_is_none_makes_none(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(app, ["status", "--store", str(tmp_path / "typo")])
    assert outcome.exit_code == 0 and not (tmp_path / "typo").exists()
    assert f"{tmp_path}/typo does not exist: it has no runs yet, or --store should name" in outcome.output


@pytest.mark.parametrize("command", [["status"], ["nodes"], ["models"]])
def test_a_store_in_the_home_folder_is_found_where_the_shell_leaves_the_tilde(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As bash does in --store=~/runs."""
    monkeypatch.setenv("HOME", str(tmp_path))
    outcome = CliRunner().invoke(app, [*command, "--store=~/runs"])
    assert f"{tmp_path / 'runs'} " in outcome.output


def test_of_a_store_that_exists_nothing_is_said_but_what_is_in_it(tmp_path: Path) -> None:
    assert "does not exist" not in CliRunner().invoke(app, ["status", "--store", str(tmp_path)]).output


def test_a_limit_without_end_and_a_seed_beyond_its_bits_end_in_no_traceback(tmp_path: Path) -> None:
    with Ledger(tmp_path / LEDGER_FILE):
        pass
    pruned = CliRunner().invoke(app, ["prune", "--max-gb", "inf", "--store", str(tmp_path)])
    assert (pruned.exit_code, pruned.output) == (0, "nothing to remove; 0 folders of 0.000 GB stay\n")
    pruned = CliRunner().invoke(app, ["prune", "--json", "--store", str(tmp_path)])
    assert (pruned.exit_code, pruned.output) == (0, "")
    seeded = CliRunner().invoke(app, ["quickstart", "--seed", str(2**70), "--store", str(tmp_path / "other")])
    assert seeded.exit_code == 2, seeded.output
    assert isinstance(seeded.exception, SystemExit)


def test_what_a_run_prints_at_its_end_can_be_copied_whatever_the_store_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets are markup to rich: names would be left out, and what begins with [/ is an error in place of a path."""
    store = tmp_path / "my [bold] runs[" / "x]"
    config = write_small_pipeline(tmp_path, run={"store": str(store)})
    report = f"{store}/runs/small-01234567/report.html"
    result = PipelineResult(report=report, checkpoint=f"{store}/checkpoint", verdict="")
    monkeypatch.setattr("rollouts.flows.cli.run_checked", lambda *_, **__: result)
    run_pipeline(load_pipeline(config), port=0, as_json=True)
    printed = capsys.readouterr()
    said = printed.err.splitlines()
    paths = {"report": report, "checkpoint": result.checkpoint, "verdict": "", "published": ""}
    assert json.loads(printed.out) == {"kind": "result", "run": "small-01234567", **paths}
    assert f"Report:      {report}" in said
    assert shlex.split(said[-1])[-2:] == ["--store", str(store)]
