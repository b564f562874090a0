"""Reinforcement learning: the loop, and how graded samples become its batches.

Not here: sampling (rollout.py), engines (engines/), the loss (loss.py), the model (pytorch_backend.py).

    engines --completions--> rollout_manager --groups--> advantages -> micro-batches -> forward_backward -> optim_step
       ^                                                                                                      |
       +---------------------------- weights, by version, verified <------------------------------------------+

The loop is synchronous: the engines wait while the weights change, so every sample of a step comes from one version.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

from torch import Tensor

from rollouts_core.backend import TrainingBackend
from rollouts_core.batch import build_batch, split_by_sample
from rollouts_core.checkpoint import prune_checkpoints, step_directory
from rollouts_core.config import RLTrainingConfig
from rollouts_core.data_buffer import DataBuffer
from rollouts_core.engines import InferenceEngine, PublishTarget, publish_weights
from rollouts_core.loss import Metrics
from rollouts_core.metrics import EventLog, MetricsLogger, average_metrics, sum_metrics
from rollouts_core.rl_batch import (
    RolloutScores,
    places_to_score,
    plan_rows,
    prepare_updates,
    trained_samples,
)
from rollouts_core.rollout import AsyncRolloutManager
from rollouts_core.sft import load_latest_checkpoint
from rollouts_core.types import RolloutBatch, Status

OnBatch = Callable[[int, RolloutBatch], None]
"""(step, batch): called with the rollouts of every step before they are trained on."""


async def run_rl_training(
    backend: TrainingBackend,
    data_buffer: DataBuffer,
    rollout_manager: AsyncRolloutManager,
    inference_engines: Sequence[InferenceEngine],
    config: RLTrainingConfig,
    metrics_logger: MetricsLogger | None = None,
    *,
    target: PublishTarget,
    pad_id: int = 0,
    checkpoint_dir: Path | None = None,
    events: EventLog | None = None,
    on_batch: OnBatch | None = None,
) -> list[Metrics]:
    """Train for `config.num_steps` steps; returns the metrics of each step that was run.

    With a `checkpoint_dir`, training goes on from its newest intact checkpoint. The engines serve the trainer's
    weights before the first sample is asked for, also after a restart.

    Args:
        target: where weights are published for the engines.

    Raises:
        WeightSyncError: an engine that does not take the weights.
        TrainingError: a loss or gradient that is not finite.
    """
    state = await load_latest_checkpoint(backend, checkpoint_dir, events)
    if state:
        data_buffer.load_state_dict(state["data_buffer"])
        rollout_manager.load_state_dict(state["rollout"])
    version = await publish_weights(backend, inference_engines, target)
    history: list[Metrics] = []
    for step in range((state["step"] if state else 0) + 1, config.num_steps + 1):
        began = perf_counter()
        batch = await rollout_manager.generate_batch()
        if on_batch:
            on_batch(step, batch)
        generated = perf_counter()
        metrics = await train_on_rollouts(backend, batch, config, pad_id=pad_id)
        trained = perf_counter()
        if step % config.sync_every == 0 and not metrics["skipped"]:
            version = await publish_weights(backend, inference_engines, target)
            if events:
                events.write("weights_published", step=step, version=version)
        metrics |= describe_rollouts(batch)
        metrics |= {
            "generate_s": generated - began,
            "train_s": trained - generated,
            "publish_s": perf_counter() - trained,
        }
        history.append(metrics)
        if metrics_logger and (step % config.log_every == 0 or step in (1, config.num_steps)):
            metrics_logger.log(metrics, step)
        if checkpoint_dir and (step % config.checkpoint_every == 0 or step == config.num_steps):
            cursors = {"data_buffer": data_buffer.state_dict(), "rollout": rollout_manager.state_dict()}
            checkpoint = step_directory(checkpoint_dir, step)
            await backend.save_checkpoint(checkpoint, {"step": step, **cursors}).result()
            prune_checkpoints(checkpoint_dir, newest=checkpoint, keep=config.keep_checkpoints)
            if events:
                events.write("checkpoint", step=step)
    return history


async def train_on_rollouts(
    backend: TrainingBackend, batch: RolloutBatch, config: RLTrainingConfig, *, pad_id: int
) -> Metrics:
    """The optimizer updates that a batch of rollouts gives; without any signal in it there is none."""
    scores = await score_rollouts(backend, batch, config, pad_id=pad_id)
    updates = prepare_updates(
        batch, batch.rewards, config, num_updates=config.num_minibatches, pad_id=pad_id, scores=scores
    )
    done = []
    for micro_batches in updates * config.num_epochs:
        if not micro_batches:
            continue
        results = [await backend.forward_backward(micro_batch).result() for micro_batch in micro_batches]
        done.append({**sum_metrics(results), **await backend.optim_step().result()})
    counts = {"skipped": float(not done), "num_updates": float(len(done))}
    return {**counts, **average_metrics(done)} if done else counts


async def score_rollouts(
    backend: TrainingBackend, batch: RolloutBatch, config: RLTrainingConfig, *, pad_id: int
) -> RolloutScores:
    """What the settings ask of the weights before the first update, and of the reference; often nothing.

    With one update per step, the update's own forward pass tells what the weights said before it.
    """
    old: dict[int, Tensor] = {}
    ref: dict[int, Tensor] = {}
    values: dict[int, Tensor] = {}
    samples = trained_samples(batch.samples, config.reward_shaping)
    places = places_to_score(samples, batch.rewards, config)
    for rows in plan_rows(places, samples, max_tokens=config.max_micro_batch_tokens):
        in_rows = [[samples[place] for place in row] for row in rows]
        in_order = list(itertools.chain(*rows))
        micro_batch = build_batch(in_rows, pad_id=pad_id)
        if config.needs_old_scores:
            scores = await backend.score(micro_batch).result()
            old |= zip(in_order, itertools.chain(*split_by_sample(scores.logprobs_BT, in_rows)), strict=True)
            if scores.values_BT is not None:
                values |= zip(in_order, itertools.chain(*split_by_sample(scores.values_BT, in_rows)), strict=True)
        if config.with_reference:
            scores = await backend.score(micro_batch, reference=True).result()
            ref |= zip(in_order, itertools.chain(*split_by_sample(scores.logprobs_BT, in_rows)), strict=True)
    return RolloutScores(old_logprobs=old, ref_logprobs=ref, values=values)


def describe_rollouts(batch: RolloutBatch) -> Metrics:
    """What the policy did in a step, as numbers."""
    statuses = [sample.status for sample in batch.samples]
    groups = [[sample.reward for sample in group] for group in batch.groups]
    return {
        "reward": statistics.fmean(batch.rewards),
        "reward_std": statistics.pstdev(batch.rewards),
        "response_tokens": statistics.fmean(batch.response_lengths),
        "truncated_share": statuses.count(Status.TRUNCATED) / len(statuses),
        "signal_share": sum(len(set(rewards)) > 1 for rewards in groups) / len(groups),
        "num_dropped_groups": float(batch.metadata.get("num_dropped_groups", 0)),
    }
