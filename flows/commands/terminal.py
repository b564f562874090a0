"""Common parts of the commands: their console, and options that several of them have.

Not here: the commands (cli.py, up.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rollouts.flows.store import STORE_VARIABLE, from_home
from rollouts_core.findings import count_cautions, split_findings
from rollouts_core.system.standard_error import standard_error

DEFAULT_STORE = Path(".rollouts")
Store = Annotated[
    Path,
    typer.Option(
        envvar=STORE_VARIABLE, callback=from_home, help="Folder that keeps stages, runs and Prefect's database."
    ),
]
Port = Annotated[
    int,
    typer.Option(
        min=0,
        max=65535,
        help="Port of the Prefect server, which `rollouts up` keeps; 0 takes the kept one, 4200 or any free one.",
    ),
]

LOOKING_FOR_SERVER = "prefect        looking for the server, and starting one if none runs (about eight seconds)"

console = Console(file=standard_error(), highlight=False, soft_wrap=True)


@contextmanager
def told_progress(tell: Callable[[str], None]) -> Iterator[None]:
    """Tell a line now and then while checks read many rows, until the block is left."""

    class Teller(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            tell(record.getMessage())

    checks, teller = logging.getLogger("rollouts_core.checks"), Teller(logging.INFO)
    level = checks.level
    checks.setLevel(logging.INFO)
    checks.addHandler(teller)
    try:
        yield
    finally:
        checks.removeHandler(teller)
        checks.setLevel(level)


def show_checks(check: Callable[[], Iterable[str]], *, fact: str, caution: str) -> None:
    """Make checks and print what they find, a line each: the warnings last, where they are seen, and their number.

    Args:
        fact: what a line begins with, also one that says how far checks are that take long.
        caution: what one that warns begins with.
    """
    with told_progress(lambda line: console.print(f"{fact}{line}", markup=False)):
        facts, cautions = split_findings(check())
    for mark, found in ((fact, facts), (caution, cautions)):
        for finding in found:
            console.print(f"{mark}{finding}", markup=False)
    if cautions:
        console.print(f"{caution}{count_cautions(cautions)} in all; a run starts in spite of them", markup=False)
