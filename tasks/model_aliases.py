"""Show a registered model's name and aliases ("small-3 (production)") in its run's report and in `rollouts status`.

Reports are files, so each change of an alias must be written into the reports.

Not here: changing aliases (infra/registry.py), the other parts of a report (rollouts_core/report/).
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
    """All registered models, each with a text for messages such as "small-3 (production)"."""
    every = models(ledger)
    named: dict[int, list[str]] = {}
    for line in {model.line for model in every}:
        for alias in Alias:
            if (model := current(ledger, line, alias)) is not None:
                named.setdefault(model.id, []).append(alias.value)
    return [(model, _describe(model, named.get(model.id, []))) for model in every]


def models_of_runs(store: Path) -> dict[str, list[str]]:
    """The texts of `describe_models` for the models that each run has registered, by the run's short id."""
    if not (store / LEDGER_FILE).is_file():
        return {}
    found: dict[str, list[str]] = {}
    with Ledger(store / LEDGER_FILE) as ledger:
        for model, described in describe_models(ledger):
            for run in _runs_of(model):
                found.setdefault(run, []).append(described)
    return found


def note_in_reports(store: Path, ledger: Ledger, *, forgotten: Model | None = None) -> None:
    """Write each registered model's current name and aliases into the report of its run.

    Args:
        forgotten: a model that was removed from the registry. The report of its run then loses the model's name.
    """
    from rollouts_core.report import with_registered_name  # loads numpy, which would slow down `rollouts status`

    folders_of: dict[str, list[Path]] = {}
    for folder in (store / RUNS).glob("*-*"):
        folders_of.setdefault(folder.name.rpartition("-")[2], []).append(folder)
    names: dict[Path, str] = {}  # if a run registered two models, its report shows the later model
    for model, described in [*([(forgotten, "")] if forgotten else []), *describe_models(ledger)]:
        folders = {store / Path(model.checkpoint).parent}
        folders.update(folder for run in _runs_of(model) for folder in folders_of.get(run, []))
        names |= {folder / "report.html": described for folder in folders}
    for report, described in names.items():
        with suppress(FileNotFoundError):  # the report was removed, or no run made the checkpoint
            page = report.read_text()
            noted = with_registered_name(page, described)
            if noted != page:
                write_atomically(report, noted)


def _runs_of(model: Model) -> set[str]:
    """The short ids of the run that made the model, and of the run whose folder holds the model."""
    folders = [place for place in places_in(model.checkpoint) if place.startswith(f"{RUNS}/")]
    return {short_id(model.run_id), *(folder.rpartition("-")[2] for folder in folders)} - {""}


def _describe(model: Model, aliases: list[str]) -> str:
    return f"{model.name} ({', '.join(aliases)})" if aliases else model.name
