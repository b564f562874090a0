"""Remember which data was trained on when, and what came of it: the rows of the ledger about retrainings.

Not here: the database (ledger_file.py), models (registry.py), what is to be done next (tasks/retraining.py).

    training ──a candidate was compared──> compared ────────────────────> promoted | rejected
        \\──> failed                           \\──> waiting for a person ──┘
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from rollouts.infra.ledger import Ledger


class RetrainingState(StrEnum):
    """How far a retraining has come."""

    TRAINING = "training"
    COMPARED = "compared"
    """There is a candidate, and it was compared with what was in production."""
    WAITING = "waiting"
    """A person was asked whether the candidate may be promoted."""
    PROMOTED = "promoted"
    REJECTED = "rejected"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """True when its run does nothing more for it by itself."""
        return self in (RetrainingState.PROMOTED, RetrainingState.REJECTED, RetrainingState.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retraining:
    """One run that found data to train on."""

    run_id: str
    line: str
    """The line of models that it is about."""
    state: RetrainingState = RetrainingState.TRAINING
    data: Mapping[str, str]
    """Digests of what was watched, by path, from before the training."""
    model_id: int | None = None
    """The candidate."""
    baseline_id: int | None = None
    """The model of the registry that it was compared with; `registry.NOTHING` for the start model."""
    is_better: bool = False
    """Whether the comparison came out for the candidate."""
    approved: bool | None = None
    """What a person said about this comparison; None as long as nobody did."""
    approved_by: str = ""
    note: str = ""
    """What happened to it last, in words."""
    began_at: float
    """Seconds since 1970, like all times here."""
    ended_at: float | None = None


_COLUMNS = ", ".join(Retraining.__slots__)


def begin_retraining(
    ledger: Ledger, run_id: str, line: str, data: Mapping[str, str], *, now: float | None = None
) -> Retraining:
    """A retraining of this run, from its start; an earlier try of the same run is forgotten."""
    row = Retraining(run_id=run_id, line=line, data=dict(data), began_at=time.time() if now is None else now)
    _write(ledger, row)
    return row


def change_retraining(ledger: Ledger, row: Retraining, **changes: Any) -> Retraining:  # Any: values of columns
    """Write the changes and return the row as it is now."""
    changed = replace(row, **changes)
    _write(ledger, changed)
    return changed


def end_retraining(
    ledger: Ledger, row: Retraining, state: RetrainingState, note: str, *, now: float | None = None
) -> Retraining:
    """Write how it ended, and return the row."""
    assert state.is_over, state
    return change_retraining(ledger, row, state=state, note=note, ended_at=time.time() if now is None else now)


def find_retraining(ledger: Ledger, run_id: str) -> Retraining | None:
    """That of a run."""
    return next(iter(_select(ledger, "WHERE run_id = ?", run_id)), None)


def retrainings(ledger: Ledger, line: str) -> list[Retraining]:
    """Those of a line, oldest first."""
    return _select(ledger, "WHERE line = ? ORDER BY began_at, run_id", line)


def _write(ledger: Ledger, row: Retraining) -> None:
    values = [getattr(row, column) for column in Retraining.__slots__]
    values[_DATA] = json.dumps(dict(row.data))
    with ledger.transaction() as database:
        database.execute(f"REPLACE INTO retrainings ({_COLUMNS}) VALUES ({', '.join('?' * len(values))})", values)


def _select(ledger: Ledger, condition: str, *values: str) -> list[Retraining]:
    with ledger.transaction() as database:
        rows = database.execute(f"SELECT {_COLUMNS} FROM retrainings {condition}", values).fetchall()
    return [_from(dict(zip(Retraining.__slots__, row, strict=True))) for row in rows]


def _from(row: dict[str, Any]) -> Retraining:  # Any: values of columns
    approved = None if row["approved"] is None else bool(row["approved"])
    typed = {"state": RetrainingState(row["state"]), "is_better": bool(row["is_better"]), "approved": approved}
    return Retraining(**{**row, **typed, "data": json.loads(row["data"])})


_DATA = Retraining.__slots__.index("data")
