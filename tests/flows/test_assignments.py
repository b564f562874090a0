"""Pins settings as `key=value` after a configuration: how they are read, what they replace, and the words of mistakes.

Without it a run could train with a setting that the command line replaced, or look for its data in another folder.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rollouts.flows.assignments import assigned_value
from rollouts.flows.cli import app
from rollouts.flows.commands.preset import load_preset
from rollouts.flows.form import load_pipeline
from rollouts_core.errors import ConfigError
from rollouts_core.rewards import REWARDS
from tests.kit.small_pipeline import small_settings, write_small_pipeline


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_pipeline(tmp_path_factory.mktemp("small"))


def call(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-5", 1e-5),
        ("1_000", 1000),
        ("true", True),
        ('"3"', "3"),
        ("['sft', 'rl']", ["sft", "rl"]),
        ("{lr = 0.1}", {"lr": 0.1}),
        ('{"lr": 0.1}', {"lr": 0.1}),
        ("null", None),
        ("sft+rl", "sft+rl"),
        ("a=b", "a=b"),
        ("2026-01-02", "2026-01-02"),
        ("1\nmode = 2", "1\nmode = 2"),
        ("", ""),
    ],
)
def test_a_value_is_toml_or_json_or_text(text: str, value: object) -> None:
    assert assigned_value(text) == value


def test_settings_replace_those_of_the_file_and_the_later_one_wins(config: Path) -> None:
    given = ["training.rl.num_steps=3", "run.name=first", "training.rl.num_steps=7", "training.sft.optim.lr=1e-3"]
    found, before = load_pipeline(config, given), load_pipeline(config)
    assert (found.config.training.rl.num_steps, found.run.name) == (7, "first")
    assert found.config.training.sft.optim.lr == 1e-3
    assert found.config.data == before.config.data
    assert found.config.training.rl.optim == before.config.training.rl.optim


def test_a_path_is_relative_to_the_current_folder(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [
        "data.sft=mine.jsonl",
        "node.kind=ssh",
        "node.host=box",
        "node.python=/p",
        "node.key_file=key",
        "evaluate.model=./model",
        "evaluate.data=s3://bucket/rows.jsonl",
    ]
    found = load_pipeline(config, given)
    assert found.config.data.sft == str(tmp_path / "mine.jsonl")
    assert found.config.data.prompts == str(config.parent / "prompts.jsonl")
    assert getattr(found.node, "key_file", "") == str(tmp_path / "key")
    assert found.evaluate is not None
    assert (found.evaluate.model, found.evaluate.data) == (str(tmp_path / "model"), "s3://bucket/rows.jsonl")


def test_a_python_file_keeps_its_functions_and_takes_another_algorithm_whole(config: Path) -> None:
    settings = {key: value for key, value in small_settings().items() if key not in ("node", "run")}
    path = config.parent / "own.py"
    path.write_text(
        "from rollouts_core.config import Config\nfrom rollouts_core.rewards import REWARDS\n"
        f"settings = {settings!r}\n"
        "settings['rollout']['reward_fn'] = REWARDS['last_number']\n"
        "settings['training']['rl']['algorithm'] = 'trl-grpo'\n"
        "config = Config(**settings)\n"
    )
    found = load_pipeline(path, ["training.rl.algorithm=verl-grpo"]).config
    assert found.rollout.reward_fn is REWARDS["last_number"]
    plain = load_pipeline(config, ["training.rl.algorithm=verl-grpo"]).config
    assert (found.training.rl.loss, found.training.rl.advantage) == (
        plain.training.rl.loss,
        plain.training.rl.advantage,
    )


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("training.rl.num_stepz=3", "command line: unknown key training.rl.num_stepz; did you mean num_steps?"),
        ("training.rl.learning_rate=1", "command line: unknown key training.rl.learning_rate; did you mean "),
        ("training.rl.num_steps=0", "command line: training.rl.num_steps: input should be greater than or equal to 1"),
        ("node.hosst=a", "command line: unknown key node.hosst"),
        ("modell.path=a", "command line: unknown key modell"),
        ("report.samples.deeper=1", "command line: report.samples: input should be 'all', 'held-out' or 'none'"),
    ],
)
def test_a_mistake_is_the_sentence_of_a_file_and_names_the_command_line(
    config: Path, assignment: str, sentence: str
) -> None:
    with pytest.raises(ConfigError) as mistake:
        load_pipeline(config, [assignment])
    assert str(mistake.value).startswith(sentence)
    with pytest.raises(ConfigError) as mistake:
        load_preset("sft_qwen", [assignment])
    assert sentence in str(mistake.value)


def test_a_mistake_of_the_file_still_names_the_file(config: Path) -> None:
    path = config.parent / "wrong.json"
    path.write_text(json.dumps(small_settings(training__rl__num_stepz=3)))
    with pytest.raises(ConfigError, match=re.escape(f"{path}: unknown key training.rl.num_stepz")):
        load_pipeline(path, ["run.name=other"])


def test_validate_and_show_take_settings(config: Path, tmp_path: Path) -> None:
    store = ["--store", str(tmp_path / "store")]
    said = call("validate", str(config), "training.sft.optim.lr=0.0", *store).stderr
    assert "training.sft.optim.lr is 0, so the model does not change" in said
    shown = call("show", str(config), "training.rl.num_steps=9", "--json", *store).stdout
    settings = {each["name"]: each for each in map(json.loads, shown.splitlines())}
    assert settings["training.rl.num_steps"]["value"] == 9


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "CONFIG", "other.toml"], "expected settings as key=value after the configuration, found other.toml"),
        (
            ["run", "CONFIG", "mode=rl", "--deployment", "a"],
            "--deployment a has its own configuration, but found CONFIG",
        ),
        (["validate", "run.name=a"], "expected CONFIG before run.name=a"),
        (["show", "small-11111111", "run.name=a"], "small-11111111 is not a file, and the settings of a run are fixed"),
        (
            ["evaluate", "CONFIG", "base", "other"],
            "expected settings as key=value after the configuration, found other",
        ),
        (["evaluate", "CONFIG", "evaluation.metricc=1"], "command line: unknown key evaluation.metricc"),
    ],
)
def test_other_arguments_are_refused_in_one_sentence(config: Path, arguments: list[str], sentence: str) -> None:
    given = [str(config) if each == "CONFIG" else each for each in arguments]
    said = " ".join(call(*given, code=2).stderr.split())
    assert said.startswith(f"rollouts: {sentence.replace('CONFIG', str(config)) if 'found' in sentence else sentence}")
