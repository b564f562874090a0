"""Decide the next step of a retraining, and carry it out: skip, train and compare, ask a user, promote or reject.

Each step writes its result to the ledger, so that a killed or suspended run resumes with the next step. Not here: the
Prefect flow (flows/retrain.py), the tables of the ledger (infra/retrainings.py, infra/registry.py).

    unchanged data ──> skip
    new data ──> train ──> compare ──not better──> reject
                             ^ └──better──> (ask) ──> promote
                             └─ production changed since ─┘
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

from rollouts.infra.errors import MachineGoneError, TransientInfraError
from rollouts.infra.ledger import Ledger
from rollouts.infra.registry import (
    NOTHING,
    Alias,
    Model,
    ProductionChangedError,
    current,
    find_model,
    note_evaluation,
    promote,
    reject,
)
from rollouts.infra.retrainings import (
    Retraining,
    RetrainingState,
    begin_retraining,
    change_retraining,
    end_retraining,
    find_retraining,
    retrainings,
)
from rollouts_core.errors import RolloutsError

MAX_STEPS = 20
"""The most steps of one retraining. Each change of the production model during a comparison adds steps."""

CONSIDERED = (RetrainingState.WAITING, RetrainingState.PROMOTED, RetrainingState.REJECTED)
"""A retraining in one of these states has trained on its data, so that the same data need no further retraining."""

WAITS = "waits for approval: Resume on its page, or Retry if it was cancelled"
"""Text for a retraining that waits for a user's approval. The ledger does not record whether a run was cancelled, so
the text names both buttons."""


class Step(StrEnum):
    """The next step of a retraining."""

    SKIP = "skip"
    TRAIN = "train"
    """Train, or reuse a finished training, and compare the new model with the production model."""
    COMPARE = "compare"
    """Compare the existing candidate with the current production model."""
    ASK = "ask"
    """Wait until a user approves or declines the candidate."""
    PROMOTE = "promote"
    """Make the candidate the production model."""
    REJECT = "reject"
    NOTHING = "nothing"
    """The retraining has already ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The user's settings that decide the steps of a retraining."""

    needs_approval: bool = False
    force: bool = False
    """Train even if the data is unchanged."""
    max_failures: int = 3
    """After this many failed retrainings in a row on the same data, retrainings are skipped until the data changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The next step of a retraining, and the reason in words."""

    step: Step
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The result of comparing a candidate with the production model."""

    model: Model
    """The candidate."""
    is_better: bool
    sentence: str
    evaluation: Mapping[str, Any]  # Any: JSON
    """Scores, intervals and p-value for the registry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A user's approval or refusal of a candidate."""

    approved: bool
    by: str
    comment: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The final result of a retraining."""

    name: str
    """Skipped, Promoted or Rejected."""
    sentence: str

    @property
    def is_promotion(self) -> bool:
        """True if the candidate became the production model."""
        return self.name == RetrainingState.PROMOTED.value.capitalize()


class Work(Protocol):
    """The operations of a retraining that need more than the ledger.

    Each method may be called again after a crash. The method then does only the missing part of its work.
    """

    def watch(self) -> dict[str, str]:
        """Compute the digests of the watched data, by path."""
        ...

    def train(self, data: Mapping[str, str], production: Model | None) -> Compared:
        """Train a model, register it as the candidate, and compare it with the production model.

        Without a production model, the candidate is compared with the start model.
        """
        ...

    def compare(self, candidate: Model, production: Model | None) -> Compared:
        """Compare a registered candidate of this run with the production model, or with the start model without one."""
        ...

    def ask(self, row: Retraining, candidate: Model) -> Answer:
        """Ask a user to approve the candidate, and wait for the answer.

        The process may end during the wait. A later process of the run then asks again.
        """
        ...


def decide_start(data: Mapping[str, str], earlier: Sequence[Retraining], rules: Rules) -> Decision:
    """Decide whether to train, or to skip the retraining: on unchanged data, or on data that failed too often.

    Args:
        earlier: the earlier retrainings of the line, oldest first.
    """
    if rules.force:
        return Decision(step=Step.TRAIN, reason="retrain.force is set")
    considered = next((row for row in reversed(earlier) if row.state in CONSIDERED), None)
    if considered is not None and dict(considered.data) == dict(data):
        ended = f"ended {considered.state.value}" if considered.state.is_over else WAITS
        began = time.strftime("%Y-%m-%d %H:%M", time.gmtime(considered.began_at))
        return Decision(step=Step.SKIP, reason=f"data unchanged since the retraining of {began} UTC, which {ended}")
    failures = 0
    for row in reversed(earlier):
        if row.state is not RetrainingState.FAILED or dict(row.data) != dict(data):
            break
        failures += 1
    if failures >= rules.max_failures:
        return Decision(
            step=Step.SKIP,
            reason=f"the last {failures} retrainings on the same data failed ({earlier[-1].note}): change the data, or "
            "start one with retrain.force=true",
        )
    return Decision(step=Step.TRAIN, reason="first training" if considered is None else "new data")


def decide_end(row: Retraining, production_id: int, rules: Rules) -> Decision:
    """Decide the next step of a retraining that has started.

    Args:
        production_id: the id of the current production model, or NOTHING.
    """
    if row.state in (RetrainingState.PROMOTED, RetrainingState.REJECTED):
        return Decision(step=Step.NOTHING)
    if row.state in (RetrainingState.TRAINING, RetrainingState.FAILED):
        return Decision(step=Step.TRAIN)
    if row.state is RetrainingState.WAITING and row.approved is None:
        return Decision(step=Step.ASK)
    if row.approved is False:
        return Decision(step=Step.REJECT, reason=f"{row.approved_by} declined it")
    if row.model_id == production_id:
        return Decision(step=Step.PROMOTE, reason="it is already the production model")
    if row.baseline_id != production_id:
        return Decision(step=Step.COMPARE, reason="production changed since the comparison")
    if not row.is_better:
        return Decision(step=Step.REJECT, reason=row.note)
    if rules.needs_approval and row.approved is None:
        return Decision(step=Step.ASK)
    return Decision(step=Step.PROMOTE, reason=row.note)


def retrain_once(
    ledger: Ledger, work: Work, *, run_id: str, line: str, rules: Rules, clock: Callable[[], float] = time.time
) -> Outcome:
    """Carry out the remaining steps of this run's retraining. An error of the training is recorded and raised.

    Args:
        line: the name of the series of models to which the new model belongs.

    Raises:
        TransientInfraError: a machine failed temporarily. The retraining then does not count as failed.
    """
    row = find_retraining(ledger, run_id)
    if row is None or row.state in (RetrainingState.TRAINING, RetrainingState.FAILED):
        data = work.watch()
        earlier = [each for each in retrainings(ledger, line) if each.run_id != run_id]
        decision = decide_start(data, earlier, rules)
        if decision.step is Step.SKIP:
            return Outcome(name="Skipped", sentence=f"skipped, {decision.reason}")
        row = begin_retraining(ledger, run_id, line, data, now=clock())
    for _ in range(MAX_STEPS):
        production = current(ledger, line, Alias.PRODUCTION)
        decision = decide_end(row, production.id if production else NOTHING, rules)
        match decision.step:
            case Step.TRAIN:
                row = _compared(ledger, row, production, partial(work.train, row.data, production), clock)
            case Step.COMPARE:
                candidate = find_model(ledger, str(row.model_id))
                row = _compared(ledger, row, production, partial(work.compare, candidate, production), clock)
            case Step.ASK:
                row = _ask(ledger, work, row)
            case Step.PROMOTE:
                row = _promote(ledger, row, decision.reason, clock)
            case Step.REJECT:
                row = _reject(ledger, row, decision.reason, clock)
            case _:
                return Outcome(name=row.state.value.capitalize(), sentence=row.note)
    raise RolloutsError(f"the production model of {line} changed {MAX_STEPS} times during comparisons: start again")


def _compared(
    ledger: Ledger,
    row: Retraining,
    production: Model | None,
    compare: Callable[[], Compared],
    clock: Callable[[], float],
) -> Retraining:
    try:
        compared = compare()
    except (TransientInfraError, MachineGoneError):
        raise  # the data and settings did not cause the error, so the retraining does not count as failed
    except Exception as error:
        end_retraining(ledger, row, RetrainingState.FAILED, str(error), now=clock())
        raise
    note_evaluation(ledger, compared.model, compared.evaluation)
    return change_retraining(
        ledger,
        row,
        state=RetrainingState.COMPARED,
        model_id=compared.model.id,
        baseline_id=production.id if production else NOTHING,
        is_better=compared.is_better,
        approved=None,
        approved_by="",
        note=compared.sentence,
    )


def _ask(ledger: Ledger, work: Work, row: Retraining) -> Retraining:
    waiting = change_retraining(ledger, row, state=RetrainingState.WAITING)
    answer = work.ask(waiting, find_model(ledger, str(row.model_id)))
    said = f"; {answer.by}: {answer.comment}" if answer.comment else ""
    return change_retraining(
        ledger,
        waiting,
        state=RetrainingState.COMPARED,
        approved=answer.approved,
        approved_by=answer.by,
        note=f"{row.note}{said}",
    )


def _promote(ledger: Ledger, row: Retraining, reason: str, clock: Callable[[], float]) -> Retraining:
    model = find_model(ledger, str(row.model_id))
    by = row.approved_by or f"run {row.run_id}"
    try:
        promote(ledger, model, by=by, reason=reason, instead_of=row.baseline_id, now=clock())
    except ProductionChangedError:
        return row  # another retraining has just promoted its model, to which the next step compares
    return end_retraining(ledger, row, RetrainingState.PROMOTED, f"promoted {model.name}: {reason}", now=clock())


def _reject(ledger: Ledger, row: Retraining, reason: str, clock: Callable[[], float]) -> Retraining:
    model = find_model(ledger, str(row.model_id))
    by = row.approved_by or f"run {row.run_id}"
    reject(ledger, model, by=by, reason=reason, now=clock())
    return end_retraining(ledger, row, RetrainingState.REJECTED, f"rejected {model.name}: {reason}", now=clock())
