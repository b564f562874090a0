"""Pins what a person meets who made a mistake: one sentence on stderr, exit code 2, and nothing left in the store.

Without it a misspelt key would train with a default that nobody chose, a broken row would be found after an hour, and
what the person reads would be the traceback of a library.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

from flows.cli import app
from rollouts_core.config import ModelConfig, SFTTrainingConfig
from rollouts_core.data.rows import digest_path
from rollouts_core.fingerprint import digest_model
from rollouts_core.job import InputDataset, InputModel, SFTJob
from tests.flows.conftest import RUN_TIMEOUT_S, Rollouts, clean_environment, processes_of, wait_until
from tests.small_pipeline import small_settings, write_small_pipeline

Settings = dict[str, Any]  # Any: settings of every type
Change = Callable[[Path], object]
"""What a person does to the folder of a model."""

GOOD_ROW = {"prompt": "1+1=?", "completion": ":2"}
USER, ASSISTANT = {"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": ":2"}
NAN = float("nan")
PROGRESS = ("checked  ", "prefect  ")
"""What `run` says before anything can go wrong."""


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the small pipeline, not to be changed."""
    folder = tmp_path_factory.mktemp("pristine") / "small"
    write_small_pipeline(folder)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """The files of the small pipeline, to be changed."""
    return Path(shutil.copytree(pristine, tmp_path / "small"))


def write_config(folder: Path, **overrides: Any) -> Path:  # Any: settings of every type
    """The small pipeline's configuration with these settings."""
    config = folder / "small.toml"
    config.write_text(tomli_w.dumps(small_settings(**overrides)))
    return config


