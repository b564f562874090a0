"""`rollouts models` and its subcommands: list the models of a store, and change the model in production by hand.

    rollouts models                   every model with its aliases and its last comparison
    rollouts models history           every registration, promotion and rollback, with its reason
    rollouts models promote small-3   put a model into production without a comparison
    rollouts models rollback          put the previous production model back
    rollouts models forget small-2    unregister a model, so that `rollouts prune` may remove its stages
    rollouts models path small        print the folder of the checkpoint in production, for other commands

Not here: the other commands (cli.py), the registry (infra/registry.py), promotions by comparison (tasks/retraining.py).
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rollouts.flows.commands.machines import Explained, at, open_ledger, render_table
from rollouts.flows.commands.notify import RunState, tell_by_hand
from rollouts.flows.commands.terminal import DEFAULT_STORE, AsJson, emit, tell
from rollouts.flows.store import STORE_VARIABLE, from_home
from rollouts.infra.ledger import Ledger
from rollouts.infra.registry import (
    Alias,
    Model,
    current,
    find_model,
    find_replaced,
    forget_model,
    history,
    models,
    promote,
    rollback,
)
from rollouts.tasks.candidate import check_whole
from rollouts.tasks.model_aliases import note_in_reports
from rollouts_core.errors import InputError

Store = Annotated[
    Path, typer.Option(envvar=STORE_VARIABLE, callback=from_home, help="Folder with the registry of the models.")
]
ModelName = Annotated[str, typer.Argument(metavar="NAME|ID", help="Name or id, as `rollouts models` shows it.")]
Line = Annotated[
    str,
    typer.Argument(
        metavar="[LINE]", help="Line of models: small for small-1 and small-2. Needed if the store has several."
    ),
]
Reason = Annotated[str, typer.Option(help="Reason, saved in the history.")]

NO_MODELS = "there are no models: retrainings and runs with run.register_as register models"


def add_model_commands(app: typer.Typer, explained: Explained, *, panel: str) -> None:
    """Add `models` and its subcommands to the command line.

    Args:
        explained: decorator that turns an expected exception of a command into one printed sentence.
        panel: the section of the help that lists these commands.
    """
    group = typer.Typer(help="The models of this store: candidates, production, history.", no_args_is_help=False)
    listed = _list_unless_asked(explained)
    app.add_typer(group, name="models", invoke_without_command=True, callback=listed, rich_help_panel=panel)
    group.command("history")(explained(show_history))
    group.command("promote")(explained(promote_by_hand))
    group.command("rollback")(explained(roll_back))
    group.command("forget")(explained(forget))
    group.command("path")(explained(show_path))


def _list_unless_asked(explained: Explained) -> Callable[..., None]:
    """Return the function for `rollouts models` without a subcommand, which lists the models."""

    def callback(context: typer.Context, store: Store = DEFAULT_STORE, as_json: AsJson = False) -> None:
        if context.invoked_subcommand is None:
            explained(list_models)(store, as_json=as_json)

    return callback


def list_models(store: Path, *, as_json: bool = False) -> None:
    """Print every model, oldest first."""
    with open_registry(store) as ledger:
        every = models(ledger)
        aliases = {
            (line, alias): current(ledger, line, alias) for line in {each.line for each in every} for alias in Alias
        }
    if as_json:
        emit({"kind": "model", **asdict(model), "aliases": aliases_of(model, aliases)} for model in every)
        return
    typer.echo(render_models(every, aliases) if every else NO_MODELS)


def show_history(line: Line = "", store: Store = DEFAULT_STORE, as_json: AsJson = False) -> None:
    """Print all registrations, promotions and rollbacks of models, oldest first."""
    with open_registry(store) as ledger:
        names = {model.id: model.name for model in models(ledger)}
        changes = history(ledger, line)
        if line and not changes:
            only_line(ledger, line)  # raises an error that lists the lines of the store
    if as_json:
        emit({"kind": "change", **asdict(change), "model": names.get(change.model_id or 0)} for change in changes)
        return
    rows = [
        (
            at(change.changed_at),
            change.line,
            change.alias.value,
            "-" if change.model_id is None else names.get(change.model_id, f"id {change.model_id}"),
            change.changed_by,
            change.reason,
        )
        for change in changes
    ]
    typer.echo(render_table(("WHEN (UTC)", "LINE", "ALIAS", "MODEL", "BY", "WHY"), rows))


def promote_by_hand(
    name: ModelName, store: Store = DEFAULT_STORE, reason: Reason = "by hand", as_json: AsJson = False
) -> None:
    """Verify a model's checkpoint, then put the model into production without a comparison."""
    with open_registry(store) as ledger:
        model = find_model(ledger, name)
        check_whole(model, store.resolve())
        promote(ledger, model, by=_user(), reason=reason)
        note_in_reports(store.resolve(), ledger)
    said = f"{model.name} is in production: {store.resolve() / model.checkpoint}"
    tell(said, as_json=as_json)
    tell_by_hand(store, RunState.PROMOTED, f"{model.name}: Promoted", f"{said} (by {_user()}: {reason})")


