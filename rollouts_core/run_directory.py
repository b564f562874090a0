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
"""Version of the directory's layout; readers must refuse other versions."""


ATTEMPT_VARIABLE = "ROLLOUTS_ATTEMPT"
"""Environment variable in which the supervisor passes the attempt's number."""


def attempt_number() -> int:
    """The number of this attempt at the job, from 1."""
    return int(os.environ.get(ATTEMPT_VARIABLE, "1"))


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of one stage's files."""

    root: Path

    @property
    def job(self) -> Path:
        """In: resolved settings and input artifacts."""
        return self.root / "job.json"

    @property
    def log(self) -> Path:
        """Out: stdout and stderr of the process."""
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
    def gpu_use(self) -> Path:
        """Out: GPU load and memory, one object per sample; absent without GPUs."""
        return self.root / "gpu_use.jsonl"

    @property
    def samples(self) -> Path:
        """Out: completions, one file per step or checkpoint."""
        return self.root / "samples"

    @property
    def rows(self) -> Path:
        """Out: rows of SFT in the form of training, and the lengths of all rows."""
        return self.root / "rows.json"

    @property
    def credit(self) -> Path:
        """Out: advantages and the trainer's log-probs of each RL sample, one file per step."""
        return self.root / "credit"

    @property
    def checkpoints(self) -> Path:
        """Out: one directory per checkpoint."""
        return self.root / "checkpoints"

    @property
    def weights(self) -> Path:
        """Out: weight versions published to engines."""
        return self.root / "weights"

    @property
    def end_request(self) -> Path:
        """In: the id of a run that requests the end of this attempt's training after the current step."""
        return self.root / f"finish-{attempt_number()}"

    @property
    def stop_request(self) -> Path:
        """In: the seconds that this attempt has to save and end; written before SIGTERM."""
        return self.root / f"stop-{attempt_number()}"

    @property
    def stop_state(self) -> Path:
        """Out: seconds that the training needs to save and end, process id to signal, and saved step."""
        return self.root / "stop.json"

    @property
    def lease_file(self) -> Path:
        """In: its modification time is the last lease renewal."""
        return self.root / ".job" / "lease"

    @property
    def result(self) -> Path:
        """Out: the stage's record, written last; absent means not finished."""
        return self.root / "result.json"

    def last_end(self) -> dict[str, Any] | None:  # Any: JSON
        """The supervisor's record of the last attempt's end; None before the first end and while an attempt runs."""
        begun = [int(path.stem.removeprefix("meta-")) for path in (self.root / ".job").glob("meta-*.json")]
        record = self.root / f"exit-{max(begun, default=0)}.json"
        try:
            end: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))  # Any: JSON
        except (OSError, ValueError):
            return None
        return end

    def write_samples(self, name: str, samples: Sequence[Sample], *, temperature: float) -> None:
        """Write samples/<name>.jsonl; each line has the temperature of its log-probs.

        Raises:
            RewardError: the user's code stored a value in a sample's metadata that is not JSON. The message names the
            prompt.
        """
        self.samples.mkdir(exist_ok=True)
        lines = "".join(_sample_line(sample, temperature) for sample in samples)
        write_atomically(self.samples / f"{name}.jsonl", lines)

    def write_result(self, result: dict[str, Any]) -> None:  # Any: JSON
        """Write the stage's record, which marks the stage as finished."""
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
