"""Pins what publishing into a run's folder leaves alone: the checkpoints of models that are registered.

Without it a run that is tried again could put other weights into the folder of the model in production.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rollouts.infra.ledger import Ledger
from rollouts.infra.registry import find_model, promote
from rollouts.tasks.candidate import check_whole, register_candidate
from rollouts.tasks.records import RunScope
from rollouts.tasks.sync import sync_results
from rollouts_core.checkpoint import load_manifest, new_checkpoint
from rollouts_core.config import ModelConfig
from rollouts_core.errors import CheckpointError
from rollouts_core.job import InputModel


def selected(folder: Path, weights: bytes) -> InputModel:
    """What a run ends with."""
    with new_checkpoint(folder, step=20) as partial:
        (partial / "model.safetensors").write_bytes(weights)
    return InputModel(name="rl", model=ModelConfig(path=str(folder)), digest=load_manifest(folder).digest, step=20)


def test_a_registered_model_keeps_its_weights_when_its_run_is_tried_again_with_other_data(tmp_path: Path) -> None:
    store = tmp_path / "store"
    scope = RunScope(run_id="0123456789", run_name="small", store=str(store))
    first, second = (selected(tmp_path / name, name.encode()) for name in ("first", "second"))
    checkpoint = sync_results.fn(first, scope)
    small = register_candidate("small", checkpoint, [], {}, scope)
    other = register_candidate("other", checkpoint, [], {}, scope)
    with Ledger(scope.ledger_path) as ledger:
        promote(ledger, small, by="Ada", reason="by hand")

    assert sync_results.fn(first, scope) == checkpoint
    for _ in range(2):
        assert sync_results.fn(second, scope) == checkpoint
    assert load_manifest(Path(checkpoint)).digest == second.digest
    with Ledger(scope.ledger_path) as ledger:
        for model in (find_model(ledger, each.name) for each in (small, other)):
            check_whole(model, store)
            assert model.checkpoint.startswith(str(scope.output_dir.relative_to(store)))


def test_a_registered_model_that_is_damaged_already_does_not_hold_up_the_next_try(tmp_path: Path) -> None:
    scope = RunScope(run_id="0123456789", run_name="small", store=str(tmp_path / "store"))
    first, second = (selected(tmp_path / name, name.encode()) for name in ("first", "second"))
    checkpoint = sync_results.fn(first, scope)
    model = register_candidate("small", checkpoint, [], {}, scope)
    (Path(checkpoint) / "model.safetensors").write_bytes(b"fiRst")
    assert sync_results.fn(second, scope) == checkpoint
    with pytest.raises(CheckpointError):
        check_whole(model, tmp_path / "store")
