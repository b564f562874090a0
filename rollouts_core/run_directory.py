"""The files of a run directory, by name. docs/run_directory.md describes their contents.

Not here: writing them (metrics.py, system/gpu_use.py, checkpoint.py, sft_job.py, rl_job.py, eval_job.py).
"""

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
    def gpu_use(self) -> Path:
        """Out: how busy and how full the GPUs were, one object per sample; absent without GPUs."""
        return self.root / "gpu_use.jsonl"

    @property
    def samples(self) -> Path:
        """Out: what the policy said, one file per step or checkpoint."""
        return self.root / "samples"

    @property
    def rows(self) -> Path:
        """Out: rows of SFT as training sees them, and the lengths of all."""
        return self.root / "rows.json"

    @property
    def credit(self) -> Path:
        """Out: what RL made of each sample, one file per step: advantages, and log-probs of the trainer."""
        return self.root / "credit"

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
    def stop_request(self) -> Path:
        """In: how many seconds this attempt has to save and end; there before it gets SIGTERM."""
        return self.root / f"stop-{attempt_number()}"

    @property
    def stop_state(self) -> Path:
        """Out: how long the training needs to save and end, which process is to be told, which step is saved."""
        return self.root / "stop.json"

    @property
    def lease_file(self) -> Path:
        """In: its modification time says when somebody last wanted the job."""
        return self.root / ".job" / "lease"

    @property
    def result(self) -> Path:
        """Out: the stage's record, written last; absent means not finished."""
        return self.root / "result.json"

    def last_end(self) -> dict[str, Any] | None:  # Any: JSON
        """How the last attempt ended, as its supervisor wrote; None while one is under way, and before the first."""
        begun = [int(path.stem.removeprefix("meta-")) for path in (self.root / ".job").glob("meta-*.json")]
        record = self.root / f"exit-{max(begun, default=0)}.json"
        try:
            end: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))  # Any: JSON
        except (OSError, ValueError):
            return None
        return end

    def write_samples(self, name: str, samples: Sequence[Sample], *, temperature: float) -> None:
        """Write samples/<name>.jsonl, each sample with the temperature that its log-probs are of.

        Raises:
            RewardError: the user's code noted something in the metadata of a sample that is no JSON; names the prompt.
        """
        self.samples.mkdir(exist_ok=True)
        lines = "".join(_sample_line(sample, temperature) for sample in samples)
        write_atomically(self.samples / f"{name}.jsonl", lines)

    def write_result(self, result: dict[str, Any]) -> None:  # Any: JSON
        """Finish the stage."""
        write_json(self.result, {"format": FORMAT, **result})

    def read_result(self) -> dict[str, Any] | None:  # Any: JSON
        """The stage's record, or None while it is not finished."""
        if not self.result.is_file():
            return None
        result: dict[str, Any] = json.loads(self.result.read_text(encoding="utf-8"))  # Any: JSON
        return result


def _sample_line(sample: Sample, temperature: float) -> str:
    try:
        return json.dumps({**sample.to_json(), "temperature": temperature}) + "\n"
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"prompt {sample.metadata.get('prompt_id', '?')!r}: a reward, an environment or a generate_fn noted "
            f"in the metadata of a sample what is no JSON ({error}): note numbers, texts, lists and dicts of Python"
        ) from error
