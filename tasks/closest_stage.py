"""Explain why a stage has to run again although the store has a similar finished stage.

An edited setting or a changed data file can repeat a training of several days, so the user must see the difference.

Not here: the fingerprint, which decides whether two stages are the same (rollouts_core/fingerprint.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollouts.tasks.records import Stage
from rollouts.tasks.store_paths import newest_first
from rollouts_core.config.record import SELECTION
from rollouts_core.errors import ConfigError
from rollouts_core.fingerprint import FINGERPRINT_CHARS, SEMANTICS_VERSION, fingerprint_job, flat_settings
from rollouts_core.job import Job, TrainingJob, job_type, load_job
from rollouts_core.run_directory import RunDirectory

MAX_COMPARED = 50
"""An unfinished stage is compared with at most this many finished stages, the newest ones."""
MAX_DIFFERENCES = 4
"""A finished stage that differs in more than this many settings or inputs is not mentioned as similar."""
CONTENTS = {
    "model.digest": "the start model",
    "data": "the demonstrations",
    "data.digest": "the rows",
    "eval_data.digest": "the demonstrations of sft_eval",
    "prompts.digest": "the prompts",
    "rollouts.digest": "the recorded rollouts",
    "checkpoints": "the checkpoints",
    "resume_digest": "the checkpoint to resume from",
    "plugin_digest": "the code of rewards, environments or the loss, or a model that grades,",
}
"""The fields of a job that hold digests, each with the words that messages use for the digested input."""


def describe_difference(stage: Stage) -> str:
    """Describe how a stage differs from the most similar finished stage of the same name. "" if no stage is similar."""
    if older := find_older_version(
        stage.name, job_type(stage.kind).model_validate(stage.job), Path(stage.run_dir).parent
    ):
        return f"unlike {older}, which an older version of rollouts computed: the same settings give other results now"
    closest: tuple[list[str], str] | None = None
    for name, job in _finished_jobs(stage):
        wanted, other = flat_settings(job_type(stage.kind).model_validate(stage.job)), flat_settings(job)
        differing = [key for key in sorted(wanted.keys() | other.keys()) if wanted.get(key) != other.get(key)]
        if differing and (closest is None or len(differing) < len(closest[0])):
            closest = differing, f"unlike {name}: " + "; ".join(_word(key, other, wanted, stage) for key in differing)
    return closest[1] if closest and len(closest[0]) <= MAX_DIFFERENCES else ""


def find_shorter(stage: Stage) -> str:
    """The directory name of the newest finished training that this stage would repeat with more steps, or "".

    Other settings may differ only if a resumed training may change them.
    """
    job = job_type(stage.kind).model_validate(stage.job)
    wanted, free = flat_settings(job), _free_settings(job)
    for name, other in _finished_jobs(stage):
        settings = flat_settings(other)
        differing = {key for key in wanted.keys() | settings.keys() if wanted.get(key) != settings.get(key)}
        is_shorter = isinstance(other, TrainingJob) and other.training.num_steps < stage.num_steps
        if is_shorter and differing <= free:
            return name
    return ""


def _free_settings(job: Job) -> set[str]:
    """The names of the settings that a resumed training may change, as `flat_settings` writes them."""
    fields = type(job.training).model_fields if isinstance(job, TrainingJob) else {}
    marked = {name: field.json_schema_extra for name, field in fields.items()}
    return {
        f"training.{name}"
        for name, marks in marked.items()
        if isinstance(marks, dict) and SELECTION.items() <= marks.items()
    }


def find_older_version(name: str, job: Job, stages: Path) -> str:
    """The directory name of a finished stage that ran the same job under an older SEMANTICS_VERSION, or ""."""
    for semantics in range(SEMANTICS_VERSION - 1, 0, -1):
        directory = stages / f"{name}-{fingerprint_job(name, job, semantics=semantics)}"
        if RunDirectory(directory).result.exists():
            return directory.name
    return ""


def _finished_jobs(stage: Stage) -> Iterator[tuple[str, Job]]:
    """Yield the directory names and jobs of finished stages with this stage's name, newest first."""
    own = Path(stage.run_dir)
    results = own.parent.glob(f"{stage.name}-{'?' * FINGERPRINT_CHARS}/{RunDirectory(own).result.name}")
    for result in newest_first(results)[:MAX_COMPARED]:
        try:
            yield result.parent.name, load_job(RunDirectory(result.parent).job)
        except ConfigError:
            continue  # the job file is damaged, or an earlier version wrote it


def _word(key: str, was: Mapping[str, Any], now: Mapping[str, Any], stage: Stage) -> str:  # Any: JSON
    if key in CONTENTS:
        return f"{CONTENTS[key]} changed"
    setting = key.replace("training.", f"training.{stage.kind}.", 1) if stage.trains else key
    before, after = (json.dumps(each[key]) if key in each else "its default" for each in (was, now))
    return f"{setting} was {before} and is {after}"
