"""The files of a run directory, by name. docs/run_directory.md describes their contents.

Not here: writing them (metrics.py, checkpoint.py, run_job.py).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollouts_core.files import write_json

FORMAT = 1
"""Version of the directory's layout; a reader of another version must refuse it."""


ATTEMPT_VARIABLE = "ROLLOUTS_ATTEMPT"
"""Environment variable in which the supervisor says which attempt a process is."""


def attempt_number() -> int:
    """Which attempt at this job this process is."""
    return int(os.environ.get(ATTEMPT_VARIABLE, "1"))


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Where the files of one stage lie."""

    root: Path

    @property
    def job(self) -> Path:
        """In: resolved settings and input artifacts."""
        return self.root / "job.json"

    @property
    def log(self) -> Path:
        """Out: what the process printed."""
        return self.root / "log.txt"

    @property
    def metrics(self) -> Path:
        """Out: one object per logged step."""
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """Out: started, resumed, checkpoint, weights_published, failed, ..."""
        return self.root / "events.jsonl"

    @property
    def samples(self) -> Path:
        """Out: what the policy said, one file per step or checkpoint."""
        return self.root / "samples"

    @property
    def checkpoints(self) -> Path:
        """Out: one directory per checkpoint."""
        return self.root / "checkpoints"

    @property
    def weights(self) -> Path:
        """Out: versions published to engines."""
        return self.root / "weights"

    @property
    def end_request(self) -> Path:
        """In: the id of a run that asks this attempt at a training to end after the step under way."""
        return self.root / f"finish-{attempt_number()}"

    @property
    def result(self) -> Path:
        """Out: the stage's record, written last; absent means not finished."""
        return self.root / "result.json"

    def write_result(self, result: dict[str, Any]) -> None:  # Any: JSON
        """Finish the stage."""
        write_json(self.result, {"format": FORMAT, **result})

    def read_result(self) -> dict[str, Any] | None:  # Any: JSON
        """The stage's record, or None while it is not finished."""
        if not self.result.is_file():
            return None
        result: dict[str, Any] = json.loads(self.result.read_text())  # Any: JSON
        return result
