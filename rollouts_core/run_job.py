"""Do what a job.json asks, in its run directory, and leave the stage's record.

Not here: what a job is (job.py), whether its inputs are still the same (job_inputs.py), its engines (job_engines.py),
the loops (sft.py, rl.py), starting and supervising the process (infra).

    job.json -> check every input -> load -> run -> result.json
                                         |
                                         +--> metrics.jsonl, events.jsonl, samples/, checkpoints/ on the way
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from rollouts_core.algorithms.loss import create_cross_entropy_loss, create_policy_loss
from rollouts_core.backends.create import create_backend
from rollouts_core.backends.fsdp import FSDPTrainingBackend
from rollouts_core.backends.launch import is_follower, is_launched
from rollouts_core.backends.protocol import TrainingBackend
from rollouts_core.backends.ranks import Ranks, join_ranks
from rollouts_core.checkpoint import list_checkpoints, load_manifest
from rollouts_core.comparison import estimate_mean, select_best
from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.data.dataset import (
    SFTDataset,
    load_prompts_from_jsonl,
    load_sft_dataset,
    sample_rules,
)
from rollouts_core.engines import InferenceEngine
from rollouts_core.environments.protocol import describe_tools
from rollouts_core.evaluate import (
    evaluation_rollouts,
    generate_samples,
    score_demonstrations,
    scores_by_prompt,
)
from rollouts_core.files import write_atomically
from rollouts_core.fingerprint import digest_datasets
from rollouts_core.generate import check_prompt_lengths, create_engine_generate_fn
from rollouts_core.job import (
    EvalJob,
    GenerateJob,
    InputModel,
    RLJob,
    SFTJob,
)
from rollouts_core.job_engines import keep_leases, open_engines, publish_target
from rollouts_core.job_inputs import check_model, check_resume, checked_file, open_checked_datasets
from rollouts_core.metrics import EventLog, JSONLLogger
from rollouts_core.model.loading import load_tokenizer, pad_token_id, silence_progress_bars
from rollouts_core.offline_rollouts import OfflineRollouts
from rollouts_core.resolve import resolve_environment, resolve_generate_fn, resolve_reward_fn
from rollouts_core.rewards import grade_group
from rollouts_core.rl import run_rl_training
from rollouts_core.rollout import AsyncRolloutManager
from rollouts_core.run_directory import RunDirectory, attempt_number
from rollouts_core.sft import run_sft_training
from rollouts_core.types import RolloutBatch, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def run_job(job: SFTJob | RLJob | EvalJob | GenerateJob, directory: RunDirectory) -> None:
    """Do a job that ends; its result.json exists when this returns."""
    silence_progress_bars()
    torch.set_num_threads(_num_threads(job))
    if isinstance(job, SFTJob | RLJob):
        run_training_job(job, directory)
        return
    with EventLog(directory.events, attempt=attempt_number()) as events:
        events.write("started", kind=job.kind, pid=os.getpid())
        if isinstance(job, EvalJob):
            asyncio.run(run_eval_job(job, directory))
        else:
            asyncio.run(run_generate_job(job, directory))


def run_training_job(job: SFTJob | RLJob, directory: RunDirectory) -> None:
    """Train, alone or as one of the processes that torchrun started; the first of them does all but computing."""
    if is_follower():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the leader ends, and with it the others
    with join_ranks() if is_launched() else nullcontext() as ranks:
        if ranks is not None and not ranks.is_leader:
            backend = create_job_backend(job, ranks)
            assert isinstance(backend, FSDPTrainingBackend)
            backend.follow()
            return
        with EventLog(directory.events, attempt=attempt_number()) as events:
            events.write("started", kind=job.kind, pid=os.getpid())
            if isinstance(job, SFTJob):
                asyncio.run(until_sigterm(run_sft_job(job, directory, events, ranks)))
            else:
                asyncio.run(until_sigterm(run_rl_job(job, directory, events, ranks)))


def create_job_backend(job: SFTJob | RLJob, ranks: Ranks | None) -> TrainingBackend:
    """The backend that a job trains with: that of one process, or this rank's part of that of several."""
    training = job.training
    if isinstance(job, SFTJob):
        return create_backend(
            job.model.model,
            training.optim,
            create_cross_entropy_loss(),
            num_steps=job.training.num_steps,
            policy=training.policy,
            seed=job.training.seed,
            ranks=ranks,
        )
    return create_backend(
        job.model.model,
        training.optim,
        create_policy_loss(job.training.loss),
        num_steps=job.training.num_optim_steps,
        policy=training.policy,
        seed=job.replicated_rollout.seed,
        temperature=job.rollout.sampling.temperature,
        with_entropies=True,
        with_values=job.training.with_values,
        with_reference=job.training.with_reference,
        ranks=ranks,
    )


