"""Remember which models there are, which one is in production, and which were: the rows of the ledger about models.

Not here: the database (ledger_file.py), when a model is promoted (tasks/retraining.py), looking into a checkpoint.

A line is a series of models that replace each other, `small`; its models are small-1, small-2 and so on. An alias names
at most one model of a line:

    candidate    registered last, not decided yet
    production   the one that counts; each promotion stands on the one before, and a rollback goes down by one

    promote small-1, promote small-3, rollback: small-1 again        nothing is ever deleted from the history
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
"""In place of the id of a model where there is none; ids count from 1."""
REGISTERED = "registered"
"""Why a model becomes the candidate."""


class Alias(StrEnum):
    """What a model of a line can be called besides its name."""

    CANDIDATE = "candidate"
    PRODUCTION = "production"


class ProductionChangedError(PermanentInfraError):
    """Another model is in production than somebody went by; nothing was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A checkpoint that was registered."""

    id: int
    """Unique in the store."""
    line: str
    version: int
    """From 1, in order of registration."""
    checkpoint: str
    """Folder of the checkpoint, relative to the store."""
    digest: str
    run_id: str
    """The run that made it."""
    stages: tuple[str, ...]
    """Directories of the stages that it came from, by name: sft-<fingerprint> and so on."""
    data: Mapping[str, str]
    """Digests of the data that it was trained on, by path."""
    evaluation: Mapping[str, Any]  # Any: JSON
    """How it was compared last; empty where it was not."""
    registered_at: float
    """Seconds since 1970, like all times here."""
    registered_by: str

    @property
    def name(self) -> str:
        """What people call it."""
        return f"{self.line}-{self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasChange:
    """An alias that began to name another model, or none."""

    id: int
    line: str
    alias: Alias
    model_id: int | None
    below: int | None
    """The change whose model comes back at a rollback."""
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
    """The model of the line with this content, made the candidate; one that is known only gets its new folder."""
    at = time.time() if now is None else now
    with ledger.transaction() as database:
        known = _select(database, "WHERE line = ? AND digest = ?", line, digest)
        if known:
            database.execute("UPDATE models SET checkpoint = ? WHERE id = ?", (checkpoint, known[0].id))
            return replace(known[0], checkpoint=checkpoint)
        # Counted in the history, because a number must not come back when its model was forgotten.
        version = 1 + database.execute(_COUNT_REGISTERED, (line, Alias.CANDIDATE, REGISTERED)).fetchone()[0]
        values = (line, version, checkpoint, digest, run_id, json.dumps(list(stages)), json.dumps(dict(data)))
        database.execute(
            "INSERT INTO models (line, version, checkpoint, digest, run_id, stages, data, evaluation, registered_at, "
            "registered_by) VALUES (?, ?, ?, ?, ?, ?, ?, '{}', ?, ?)",
            (*values, at, by),
        )
        [model] = _select(database, "WHERE line = ? AND digest = ?", line, digest)
        _change(database, line, Alias.CANDIDATE, model.id, below=None, at=at, by=by, reason=REGISTERED)
    return model


def note_evaluation(ledger: Ledger, model: Model, evaluation: Mapping[str, Any]) -> None:  # Any: JSON
    """Keep the figures of the model's latest comparison."""
    with ledger.transaction() as database:
        database.execute("UPDATE models SET evaluation = ? WHERE id = ?", (json.dumps(dict(evaluation)), model.id))


def move_model(ledger: Ledger, model: Model, checkpoint: str) -> None:
    """Say that the checkpoint of a model lies in another folder, relative to the store."""
    with ledger.transaction() as database:
        database.execute("UPDATE models SET checkpoint = ? WHERE id = ?", (checkpoint, model.id))


def models(ledger: Ledger, line: str = "") -> list[Model]:
    """The models of a line, or of all, oldest first."""
    with ledger.transaction() as database:
        return _select(database, "WHERE line = ? ORDER BY id", line) if line else select_models(database)


def select_models(database: sqlite3.Connection) -> list[Model]:
    """All models, oldest first, as a transaction that is under way sees them."""
    return _select(database, "ORDER BY id")


