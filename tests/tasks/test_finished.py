"""Pins when nothing is rented because everything is done, and that whatever is left to do, or to end, gets a machine.

Without it a run that repeats an earlier one costs money for nothing, or one that has a machine forgets it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rollouts.infra.clouds import cloud_names, find_cloud
from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.ledger import Ledger
from rollouts.infra.node import LocalNode, Node, NodeSettings, RentedNode, SSHNode, no_machine
from rollouts.infra.providers import open_session
from rollouts.infra.providers.rented import purpose_of
from rollouts.infra.renting.rentals import Rental, RentalState, add_rental
from rollouts.tasks.finished import RunStage, placeholder_if_finished, trainings_begun
from rollouts.tasks.records import RunScope, Stage, StageRecord
from rollouts_core.checkpoint import load_manifest, new_checkpoint
from rollouts_core.run_directory import RunDirectory

RENTED = RentedNode(max_usd=5.0)


@pytest.fixture
def scope(tmp_path: Path) -> RunScope:
    return RunScope(run_id="mine", run_name="small", store=str(tmp_path))


@pytest.fixture
def stages(scope: RunScope) -> dict[str, Stage]:
    """A training with one checkpoint, and its selection, both finished."""
    directories = {name: RunDirectory(Path(scope.store, "stages", f"{name}-0123")) for name in ("sft", "select-sft")}
    path = directories["sft"].checkpoints / "step_000020"
    with new_checkpoint(path, step=20) as partial:
        (partial / "model.safetensors").write_bytes(b"weights")
    entry = {"name": path.name, "step": 20, "digest": load_manifest(path).digest}
    directories["sft"].write_result({"checkpoints": [entry]})
    directories["select-sft"].root.mkdir()
    directories["select-sft"].write_result({"best": path.name})
    return {
        name: Stage(
            name=name, fingerprint="0123", run_dir=str(each.root), job={"kind": "sft"}, num_steps=20, timeout_s=1.0
        )
        for name, each in directories.items()
    }


def test_the_trainings_that_were_begun_are_those_up_to_what_is_left_to_do(
    stages: dict[str, Stage], scope: RunScope
) -> None:
    select = stages["select-sft"].model_copy(update={"job": {"kind": "eval"}})
    unfinished = {"name": "rl", "run_dir": f"{scope.store}/stages/rl-4567", "job": {"kind": "rl"}}
    rl = stages["sft"].model_copy(update=unfinished)

    def run_stages(_: Node, run: RunStage) -> None:
        for stage in (stages["sft"], select, rl):
            run(stage)

    here = no_machine(scope.store)
    assert trainings_begun(scope, here, run_stages) == (stages["sft"].run_dir, rl.run_dir)
    RunDirectory(Path(stages["sft"].run_dir)).result.unlink()
    assert trainings_begun(scope, here, run_stages) == (stages["sft"].run_dir,)
    assert trainings_begun(scope.model_copy(update={"store": f"{scope.store}/new"}), here, run_stages) == ()


def spared(stages: dict[str, Stage], scope: RunScope, settings: NodeSettings = RENTED) -> Node | None:
    def run_stages(machine: Node, run: RunStage) -> list[StageRecord]:
        trained = run(stages["sft"])
        assert trained.how == "reused" and trained.result["checkpoints"][0]["step"] == 20
        return [trained, run(stages["select-sft"])]

    return placeholder_if_finished(settings, scope, run_stages)


@pytest.fixture
def ledger(scope: RunScope) -> Iterator[Ledger]:
    with Ledger(scope.ledger_path) as ledger:
        yield ledger


def rent(
    ledger: Ledger, run_id: str, state: RentalState = RentalState.READY, settings: RentedNode | None = RENTED
) -> None:
    row = Rental(
        name="rollouts-1",
        run_id=run_id,
        provider="runpod",
        purpose=purpose_of(settings) if settings else "",
        state=state,
        instance_id="1",
        gpu="1x H100",
        region="",
        usd_per_hour=2.0,
        intended_at=time.time(),
        expires_at=time.time() + 3600,
    )
    add_rental(ledger, row)


def test_nothing_is_rented_where_every_stage_is_finished(stages: dict[str, Stage], scope: RunScope) -> None:
    nowhere = spared(stages, scope)
    assert nowhere is not None and nowhere.local_root == scope.store and not nowhere.is_rented


@pytest.mark.parametrize("name", ["sft", "select-sft"])
@pytest.mark.parametrize("content", [None, "{"])
def test_an_unfinished_or_unreadable_stage_takes_a_machine(
    stages: dict[str, Stage], scope: RunScope, name: str, content: str | None
) -> None:
    result = RunDirectory(Path(stages[name].run_dir)).result
    result.unlink()
    if content is not None:
        result.write_text(content)
    assert spared(stages, scope) is None


def test_a_damaged_checkpoint_takes_a_machine(stages: dict[str, Stage], scope: RunScope) -> None:
    path = RunDirectory(Path(stages["sft"].run_dir)).checkpoints / "step_000020" / "model.safetensors"
    path.write_bytes(b"others!")
    assert spared(stages, scope) is None


@pytest.mark.parametrize("state", [RentalState.INTENDED, RentalState.READY, RentalState.RELEASING])
def test_a_machine_that_the_run_has_is_taken_over_to_be_ended(
    stages: dict[str, Stage], scope: RunScope, ledger: Ledger, state: RentalState
) -> None:
    rent(ledger, scope.run_id, state)
    assert spared(stages, scope) is None


@pytest.mark.parametrize(("is_alive", "is_spared"), [(True, True), (False, False)])
def test_so_is_one_that_a_dead_run_left_and_no_other(
    stages: dict[str, Stage], scope: RunScope, ledger: Ledger, is_alive: bool, is_spared: bool
) -> None:
    rent(ledger, "theirs")
    with ExitStack() as living:
        living.enter_context(ledger.living_run("theirs"))
        if not is_alive:
            living.close()
        assert (spared(stages, scope) is not None) == is_spared


@pytest.mark.parametrize("state", [RentalState.READY, RentalState.INTENDED, RentalState.RELEASING])
def test_beside_one_that_no_run_of_these_settings_goes_on_with_nothing_is_rented(
    stages: dict[str, Stage],
    scope: RunScope,
    ledger: Ledger,
    state: RentalState,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name in cloud_names():
        monkeypatch.delenv(find_cloud(name).endpoint.key_variable, raising=False)
    rent(ledger, "theirs", state, settings=None if state is RentalState.READY else RENTED)
    with ledger.living_run("theirs"):
        pass
    assert spared(stages, scope) is not None
    said = capfd.readouterr().err
    assert "no provider has a key here" in said and "every stage is finished: nothing is rented" in said


@pytest.mark.parametrize("settings", [LocalNode(), SSHNode(host="me@machine", python="/usr/bin/python3")])
def test_what_costs_nothing_is_used_as_ever(stages: dict[str, Stage], scope: RunScope, settings: NodeSettings) -> None:
    assert spared(stages, scope, settings) is None


def test_no_job_can_be_run_there(stages: dict[str, Stage], scope: RunScope) -> None:
    nowhere = spared(stages, scope)
    assert nowhere is not None
    with pytest.raises(PermanentInfraError, match="one of them no longer is: start the run again"):
        open_session(nowhere)