async def until_sigterm(work: Coroutine[Any, Any, None]) -> None:
    """Do the work; SIGTERM cancels it where it waits next, so that a checkpoint being written is finished first.

    An exception out of the signal's handler could strike anywhere, for instance while a thread is being started.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    arrived: list[int] = []

    def cancel(number: int, frame: FrameType | None) -> None:
        if not arrived:  # another one would break off what the first one lets finish
            loop.call_soon_threadsafe(task.cancel)
        arrived.append(number)

    previous = signal.signal(signal.SIGTERM, cancel)
    try:
        await work
    except asyncio.CancelledError:
        if arrived:
            sys.exit(128 + arrived[0])
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


async def run_sft_job(job: SFTJob, directory: RunDirectory, events: EventLog, ranks: Ranks | None) -> None:
    """Fine-tune on demonstrations; the record lists the checkpoints."""
    check_model(job.model)
    tables = open_checked_datasets(job.data)
    check_resume(job, directory)
    backend = create_job_backend(job, ranks)
    tokenizer = load_tokenizer(job.model.model)
    rules = sample_rules(job.training)
    samples = SFTDataset(job.data, tables, tokenizer, rules, streaming=job.streaming)
    eval_samples = load_eval_samples(job, tokenizer)
    events.write("data_loaded", num_samples=len(samples), num_dropped=samples.num_dropped)
    with JSONLLogger(directory.metrics, attempt=events.attempt) as metrics_logger:
        await run_sft_training(
            backend,
            samples,
            job.training,
            metrics_logger,
            pad_id=pad_token_id(tokenizer),
            checkpoint_dir=directory.checkpoints,
            inputs={"model": job.model.digest, "data": digest_datasets(job.data)},
            events=events,
            eval_samples=eval_samples,
            is_end_asked=directory.end_request.exists,
        )
    num_samples = len(samples) if job.streaming else len(samples) - samples.num_dropped
    directory.write_result({**describe_training(job, directory), "num_samples": num_samples})


def load_eval_samples(job: SFTJob, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """The demonstrations that are not trained on, if the job has any."""
    if job.eval_data is None:
        return []
    training = job.training
    with checked_file(job.eval_data):
        return load_sft_dataset(
            job.eval_data.path,
            tokenizer,
            max_length=training.max_length,
            train_on=training.train_on,
            on_overlong=training.on_overlong,
        )


async def run_rl_job(job: RLJob, directory: RunDirectory, events: EventLog, ranks: Ranks | None) -> None:
    """Improve a model; the record lists the checkpoints, and how much there was to train on."""
    with keep_leases(job.engines):
        check_model(job.model)
        train = train_on_recorded if job.rollouts else train_on_prompts
        counts = await train(job, directory, events, ranks)
    directory.write_result({**describe_training(job, directory), **counts})


async def train_on_recorded(
    job: RLJob, directory: RunDirectory, events: EventLog, ranks: Ranks | None
) -> dict[str, int]:
    """Train on the rollouts of an earlier run; returns how many steps of it there are."""
    assert job.rollouts is not None, "the job has prompts"
    with checked_file(job.rollouts):
        source = OfflineRollouts(Path(job.rollouts.path), job.rollout)
        check_resume(job, directory)
        await run_rl_loop(job, directory, events, create_job_backend(job, ranks), source, [])
    return {"num_steps": len(source.files)}


async def train_on_prompts(
    job: RLJob, directory: RunDirectory, events: EventLog, ranks: Ranks | None
) -> dict[str, int]:
    """Train on what engines sample for prompts; returns how many prompts there are."""
    assert job.prompts is not None, "the job has recorded rollouts"
    with checked_file(job.prompts):
        prompts = load_prompts_from_jsonl(job.prompts.path)
    check_resume(job, directory)
    backend = create_job_backend(job, ranks)
    tokenizer = load_tokenizer(job.model.model)
    max_tokens = job.rollout.max_prompt_tokens
    tools = describe_tools(resolve_environment(job.rollout))
    check_prompt_lengths(prompts, tokenizer, max_tokens=max_tokens, source=job.prompts.path, tools=tools)
    data_buffer = DataBuffer(prompts, seed=job.replicated_rollout.seed)
    await train_against_engines(job, directory, events, backend, data_buffer)
    return {"num_prompts": len(prompts)}


async def train_against_engines(
    job: RLJob, directory: RunDirectory, events: EventLog, backend: TrainingBackend, data_buffer: DataBuffer
) -> None:
    """Open everything that sampling needs, and train on what is sampled."""
    tokenizer, rollout = load_tokenizer(job.model.model), job.replicated_rollout
    async with open_engines(job) as engines:
        generate_fn = (
            resolve_generate_fn(rollout)
            if rollout.generate_fn
            else create_engine_generate_fn(engines, tokenizer, rollout)
        )
        async with AsyncRolloutManager(data_buffer, rollout, generate_fn=generate_fn) as manager:
            await run_rl_loop(job, directory, events, backend, manager, engines)


async def run_rl_loop(
    job: RLJob,
    directory: RunDirectory,
    events: EventLog,
    backend: TrainingBackend,
    source: AsyncRolloutManager | OfflineRollouts,
    engines: Sequence[InferenceEngine],
) -> None:
    """Run the loop in the job's directory."""
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
            inputs={"model": job.model.digest, "plugins": job.plugin_digest},
            events=events,
            on_batch=lambda step, batch: write_rollouts(directory, step, batch),
            is_colocated=job.deployment.colocated,
            is_end_asked=directory.end_request.exists,
        )