def write_rows(path: Path, rows: Sequence[Mapping[str, object] | str]) -> None:
    """A JSONL file; a row that is text is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def refusal(config: Path, *arguments: str, command: str = "validate") -> str:
    """The sentence with which the command refuses a configuration."""
    store = config.parent / "store"
    outcome = CliRunner().invoke(app, [command, str(config), "--store", str(store), *arguments])
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), repr(outcome.exception)
    assert outcome.exit_code == 2, outcome.output
    assert "Traceback" not in outcome.output
    said = [line for line in outcome.stderr.splitlines() if line.strip() and not line.startswith(PROGRESS)]
    assert len(said) == 1, said
    assert said[0].startswith("rollouts: ")
    assert not (store / "stages").exists()
    assert not (store / "runs").exists()
    return said[0]


def assert_refused(config: Path, *words: str) -> None:
    """`validate` and `run` refuse the configuration with the same sentence, which has these words."""
    sentence = refusal(config)
    assert refusal(config, command="run") == sentence
    for word in words:
        assert word in sentence


# ── the configuration ──


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("modle", {}, "unknown key modle; did you mean model?"),
        ("nodes", {}, "unknown key nodes; did you mean node?"),
        (
            "zzz",
            1,
            "unknown key zzz; known are data, deployment, evaluation, mode, model, node, rollout, run",
        ),
        ("model__pth", "x", "unknown key model.pth; did you mean path?"),
        ("data__promts", "x", "unknown key data.promts; did you mean prompts?"),
        ("training__stf", {}, "unknown key training.stf; did you mean sft?"),
        ("training__sft__num_stepz", 3, "unknown key training.sft.num_stepz; did you mean num_steps?"),
        ("training__sft__optim__lrr", 1.0, "unknown key training.sft.optim.lrr; did you mean lr?"),
        ("training__rl__loss__clip_lo", 0.1, "unknown key training.rl.loss.clip_lo; did you mean clip_low?"),
        ("rollout__batchsize", 1, "unknown key rollout.batchsize; did you mean batch_size?"),
        ("rollout__sampling__temprature", 1, "unknown key rollout.sampling.temprature; did you mean temperature?"),
        ("evaluation__metrc", "loss", "unknown key evaluation.metrc; did you mean metric?"),
        ("deployment__engin_port", 1, "unknown key deployment.engin_port; did you mean engine_port?"),
        ("node__min_free", 1, "unknown key node.min_free; did you mean min_free_gb?"),
        ("run__nam", "x", "unknown key run.nam; did you mean name?"),
        ("model", "./base_model", "model: expected a table of settings, found './base_model'"),
        ("training", [], "training: expected a table of settings, found []"),
        ("node", 3, "node: expected a table of settings, found 3"),
        ("run", 3, "run: expected a table of settings, found 3"),
        ("training__sft__num_steps", "many", "training.sft.num_steps: input should be a valid integer"),
        ("training__sft__num_steps", 1.5, "found 1.5"),
        ("training__sft__packing", "perhaps", "training.sft.packing: input should be a valid boolean"),
        ("data__sft", 3, "data.sft: input should be a valid string, found 3"),
        ("rollout__filter_fn", 3, "rollout.filter_fn: input should be a valid string, found 3"),
        ("deployment__trainer_gpu_ranks", ["a"], "deployment.trainer_gpu_ranks.0: input should be a valid integer"),
        ("node__min_free_gb", "ten", "min_free_gb: input should be a valid number"),
        ("training__sft__num_steps", 0, "training.sft.num_steps: input should be greater than or equal to 1, found 0"),
        ("training__sft__optim__lr", -1.0, "training.sft.optim.lr: input should be greater than or equal to 0"),
        ("rollout__sampling__temperature", 11, "less than or equal to 10, found 11"),
        ("rollout__sampling__temperature", 0, "rollout.sampling.temperature above 0"),
        ("deployment__engine_port", 70000, "deployment.engine_port: input should be less than or equal to 65535"),
        ("rollout__engine", {"kind": "tgi"}, "rollout.engine.kind: input should be 'embedded', 'sglang' or 'vllm'"),
        ("rollout__engine", {"extra_args": ["-x"]}, "engine.extra_args is a setting of the kinds"),
        ("deployment__num_engines", 0, "deployment.num_engines: input should be greater than or equal to 1"),
        ("deployment__trainer_gpu_ranks", [-1], "deployment.trainer_gpu_ranks.0: input should be greater than"),
        ("training__sft__optim__lr", NAN, "training.sft.optim.lr: must be a finite number, found nan"),
        ("training__sft__optim__betas", [0.9, NAN], "training.sft.optim.betas.1: must be a finite number, found nan"),
        ("training__sft__optim__betas", [0.9], "training.sft.optim.betas.1 is missing"),
        ("evaluation__max_p_value", NAN, "evaluation.max_p_value: must be a finite number, found nan"),
        ("node__min_free_gb", NAN, "min_free_gb: input should be a finite number, found nan"),
        ("mode", "sft+dpo", "mode: input should be 'sft', 'rl' or 'sft+rl', found 'sft+dpo'"),
        ("training__sft__seed", -1, "training.sft.seed: input should be greater than or equal to 0, found -1"),
        ("node__provider", "runpod", "node.provider is 'runpod': expected one of local, ssh"),
        ("run__fresh", ["sfft"], "fresh.0: input should be 'sft', 'select-sft', 'rl', 'select-rl' or 'evaluate'"),
        ("run__name", "my run", "name: string should match pattern"),
        ("evaluation__metric", "loss", 'evaluation.metric cannot be "loss"'),
        ("rollout__environment", "", "rollout.environment: string should have at least 1 character"),
        ("training__sft__micro_batch_size", 3, "batch_size 8 is not a multiple of micro_batch_size 3"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(folder: Path, key: str, value: object, words: str) -> None:
    assert_refused(write_config(folder, **{key: value}), "small.toml", words)


@pytest.mark.parametrize(("mode", "missing"), [("rl", "prompts"), ("sft", "sft"), ("sft+rl", "heldout")])
def test_a_mode_without_its_data_is_named(folder: Path, mode: str, missing: str) -> None:
    assert_refused(write_config(folder, mode=mode, **{f"data__{missing}": ""}), f'mode "{mode}" needs data.{missing}')


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.toml", "mode = \n", "is not valid TOML: Invalid value (at line 1, column 8)"),
        ("a.toml", "mode = 'sft'\nmode = 'rl'\n", "is not valid TOML"),
        ("a.toml", "", "model is missing (and 1 more)"),
        ("a.json", "[1]", "must hold a table of settings at its top, found list"),
        ("a.json", "{", "is not valid JSON"),
        ("a.json", "[" * 100_000, "is not valid JSON"),
        ("a.yaml", "mode: sft\n", "is not valid TOML"),
        ("a.py", "raise ValueError('no\\nway')\n", "raised ValueError: no"),
        ("a.py", "def (\n", "raised SyntaxError: invalid syntax"),
        ("a.py", "raise SystemExit(0)\n", "raised SystemExit: 0"),
        ("a.py", "import no_such_package\n", "raised ModuleNotFoundError: No module named 'no_such_package'"),
        ("a.py", "x = 1\n", "must define `config`"),
        ("a.py", "config = [1]\n", "must define `config`"),
        ("a.py", "config = {'modle': 1}\n", "unknown key modle; did you mean model?"),
        (
            "a.py",
            "from rollouts_core.config import ModelConfig\nModelConfig(path='')\n",
            "ModelConfig path: String",
        ),
    ],
)
def test_a_configuration_that_cannot_be_read_is_named(folder: Path, name: str, content: str, words: str) -> None:
    (folder / name).write_text(content)
    assert_refused(folder / name, name, words)


def test_a_configuration_that_is_no_text_is_named(folder: Path) -> None:
    (folder / "a.toml").write_bytes(b"\xff\xfe")
    assert_refused(folder / "a.toml", "a.toml is not valid TOML", "can't decode")


@pytest.mark.parametrize("name", ["none.toml", "none.json", "none.py"])
def test_a_missing_configuration_is_named(folder: Path, name: str) -> None:
    assert_refused(folder / name, f"{name} does not exist: give the path")


def test_a_folder_is_no_configuration(folder: Path) -> None:
    assert_refused(folder / "base_model", "base_model is a folder: give the path")


def test_a_function_of_the_configuration_file_itself_is_refused(folder: Path) -> None:
    settings = small_settings()
    source = f"def reward(sample):\n    return 1.0\n\nconfig = {settings!r}\nconfig['rollout']['reward_fn'] = reward\n"
    (folder / "own.py").write_text(source)
    assert_refused(folder / "own.py", "rollout.reward_fn", "cannot import", 'name it "module:function"')


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--name", "a b"], "command line: name: string should match pattern"),
        (["--fresh", "sfft"], "command line: fresh.0: input should be 'sft', 'select-sft'"),
    ],
)
def test_an_option_that_does_not_fit_is_named(folder: Path, arguments: list[str], words: str) -> None:
    assert words in refusal(folder / "small.toml", *arguments, command="run")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "Missing argument"),
        (["rnu"], "No such command"),
        (["run", "a.toml", "--prot", "1"], "--port"),
        (["run", "a.toml", "--port", "70000"], "65535"),
        (["quickstart", "--seed", "-1"], "--seed"),
    ],
)
def test_a_command_line_that_does_not_fit_is_explained_by_its_usage(arguments: list[str], words: str) -> None:
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 2
    assert "Usage: " in outcome.output
    assert words in outcome.output


# ── the data ──


@pytest.mark.parametrize("name", ["sft", "prompts", "selection", "heldout"])
def test_a_missing_data_file_is_named(folder: Path, name: str) -> None:
    assert_refused(
        write_config(folder, **{f"data__{name}": "none.jsonl"}), f"data.{name}: ", "none.jsonl does not exist"
    )


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("sft.jsonl", b"", "sft.jsonl is empty: expected at least one row"),
        ("heldout.jsonl", b"", "heldout.jsonl is empty"),
        ("sft.jsonl", b"\n  \n\n", "sft.jsonl is empty"),
        ("sft.jsonl", '{"text": "é"}\n'.encode("latin-1"), "row 1: not valid JSON: 'utf-8' codec can't decode"),
        ("sft.jsonl", b'{"text": "1"}\n[' + b"[" * 100_000, "row 2: not valid JSON"),
        ("rows.csv", b"prompt,completion\n1,2\n", "rows.csv is neither JSONL nor Parquet by its name"),
        ("rows.parquet", b"hello", "rows.parquet is not a Parquet file, or was cut"),
        ("rows.parquet", b"PAR1 and then nothing", "rows.parquet is not a Parquet file, or was cut"),
    ],
)
def test_a_data_file_of_another_kind_is_named(folder: Path, name: str, content: bytes, words: str) -> None:
    (folder / name).write_bytes(content)
    changes = {"data__sft": name} if name.startswith("rows") else {}
    assert_refused(write_config(folder, **changes), words)


def test_a_folder_without_a_dataset_is_named(folder: Path) -> None:
    assert_refused(write_config(folder, data__sft="base_model"), "base_model is no dataset", "save_to_disk")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([GOOD_ROW] * 6 + ["{broken", GOOD_ROW], "row 7: not valid JSON"),
        (["", "", *[GOOD_ROW] * 4, "{broken"], "row 7: not valid JSON"),
        (["", "", *[GOOD_ROW] * 4, {"question": "x"}], "row 7: expected `messages`"),
        ([GOOD_ROW, "[1]"], "row 2: expected a JSON object, found list"),
        ([GOOD_ROW, {"question": "x"}], "row 2: expected `messages`, or `prompt` and `completion`, or `text`"),
        ([GOOD_ROW, {"messages": [{"content": "x"}, ASSISTANT]}], "row 2: message 0 must have `role` and `content`"),
        ([GOOD_ROW, {"messages": [USER]}], "row 2: the conversation has no assistant turn"),
        ([GOOD_ROW, {"prompt": "1" * 200, "completion": "2"}], "row 2: nothing to train on within the first 128 of"),
    ],
)
def test_a_demonstration_that_does_not_fit_is_named_by_its_row(
    folder: Path, rows: list[Mapping[str, object] | str], words: str
) -> None:
    write_rows(folder / "sft.jsonl", rows)
    assert_refused(write_config(folder), "sft.jsonl, ", words)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "1", "answer": "1"}, {"question": "x"}], "row 2: expected `prompt` or `messages`; found question"),
        ([{"prompt": "1", "answer": "1"}, {"prompt": "1" * 40, "answer": "1"}], "row 2: the prompt 'prompts-2' has 43"),
        ([{"id": "a", "prompt": "1"}, {"id": "a", "prompt": "2"}], "row 2: id 'a' is also that of row 1"),
        ([{"id": "a", "prompt": "1", "solution": "1"}], "prompt 'a' has no `answer`, which arithmetic compares"),
        ([{"id": None, "prompt": "1", "answer": None}], "prompt 'prompts-1' has no `answer`"),
    ],
)
def test_a_prompt_that_does_not_fit_is_named(folder: Path, rows: list[Mapping[str, object]], words: str) -> None:
    write_rows(folder / "prompts.jsonl", rows)
    assert_refused(write_config(folder), "prompts.jsonl", words)


def test_a_prompt_of_the_selection_among_the_heldout_ones_is_named(folder: Path) -> None:
    row = json.loads((folder / "selection.jsonl").read_text().splitlines()[3])
    write_rows(folder / "heldout.jsonl", [{"prompt": "1+1=?", "answer": "2"}, {**row, "id": "other"}])
    words = f"prompt 'other' of data.heldout is also prompt '{row['id']}' of data.selection"
    assert_refused(write_config(folder), words, "remove it from one of them")


def test_a_demonstration_of_the_selection_among_the_heldout_ones_is_named(folder: Path) -> None:
    write_rows(folder / "selection.jsonl", [GOOD_ROW])
    write_rows(folder / "heldout.jsonl", [{"text": "1"}, GOOD_ROW])
    config = write_config(folder, mode="sft", evaluation__metric="loss")
    assert_refused(config, "heldout.jsonl, row 2 is also row 1 of", "remove it from one of them")


# ── the model ──


def delete(*patterns: str) -> Change:
    """Delete the files of these names."""
    return lambda model: [path.unlink() for pattern in patterns for path in model.glob(pattern)]


def change_json(name: str, **changes: object) -> Change:
    """Set keys of a JSON file; None removes one."""

    def change(model: Path) -> None:
        settings = {**json.loads((model / name).read_text()), **changes}
        (model / name).write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))

    return change


def write_template(template: str) -> Change:
    """Give the tokenizer another chat template."""
    return lambda model: (model / "chat_template.jinja").write_text(template)


def cut_weights(model: Path) -> None:
    """Lose the end of the weights, as an interrupted copy does."""
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (shutil.rmtree, "base_model is not a folder: give that of a Hugging Face checkpoint"),
        (delete("tokenizer.json"), "base_model has no tokenizer (tokenizer.json or"),
        (delete("config.json"), "base_model has no configuration (config.json)"),
        (delete("model.safetensors"), "base_model has no weights (*.safetensors)"),
        (cut_weights, "model.safetensors was cut or is damaged"),
        (delete("chat_template*"), "the tokenizer has no chat template: add one"),
        (write_template("{% for %}"), "the chat template refuses the turns user"),
        (write_template("{{ raise_exception('no user') }}"), ": no user"),
        (change_json("tokenizer_config.json", eos_token=None), "has no eos_token"),
        (change_json("config.json", vocab_size=10), "has 29 tokens but the model embeds 10"),
        (
            change_json("config.json", architectures=["GPT2LMHeadModel"]),
            "does not support architecture GPT2",
        ),
        (change_json("config.json", max_position_embeddings=40), "need 63 positions, the model at"),
        (lambda model: (model / "config.json").write_text("{"), "config.json"),
    ],
)
def test_a_model_that_does_not_fit_is_named(folder: Path, change: Change, words: str) -> None:
    change(folder / "base_model")
    assert_refused(folder / "small.toml", words)


@pytest.mark.parametrize("name", ["some_model", "some_org/some_model", "~/some_model"])
def test_a_model_that_is_no_folder_is_named_without_asking_a_hub(folder: Path, name: str) -> None:
    assert_refused(write_config(folder, model__path=name), f"model.path: {name} is not a folder")


# ── the person's own functions ──


def write_function(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module of the person's own; returns its name, which no other test uses."""
    name = f"own_{folder.parent.name}"
    (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    return name


@pytest.mark.parametrize(
    ("setting", "source", "words"),
    [
        ("reward_fn", "def f(sample): raise ValueError('no\\nway')", ":f on prompt '"),
        ("reward_fn", "def f(sample): raise ValueError('no\\nway')", "' raised ValueError: no"),
        ("reward_fn", "def f(sample): raise SystemExit", "raised SystemExit"),
        ("reward_fn", "def f(sample): return float('nan')", "returned nan: expected a finite number"),
        ("reward_fn", "def f(sample): pass", "returned None: expected a finite number"),
        ("reward_fn", "def f(sample): return '1'", "returned '1': expected a finite number"),
        ("reward_fn", "def f(): return 1", "raised TypeError"),
        ("reward_fn", "f = 3", ":f' is not a function"),
        ("reward_fn", "def ff(sample): return 1", "has no 'f'; did you mean ff?"),
        ("reward_fn", "def f(", "it raised SyntaxError"),
        ("reward_fn", "1 / 0", "it raised ZeroDivisionError: division by zero"),
        ("reward_fn", "raise SystemExit(4)", "it raised SystemExit: 4"),
        ("reward_fn", "import no_such_package", "cannot be imported (No module named 'no_such_package')"),
        ("filter_fn", "def f(group): raise ValueError('no')", "filter function"),
        ("filter_fn", "def f(group): pass", "returned None: expected True or False"),
        ("environment", "class f: pass", "is no environment"),
        ("generate_fn", "def g(group): return group", "has no 'f'"),
    ],
)
def test_an_own_function_that_does_not_fit_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, setting: str, source: str, words: str
) -> None:
    module = write_function(folder, source, monkeypatch)
    assert_refused(write_config(folder, **{f"rollout__{setting}": f"{module}:f"}), setting.split("_")[0], module, words)


