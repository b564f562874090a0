"""Execute a job of kind eval or generate: sample completions from checkpoints, grade them, and write result.json.

The jobs are defined in job.py. This file must not import training code, which imports most of transformers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollouts_core.comparison import estimate_mean, estimate_means, select_best
from rollouts_core.config import DeploymentConfig, RolloutConfig
from rollouts_core.data.dataset import load_prompts_from_jsonl, load_sft_dataset
from rollouts_core.embedded.weights import find_not_finite
from rollouts_core.errors import DataError, DivergedError, EngineError
from rollouts_core.evaluate import (
    ask_engine,
    evaluation_rollouts,
    generate_samples,
    grade_completions,
    longest_prompt,
    outcomes_by_prompt,
    score_demonstrations,
    scores_by_prompt,
)
from rollouts_core.fingerprint import training_settings
from rollouts_core.job import EvalJob, GenerateJob, InputFile, InputModel
from rollouts_core.jobs.job_inputs import check_model, checked_file
from rollouts_core.metrics import EventLog, JSONLLogger, read_json_lines
from rollouts_core.model.loading import describe_diverged, load_tokenizer, silence_progress_bars
from rollouts_core.rollout.resolve import resolve_vote_fn
from rollouts_core.run_directory import RunDirectory, attempt_number
from rollouts_core.system.processors import count_processors
from rollouts_core.types import Prompt, Sample, sample_from_json

logger = logging.getLogger(__name__)


def run_eval_job(job: EvalJob | GenerateJob, directory: RunDirectory) -> None:
    """Execute the job, and write result.json."""
    silence_progress_bars()
    torch.set_num_threads(job.deployment.trainer_threads or count_processors())
    with EventLog(directory.events, attempt=attempt_number()) as events:
        events.write("started", kind=job.kind, pid=os.getpid())
        if not job.rollout.engine.spec.is_own and not (isinstance(job, EvalJob) and job.evaluation.metric == "loss"):
            from rollouts_core.engines.launch import describe_slow_engine

            sampled = job.checkpoints[0] if isinstance(job, EvalJob) else job.model
            events.warn(describe_slow_engine(job.rollout.engine, Path(sampled.model.path)))
    asyncio.run(score_checkpoints(job, directory) if isinstance(job, EvalJob) else sample_prompts(job, directory))


async def score_checkpoints(job: EvalJob, directory: RunDirectory) -> None:
    """Score every checkpoint on the same rows. Write all scores and the name of the best checkpoint to result.json.

    A selection of checkpoints skips a checkpoint with non-finite outputs, and writes a warning to result.json.

    Raises:
        DivergedError: all checkpoints have non-finite outputs; or the job is not a selection, and one checkpoint has
            non-finite outputs.
    """
    scores_of, outcomes_of, left_out = dict[str, list[float]](), dict[str, dict[str, Any]](), list[str]()
    with (
        checked_file(job.data),
        JSONLLogger(directory.metrics, attempt=attempt_number()) as metrics_logger,
        EventLog(directory.events, attempt=attempt_number()) as events,
    ):
        for number, checkpoint in enumerate(job.checkpoints, start=1):
            check_model(checkpoint)
            try:
                scores, outcomes = await score_checkpoint(checkpoint, job, directory)
            except DivergedError as error:
                if not job.is_selection:
                    raise
                left_out.append(f"{checkpoint.name} has no score and cannot be chosen: {error}")
                logger.warning("%s", left_out[-1])
                continue
            scores_of[checkpoint.name], outcomes_of[checkpoint.name] = scores, outcomes
            metrics_logger.log({"score": (mean := estimate_mean(scores).mean)}, number)
            events.write("scored", name=checkpoint.name, score=mean)
    if not scores_of:
        raise DivergedError(f"no checkpoint has a score; {left_out[0]}")
    estimates = dict(zip(scores_of, estimate_means(list(scores_of.values())), strict=True))
    scored = [
        {
            "name": each.name,
            "step": each.step,
            "scores": scores_of[each.name],
            **asdict(estimates[each.name]),
            **outcomes_of[each.name],
        }
        for each in job.checkpoints
        if each.name in scores_of
    ]
    best = scored[select_best([estimate.mean for estimate in estimates.values()])]["name"]
    warning = {"warning": "; ".join(left_out)} if left_out else {}
    directory.write_result({"metric": job.evaluation.metric, "checkpoints": scored, "best": best, **warning})


async def score_checkpoint(
    checkpoint: InputModel, job: EvalJob, directory: RunDirectory
) -> tuple[list[float], dict[str, Any]]:  # Any: JSON
    """Score one checkpoint, and write its completions to samples/.

    Returns one score per row, and a dict for result.json. With several completions per prompt, the dict has each
    prompt's number of right completions and its majority vote; otherwise it is empty.
    """
    if job.evaluation.metric == "loss":
        demonstrations = load_demonstrations(checkpoint, job)
        if checkpoint is not job.checkpoints[0]:
            check_same_tokens(
                job.checkpoints[0], load_demonstrations(job.checkpoints[0], job), checkpoint, demonstrations
            )
        return score_demonstrations(checkpoint.model, demonstrations), {}
    prompts = load_prompts_from_jsonl(job.data.path, max_rows=job.evaluation.max_prompts, columns=job.data.columns)
    rollout = evaluation_rollouts(job.evaluation, job.rollout)
    complete = partial(complete_prompts, checkpoint, prompts, rollout, job.deployment, directory)
    made_from = describe_origin(checkpoint, job.data, rollout)
    samples = await complete_once(checkpoint.name, complete, directory, rollout, made_from, num_prompts=len(prompts))
    graded = await grade_completions(samples, rollout)
    directory.write_samples(checkpoint.name, graded, temperature=rollout.sampling.temperature)
    is_sampled_again = job.evaluation.samples_per_prompt > 1
    outcomes = outcomes_by_prompt(graded, job.evaluation, resolve_vote_fn(rollout)) if is_sampled_again else {}
    return scores_by_prompt(graded), outcomes


def load_demonstrations(checkpoint: InputModel, job: EvalJob) -> list[Sample]:
    """The evaluation's rows, tokenized with this checkpoint's tokenizer and chat template."""
    return load_sft_dataset(
        job.data.path,
        load_tokenizer(checkpoint.model),
        max_length=job.training.max_length,
        train_on=job.training.train_on,
        on_overlong=job.training.on_overlong,
        max_rows=job.evaluation.max_prompts,
        columns=job.data.columns,
    )


def check_same_tokens(
    first: InputModel, samples: Sequence[Sample], second: InputModel, others: Sequence[Sample]
) -> None:
    """Raise DataError if two checkpoints have different tokens for the same demonstrations.

    Losses are means over tokens, so losses over different tokens cannot be compared.
    """
    if [trained_tokens(sample) for sample in samples] != [trained_tokens(sample) for sample in others]:
        raise DataError(
            f"{first.name} and {second.name} have different tokens for the same demonstrations, because their "
            "tokenizers or chat templates differ. Their losses cannot be compared: compare the checkpoints with "
            'evaluation.metric = "accuracy"'
        )


def trained_tokens(sample: Sample) -> list[int]:
    """The tokens of a sample that contribute to the loss."""
    return [token for token, weight in zip(sample.tokens, sample.loss_mask, strict=True) if weight]


async def sample_prompts(job: GenerateJob, directory: RunDirectory) -> None:
    """Sample and grade completions of prompts, and write them to samples/completions.jsonl."""
    check_model(job.model)
    with checked_file(job.prompts):
        prompts = load_prompts_from_jsonl(job.prompts.path, max_rows=job.max_prompts, columns=job.prompts.columns)
    complete = partial(complete_prompts, job.model, prompts, job.rollout, job.deployment, directory)
    made_from = describe_origin(job.model, job.prompts, job.rollout)
    samples = await complete_once("completions", complete, directory, job.rollout, made_from, num_prompts=len(prompts))
    graded = await grade_completions(samples, job.rollout)
    directory.write_samples("completions", graded, temperature=job.rollout.sampling.temperature)
    directory.write_result({"num_samples": len(graded), **asdict(estimate_mean(scores_by_prompt(graded)))})


async def complete_once(
    name: str,
    complete: Callable[[], Awaitable[list[Sample]]],
    directory: RunDirectory,
    rollout: RolloutConfig,
    made_from: str,
    *,
    num_prompts: int,
) -> list[Sample]:
    """Reuse the completions in samples/<name>.jsonl if an earlier attempt wrote all of them, else call `complete`.

    Completions are written before grading, so that a failing reward function or a failing later checkpoint does not
    lose them. Rewards are not reused, because the user may have repaired the reward function.

    Args:
        made_from: digest of model, rows and settings (`describe_origin`). Stored completions with another digest are
            not reused.
    """
    path = directory.samples / f"{name}.jsonl"
    origins = [
        line["made_from"]
        for line in read_json_lines(directory.events)
        if line["event"] == "completing" and line["name"] == name
    ]
    kept = [sample_from_json(line) for line in read_json_lines(path)] if origins[-1:] == [made_from] else []
    if len(kept) == num_prompts * rollout.n_samples_per_prompt:
        logger.info("reusing the completions in samples/%s.jsonl from an earlier attempt", name)
        return [replace(sample, reward=None) for sample in kept]
    path.unlink(missing_ok=True)  # delete before writing the event, so that a file always belongs to the last event
    with EventLog(directory.events, attempt=attempt_number()) as events:
        events.write("completing", name=name, made_from=made_from)
    samples = await complete()
    directory.write_samples(name, samples, temperature=rollout.sampling.temperature)
    return samples


def describe_origin(model: InputModel, rows: InputFile, rollout: RolloutConfig) -> str:
    """A digest of everything that determines completions: the model, the rows and the sampling settings."""
    settings = {name: value for name, value in training_settings(rollout).items() if not name.startswith("reward")}
    of_rows = [rows.digest, rows.columns] if rows.columns else rows.digest
    named = json.dumps([model.digest, of_rows, settings], sort_keys=True)
    return hashlib.sha256(named.encode()).hexdigest()[:16]


async def complete_prompts(
    checkpoint: InputModel,
    prompts: Sequence[Prompt],
    rollout: RolloutConfig,
    deployment: DeploymentConfig,
    directory: RunDirectory,
) -> list[Sample]:
    """Sample ungraded completions with the embedded engine in this process, or start other engines for the checkpoint.

    Raises:
        DivergedError: the checkpoint computes non-finite numbers, even if the engine failed with another error.
    """
    model, num_running = checkpoint.model, deployment.max_running_requests
    if rollout.engine.spec.is_own:
        return await generate_samples(model, prompts, rollout, num_slots=num_running)
    from rollouts_core.engines.child import started_engines

    max_tokens = rollout.engine_context(longest_prompt(model, prompts, rollout))
    try:
        async with started_engines(checkpoint, rollout, deployment, directory, max_tokens=max_tokens) as engines:
            return await ask_engine(engines, model, prompts, rollout, num_running=num_running * engines.num_engines)
    except EngineError as error:
        if not find_not_finite(Path(model.path)):
            raise
        raise DivergedError(describe_diverged(model.path)) from error
