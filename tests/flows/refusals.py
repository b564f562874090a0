"""A small pipeline to spoil, and the one sentence with which `validate` and `run` refuse it.

Every refusal is a sentence on stderr, exit code 2, and nothing left in the store.

Not here: what can be spoilt (test_bad_*.py), the files themselves (tests/kit/small_pipeline.py).
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

from rollouts.flows.cli import app
from rollouts.flows.form import load_pipeline
from rollouts_core.errors import InputError
from tests.kit.small_pipeline import small_settings

Settings = dict[str, Any]  # Any: settings of every type
Change = Callable[[Path], object]
"""What a person does to the folder of a model."""

GOOD_ROW = {"prompt": "1+1=?", "completion": ":2"}
USER, ASSISTANT = {"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": ":2"}
NAN = float("nan")
PROGRESS = ("checked  ", "warning  ", "prefect  ")
"""What `run` says before anything can go wrong."""
_FREE = re.compile(r"[\d.]+ GB are there")


def write_config(folder: Path, **overrides: Any) -> Path:  # Any: settings of every type
    """The small pipeline's configuration with these settings."""
    config = folder / "small.toml"
    config.write_text(tomli_w.dumps(small_settings(**overrides)))
    return config


def write_rows(path: Path, rows: Sequence[Mapping[str, object] | str]) -> None:
    """A JSONL file; a row that is text is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def refusal(config: Path, *arguments: str, command: str = "validate") -> str:
    """What the command refuses a configuration with: a line for each mistake."""
    store = config.parent / "store"
    outcome = CliRunner().invoke(app, [command, str(config), "--store", str(store), *arguments])
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), repr(outcome.exception)
    assert outcome.exit_code == 2, outcome.output
    assert "Traceback" not in outcome.output
    said = [line for line in outcome.stderr.splitlines() if line.strip() and not line.startswith(PROGRESS)]
    assert said[0].startswith("rollouts: ")
    assert not (store / "stages").exists()
    assert not (store / "runs").exists()
    return "\n".join(said)


def assert_refused(config: Path, *words: str) -> None:
    """`validate` and `run` refuse the configuration with the same lines, some of which have these words.

    If settings do not fit, `run` tells this at once and leaves out what only models and rows show. How much of the disk
    is free may change meanwhile.
    """
    said = {command: refusal(config, command=command) for command in ("run", "validate")}
    ran, validated = (_FREE.sub("", text.removeprefix("rollouts: ")).splitlines() for text in said.values())
    if _is_read(config):
        assert ran == validated
    assert [line for line in validated if line in ran] == ran
    for word in words:
        assert word in said["run"]


def _is_read(config: Path) -> bool:
    """Whether the settings fit."""
    try:
        load_pipeline(config)
    except InputError:
        return False
    return True


def write_function(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module of the person's own; returns its name, which no other test uses."""
    name = f"own_{folder.parent.name}"
    (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    return name