@pytest.mark.parametrize(
    ("setting", "name", "words"),
    [
        ("reward_fn", "exact_mach", "unknown name 'exact_mach'; did you mean exact_match?"),
        (
            "reward_fn",
            "rollouts_core.rewards",
            "'rollouts_core.rewards'; known are exact_match, last_number",
        ),
        ("reward_fn", "no_such_package:f", "named 'no_such_package'); is its folder on PYTHONPATH?"),
        ("reward_fn", ":f", "':f' names no module: give package.module:function"),
        ("filter_fn", "any_sucess", "unknown name 'any_sucess'; did you mean any_success?"),
        ("environment", "arithmetics", "unknown name 'arithmetics'; did you mean arithmetic?"),
        ("generate_fn", "mine", "unknown name 'mine'; give package.module:function"),
    ],
)
def test_a_misspelt_function_is_named(folder: Path, setting: str, name: str, words: str) -> None:
    assert_refused(write_config(folder, **{f"rollout__{setting}": name}), f"rollout.{setting}: ", words)


# ── ports, stores, servers ──


@contextmanager
def taken_port() -> Iterator[int]:
    """A port on which somebody else listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@contextmanager
def small_disk(path: Path, *options: str) -> Iterator[Path]:
    """A file system of 64 MB at `path`."""
    path.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", ",".join(["size=64m", *options]), "tmpfs", str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False) if sys.platform == "linux" else None
    if mounted is None or mounted.returncode:
        pytest.skip(f"a full disk needs the right to mount one: {mounted.stderr.strip() if mounted else sys.platform}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk: Path) -> None:
    """Leave no byte free."""
    with pytest.raises(OSError, match="No space left"), (disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))


@pytest.mark.parametrize("python", [sys.executable, "/nowhere/bin/python"])
def test_an_engine_that_is_not_installed_is_named_before_anything_starts(folder: Path, python: str) -> None:
    words = f'rollout.engine.kind is "vllm", but {python} has no vllm: install it, and name the interpreter'
    assert_refused(write_config(folder, rollout__engine={"kind": "vllm", "python": python}), words)


def test_an_engine_port_in_use_is_named(folder: Path) -> None:
    with taken_port() as port:
        words = f"deployment.engine_port: port {port} is in use by another process: choose another, or 0"
        assert_refused(write_config(folder, deployment__engine_port=port), words)


def test_a_server_port_in_use_is_named(folder: Path) -> None:
    with taken_port() as port:
        sentence = refusal(folder / "small.toml", "--port", str(port), command="run")
    assert f"port {port} is in use" in sentence
    assert not processes_of(folder / "store")


def test_a_prefect_server_that_does_not_answer_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    sentence = refusal(folder / "small.toml", command="run")
    assert "PREFECT_API_URL is set to http://127.0.0.1:9/api, where nothing answers" in sentence


@pytest.mark.parametrize(
    ("store", "words"), [("sft.jsonl", "it is a file"), ("sft.jsonl/store", "Not a directory"), ("/proc/store", "")]
)
@pytest.mark.parametrize("command", ["validate", "run", "ui"])
def test_a_store_that_cannot_be_made_is_named(folder: Path, store: str, words: str, command: str) -> None:
    config = [] if command == "ui" else [str(folder / "small.toml")]
    outcome = CliRunner().invoke(app, [command, *config, "--store", str(folder / store)])
    assert outcome.exit_code == 2
    assert outcome.stderr.count("\n") == 1
    assert f"rollouts: the store {folder / store} cannot be written ({words}" in outcome.stderr
    assert "choose another with --store" in outcome.stderr


def test_a_store_on_a_full_disk_is_named(folder: Path) -> None:
    with small_disk(folder / "store") as disk:
        fill(disk)
        assert_refused(folder / "small.toml", "cannot be written (No space left on device): choose another")


def test_a_store_that_is_read_only_is_named(folder: Path) -> None:
    with small_disk(folder / "store", "ro"):
        assert_refused(folder / "small.toml", "cannot be written (Read-only file system): choose another")


# ── one job by itself ──


def write_job(folder: Path) -> Path:
    """The job.json of a short SFT on the small pipeline's files, alone in a run directory."""
    model = ModelConfig(path=str(folder / "base_model"))
    job = SFTJob(
        model=InputModel(name="base", model=model, digest=digest_model(model)),
        data=(InputDataset(path=str(folder / "sft.jsonl"), digest=digest_path(folder / "sft.jsonl")),),
        training=SFTTrainingConfig(num_steps=1, max_length=128),
    )
    (folder / "run").mkdir()
    (folder / "run/job.json").write_text(job.model_dump_json())
    return folder / "run/job.json"


