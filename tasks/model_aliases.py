"""Say what models are called now where people look at the run that made them: in its report, and in `rollouts status`.

A report is a page on the disk, so it is written anew when an alias changes.

Not here: changing aliases (infra/registry.py), the other parts of the page (rollouts_core/report/).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.registry import Alias, Model, current, models
from rollouts.infra.run_ids import short_id
from rollouts.tasks.store_paths import RUNS, places_in
from rollouts_core.system.files import write_atomically


def describe_models(ledger: Ledger) -> list[tuple[Model, str]]:
    """Every model with its name and aliases: "small-3 (production)"."""
    every = models(ledger)
    named: dict[int, list[str]] = {}
    for line in {model.line for model in every}:
        for alias in Alias:
            if (model := current(ledger, line, alias)) is not None:
                named.setdefault(model.id, []).append(alias.value)
    return [(model, _describe(model, named.get(model.id, []))) for model in every]


def models_of_runs(store: Path) -> dict[str, list[str]]:
    """The names of each run's models, by the first characters of the run's id."""
    if not (store / LEDGER_FILE).is_file():
        return {}
    found: dict[str, list[str]] = {}
    with Ledger(store / LEDGER_FILE) as ledger:
        for model, described in describe_models(ledger):
            for run in _runs_of(model):
                found.setdefault(run, []).append(described)
    return found


def note_in_reports(store: Path, ledger: Ledger, *, forgotten: Model | None = None) -> None:
    """Write a model's present names into the report of the run that made it, and no name for a forgotten model."""
    from rollouts_core.report import with_registered_name  # numpy loads here, which `rollouts status` need not wait for

    folders_of: dict[str, list[Path]] = {}
    for folder in (store / RUNS).glob("*-*"):
        folders_of.setdefault(folder.name.rpartition("-")[2], []).append(folder)
    names: dict[Path, str] = {}  # of two models of a run the later one's, which the report is about
    for model, described in [*([(forgotten, "")] if forgotten else []), *describe_models(ledger)]:
        folders = {store / Path(model.checkpoint).parent}
        folders.update(folder for run in _runs_of(model) for folder in folders_of.get(run, []))
        names |= {folder / "report.html": described for folder in folders}
    for report, described in names.items():
        with suppress(FileNotFoundError):  # it was removed, or no run made the checkpoint
            page = report.read_text()
            noted = with_registered_name(page, described)
            if noted != page:
                write_atomically(report, noted)


def _runs_of(model: Model) -> set[str]:
    """The run that made the model, and the run whose folder holds it now, if another run made the same model again."""
    folders = [place for place in places_in(model.checkpoint) if place.startswith(f"{RUNS}/")]
    return {short_id(model.run_id), *(folder.rpartition("-")[2] for folder in folders)} - {""}


def _describe(model: Model, aliases: list[str]) -> str:
    return f"{model.name} ({', '.join(aliases)})" if aliases else model.name