def roll_back(
    line: Line = "", store: Store = DEFAULT_STORE, reason: Reason = "rollback by hand", as_json: AsJson = False
) -> None:
    """Verify the checkpoint of the previous production model, then put this model back into production."""
    with open_registry(store) as ledger:
        chosen = only_line(ledger, line)
        replaced = find_replaced(ledger, chosen)
        check_whole(replaced, store.resolve())  # takes minutes, in which another user may promote a model
        model = rollback(ledger, chosen, by=_user(), reason=reason, to=replaced)
        note_in_reports(store.resolve(), ledger)
    said = f"{model.name} is in production again: {store.resolve() / model.checkpoint}"
    tell(said, as_json=as_json)
    tell_by_hand(store, RunState.PROMOTED, f"{model.name}: Rolled back", f"{said} (by {_user()}: {reason})")


def forget(name: ModelName, store: Store = DEFAULT_STORE, as_json: AsJson = False) -> None:
    """Unregister a model that no alias refers to and no rollback needs. Its checkpoint stays, but `rollouts prune` may
    remove its stages."""
    with open_registry(store) as ledger:
        model = find_model(ledger, name)
        forget_model(ledger, model)
        note_in_reports(store.resolve(), ledger, forgotten=model)
    said = f"{model.name} is no longer registered; its checkpoint stays: {store.resolve() / model.checkpoint}"
    tell(said, as_json=as_json)


def show_path(
    line: Line = "",
    store: Store = DEFAULT_STORE,
    alias: Annotated[Alias, typer.Option(help="Alias of the model.")] = Alias.PRODUCTION,
) -> None:
    """Print the folder of the checkpoint in production, for use as in `rollouts serve $(rollouts models path)`."""
    with open_registry(store) as ledger:
        chosen = only_line(ledger, line)
        model = current(ledger, chosen, alias)
    if model is None:
        raise InputError(f"no model of {chosen} has the alias {alias.value}: rollouts models lists the aliases")
    typer.echo(str(store.resolve() / model.checkpoint))


def open_registry(store: Path) -> Ledger:
    """Open the ledger of a store, which contains the registry. Raises PermanentInfraError if the store has no
    ledger."""
    return open_ledger(store, nothing="no run has used it")


def _user() -> str:
    """The name of the operating system's user, for the history."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container, the user id may have no name
        return f"user {os.getuid()}"


def only_line(ledger: Ledger, line: str) -> str:
    """The line of models that the user named, or the only line of the store. small-1 is of the line small.

    Raises:
        InputError: the store does not have this line, or `line` is empty and the store has several lines.
    """
    known = sorted({model.line for model in models(ledger)})
    if line in known or (not line and len(known) == 1):
        return line or known[0]
    if not known:
        raise InputError(NO_MODELS)
    wanted = f"there is no line {line}" if line else "the store has several lines of models"
    raise InputError(f"{wanted}: name one of {', '.join(known)}")


def render_models(every: Sequence[Model], aliases: Mapping[tuple[str, Alias], Model | None]) -> str:
    head = ("NAME", "ID", "ALIASES", "SCORE", "AGAINST", "MADE (UTC)", "CHECKPOINT")
    rows = []
    for model in every:
        rows.append(
            (
                model.name,
                str(model.id),
                " ".join(aliases_of(model, aliases)) or "-",
                *_figures(model.evaluation),
                at(model.registered_at),
                model.checkpoint,
            )
        )
    return render_table(head, rows)


def aliases_of(model: Model, aliases: Mapping[tuple[str, Alias], Model | None]) -> list[str]:
    return sorted(alias.value for (line, alias), each in aliases.items() if line == model.line and each == model)


def _figures(evaluation: Mapping[str, Any]) -> tuple[str, str]:  # Any: JSON
    """A model's mean score, and its difference to the compared model with the confidence interval."""
    if "mean" not in evaluation:
        return "-", "-"
    difference, low, high = (evaluation[key] for key in ("difference", "difference_low", "difference_high"))
    return f"{evaluation['mean']:.3f}", f"{evaluation['against']} {difference:+.3f} ({low:+.3f} to {high:+.3f})"
