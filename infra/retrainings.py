"""Retrainings in the ledger: the data of each retraining, and its outcome.

Not here: the database (ledger_file.py), models (registry.py), the next step of a retraining (tasks/retraining.py).

    training ──a candidate was compared──> compared ───────────────────────────> promoted | rejected
        \\──> failed                           \\──> waiting for an approval ──┘
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from rollouts.infra.ledger import Ledger


class RetrainingState(StrEnum):
    TRAINING = "training"
    COMPARED = "compared"
    """A candidate has been compared with the production model."""
    WAITING = "waiting"
    """A user has been asked whether to promote the candidate."""
    PROMOTED = "promoted"
    REJECTED = "rejected"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """Whether the retraining has ended: the candidate was promoted or rejected, or the run failed."""
        return self in (RetrainingState.PROMOTED, RetrainingState.REJECTED, RetrainingState.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retraining:
    """A run that found new data and trains a model on the data."""

    run_id: str
    line: str
    """The name of the model line to which the retraining adds its model."""
    state: RetrainingState = RetrainingState.TRAINING
    data: Mapping[str, str]
    """Digests of the watched data files before the training, by path."""
    model_id: int | None = None
    baseline_id: int | None = None
    """Id of the model with which the candidate was compared. `registry.NOTHING` means the base model."""
    is_better: bool = False
    approved: bool | None = None
    """A user's decision about promoting the candidate, or None before the decision."""
    approved_by: str = ""
    note: str = ""
    began_at: float
    """Time of the begin in seconds since 1970, like all times of this record."""
    ended_at: float | None = None


_COLUMNS = ", ".join(Retraining.__slots__)


def begin_retraining(
    ledger: Ledger, run_id: str, line: str, data: Mapping[str, str], *, now: float | None = None
) -> Retraining:
    """Write a new row for this run's retraining, in place of the row of an earlier attempt of the run. Returns the new
    row."""
    row = Retraining(run_id=run_id, line=line, data=dict(data), began_at=time.time() if now is None else now)
    _write(ledger, row)
    return row


def change_retraining(ledger: Ledger, row: Retraining, **changes: Any) -> Retraining:  # Any: values of columns
    changed = replace(row, **changes)
    _write(ledger, changed)
    return changed


def end_retraining(
    ledger: Ledger, row: Retraining, state: RetrainingState, note: str, *, now: float | None = None
) -> Retraining:
    assert state.is_over, state
    return change_retraining(ledger, row, state=state, note=note, ended_at=time.time() if now is None else now)


def find_retraining(ledger: Ledger, run_id: str) -> Retraining | None:
    return next(iter(_select(ledger, "WHERE run_id = ?", run_id)), None)


def retrainings(ledger: Ledger, line: str) -> list[Retraining]:
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
