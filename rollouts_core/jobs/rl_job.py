"""Execute a job of kind rl: train a model on completions that engines sample from it, and write result.json.

The job is defined in job.py. The training loop is in rl.py. training_job.py handles processes and signals.

    job.json -> check every input -> load -> train -> result.json
                                               |
                                               +--> metrics.jsonl, events.jsonl, samples/, checkpoints/
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollouts_core.algorithms.credit import Credit, RolloutScores
from rollouts_core.algorithms.loss import create_policy_loss
from rollouts_core.backends.create import create_backend
from rollouts_core.backends.protocol import TrainingBackend
from rollouts_core.backends.ranks import Ranks
from rollouts_core.config import RLTrainingConfig
from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.data.dataset import load_prompts_from_jsonl
from rollouts_core.engines import InferenceEngine
from rollouts_core.engines.transfer.nccl import share_memory_as
from rollouts_core.engines.transfer.rounding import common_dtype, describe_last_rounding
from rollouts_core.environments.protocol import describe_tools
from rollouts_core.job import RLJob
from rollouts_core.jobs.attention import settle_attention
from rollouts_core.jobs.job_engines import keep_leases, open_engines, publish_target
from rollouts_core.jobs.job_inputs import check_model, check_resume, checked_file
from rollouts_core.jobs.training_job import describe_training, run_training_job
from rollouts_core.keys import read_key
from rollouts_core.metrics import EventLog, JSONLLogger, read_metrics
from rollouts_core.model.loading import count_token_ids, load_tokenizer, pad_token_id
from rollouts_core.rl import run_rl_training
from rollouts_core.rollout.generate import check_prompt_lengths, create_engine_generate_fn
from rollouts_core.rollout.manager import AsyncRolloutManager
from rollouts_core.rollout.offline_rollouts import OfflineRollouts
from rollouts_core.rollout.resolve import resolve_environment, resolve_generate_fn
from rollouts_core.run_directory import RunDirectory
from rollouts_core.signal_watch import BY_REWARDS, REMEDIES, is_untaught, why_skipped
from rollouts_core.stopping import TrainingStop
from rollouts_core.system.files import write_atomically
from rollouts_core.types import RolloutBatch

logger = logging.getLogger(__name__)

CREDIT_DIGITS = 4
MANY_SKIPPED = 0.5
"""result.json has a warning if at least this share of the steps made no update."""


def run_rl_job(job: RLJob, directory: RunDirectory) -> None:
    """Train a model by RL, and write result.json with the list of checkpoints."""
    share_memory_as(job.rollout.engine)
    settled = settle_attention(job, directory)
    run_training_job(
        settled, directory, create=partial(create_rl_backend, settled), train=partial(train, settled, directory)
    )


def create_rl_backend(job: RLJob, ranks: Ranks | None) -> TrainingBackend:
    """The training backend of the job; with several processes, the part of the backend on this rank."""
    training = job.training
    return create_backend(
        job.model.model,
        training.optim,
        create_policy_loss(training.loss, training.loss_fn),
        num_steps=training.num_optim_steps,
        policy=training.policy,
        seed=job.replicated_rollout.seed,
        temperature=job.rollout.sampling.temperature,
        with_entropies=True,
        with_values=training.with_values,
        with_reference=training.with_reference,
        within_tokenizer=True,
        ranks=ranks,
    )


async def train(job: RLJob, directory: RunDirectory, events: EventLog, ranks: Ranks | None, stop: TrainingStop) -> None:
    """Check the inputs, load the model, train, and write result.json."""
    with keep_leases(job.engines, read_key(job.rollout.engine.api_key_variable, "rollout.engine")):
        check_model(job.model)
        train_on = train_on_recorded if job.rollouts else train_on_prompts
        counts = await train_on(job, directory, events, ranks, stop)
    engines = sorted({f"{each.kind} {each.version}" for each in job.engines if each.version})
    record = {**describe_training(job, directory), **counts, **({"engines": engines} if engines else {})}
    warnings = [*filter(None, (record.get("warning"), collect_warnings(directory)))]
    directory.write_result({**record, **({"warning": "; ".join(warnings)} if warnings else {})})


async def train_on_recorded(
    job: RLJob, directory: RunDirectory, events: EventLog, ranks: Ranks | None, stop: TrainingStop
) -> dict[str, int]:
    """Train on the recorded rollouts of an earlier run. Returns the number of recorded steps, for result.json."""
    assert job.rollouts is not None, "the job has prompts"
    with checked_file(job.rollouts):
        num_tokens = count_token_ids(load_tokenizer(job.model.model))
        source = OfflineRollouts(Path(job.rollouts.path), job.rollout, num_tokens=num_tokens)
        check_resume(job, directory)
        await run_rl_loop(job, directory, events, create_rl_backend(job, ranks), source, [], stop)
    return {"num_steps": len(source.files)}


async def train_on_prompts(
    job: RLJob, directory: RunDirectory, events: EventLog, ranks: Ranks | None, stop: TrainingStop
) -> dict[str, int]:
    """Train on completions that engines sample for the prompts.

    Returns two fields of result.json: the number of prompts in the file, and the number of times that a prompt was
    drawn.
    """
    assert job.prompts is not None, "the job has recorded rollouts"
    with checked_file(job.prompts):
        prompts = load_prompts_from_jsonl(job.prompts.path, columns=job.prompts.columns)
    check_resume(job, directory)
    backend = create_rl_backend(job, ranks)
    tokenizer = load_tokenizer(job.model.model)
    max_tokens = job.rollout.max_prompt_tokens
    tools = describe_tools(resolve_environment(job.rollout))
    check_prompt_lengths(prompts, tokenizer, max_tokens=max_tokens, source=job.prompts.path, tools=tools)
    data_buffer = DataBuffer(prompts, seed=job.replicated_rollout.seed)
    await train_against_engines(job, directory, events, backend, data_buffer, stop)
    return {"num_prompts": len(prompts), "num_drawn": data_buffer.num_drawn}


async def train_against_engines(
    job: RLJob,
    directory: RunDirectory,
    events: EventLog,
    backend: TrainingBackend,
    data_buffer: DataBuffer,
    stop: TrainingStop,
) -> None:
    """Connect to the engines, start sampling, and train on the samples."""
    tokenizer, rollout = load_tokenizer(job.model.model), job.replicated_rollout
    async with open_engines(job, directory) as engines:
        generate_fn = (
            resolve_generate_fn(rollout)
            if rollout.generate_fn
            else create_engine_generate_fn(engines, tokenizer, rollout)
        )
        num_tokens = count_token_ids(tokenizer)
        if said := describe_formats(job.training, await common_dtype(engines)):
            logger.info("%s", said)
        async with AsyncRolloutManager(data_buffer, rollout, generate_fn=generate_fn, num_tokens=num_tokens) as manager:
            await run_rl_loop(job, directory, events, backend, manager, engines, stop)


async def run_rl_loop(
    job: RLJob,
    directory: RunDirectory,
    events: EventLog,
    backend: TrainingBackend,
    source: AsyncRolloutManager | OfflineRollouts,
    engines: Sequence[InferenceEngine],
    stop: TrainingStop,
) -> None:
    """Run the training loop (rl.py), which writes metrics and checkpoints to the job's directory.

    Args:
        source: gives the samples of each step. Engines sample them, or an earlier run recorded them.
    """
    with JSONLLogger(directory.metrics, attempt=events.attempt) as metrics_logger:
        await run_rl_training(
            backend,
            source.data_buffer if isinstance(source, AsyncRolloutManager) else None,
            source,
            engines,
            job.training,
            metrics_logger,
            target=publish_target(job, directory),
            pad_id=pad_token_id(load_tokenizer(job.model.model)),
            checkpoint_dir=directory.checkpoints,
            inputs=job.inputs,
            events=events,
            on_batch=partial(write_rollouts, directory, temperature=job.rollout.sampling.temperature),
            on_credit=partial(write_credit, directory),
            is_colocated=job.deployment.colocated,
            is_end_asked=directory.end_request.exists,
            stop=stop,
        )


def describe_formats(training: RLTrainingConfig, dtype: torch.dtype | None) -> str:
    """The log message that trainer and engines use different number formats, and whether the loss corrects for the
    difference; empty if the formats are equal.

    Args:
        dtype: the number format of the engines' weights; None if unknown.
    """
    name, precision = str(dtype).removeprefix("torch."), training.policy.precision
    if dtype is None or name == precision:
        return ""
    found = f"the trainer computes in {precision}, the engines in {name}: their log-probs differ (mismatch_mean)"
    if training.corrects_for_age:
        return f"{found}, and the loss corrects for that by importance weights"
    return f'{found}, and nothing in training.rl.loss corrects for that: set ratio_base = "rollout", or mismatch.weight'


def collect_warnings(directory: RunDirectory) -> str:
    """A warning for result.json about all logged steps; empty without a warning.

    The warning says that many steps made no update, or that engines rounded most of the updates away. During the
    training, warning_rules.py has already logged these problems.
    """
    lines = read_metrics(directory.metrics)
    if skipped := describe_skipped_steps(lines):
        logger.warning("%s", skipped)
    return "; ".join(filter(None, (skipped, describe_last_rounding(lines))))


def describe_skipped_steps(lines: Sequence[Mapping[str, float]]) -> str:
    """A warning with the number of steps without an update by rewards, the reasons and a remedy.

    Empty if less than the share `MANY_SKIPPED` of the logged steps lacked an update by rewards.

    Args:
        lines: the metrics of the logged steps.
    """
    skipped = [line for line in lines if is_untaught(line)]
    if not skipped or len(skipped) < MANY_SKIPPED * len(lines):
        return ""
    reasons = Counter(map(why_skipped, skipped))
    [(most, _)] = reasons.most_common(1)
    counted = ", ".join(f"{reason}: {count}" for reason, count in reasons.most_common())
    many = "no step" if len(skipped) == len(lines) else f"only {len(lines) - len(skipped)}"
    logged = " that were logged" * (len(lines) <= lines[-1]["step"] - lines[0]["step"])
    by_rewards = BY_REWARDS * any(not line["skipped"] for line in skipped)
    return f"{many} of {len(lines)}{logged} made an update{by_rewards} ({counted}): {REMEDIES[most]}"


def write_rollouts(directory: RunDirectory, step: int, batch: RolloutBatch, *, temperature: float) -> None:
    """Write the samples of an RL step and their sampling temperature to samples/.

    Files of later steps are deleted, because they belong to an earlier attempt that was rolled back.
    """
    directory.write_samples(f"step_{step:06d}", batch.samples, temperature=temperature)
    for path in (*directory.samples.glob("step_*.jsonl"), *directory.credit.glob("step_*.jsonl")):
        if int(path.stem.removeprefix("step_")) > step:
            path.unlink()


def write_credit(directory: RunDirectory, step: int, credit: Credit, scores: RolloutScores) -> None:
    """Write advantages and the trainer's log-probs of a step to credit/, one line per sample.

    An advantage is one number per sample or one per token. Log-probs are written only if the settings need log-probs.
    Numbers per token have the same indices as the tokens in samples/.
    """
    lines = []
    for place, advantage in enumerate(credit.advantages):
        number = _rounded(advantage) if isinstance(advantage, Tensor) else round(advantage, CREDIT_DIGITS)
        line: dict[str, Any] = {"advantage": number}  # Any: JSON
        if place in scores.old_logprobs:
            line["logprobs"] = _rounded(scores.old_logprobs[place])
        lines.append(json.dumps(line) + "\n")
    directory.credit.mkdir(exist_ok=True)
    write_atomically(directory.credit / f"step_{step:06d}.jsonl", "".join(lines))


def _rounded(of_positions: Tensor) -> list[float]:
    """Numbers per token from numbers per position, rounded. Position i predicts token i + 1, so token 0 gets 0."""
    return [0.0, *(round(each, CREDIT_DIGITS) for each in of_positions.tolist())]