def job_refusal(kind: str, job: Path) -> str:
    """The sentence with which `python -m rollouts_core` ends."""
    ended = subprocess.run(
        [sys.executable, "-m", "rollouts_core", kind, str(job)],
        cwd=job.parent.parent,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    [sentence] = [line for line in ended.stderr.splitlines() if line.startswith("rollouts: ")]
    assert sentence == ended.stderr.splitlines()[-1]
    return sentence


def test_a_missing_job_is_named_and_nothing_is_written_where_it_should_be(folder: Path) -> None:
    (folder / "run").mkdir()
    assert "job.json does not exist: give the path of a job.json" in job_refusal("sft", folder / "run/job.json")
    assert list((folder / "run").iterdir()) == []


def test_a_job_of_another_kind_is_named(folder: Path) -> None:
    assert "job.json describes a job of kind sft, not rl" in job_refusal("rl", write_job(folder))


def test_a_job_that_is_no_json_is_named(folder: Path) -> None:
    job = write_job(folder)
    job.write_text("{")
    assert "job.json is not valid JSON" in job_refusal("sft", job)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: write_rows(folder / "sft.jsonl", [GOOD_ROW]), "sft.jsonl changed since the stage was planned"),
        (lambda folder: (folder / "sft.jsonl").unlink(), "sft.jsonl is gone since the stage was planned"),
        (lambda folder: (folder / "base_model/new").touch(), "base_model changed since the stage was planned"),
        (lambda folder: shutil.rmtree(folder / "base_model"), "base_model is gone since the stage was planned"),
    ],
)
def test_an_input_that_changed_since_the_job_was_made_is_named(folder: Path, change: Change, words: str) -> None:
    job = write_job(folder)
    change(folder)
    assert words in job_refusal("sft", job)
    assert sorted(path.name for path in job.parent.iterdir()) == ["events.jsonl", "job.json"]
    assert words in (job.parent / "events.jsonl").read_text()


