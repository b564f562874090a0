"""`rollouts compare`: compare the settings, data, curves and scores of finished runs of a store.

    rollouts compare RUN RUN               write one HTML file and print its path
    rollouts compare RUN RUN --json        print the comparison, a JSON object per line

Not here: the comparison (rollouts_core/report/compared.py), reading a run (tasks/earlier_report.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rollouts.flows.commands.runs import load_settings_of_run, open_in_browser, refuse_evaluation
from rollouts.flows.commands.terminal import DEFAULT_STORE, AsJson, Store, emit
from rollouts.flows.shown_settings import settings_of
from rollouts.flows.store_runs import find_named_run, lives, living_runs
from rollouts.tasks.earlier_report import load_report_input
from rollouts.tasks.store_paths import RUN_FILE
from rollouts_core.config import read_settings
from rollouts_core.errors import ConfigError, InputError
from rollouts_core.report.compared import MAX_RUNS, ComparedRun, compare_runs
from rollouts_core.report.compared_page import comparison_records, render_comparison_page
from rollouts_core.report.provenance import flatten
from rollouts_core.system.files import write_atomically

COMPARISONS = "comparisons"
"""Folder in a store for the HTML files of this command."""
MAX_NAME_CHARS = 150
"""Longer file names are cut and end with a digest, because file systems limit a name to 255 bytes."""


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Runs, named as for `samples`. The first run is the baseline."),
    ],
    store: Store = DEFAULT_STORE,
    opens: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare finished runs in one HTML file: settings and data that differ, curves, scores, answers, costs."""
    if opens and as_json:
        raise InputError("--open shows a page, but --json prints objects: give only one of these options")
    store = store.resolve()
    names = find_compared(store, runs)
    compared = compare_runs(load_compared(store, names))
    if as_json:
        emit(comparison_records(compared))
        return
    path = store / COMPARISONS / page_name(names)
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, render_comparison_page(compared))
    typer.echo(path)
    if opens:
        open_in_browser(path)


def find_compared(store: Path, given: Sequence[str]) -> list[str]:
    """The names of the folders of the runs that the user named.

    Raises:
        InputError: fewer than two runs, more than MAX_RUNS, the same run twice, or a run without a report.
    """
    found = [find_named_run(store, each) for each in given]
    names = [uses[0].run for uses in found]
    if len(names) < 2:
        raise InputError(f"a comparison needs two runs or more, not only {names[0]}: rollouts runs lists others")
    if len(names) > MAX_RUNS:
        raise InputError(f"{len(names)} runs are too many for one comparison: name at most {MAX_RUNS}")
    for place, (name, uses) in enumerate(zip(names, found, strict=True)):
        if name in names[:place]:
            raise InputError(
                f"{given[names.index(name)]} and {given[place]} are the same run, {name}: name another one"
            )
        if not (store / "runs" / name / RUN_FILE).is_file():
            refuse_evaluation(store, name)
            state = "is running" if lives(uses, living_runs(store)) else "ended before its report"
            raise InputError(f"{name} {state}, so it has no scores to compare: name a run with a report")
    return names


def load_compared(store: Path, names: Sequence[str]) -> list[ComparedRun]:
    """Load the runs with their settings.

    If the settings of a run cannot be read because another version wrote them, all runs get only the settings in
    their config.toml, without defaults.
    """
    reports = [load_report_input(store, name) for name in names]
    try:
        settings = [
            {each.name: each.value for each in settings_of(load_settings_of_run(store, name))} for name in names
        ]
    except ConfigError:
        settings = [changed_settings(store, name) for name in names]
    return [
        ComparedRun(name=name, report=report, settings=known)
        for name, report, known in zip(names, reports, settings, strict=True)
    ]


def changed_settings(store: Path, name: str) -> dict[str, Any]:  # Any: JSON
    """The settings in a run's config.toml, which has only settings that differed from their defaults."""
    return dict(flatten(read_settings(store / "runs" / name / "config.toml")))


def page_name(names: Sequence[str]) -> str:
    whole = "_".join(names)
    if len(whole) <= MAX_NAME_CHARS:
        return f"{whole}.html"
    return f"{whole[:MAX_NAME_CHARS]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}.html"
