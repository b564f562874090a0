"""The model registry: which models exist, and which models are or were in production. The registry consists of tables
of the ledger.

A model line is a series of models that replace each other. For example, the line `small` has the models small-1,
small-2 and so on. An alias names at most one model of a line:

    candidate    the model registered last, until it is promoted or rejected
    production   the model in use. A promotion replaces the production model, and a rollback restores the replaced model

    promote small-1, promote small-3, rollback: small-1 again        the history is never deleted

Not here: the database (ledger_file.py), the decision to promote (tasks/retraining.py), the checkpoints themselves.
"""

import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.ledger import Ledger

NOTHING = 0
"""Value in place of a model's id that means "no model". Ids begin at 1."""
BENCHMARKS = "benchmarks"
"""Key of the benchmarks in `Model.evaluation`."""
_REGISTERED = "registered"
"""Reason of the alias change that makes a new model the candidate."""


class Alias(StrEnum):
    """Names that move from one model of a line to another."""

    CANDIDATE = "candidate"
    PRODUCTION = "production"


class ProductionChangedError(PermanentInfraError):
    """The production model differs from the model that the caller expected. Nothing was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A registered checkpoint."""

    id: int
    line: str
    version: int
    """Number in the order of registration, from 1."""
    checkpoint: str
    """Folder of the checkpoint, relative to the store."""
    digest: str
    run_id: str
    stages: tuple[str, ...]
    """Directories of the stages whose results the model depends on, for example sft-<fingerprint>."""
    data: Mapping[str, str]
    """Digests of the model's training data, by path."""
    evaluation: Mapping[str, Any]  # Any: JSON
    """Results of the model's latest comparison, and its results in benchmarks as BENCHMARKS. Empty before both."""
    registered_at: float
    """Time of the registration in seconds since 1970, like all times of this record."""
    registered_by: str

    @property
    def name(self) -> str:
        """The model's name that users see, for example small-3."""
        return f"{self.line}-{self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasChange:
    id: int
    line: str
    alias: Alias
    model_id: int | None
    below: int | None
    """Id of the earlier change whose model a rollback restores, or None if a rollback is not possible."""
    changed_at: float
    changed_by: str
    reason: str


def register_model(
    ledger: Ledger,
    line: str,
    *,
    checkpoint: str,
    digest: str,
    run_id: str,
    stages: Sequence[str],
    data: Mapping[str, str],
    by: str,
    now: float | None = None,
) -> Model:
    """Register a model as the candidate, and return the model. If the line already has a model with the same digest,
    only update the checkpoint folder of that model."""
    at = time.time() if now is None else now
    with ledger.transaction() as database:
        known = _select(database, "WHERE line = ? AND digest = ?", line, digest)
        if known:
            database.execute("UPDATE models SET checkpoint = ? WHERE id = ?", (checkpoint, known[0].id))
            return replace(known[0], checkpoint=checkpoint)
        # Count registrations in the history, so that a new model never gets the number of a removed model.
        version = 1 + database.execute(_COUNT_REGISTERED, (line, Alias.CANDIDATE, _REGISTERED)).fetchone()[0]
        values = (line, version, checkpoint, digest, run_id, json.dumps(list(stages)), json.dumps(dict(data)))
        database.execute(
            "INSERT INTO models (line, version, checkpoint, digest, run_id, stages, data, evaluation, registered_at, "
            "registered_by) VALUES (?, ?, ?, ?, ?, ?, ?, '{}', ?, ?)",
            (*values, at, by),
        )
        [model] = _select(database, "WHERE line = ? AND digest = ?", line, digest)
        _change(database, line, Alias.CANDIDATE, model.id, below=None, at=at, by=by, reason=_REGISTERED)
    return model


def note_evaluation(ledger: Ledger, model: Model, evaluation: Mapping[str, Any]) -> None:  # Any: JSON
    """Replace the results of the model's comparison. Its results in benchmarks stay."""
    with ledger.transaction() as database:
        known = _select(database, "WHERE id = ?", model.id)
        kept = {key: each.evaluation[key] for each in known for key in (BENCHMARKS,) if key in each.evaluation}
        _set_evaluation(database, model, {**evaluation, **kept})