# ── what shows only while the pipeline runs ──

GRUMPY_REWARD = """
def f(sample):
    if len(sample.response) > 5:
        raise ValueError("a long answer")
    return 0.0
"""


def sentence_of(output: str) -> str:
    """The one sentence in everything that a command printed."""
    assert "Traceback" not in output, output
    [sentence] = [line for line in output.splitlines() if line.startswith("rollouts: ")]
    return sentence


@pytest.mark.slow
def test_a_reward_that_raises_on_some_completions_ends_the_run_and_the_engine(
    rollouts: Rollouts, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = write_function(folder, GRUMPY_REWARD, monkeypatch)
    config = write_config(folder, mode="rl", rollout__reward_fn=f"{module}:f")
    environment = clean_environment()
    ended = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", str(config), "--store", str(rollouts.store)],
        env=environment | {"PYTHONPATH": f"{environment['PYTHONPATH']}{os.pathsep}{folder}"},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert f"reward function {module}:f on prompt '" in sentence_of(ended.stderr)
    assert sentence_of(ended.stderr).endswith("raised ValueError: a long answer")
    assert "engine         answers at http://" in ended.stderr
    wait_until(lambda: not jobs_of(rollouts.store), what="the end of the engine", timeout_s=15.0)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["store", "root"])
def test_a_disk_that_runs_full_during_sft_is_named(rollouts: Rollouts, folder: Path, place: str) -> None:
    store = rollouts.store
    with small_disk(folder / "disk") as disk:
        overrides = {"node__root": str(disk), "node__min_free_gb": 0.0}
        if place == "store":
            shutil.copytree(store / "prefect", disk / "prefect")
            store = disk
        config = write_config(folder, mode="sft", training__sft__num_steps=400, **overrides)
        command = dataclasses.replace(rollouts, store=store)
        process = command.start("run", str(config))
        checkpoints = "stages/sft-*/checkpoints/step_*"
        wait_until(lambda: any(disk.glob(checkpoints)) or process.poll() is not None, what="a checkpoint")
        fill(disk)
        assert process.wait(120) == 2, command.said()
        assert "No space left on device" in sentence_of(command.said())
        wait_until(lambda: not processes_of(store), what=f"the end of {processes_of(store)}", timeout_s=30.0)


def jobs_of(store: Path) -> list[str]:
    """The command lines of jobs and their supervisors in a store; its Prefect server lives a little longer."""
    return [command for command in processes_of(store) if f"{store}/stages/" in command]
