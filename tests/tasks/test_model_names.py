"""Which model a name means, and the sentence where it means none.

Without these tests an evaluation could score another model than the one that somebody named, and nobody would notice.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.registry import Model, promote, register_model
from rollouts.tasks.model_names import find_named_model, with_heldout
from rollouts_core.checkpoint import load_manifest, new_checkpoint
from rollouts_core.config import Config, DataConfig, ModelConfig
from rollouts_core.errors import CheckpointError, ConfigError


@pytest.fixture
def store(tmp_path: Path) -> Path:
    store = tmp_path / "store"
    store.mkdir()
    return store


@pytest.fixture
def config(tmp_path: Path) -> Config:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    data = DataConfig(sft="sft.jsonl", selection="selection.jsonl", heldout="heldout.jsonl")
    return Config(
        mode="sft", model=ModelConfig(path=str(base), trust_remote_code=True, chat_template_kwargs={"a": 1}), data=data
    )


def checkpoint(folder: Path) -> Path:
    with new_checkpoint(folder, step=3) as partial:
        (partial / "config.json").write_text("{}")
        (partial / "model.safetensors").write_text(str(folder))
    return folder


def register(store: Path, number: int, line: str = "small") -> Model:
    folder = checkpoint(store / f"runs/{line}-run-{number}/checkpoint")
    with Ledger(store / LEDGER_FILE) as ledger:
        return register_model(
            ledger,
            line,
            checkpoint=str(folder.relative_to(store)),
            digest=load_manifest(folder).digest,
            run_id=f"run-{number}",
            stages=[],
            data={},
            by="run small",
        )


def found(given: str, config: Config, store: Path) -> tuple[str, str]:
    named = find_named_model(given, config, store, print)
    assert named.model.trust_remote_code == config.model.trust_remote_code
    assert named.model.chat_template_kwargs == config.model.chat_template_kwargs
    return named.title, named.model.path


def test_every_kind_of_name_finds_its_model(config: Config, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = register(store, 1), register(store, 2)
    with Ledger(store / LEDGER_FILE) as ledger:
        promote(ledger, first, by="Ada", reason="first")
    sft = store / "stages/sft-0123456789abcdef"
    for step in (10, 20):
        checkpoint(sft / f"checkpoints/step_{step:06d}")
    own = checkpoint(store.parent / "own")
    monkeypatch.chdir(store.parent)
    paths = [str(store / model.checkpoint) for model in (first, second)]
    assert found("base", config, store) == ("base", config.model.path)
    assert found("production", config, store) == ("production (small-1)", paths[0])
    assert found("small/candidate", config, store) == ("small/candidate (small-2)", paths[1])
    assert found("small-2", config, store) == ("small-2", paths[1])
    assert found("small-run-2", config, store) == ("runs/small-run-2/checkpoint", paths[1])
    newest = "sft-0123456789abcdef/checkpoints/step_000020"
    assert found("sft-0123456789abcdef", config, store) == (newest, str(store / "stages" / newest))
    older = "sft-0123456789abcdef/checkpoints/step_000010"
    assert found(older, config, store) == (older, str(store / "stages" / older))
    assert found("own", config, store) == found(str(own), config, store) == (str(own), str(own))


def test_a_name_that_means_nothing_or_too_much_is_one_sentence(config: Config, store: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no model productoin; did you mean production\? give base"):
        found("productoin", config, store)
    register(store, 1)
    with pytest.raises(ConfigError, match="no model has the alias production: `rollouts models` lists"):
        found("production", config, store)
    register(store, 1, "large")
    with pytest.raises(
        ConfigError, match="several lines of models: name one, for example large/candidate; the lines are large, small"
    ):
        found("candidate", config, store)
    (store / "stages/rl-00").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="there is no checkpoint at "):
        found("rl-00", config, store)


def test_a_damaged_model_of_the_registry_is_not_scored(config: Config, store: Path) -> None:
    model = register(store, 1)
    (store / model.checkpoint / "model.safetensors").write_text("other weights")
    with pytest.raises(CheckpointError, match="small-1 cannot be used"):
        found("small-1", config, store)


def test_the_rows_are_those_that_were_named_and_nothing_else_of_the_data_is_read(config: Config, store: Path) -> None:
    rows = store / "rows.jsonl"
    rows.touch()
    scored = with_heldout(config, str(rows), store, print)
    assert scored.data == DataConfig(heldout=str(rows))
    with pytest.raises(ConfigError, match=r"evaluate\.data: .*missing\.jsonl does not exist"):
        with_heldout(config, str(store / "missing.jsonl"), store, print)
