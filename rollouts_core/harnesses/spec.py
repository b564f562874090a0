"""`Harness`: a benchmark program that scores a served model, and the records that its file reads and writes.

Not here: the programs themselves (the other modules of this folder), the comparison of results (benchmarks.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessTask:
    """The work of a harness."""

    tasks: str
    """Names of tasks, separated by commas."""
    limit: int = 0
    """Number of first rows of each task to score; 0 scores all rows."""
    include_path: str = ""
    """Folder with the user's own tasks; empty if all tasks belong to the harness."""
    arguments: tuple[str, ...] = ()
    """Further arguments for the harness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that a server with OpenAI's API serves."""

    url: str
    """The server's URL, without /v1."""
    name: str
    """Name of the model in requests."""
    folder: Path
    """The checkpoint, which has the tokenizer."""
    max_length: int
    """Most tokens of a prompt and its completion."""
    max_requests: int
    """Most requests that run at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricResult:
    """One metric of one task, for one model."""

    task: str
    metric: str
    value: float
    """The value that the harness reports."""
    stderr: float | None
    """The standard error that the harness reports; None if it reports none."""
    is_lower_better: bool
    num_rows: int
    scores: tuple[float, ...]
    """The metric of each row. Empty if the value is not the mean of its rows, as in a perplexity."""
    rows: str
    """Digest of the rows. Two models are paired only on the same rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """A benchmark program."""

    name: str
    """Name in files of the store."""
    package: str
    """The package that the harness is installed by. Also the prefix of its environment's folder."""
    requirements: str
    """The file below requirements/ with the exact version of every package."""
    disk_gb: float
    """Size of the environment on the disk, in GB (10^9 bytes)."""
    own_arguments: tuple[str, ...]
    """Arguments that `render` sets, so that the user must not set them."""
    render: Callable[[HarnessTask, ServedModel, Path], list[str]]
    """(task, model, output folder) -> the arguments for the interpreter of the harness."""
    read: Callable[[Path], list[MetricResult]]
    """Reads the results in the output folder. Raises ValueError if there are none."""
    explain: Callable[[str], str]
    """Reads the user's mistake from the log of a failed harness; "" if the log shows no such mistake."""

    @property
    def file(self) -> Path:
        """The file with the exact versions."""
        return Path(__file__).parent / "requirements" / self.requirements
