"""The paths of the files in a run directory. docs/run_directory.md describes their contents."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts_core.errors import RewardError
from rollouts_core.system.files import write_atomically, write_json

if TYPE_CHECKING:
    from rollouts_core.types import Sample

FORMAT = 1
"""Version of the directory's layout. Programs that read a run directory must refuse other versions."""


ATTEMPT_VARIABLE = "ROLLOUTS_ATTEMPT"
"""Environment variable through which the supervisor passes the number of the attempt."""


def attempt_number() -> int:
    """The number of this attempt at the job, from 1."""
    return int(os.environ.get(ATTEMPT_VARIABLE, "1"))


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of one stage's files."""

    root: Path

    @property
    def job(self) -> Path:
        """Input: the resolved settings and the input artifacts."""
        return self.root / "job.json"

    @property
    def log(self) -> Path:
        """Output: stdout and stderr of the process."""
        return self.root / "log.txt"

    @property
    def metrics(self) -> Path:
        """Output: the metrics, one JSON object per logged step."""
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """Output: the events started, resumed, checkpoint, weights_published, failed and others."""
        return self.root / "events.jsonl"

    @property
    def gpu_use(self) -> Path:
        """Output: load and memory of the GPUs, one JSON object per measurement. The file is absent without GPUs."""
        return self.root / "gpu_use.jsonl"

    @property
    def samples(self) -> Path:
        """Output: completions, one file per step or per evaluated checkpoint."""
        return self.root / "samples"

    @property
    def rows(self) -> Path:
        """Output: some SFT rows as they are trained on, and the lengths of all rows."""
        return self.root / "rows.json"

    @property
    def credit(self) -> Path:
        """Output: advantages and trainer log-probs of each RL sample, one file per step."""
        return self.root / "credit"

    @property
    def checkpoints(self) -> Path:
        """Output: one directory per checkpoint."""
        return self.root / "checkpoints"

    @property
    def weights(self) -> Path:
        """Output: the weight versions that were published to engines."""
        return self.root / "weights"

    @property
    def end_request(self) -> Path:
        """Input: the id of a run that requests that this attempt ends its training after the current step."""
        return self.root / f"finish-{attempt_number()}"

    @property
    def stop_request(self) -> Path:
        """Input: seconds that this attempt gets to save and end. The supervisor writes the file before it sends
        SIGTERM."""
        return self.root / f"stop-{attempt_number()}"

    @property
    def stop_state(self) -> Path:
        """Output: the seconds that the training needs to save and end, the id of the process to signal, and the last
        saved step.
        """
        return self.root / "stop.json"

    @property
    def lease_file(self) -> Path:
        """Input: a file whose modification time is the time of the last lease renewal."""
        return self.root / ".job" / "lease"

    @property
    def result(self) -> Path:
        """Output: the stage's record. result.json is written last, so a stage without this file is not finished."""
        return self.root / "result.json"

    def last_end(self) -> dict[str, Any] | None:  # Any: JSON
        """The supervisor's record of how the last attempt ended; None before the first end and while an attempt
        runs.
        """
        begun = [int(path.stem.removeprefix("meta-")) for path in (self.root / ".job").glob("meta-*.json")]
        record = self.root / f"exit-{max(begun, default=0)}.json"
        try:
            end: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))  # Any: JSON
        except (OSError, ValueError):
            return None
        return end

    def write_samples(self, name: str, samples: Sequence[Sample], *, temperature: float) -> None:
        """Write samples/<name>.jsonl. Each line has a sample and the temperature at which the sample's log-probs were
        computed.

        Raises:
            RewardError: the user's code stored a value that is not JSON in a sample's metadata. The error names the
                prompt.
        """
        self.samples.mkdir(exist_ok=True)
        lines = "".join(_sample_line(sample, temperature) for sample in samples)
        write_atomically(self.samples / f"{name}.jsonl", lines)

    def write_result(self, result: dict[str, Any]) -> None:  # Any: JSON
        """Write the stage's record, result.json. A stage with this file counts as finished."""
        write_json(self.result, {"format": FORMAT, **result})

    def read_result(self) -> dict[str, Any] | None:  # Any: JSON
        """The stage's record; None if the stage is not finished."""
        if not self.result.is_file():
            return None
        result: dict[str, Any] = json.loads(self.result.read_text(encoding="utf-8"))  # Any: JSON
        return result


def _sample_line(sample: Sample, temperature: float) -> str:
    try:
        return json.dumps({**sample.to_json(), "temperature": temperature}) + "\n"
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"prompt {sample.metadata.get('prompt_id', '?')!r}: a reward, environment or generate_fn stored a value "
            f"in a sample's metadata that is not JSON ({error}): store numbers, strings, lists and dicts only"
        ) from error
