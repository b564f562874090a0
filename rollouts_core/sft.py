"""Supervised fine-tuning: the loop, and how demonstrations become its batches.

Not here: reading rows (dataset.py), tensors (batch.py), the model (pytorch_backend.py).

    samples -> seeded order per epoch -> rows of max_length -> batch_size rows -> micro-batches
            -> forward_backward ... optim_step -> metrics, checkpoint
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from time import perf_counter

from rollouts_core.backend import TrainingBackend, TrainingState
from rollouts_core.batch import TrainBatch, build_batch, pack_rows, with_step_totals
from rollouts_core.checkpoint import list_checkpoints, prune_checkpoints, set_damaged_aside, step_directory
from rollouts_core.config import SFTTrainingConfig
from rollouts_core.errors import DataError
from rollouts_core.loss import Metrics
from rollouts_core.metrics import EventLog, MetricsLogger, sum_metrics
from rollouts_core.types import Sample


async def run_sft_training(
    backend: TrainingBackend,
    samples: Sequence[Sample] | Iterable[Sample],
    config: SFTTrainingConfig,
    metrics_logger: MetricsLogger | None = None,
    *,
    pad_id: int = 0,
    checkpoint_dir: Path | None = None,
    events: EventLog | None = None,
    eval_samples: Sequence[Sample] = (),
) -> list[Metrics]:
    """Train for `config.num_steps` steps; returns the metrics of each step that was run.

    With a `checkpoint_dir`, training goes on from its newest intact checkpoint and leaves one every
    `checkpoint_every` steps and at the end. On the CPU the result is the same, bit for bit, as without the stop.

    Args:
        samples: demonstrations; a sequence is shuffled anew each epoch, a stream is taken as it comes.
        eval_samples: demonstrations whose loss is taken every `config.eval_every` steps and at the end.

    Raises:
        DataError: a stream that ends early.
        TrainingError: a loss or gradient that is not finite.
    """
    state = await load_latest_checkpoint(backend, checkpoint_dir, events)
    start_step = state["step"] if state else 0
    history: list[Metrics] = []
    steps = iterate_sft_steps(samples, config)
    for step, rows in enumerate(itertools.islice(steps, start_step, config.num_steps), start=start_step + 1):
        began = perf_counter()
        micro_batches = prepare_sft_batch(rows, config, pad_id=pad_id)
        results = [await backend.forward_backward(batch).result() for batch in micro_batches]
        metrics = {**sum_metrics(results), **await backend.optim_step().result()}
        num_tokens = sum(len(sample.tokens) for row in rows for sample in row)
        metrics |= {"num_tokens": num_tokens, "tokens_per_s": num_tokens / (perf_counter() - began)}
        if eval_samples and (step % config.eval_every == 0 or step == config.num_steps):
            metrics["eval_loss"] = await compute_eval_loss(backend, eval_samples, config, pad_id=pad_id)
        history.append(metrics)
        if metrics_logger and (step % config.log_every == 0 or step in (1, config.num_steps) or "eval_loss" in metrics):
            metrics_logger.log(metrics, step)
        if checkpoint_dir and (step % config.checkpoint_every == 0 or step == config.num_steps):
            checkpoint = step_directory(checkpoint_dir, step)
            await backend.save_checkpoint(checkpoint, {"step": step}).result()
            prune_checkpoints(checkpoint_dir, newest=checkpoint, keep=config.keep_checkpoints)
            if events:
                events.write("checkpoint", step=step)
    if start_step + len(history) < config.num_steps:
        raise DataError(
            f"the samples ended after {start_step + len(history)} of {config.num_steps} steps: give more rows"
        )
    return history


async def load_latest_checkpoint(
    backend: TrainingBackend, checkpoint_dir: Path | None, events: EventLog | None
) -> TrainingState | None:
    """Go on from the newest intact checkpoint; returns the loop's state, or None where there is no checkpoint."""
    if checkpoint_dir is None:
        return None
    damaged = set_damaged_aside(checkpoint_dir)
    if events and damaged:
        events.write("damaged_checkpoints", set_aside=[path.name for path in damaged])
    if not (checkpoints := list_checkpoints(checkpoint_dir)):
        return None
    checkpoint = checkpoints[-1]
    state = await backend.load_checkpoint(checkpoint).result()
    if events:
        events.write("resumed", step=state["step"], checkpoint=checkpoint.name)
    return state


async def compute_eval_loss(
    backend: TrainingBackend, samples: Sequence[Sample], config: SFTTrainingConfig, *, pad_id: int
) -> float:
    """Mean negative log-likelihood of all trained tokens of `samples`, nats."""
    rows = list(pack_rows(samples, max_length=config.max_length) if config.packing else ([s] for s in samples))
    total, num_tokens = 0.0, 0.0
    for start in range(0, len(rows), config.micro_batch_size):
        batch = collate_batch(rows[start : start + config.micro_batch_size], pad_id=pad_id)
        scores = await backend.score(batch).result()
        total -= float((scores.logprobs_BT * batch.loss_mask_BT).sum())
        num_tokens += batch.num_loss_tokens
    return total / num_tokens


def iterate_sft_steps(
    samples: Sequence[Sample] | Iterable[Sample], config: SFTTrainingConfig
) -> Iterator[list[list[Sample]]]:
    """The rows of step 1, 2, ...: a function of samples and settings alone, so a resumed run sees the same."""
    ordered = iterate_epochs(samples, seed=config.seed) if isinstance(samples, Sequence) else iter(samples)
    rows = pack_rows(ordered, max_length=config.max_length) if config.packing else ([s] for s in ordered)
    while len(step := list(itertools.islice(rows, config.batch_size))) == config.batch_size:
        yield step


def iterate_epochs(samples: Sequence[Sample], *, seed: int) -> Iterator[Sample]:
    """All samples over and over, each epoch in an order of its own that the seed decides."""
    if not samples:
        raise DataError("there is no sample to train on")
    for epoch in itertools.count():
        order = list(range(len(samples)))
        random.Random(f"{seed}-{epoch}").shuffle(order)
        yield from (samples[i] for i in order)


def prepare_sft_batch(rows: Sequence[Sequence[Sample]], config: SFTTrainingConfig, *, pad_id: int) -> list[TrainBatch]:
    """The micro-batches of one step, which know the step's totals."""
    size = config.micro_batch_size
    chunks = [rows[i : i + size] for i in range(0, len(rows), size)]
    batches = [collate_batch(chunk, pad_id=pad_id) for chunk in chunks]
    return with_step_totals(batches, (sample for row in rows for sample in row))


def collate_batch(rows: Sequence[Sequence[Sample]], *, pad_id: int) -> TrainBatch:
    """The tensors of some rows of demonstrations."""
    return build_batch(rows, pad_id=pad_id)