async def run_eval_job(job: EvalJob, directory: RunDirectory) -> None:
    """Score every checkpoint on the same rows; the record has all scores and names the best."""
    scored = []
    with checked_file(job.data), JSONLLogger(directory.metrics, attempt=attempt_number()) as metrics_logger:
        for number, checkpoint in enumerate(job.checkpoints, start=1):
            check_model(checkpoint)
            scores = await _score_checkpoint(checkpoint, job, directory)
            estimate = estimate_mean(scores)
            metrics_logger.log({"score": estimate.mean}, number)
            scored.append({"name": checkpoint.name, "step": checkpoint.step, "scores": scores, **asdict(estimate)})
    best = job.checkpoints[select_best([float(entry["mean"]) for entry in scored])]
    directory.write_result({"metric": job.evaluation.metric, "checkpoints": scored, "best": best.name})


async def run_generate_job(job: GenerateJob, directory: RunDirectory) -> None:
    """Sample and grade completions of prompts into samples/completions.jsonl."""
    check_model(job.model)
    with checked_file(job.prompts):
        prompts = load_prompts_from_jsonl(job.prompts.path, max_rows=job.max_prompts)
    num_slots = job.deployment.max_running_requests
    samples = await generate_samples(job.model.model, prompts, job.rollout, num_slots=num_slots)
    graded = await grade_group(samples, resolve_reward_fn(job.rollout), timeout_s=job.rollout.reward_timeout_s)
    write_samples(directory, "completions", graded)
    directory.write_result({"num_samples": len(graded), **asdict(estimate_mean(scores_by_prompt(graded)))})


def describe_training(job: SFTJob | RLJob, directory: RunDirectory) -> dict[str, Any]:  # Any: JSON
    """The checkpoints of a training, and where and for which run it ended early, if it did."""
    checkpoints = describe_checkpoints(directory)
    step, num_steps = checkpoints[-1]["step"], job.training.num_steps
    if step == num_steps:
        return {"checkpoints": checkpoints}
    early = {"step": step, "num_steps": num_steps, "asked_by": directory.end_request.read_text()}
    return {"checkpoints": checkpoints, "finished_early": early}


def describe_checkpoints(directory: RunDirectory) -> list[dict[str, Any]]:  # Any: JSON
    """Name, step, digest and score of every checkpoint of a run directory."""
    return [
        {
            "name": path.name,
            "step": (manifest := load_manifest(path)).step,
            "digest": manifest.digest,
            "score": manifest.score,
        }
        for path in list_checkpoints(directory.checkpoints)
    ]


def write_rollouts(directory: RunDirectory, step: int, batch: RolloutBatch) -> None:
    """Write the samples of an RL step to samples/."""
    write_samples(directory, f"step_{step:06d}", batch.samples)


def write_samples(directory: RunDirectory, name: str, samples: Sequence[Sample]) -> None:
    """Write samples as samples/<name>.jsonl."""
    directory.samples.mkdir(exist_ok=True)
    lines = "".join(json.dumps(sample.to_json()) + "\n" for sample in samples)
    write_atomically(directory.samples / f"{name}.jsonl", lines)


async def _score_checkpoint(checkpoint: InputModel, job: EvalJob, directory: RunDirectory) -> list[float]:
    if job.evaluation.metric == "loss":
        demonstrations = load_sft_dataset(
            job.data.path,
            load_tokenizer(checkpoint.model),
            max_length=job.training.max_length,
            train_on=job.training.train_on,
            on_overlong=job.training.on_overlong,
            max_rows=job.evaluation.max_prompts,
        )
        return score_demonstrations(checkpoint.model, demonstrations)
    prompts = load_prompts_from_jsonl(job.data.path, max_rows=job.evaluation.max_prompts)
    rollout = evaluation_rollouts(job.evaluation, job.rollout)
    num_slots = job.deployment.max_running_requests
    samples = await generate_samples(checkpoint.model, prompts, rollout, num_slots=num_slots)
    graded = await grade_group(samples, resolve_reward_fn(rollout), timeout_s=rollout.reward_timeout_s)
    write_samples(directory, checkpoint.name, graded)
    return scores_by_prompt(graded)


def _num_threads(job: SFTJob | RLJob | EvalJob | GenerateJob) -> int:
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's word for those of this machine
    return job.deployment.trainer_threads or max(1, (os.cpu_count() or 1) // num_processes)