def note_benchmarks(ledger: Ledger, model: Model, benchmarks: Sequence[Mapping[str, Any]]) -> None:  # Any: JSON
    """Replace the model's results in benchmarks. The results of its comparison stay."""
    with ledger.transaction() as database:
        for known in _select(database, "WHERE id = ?", model.id):
            _set_evaluation(database, model, {**known.evaluation, BENCHMARKS: list(benchmarks)})


def _set_evaluation(database: sqlite3.Connection, model: Model, evaluation: Mapping[str, Any]) -> None:  # Any: JSON
    database.execute("UPDATE models SET evaluation = ? WHERE id = ?", (json.dumps(dict(evaluation)), model.id))


def move_model(ledger: Ledger, model: Model, checkpoint: str) -> None:
    with ledger.transaction() as database:
        database.execute("UPDATE models SET checkpoint = ? WHERE id = ?", (checkpoint, model.id))


def models(ledger: Ledger, line: str = "") -> list[Model]:
    with ledger.transaction() as database:
        return _select(database, "WHERE line = ? ORDER BY id", line) if line else select_models(database)


def select_models(database: sqlite3.Connection) -> list[Model]:
    """Return all models, oldest first. The caller must have begun the transaction."""
    return _select(database, "ORDER BY id")


def find_model(ledger: Ledger, name_or_id: str) -> Model:
    """Return the model with this name (for example small-3) or id.

    Raises:
        PermanentInfraError: the registry has no such model.
    """
    every = models(ledger)
    found = [each for each in every if each.name == name_or_id or str(each.id) == name_or_id]
    if not found:
        known = ", ".join(each.name for each in every[-8:]) or "none"
        raise PermanentInfraError(f"there is no model {name_or_id}: the registry has {known}")
    return found[0]


def current(ledger: Ledger, line: str, alias: Alias) -> Model | None:
    with ledger.transaction() as database:
        change = _latest(database, line, alias)
        if change is None or change.model_id is None:
            return None
        return _select(database, "WHERE id = ?", change.model_id)[0]


def promote(
    ledger: Ledger, model: Model, *, by: str, reason: str, instead_of: int | None = None, now: float | None = None
) -> None:
    """Make a model the production model, and end its candidacy. A model that is already in production stays there.

    Args:
        instead_of: id of the model that must be in production now. NOTHING means that production must be empty. None
            skips this check.

    Raises:
        ProductionChangedError: production differs from `instead_of`.
        PermanentInfraError: the model was removed from the registry meanwhile.
    """
    at = time.time() if now is None else now
    with ledger.transaction() as database:
        if not _select(database, "WHERE id = ?", model.id):
            raise PermanentInfraError(f"{model.name} was removed from the registry meanwhile: promote another model")
        before = _latest(database, model.line, Alias.PRODUCTION)
        present = NOTHING if before is None or before.model_id is None else before.model_id
        if present != model.id:
            if instead_of is not None and present != instead_of:
                raise ProductionChangedError(f"production changed after {model.name} was compared with it")
            below = None if before is None else before.id
            _change(database, model.line, Alias.PRODUCTION, model.id, below=below, at=at, by=by, reason=reason)
        _end_candidacy(database, model, at=at, by=by, reason="promoted")


def reject(ledger: Ledger, model: Model, *, by: str, reason: str, now: float | None = None) -> None:
    with ledger.transaction() as database:
        _end_candidacy(database, model, at=time.time() if now is None else now, by=by, reason=reason)


def find_replaced(ledger: Ledger, line: str) -> Model:
    """Return the model that a rollback would restore.

    Raises:
        PermanentInfraError: production has no earlier model.
    """
    with ledger.transaction() as database:
        return _replaced(database, line)[0]


def rollback(ledger: Ledger, line: str, *, by: str, reason: str, to: Model | None = None) -> Model:
    """Restore the model that the production model has replaced, and return the restored model.

    Args:
        to: the model that the caller expects to be restored. None skips this check.

    Raises:
        ProductionChangedError: the rollback would restore another model than `to`.
        PermanentInfraError: production has no earlier model.
    """
    with ledger.transaction() as database:
        model, below = _replaced(database, line)
        if to is not None and to.id != model.id:
            raise ProductionChangedError(f"production of {line} changed meanwhile: check it, then roll back again")
        _change(database, line, Alias.PRODUCTION, model.id, below=below, at=time.time(), by=by, reason=reason)
    return model


