"""Pins that data are prepared once, under an identity of their source, code and settings, and lie in the store.

Without it a run would train on rows that another version of a preparation made, or make them anew each time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rollouts.flows.form import parse_pipeline
from rollouts.tasks.inputs import bring_inputs
from rollouts.tasks.preparing import prepare_data
from rollouts.tasks.store_paths import places_in
from rollouts_core.config import Config
from rollouts_core.data.preparations import prepare_gsm8k, prepare_math
from rollouts_core.errors import ConfigError, DataError
from rollouts_core.user_code.code_folders import add_code_folders

SIZES = {"num_train": 4, "num_selection": 2, "num_heldout": 3}
OWN = """
def prepare(read, *, num=2):
    print("talks")
    rows = [{"prompt": row["question"], "completion": row["answer"]} for row in read("train")]
    return {"sft": rows[:num], "selection": rows[num:num + 1], "heldout": rows[num + 1:]}

def fails(read):
    return {"sft": [row["none"] for row in read("train")]}

def returns_other(read):
    return {"demonstrations": []}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset with GSM8K's columns, and a module of the user's, beside a configuration."""
    (tmp_path / "dataset").mkdir()
    for split in ("train", "test"):
        rows = [{"question": f"{split} {i}?", "answer": f"<<1+1=2>>So {i}.\n#### {i}"} for i in range(8)]
        (tmp_path / f"dataset/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own_rows.py").write_text(OWN)
    monkeypatch.setenv("ROLLOUTS_CODE_PATH", "")
    monkeypatch.delitem(sys.modules, "own_rows", raising=False)  # that of another test
    monkeypatch.syspath_prepend(tmp_path)  # before the folders of other tests, which stay on the path
    add_code_folders([tmp_path])
    return tmp_path


def config_of(folder: Path, prepare: Any, **data: Any) -> Config:  # Any: settings of every type
    settings = {
        "mode": "sft",
        "model": {"path": "/m"},
        "data": {"prepare": prepare, **data},
        "evaluation": {"metric": "loss"},
    }
    return parse_pipeline(settings, folder / "my.toml").config


def prepared(config: Config, folder: Path) -> tuple[Config, list[str]]:
    said: list[str] = []
    return prepare_data(config, folder / "store", said.append), said


def test_the_rows_are_made_once_and_lie_in_the_store(folder: Path) -> None:
    config = config_of(folder, {"name": "gsm8k", "source": "dataset", "settings": SIZES})
    found, said = prepared(config, folder)
    [place] = places_in(found.data.sft)
    assert place.startswith("inputs/")
    assert "made 4 rows of sft, 4 rows of prompts, 2 rows of selection, 3 rows of heldout" in said[-1]
    first = json.loads(Path(str(found.data.sft)).read_text().splitlines()[0])
    assert first["completion"] == "So 0.\n#### 0"
    assert prepared(config, folder) == (found, [])
    assert bring_inputs(config, folder / "store", said.append) == found


def test_the_identity_has_the_source_the_settings_and_the_code(folder: Path) -> None:
    config = config_of(folder, {"name": "own_rows:prepare", "source": "dataset"})
    first = prepared(config, folder)[0].data.sft
    changed = config_of(folder, {"name": "own_rows:prepare", "source": "dataset", "settings": {"num": 3}})
    assert prepared(changed, folder)[0].data.sft != first
    (folder / "own_rows.py").write_text(OWN + "\n# edited\n")
    second = prepared(config, folder)[0].data.sft
    assert second != first
    with (folder / "dataset/train.jsonl").open("a") as file:
        file.write('{"question": "9?", "answer": "9"}\n')
    assert prepared(config, folder)[0].data.sft not in (first, second)


def test_a_file_that_is_given_stays(folder: Path) -> None:
    (folder / "mine.jsonl").touch()
    prepare = {"name": "gsm8k", "source": "dataset", "settings": SIZES}
    found, _ = prepared(config_of(folder, prepare, heldout="mine.jsonl"), folder)
    assert found.data.heldout == str(folder / "mine.jsonl")
    assert Path(found.data.selection).name == "selection.jsonl"


@pytest.mark.parametrize(
    ("prepare", "sentence"),
    [
        ({"name": "gsm8", "source": "dataset"}, r"data\.prepare\.name: unknown name 'gsm8'; did you mean gsm8k"),
        ({"name": "gsm8k", "source": "./nowhere"}, r"data\.prepare\.source: .*nowhere does not exist: give a folder"),
        (
            {"name": "gsm8k", "source": "dataset", "settings": {"rows": 3}},
            r"data\.prepare\.settings: gsm8k cannot be called",
        ),
        (
            {"name": "gsm8k", "source": "dataset"},
            r"the function made no rows for data\.selection: the source has too few rows",
        ),
        (
            {"name": "own_rows:fails", "source": "dataset"},
            r"own_rows:fails raised KeyError: 'none' \(own_rows\.py, line 8\)",
        ),
        (
            {"name": "own_rows:returns_other", "source": "dataset"},
            r"returned demonstrations: expected a dict of rows with keys among sft,",
        ),
        ({"name": "own_rows:prepare"}, r"data\.prepare\.source is empty, but the function of data"),
    ],
)
def test_what_cannot_be_prepared_is_one_sentence(folder: Path, prepare: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ConfigError, DataError), match=sentence) as raised:
        prepared(config_of(folder, prepare), folder)
    assert "\n" not in str(raised.value)
    assert not list((folder / "store").glob("inputs/*/prepared*"))


def test_a_mode_that_needs_another_file_is_refused(folder: Path) -> None:
    config = config_of(folder, {"name": "own_rows:prepare", "source": "dataset"})
    settings = {**config.model_dump(mode="json"), "mode": "rl", "evaluation": {}}
    with pytest.raises(ConfigError, match=r'makes sft, selection, heldout, and mode "rl" needs data\.prompts'):
        prepared(Config.model_validate(settings), folder)


def test_without_a_preparation_the_files_are_needed() -> None:
    with pytest.raises(ValueError, match=r'mode "sft" needs data\.sft'):
        Config.model_validate({"mode": "sft", "model": {"path": "/m"}, "data": {}})


def test_no_row_of_one_file_is_in_another() -> None:
    def read(split: str, subset: str = "") -> Any:
        return iter({"question": f"{split} {i}", "answer": f"#### {i}"} for i in range(20))

    made = prepare_gsm8k(read, num_train=10, num_selection=5, num_heldout=5)
    prompts = [row["prompt"] for name in ("sft", "selection", "heldout") for row in made[name]]
    assert len({*prompts}) == len(prompts) == 20


def test_math_keeps_integer_answers_in_a_seeded_order() -> None:
    def read(split: str, subset: str = "") -> Any:
        answers = ["1", r"\frac{1}{2}", "-3"]
        return iter({"problem": f"{split} {i}", "solution": rf"\boxed{{{answers[i % 3]}}}"} for i in range(30))

    made = prepare_math(read, num_selection=4)
    assert {row["answer"] for rows in made.values() for row in rows} == {"1", "-3"}
    assert [len(made[name]) for name in ("selection", "prompts", "heldout")] == [4, 16, 20]
    assert made == prepare_math(read, num_selection=4) != prepare_math(read, num_selection=4, seed=1)