def find_model(ledger: Ledger, name_or_id: str) -> Model:
    """The model of a name like small-3, or of an id.

    Raises:
        PermanentInfraError: there is none.
    """
    every = models(ledger)
    found = [each for each in every if each.name == name_or_id or str(each.id) == name_or_id]
    if not found:
        known = ", ".join(each.name for each in every[-8:]) or "none"
        raise PermanentInfraError(f"there is no model {name_or_id}: the registry has {known}")
    return found[0]


def current(ledger: Ledger, line: str, alias: Alias) -> Model | None:
    """The model of the line that the alias names now."""
    with ledger.transaction() as database:
        change = _latest(database, line, alias)
        if change is None or change.model_id is None:
            return None
        return _select(database, "WHERE id = ?", change.model_id)[0]


def promote(
    ledger: Ledger, model: Model, *, by: str, reason: str, instead_of: int | None = None, now: float | None = None
) -> None:
    """Put a model into production; one that is there already stays, and nothing is written.

    Args:
        instead_of: id of the model that must be in production, NOTHING where none may be; None does not ask.

    Raises:
        ProductionChangedError: something else is in production than `instead_of` says.
        PermanentInfraError: the model was forgotten meanwhile.
    """
    at = time.time() if now is None else now
    with ledger.transaction() as database:
        if not _select(database, "WHERE id = ?", model.id):
            raise PermanentInfraError(f"{model.name} was struck out of the registry meanwhile: promote another model")
        before = _latest(database, model.line, Alias.PRODUCTION)
        present = NOTHING if before is None or before.model_id is None else before.model_id
        if present != model.id:
            if instead_of is not None and present != instead_of:
                raise ProductionChangedError(f"{model.name} was compared with another model than is in production now")
            below = None if before is None else before.id
            _change(database, model.line, Alias.PRODUCTION, model.id, below=below, at=at, by=by, reason=reason)
        _end_candidacy(database, model, at=at, by=by, reason="promoted")


def reject(ledger: Ledger, model: Model, *, by: str, reason: str, now: float | None = None) -> None:
    """Make the model no candidate any more."""
    with ledger.transaction() as database:
        _end_candidacy(database, model, at=time.time() if now is None else now, by=by, reason=reason)


def find_replaced(ledger: Ledger, line: str) -> Model:
    """The model that a rollback brings back.

    Raises:
        PermanentInfraError: nothing was replaced.
    """
    with ledger.transaction() as database:
        return _replaced(database, line)[0]


def rollback(ledger: Ledger, line: str, *, by: str, reason: str, to: Model | None = None) -> Model:
    """Put the model back into production that the present one replaced, and return it.

    Args:
        to: the model that it must be; None does not ask.

    Raises:
        ProductionChangedError: it is another one than `to`.
        PermanentInfraError: nothing was replaced.
    """
    with ledger.transaction() as database:
        model, below = _replaced(database, line)
        if to is not None and to.id != model.id:
            raise ProductionChangedError(f"production of {line} changed meanwhile: look at it, and roll back again")
        _change(database, line, Alias.PRODUCTION, model.id, below=below, at=time.time(), by=by, reason=reason)
    return model


def forget_model(ledger: Ledger, model: Model) -> None:
    """Strike a model out, so that nothing keeps what it came from; the history keeps its number.

    Raises:
        PermanentInfraError: it is the candidate, in production, or what a rollback could bring back.
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
                f"{model.name} is needed: it is the candidate, in production, or below what is there; promote another "
                "model, or leave it"
            )
        database.execute("DELETE FROM models WHERE id = ?", (model.id,))


def history(ledger: Ledger, line: str = "") -> list[AliasChange]:
    """What the aliases of a line, or of all, named, oldest first."""
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
    """The model below the present one, and the change that lies below that."""
    change = _latest(database, line, Alias.PRODUCTION)
    below = None if change is None or change.below is None else _change_of(database, change.below)
    if below is None or below.model_id is None:
        raise PermanentInfraError(f"nothing of {line} was in production before: rollouts models promote takes a name")
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
