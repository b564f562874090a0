"""Describe the start model, data and work of every stage in words, from its job.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollouts_core.checks.epochs import render_epochs
from rollouts_core.config import ModelConfig, OptimConfig, PolicyConfig
from rollouts_core.errors import ConfigError
from rollouts_core.job import EvalJob, InputDataset, InputFile, InputModel, Job, RLJob, SFTJob, load_job
from rollouts_core.report.charts import format_number
from rollouts_core.report.inputs import ReportInput
from rollouts_core.roll_back import read_roll_back
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import EVALUATE, capitalized, kind_of
from rollouts_core.stages.kind import load


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The start model, data and work of one stage, as (title, text) pairs."""

    title: str
    facts: tuple[tuple[str, str], ...]


def describe_trainings(report: ReportInput) -> list[Training]:
    """The description of every stage whose job.json can be read."""
    trainings = []
    for stage in report.trainings:
        kind = kind_of(stage.name)
        if (job := load_job_of(stage.run_dir)) is not None and job.kind == kind.name:
            facts = (*load(kind.facts)(job, stage.run_dir), ("Selected", stage.selected))
            trainings.append(Training(title=capitalized(kind.title), facts=facts))
    if isinstance(evaluation_job := load_job_of(report.evaluation_dir), EvalJob):
        trainings.append(_describe_evaluation(evaluation_job))
    return trainings


def load_job_of(directory: Path | None) -> Job | None:
    """The job of a run directory; None if job.json cannot be read, for example a file that another version wrote."""
    if directory is None:
        return None
    try:
        return load_job(RunDirectory(directory).job)
    except ConfigError:
        return None


def _read_result(directory: Path | None) -> dict[str, Any]:  # Any: JSON
    """The content of the stage's result.json; empty if the file is missing."""
    return (RunDirectory(directory).read_result() if directory else None) or {}


def sft_facts(job: SFTJob, run_dir: Path) -> list[tuple[str, str]]:
    """The start model, data and work of SFT."""
    training = job.training
    rows = "packed rows" if training.packing else "rows"
    return [
        ("Start", _describe_model(job.model)),
        ("Data", _describe_mixture(job.data, run_dir)),
        (
            "Training",
            f"{_describe_steps(training.num_steps, run_dir)} of {training.batch_size} {rows} of at most "
            f"{training.max_length:,} tokens, {_describe_optim(training.optim)}{_describe_kernel(training.policy)}",
        ),
    ]


def rl_facts(job: RLJob, run_dir: Path) -> list[tuple[str, str]]:
    """The start model, source of samples, reward and work of RL."""
    training, rollout = job.training, job.rollout
    by_default = rollout.reward_fn == "" and not rollout.rewards
    reward = f"environment {rollout.environment_name}" if by_default else " + ".join(rollout.reward_names)
    return [
        ("Start", _describe_model(job.model)),
        _describe_source(job, run_dir),
        ("Reward", reward),
        (
            "Training",
            f"{_describe_steps(training.num_steps, run_dir)} of {rollout.batch_size} prompts × "
            f"{rollout.n_samples_per_prompt} completions of at most {rollout.sampling.max_new_tokens:,} tokens at "
            f"temperature {rollout.sampling.temperature:g}{_describe_epochs(run_dir)}, "
            f"{_describe_optim(training.optim)}{_describe_kernel(training.policy)}",
        ),
    ]


def _describe_steps(num_steps: int, directory: Path | None) -> str:
    """The number of trained steps. If the stage ended early, the planned number follows; after a rollback also the step
    of the best checkpoint."""
    result = _read_result(directory)
    if roll_back := read_roll_back(result):
        return f"{roll_back.from_step:,} of {num_steps:,} steps, rolled back to step {roll_back.step:,},"
    early = result.get("finished_early")
    return f"{early['step']:,} of {num_steps:,} steps" if early else f"{num_steps:,} steps"


def _describe_epochs(directory: Path | None) -> str:
    """A comma and the number of times that RL saw the prompts; empty if the result does not record this number."""
    result = _read_result(directory)
    if not result.get("num_drawn"):
        return ""
    return f", about {render_epochs(result['num_drawn'] / result['num_prompts'])} of the prompts"


def _describe_source(job: RLJob, directory: Path | None) -> tuple[str, str]:
    """The title and the description of RL's prompts or recorded rollouts."""
    if job.prompts is not None:
        return "Prompts", _describe_data(job.prompts, directory, "num_prompts", "prompts")
    assert job.rollouts is not None, "an RL job has either prompts or rollouts"
    return "Recorded rollouts", _describe_data(job.rollouts, directory, "num_steps", "steps")


def _describe_evaluation(job: EvalJob) -> Training:
    evaluation = job.evaluation
    sampling = (
        f"{evaluation.samples_per_prompt} completion{'s' if evaluation.samples_per_prompt > 1 else ''} per prompt at "
        f"temperature {evaluation.temperature:g}, at most {job.rollout.sampling.max_new_tokens:,} tokens"
    )
    scoring = "mean loss of the trained tokens" if evaluation.metric == "loss" else sampling
    return Training(
        title=capitalized(EVALUATE.title),
        facts=(("Data", _describe_data(job.data, None, "", "")), ("Scoring", scoring)),
    )


def _describe_model(model: InputModel) -> str:
    config: ModelConfig = model.model
    revision = f" at {config.revision}" if config.revision else ""
    return f"{config.path}{revision}"


def _describe_optim(optim: OptimConfig) -> str:
    return f"{optim.schedule} learning rate, peak {format_number(optim.lr)}"


def _describe_kernel(policy: PolicyConfig) -> str:
    """A comma and the attention kernel; empty for "auto", because job.json does not record the chosen kernel."""
    return "" if policy.attention == "auto" else f", attention by {policy.attention}"


def _describe_mixture(datasets: Sequence[InputDataset], directory: Path | None) -> str:
    """The number of rows of all datasets together, then each dataset with its share."""
    result = _read_result(directory)
    shares = [
        f"{each.path} ("
        + (f"first {each.max_samples:,} rows, " if each.max_samples else "")
        + (f"× {each.repeat:g}, " if each.repeat != 1 else "")
        + f"sha256 {each.digest[:10]}…)"
        for each in datasets
    ]
    count = f"{result['num_samples']:,} demonstrations: " if "num_samples" in result else ""
    return count + ", ".join(shares)


def _describe_data(file: InputFile, directory: Path | None, key: str, rows: str) -> str:
    """Path, number of rows and start of the digest of a data file. `key` is the name of the number of rows in
    result.json."""
    result = _read_result(directory)
    count = f"{result[key]:,} {rows}, " if key in result else ""
    return f"{file.path} ({count}sha256 {file.digest[:10]}…)"
