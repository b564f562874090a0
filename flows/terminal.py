"""What the commands share: the console that they speak to, and options that several of them have.

Not here: the commands (cli.py, up.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flows.store import STORE_VARIABLE

DEFAULT_STORE = Path(".rollouts")
Store = Annotated[
    Path, typer.Option(envvar=STORE_VARIABLE, help="Folder that keeps stages, runs and Prefect's database.")
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port of the Prefect server; 0 takes 4200 or any free one.")]

console = Console(stderr=True, highlight=False, soft_wrap=True)
