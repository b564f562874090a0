"""Common parts of the commands: the console, options that several commands have, and the output of checks.

Not here: the commands (cli.py, up.py).
"""

from __future__ import annotations

import json
import logging
import os
import pydoc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rollouts.flows.store import STORE_VARIABLE, from_home
from rollouts.infra.foreign_text import shown_lines
from rollouts.tasks.folded_lines import folded
from rollouts_core.findings import Caution, count_cautions, split_findings
from rollouts_core.system.standard_error import standard_error

DEFAULT_STORE = Path(".rollouts")
Store = Annotated[
    Path,
    typer.Option(envvar=STORE_VARIABLE, callback=from_home, help="Folder for stages, runs and Prefect's database."),
]
Port = Annotated[
    int,
    typer.Option(
        min=0,
        max=65535,
        help="Port of the Prefect server; `rollouts up` saves it. 0: the saved port, else 4200 or a free port.",
    ),
]

EngineGpus = Annotated[
    str, typer.Option(metavar="0,1", help="GPUs of sglang or vllm, which share the model; default: the first GPU.")
]
EnginePython = Annotated[str, typer.Option(metavar="PATH", help="Interpreter of the environment with sglang or vllm.")]
EngineArgs = Annotated[str, typer.Option(metavar="'--A B'", help="Further arguments for the server of sglang or vllm.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON object per line, each with a `kind`.")]

LOOKING_FOR_SERVER = "prefect        looking for the server, and starting one if none runs (about eight seconds)"

console = Console(file=standard_error(), highlight=False, soft_wrap=True)


def say(mark: str, message: str) -> None:
    """Print a remark to standard error. On a terminal, the rest of a long message stands below its beginning.

    Args:
        mark: the start of the line with its spaces.
    """
    console.print(folded(mark, message, console), markup=False)


def emit(records: Iterable[Mapping[str, Any]]) -> None:  # Any: JSON
    """Print the records as JSON, one object per line."""
    for record in records:
        typer.echo(json.dumps(record, ensure_ascii=False))


def tell(said: str, *, as_json: bool) -> None:
    """Print what a command has done: a sentence, or an object of the kind `done`."""
    if as_json:
        emit([{"kind": "done", "message": said}])
    else:
        typer.echo(said)


def served_at(url: str) -> dict[str, str]:
    """The JSON object of a server that a command has started or found."""
    return {"kind": "address", "url": url}


def print_text(text: str, *, as_json: bool) -> None:
    """Print a text that other programs read, or an object of the kind `text`."""
    if as_json:
        emit([{"kind": "text", "text": text}])
    else:
        typer.echo(text, nl=False)


def describe_finding(finding: str) -> dict[str, str]:
    """The JSON object of a finding of the checks."""
    return {
        "kind": "finding",
        "severity": "warning" if isinstance(finding, Caution) else "fact",
        "message": shown_lines(finding),
    }


def style(text: str, *, fg: str | None = None, bold: bool = False, dim: bool = False) -> str:
    """The text with colours, if stdout is a terminal. NO_COLOR and TERM=dumb turn colours off."""
    shows_colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return typer.style(text, fg=fg, bold=bold, dim=dim) if shows_colours else text


def page(blocks: Iterable[str]) -> None:
    """Print text. On a terminal, a pager shows a text that does not fit the screen."""
    if not sys.stdout.isatty() or os.environ.get("TERM") in (None, "dumb"):
        for block in blocks:
            typer.echo(block, nl=False)
        return
    os.environ.setdefault("LESS", "FRX")
    pydoc.pager("".join(blocks))


@contextmanager
def told_progress(tell: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, pass the progress lines of long checks to `tell`."""

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
    """Run the checks and print a line per finding. Warnings and their number come last, so that users notice them.

    Args:
        fact: the start of a line with a fact, or with the progress of a long check.
        caution: the start of a line with a warning.
    """
    with told_progress(lambda line: say(fact, line)):
        facts, cautions = split_findings(check())
    for mark, found in ((fact, facts), (caution, cautions)):
        for finding in found:
            say(mark, finding)
    if cautions:
        say(caution, f"{count_cautions(cautions)} in all; warnings do not stop a run")
