"""Pins when a retraining trains, asks, promotes and rejects, also where it was killed or somebody else was faster.

Without it the wrong model could go into production, the same data be trained on every night, or new data never.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollouts.infra.errors import InfraError, MachineGoneError, TransientInfraError
from rollouts.infra.ledger import Ledger
from rollouts.infra.registry import Alias, Model, current, models, promote, register_model, rollback
from rollouts.infra.retrainings import Retraining, RetrainingState, find_retraining, retrainings
from rollouts.tasks.retraining import Answer, Compared, Outcome, Rules, retrain_once

DAY_S = 86_400.0


class Killed(BaseException):
    """Stands for kill -9: nothing may catch it."""


@dataclass
class World:
    """Data with a quality, models as good as the data that they were trained on, and a clock."""

    ledger: Ledger
    quality: float = 0.5
    now: float = 0.0
    answer: Answer | None = None
    """What a person says; None keeps them thinking, and the run suspended."""
    faults: list[type[BaseException]] = field(default_factory=list)
    """What happens at the next steps, in order; KeyError stands for none."""
    num_trainings: int = 0
    meanwhile: Model | None = None
    """Put into production by somebody else while the next training goes on."""

    def watch(self) -> dict[str, str]:
        self.may_fail()
        return {"/data/sft.jsonl": f"{self.quality}"}

    def train(self, data: Mapping[str, str], production: Model | None) -> Compared:
        self.may_fail()
        self.num_trainings += 1
        quality = f"{self.quality}"  # what lies there now is trained on
        assert data == {"/data/sft.jsonl": quality}
        model = register_model(
            self.ledger,
            "small",
            checkpoint=f"runs/{quality}",
            digest=quality,
            run_id="r",
            stages=[f"sft-{quality}"],
            data=data,
            by="test",
            now=self.now,
        )
        if self.meanwhile:
            promote(self.ledger, self.meanwhile, by="somebody", reason="by hand", now=self.now)
            self.meanwhile = None
        return self.compare(model, production)

    def compare(self, candidate: Model, production: Model | None) -> Compared:
        self.may_fail()
        quality = candidate.digest
        baseline = float(production.digest) if production else 0.1
        is_better = float(quality) > baseline
        return Compared(model=candidate, is_better=is_better, sentence=f"{quality} to {baseline}", evaluation={})

    def ask(self, row: Retraining, candidate: Model) -> Answer:
        self.may_fail()
        if self.answer is None:
            raise Killed  # as a suspended run does, its process ends
        return self.answer

    def may_fail(self) -> None:
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None and fault is not KeyError:
            raise fault("injected")

    def look(self, run_id: str, **rules: Any) -> Outcome:
        """A look of the schedule, a day after the last one."""
        self.now += DAY_S
        return retrain_once(
            self.ledger, self, run_id=run_id, line="small", rules=Rules(**rules), clock=lambda: self.now
        )

    @property
    def production(self) -> str:
        model = current(self.ledger, "small", Alias.PRODUCTION)
        return model.digest if model else ""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with Ledger(tmp_path / "ledger.db") as ledger:
        yield World(ledger)


def test_the_first_data_is_trained_on_and_the_same_data_is_skipped(world: World) -> None:
    assert world.look("1").name == "Promoted"
    outcome = world.look("2")
    assert outcome.name == "Skipped"
    assert outcome.sentence == (
        "skipped, data unchanged since the retraining of 1970-01-02 00:00 UTC, which ended promoted"
    )
    assert (world.num_trainings, world.production) == (1, "0.5")


def test_better_data_replaces_production_and_worse_data_does_not_and_is_not_tried_again(world: World) -> None:
    world.look("1")
    world.quality = 0.7
    assert world.look("2").name == "Promoted"
    world.quality = 0.6
    assert world.look("3").name == "Rejected"
    assert world.look("4").name == "Skipped"
    assert (world.num_trainings, world.production) == (3, "0.7")
    assert current(world.ledger, "small", Alias.CANDIDATE) is None


def test_a_start_model_that_is_better_stays(world: World) -> None:
    world.quality = 0.05
    assert world.look("1").name == "Rejected"
    assert world.production == ""


def test_force_trains_on_unchanged_data(world: World) -> None:
    world.look("1")
    assert world.look("2", force=True).sentence == "promoted small-1: it is already the production model"
    assert world.num_trainings == 2


def test_failures_on_the_same_data_are_tried_again_only_so_often(world: World) -> None:
    for run in ("1", "2"):
        world.faults = [KeyError, RuntimeError]
        with pytest.raises(RuntimeError):
            world.look(run, max_failures=2)
    outcome = world.look("3", max_failures=2)
    assert outcome.name == "Skipped"
    assert "the last 2 retrainings on the same data failed (injected)" in outcome.sentence
    world.quality = 0.6
    assert world.look("4", max_failures=2).name == "Promoted"


@pytest.mark.parametrize("of_a_machine", [TransientInfraError, MachineGoneError])
def test_failures_of_machines_are_tried_again_without_limit(world: World, of_a_machine: type[InfraError]) -> None:
    for run in ("1", "2", "3"):
        world.faults = [KeyError, of_a_machine]
        with pytest.raises(of_a_machine):
            world.look(run, max_failures=2)
    assert world.look("4", max_failures=2).name == "Promoted"


def test_a_retry_of_a_failed_run_trains_and_one_of_a_run_that_is_over_does_nothing(world: World) -> None:
    world.faults = [KeyError, RuntimeError]
    with pytest.raises(RuntimeError):
        world.look("1")
    assert world.look("1").name == "Promoted"
    assert world.look("1").name == "Promoted"
    assert world.num_trainings == 1


def test_what_a_killed_run_began_is_finished_by_its_retry_or_by_the_next_look(world: World) -> None:
    for run, retry in (("1", "1"), ("2", "3")):
        world.quality += 0.1
        world.faults = [KeyError, KeyError, Killed]
        with pytest.raises(Killed):
            world.look(run)
        assert world.look(retry).name == "Promoted"
    assert world.production == f"{world.quality}"


def test_a_killed_run_that_is_retried_knows_the_data_that_it_trains_on_then(world: World) -> None:
    world.faults = [KeyError, Killed]
    with pytest.raises(Killed):
        world.look("1")
    world.quality = 0.7
    assert world.look("1").name == "Promoted"
    row = find_retraining(world.ledger, "1")
    assert row is not None
    assert row.data == {"/data/sft.jsonl": "0.7"}
    assert world.look("2").name == "Skipped"


def test_a_person_is_asked_once_and_the_answer_counts(world: World) -> None:
    with pytest.raises(Killed):
        world.look("1", needs_approval=True)
    assert world.production == ""
    assert world.look("2", needs_approval=True).sentence.endswith(
        "which waits for approval: Resume on its page, or Retry if it was cancelled"
    )
    world.answer = Answer(approved=True, by="Ada", comment="looks right")
    assert world.look("1", needs_approval=True).sentence == "promoted small-1: 0.5 to 0.1; Ada: looks right"
    assert (world.production, world.num_trainings) == ("0.5", 1)
    world.quality, world.answer = 0.9, Answer(approved=False, by="Ada")
    assert world.look("3", needs_approval=True).sentence == "rejected small-2: Ada declined it"
    assert world.production == "0.5"


def test_a_candidate_that_is_not_better_is_rejected_without_asking(world: World) -> None:
    world.quality = 0.05
    assert world.look("1", needs_approval=True).name == "Rejected"


def test_an_approval_of_an_old_comparison_promotes_nothing(world: World) -> None:
    with pytest.raises(Killed):
        world.look("1", needs_approval=True)
    [waiting] = models(world.ledger)
    world.quality = 0.8
    world.answer = Answer(approved=True, by="Ada")
    world.look("2", needs_approval=True)
    assert world.production == "0.8"
    assert world.look("1", needs_approval=True).sentence == f"rejected {waiting.name}: 0.5 to 0.8"
    assert world.num_trainings == 2
    assert world.production == "0.8"


def test_a_model_promoted_by_hand_meanwhile_is_what_the_candidate_is_compared_with(world: World) -> None:
    world.look("1")
    rival = register_model(
        world.ledger, "small", checkpoint="x", digest="0.9", run_id="r", stages=[], data={}, by="somebody"
    )
    world.quality, world.meanwhile = 0.7, rival
    assert world.look("2").sentence == "rejected small-3: 0.7 to 0.9"
    assert world.production == "0.9"


def test_a_model_promoted_by_hand_in_the_last_moment_is_not_overwritten(world: World) -> None:
    world.look("1")
    rival = register_model(
        world.ledger, "small", checkpoint="x", digest="0.9", run_id="r", stages=[], data={}, by="somebody"
    )
    world.quality = 0.7
    times: list[float] = []

    def clock() -> float:
        times.append(world.now)
        if len(times) == 2:  # the first is that of the beginning, the second that of the promotion
            promote(world.ledger, rival, by="somebody", reason="by hand")
        return world.now

    outcome = retrain_once(world.ledger, world, run_id="2", line="small", rules=Rules(), clock=clock)
    assert outcome.sentence == "rejected small-3: 0.7 to 0.9"
    assert world.production == "0.9"


def test_a_rollback_stays_until_better_data_comes(world: World) -> None:
    world.look("1")
    world.quality = 0.7
    world.look("2")
    rollback(world.ledger, "small", by="somebody", reason="it lies")
    assert world.look("3").name == "Skipped"
    assert world.production == "0.5"
    world.quality = 0.6
    world.look("4")
    assert world.production == "0.6"


@pytest.mark.parametrize("seed", range(8))
def test_a_month_of_looks_with_faults_ends_with_the_right_model_in_production(world: World, seed: int) -> None:
    """Sixty looks, twice a day: data comes or does not, runs fail or are killed and are retried or are not.

    Right is the best of all data that a run has considered: here a model is as good as its data.
    """
    chance = random.Random(seed)
    best = 0.1
    for number in range(60):
        if chance.random() < 0.4:
            world.quality = round(chance.uniform(0.0, 1.0), 6)
        faults: list[type[BaseException]] = [KeyError, RuntimeError, Killed]
        world.faults = chance.choices(faults, weights=(4, 1, 1), k=4)
        try:
            world.look(f"{number}", max_failures=60)
        except (RuntimeError, Killed):
            if chance.random() < 0.5:
                world.faults = []
                world.look(f"{number}", max_failures=60)
        rows = [row for row in retrainings(world.ledger, "small") if row.state.is_over]
        done = [float(row.data["/data/sft.jsonl"]) for row in rows if row.state is not RetrainingState.FAILED]
        best = max([0.1, *done])
        assert world.production == ("" if best == 0.1 else f"{best}")
    world.faults = []
    world.look("last")
    assert world.look("after").name == "Skipped"
    assert world.production == f"{max(best, world.quality)}"
    last = find_retraining(world.ledger, "last")
    assert last is None or last.state.is_over
    candidate = current(world.ledger, "small", Alias.CANDIDATE)
    assert candidate is None or candidate.digest != f"{world.quality}"