def forget_model(ledger: Ledger, model: Model) -> None:
    """Remove a model from the registry, so that the stages which made it can be pruned.

    No later model of the line gets the number of this model.

    Raises:
        PermanentInfraError: the model is the candidate, is in production, or a rollback could restore it.
    """
    with ledger.transaction() as database:
        candidate = _latest(database, model.line, Alias.CANDIDATE)
        needed = {candidate.model_id} if candidate else set()
        change = _latest(database, model.line, Alias.PRODUCTION)
        while change is not None:
            needed.add(change.model_id)
            change = None if change.below is None else _change_of(database, change.below)
        if model.id in needed:
            raise PermanentInfraError(
                f"{model.name} is needed: it is the candidate, in production, or an earlier production model: promote "
                "another model, or keep it"
            )
        database.execute("DELETE FROM models WHERE id = ?", (model.id,))


def history(ledger: Ledger, line: str = "") -> list[AliasChange]:
    where = ("WHERE line = ? ORDER BY id", (line,)) if line else ("ORDER BY id", ())
    with ledger.transaction() as database:
        rows = database.execute(f"SELECT {_CHANGE_COLUMNS} FROM alias_changes {where[0]}", where[1]).fetchall()
    return [_change_from(row) for row in rows]


_COLUMNS = ", ".join(Model.__slots__)
_CHANGE_COLUMNS = ", ".join(AliasChange.__slots__)
_COUNT_REGISTERED = "SELECT count(*) FROM alias_changes WHERE line = ? AND alias = ? AND reason = ?"


def _select(database: sqlite3.Connection, condition: str, *values: str | int) -> list[Model]:
    rows = database.execute(f"SELECT {_COLUMNS} FROM models {condition}", values).fetchall()
    return [_model_from(dict(zip(Model.__slots__, row, strict=True))) for row in rows]


def _model_from(row: dict[str, Any]) -> Model:  # Any: values of columns
    decoded = {key: json.loads(row[key]) for key in ("stages", "data", "evaluation")}
    return Model(**{**row, **decoded, "stages": tuple(decoded["stages"])})


def _latest(database: sqlite3.Connection, line: str, alias: Alias) -> AliasChange | None:
    query = f"SELECT {_CHANGE_COLUMNS} FROM alias_changes WHERE line = ? AND alias = ? ORDER BY id DESC LIMIT 1"
    row = database.execute(query, (line, alias)).fetchone()
    return None if row is None else _change_from(row)


def _replaced(database: sqlite3.Connection, line: str) -> tuple[Model, int | None]:
    """Return the model that a rollback would restore, and the id of the change that the next rollback would restore."""
    change = _latest(database, line, Alias.PRODUCTION)
    below = None if change is None or change.below is None else _change_of(database, change.below)
    if below is None or below.model_id is None:
        raise PermanentInfraError(
            f"{line} has no earlier production model: use `rollouts models promote` with a model's name"
        )
    return _select(database, "WHERE id = ?", below.model_id)[0], below.below


def _change_of(database: sqlite3.Connection, change_id: int) -> AliasChange:
    row = database.execute(f"SELECT {_CHANGE_COLUMNS} FROM alias_changes WHERE id = ?", (change_id,)).fetchone()
    assert row is not None, f"change {change_id} is referred to, and history is never deleted"
    return _change_from(row)


def _change_from(row: Sequence[Any]) -> AliasChange:  # Any: values of columns
    columns = dict(zip(AliasChange.__slots__, row, strict=True))
    return AliasChange(**{**columns, "alias": Alias(columns["alias"])})


def _change(
    database: sqlite3.Connection,
    line: str,
    alias: Alias,
    model_id: int | None,
    *,
    below: int | None,
    at: float,
    by: str,
    reason: str,
) -> None:
    database.execute(
        "INSERT INTO alias_changes (line, alias, model_id, below, changed_at, changed_by, reason) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (line, alias, model_id, below, at, by, reason),
    )


def _end_candidacy(database: sqlite3.Connection, model: Model, *, at: float, by: str, reason: str) -> None:
    candidate = _latest(database, model.line, Alias.CANDIDATE)
    if candidate is not None and candidate.model_id == model.id:
        _change(database, model.line, Alias.CANDIDATE, None, below=None, at=at, by=by, reason=reason)
