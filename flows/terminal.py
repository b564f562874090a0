"""What the commands share: the console that they speak to, and options that several of them have.

Not here: the commands (cli.py, up.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flows.store import STORE_VARIABLE
from rollouts_core.findings import count_cautions, split_findings

DEFAULT_STORE = Path(".rollouts")
Store = Annotated[
    Path, typer.Option(envvar=STORE_VARIABLE, help="Folder that keeps stages, runs and Prefect's database.")
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port of the Prefect server; 0 takes 4200 or any free one.")]

console = Console(stderr=True, highlight=False, soft_wrap=True)


def show_findings(findings: Iterable[str], *, fact: str, caution: str) -> None:
    """Print what checks found, a line each: the warnings last, where they are seen, and their number.

    Args:
        fact: what a line begins with.
        caution: what one that warns begins with.
    """
    facts, cautions = split_findings(findings)
    for mark, found in ((fact, facts), (caution, cautions)):
        for finding in found:
            console.print(f"{mark}{finding}", markup=False)
    if cautions:
        console.print(f"{caution}{count_cautions(cautions)} in all; a run starts in spite of them", markup=False)
