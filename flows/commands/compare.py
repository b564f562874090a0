"""`rollouts compare`: what differs between finished runs of a store, and how their models scored.

    rollouts compare RUN RUN               write one HTML file and print its path
    rollouts compare RUN RUN --json        the same facts, a JSON object per line

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
"""The folder of the store with the written pages."""
MAX_NAME_CHARS = 150
"""Longer names of pages end with a digest, because file systems limit a name to 255 bytes."""


def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Runs, the first one as the baseline, named as for `samples`.")
    ],
    store: Store = DEFAULT_STORE,
    opens: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare finished runs in one HTML file: settings and data that differ, curves, scores, answers, costs."""
    if opens and as_json:
        raise InputError("--open shows a page and --json prints objects: give one of them")
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
    """The folders of the named runs.

    Raises:
        InputError: fewer than two runs, too many, a run twice, or a run that has not ended.
    """
    found = [find_named_run(store, each) for each in given]
    names = [uses[0].run for uses in found]
    if len(names) < 2:
        raise InputError(f"a comparison needs two runs or more, and {names[0]} is one: rollouts runs lists others")
    if len(names) > MAX_RUNS:
        raise InputError(f"{len(names)} runs are too many for one comparison: name at most {MAX_RUNS}")
    for place, (name, uses) in enumerate(zip(names, found, strict=True)):
        if name in names[:place]:
            raise InputError(
                f"{given[names.index(name)]} and {given[place]} are the same run, {name}: name another one"
            )
        if not (store / "runs" / name / RUN_FILE).is_file():
            refuse_evaluation(store, name)
            state = "is running" if lives(uses, living_runs(store)) else "did not come to its end"
            raise InputError(f"{name} {state}, so it has no scores to compare: name a run with a report")
    return names


def load_compared(store: Path, names: Sequence[str]) -> list[ComparedRun]:
    """The runs with their settings. If those of one are of another version, the defaults of all are left out."""
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
    """The settings of a run's config.toml as they stand there: those that differed from the defaults of its time."""
    return dict(flatten(read_settings(store / "runs" / name / "config.toml")))


def page_name(names: Sequence[str]) -> str:
    """The file of a comparison."""
    whole = "_".join(names)
    if len(whole) <= MAX_NAME_CHARS:
        return f"{whole}.html"
    return f"{whole[:MAX_NAME_CHARS]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}.html"
