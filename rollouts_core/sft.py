"""Supervised fine-tuning: the training loop and its micro-batches.

samples -> seeded order per epoch -> rows of max_length -> batch_size rows -> micro-batches
        -> forward_backward ... optim_step -> metrics, checkpoint
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter

from rollouts_core.algorithms.loss import Metrics
from rollouts_core.backends.protocol import TrainingBackend, TrainingState
from rollouts_core.batch import TrainBatch, build_batch, with_step_totals
from rollouts_core.config import SFTTrainingConfig
from rollouts_core.data.packing import pack_rows
from rollouts_core.data.steps import Cursor, Samples, iterate_sft_steps
from rollouts_core.errors import ConfigError, DataError
from rollouts_core.metrics import EventLog, MetricsLogger, keep_logged
from rollouts_core.optimizer_step import SkipCounter, update_policy
from rollouts_core.run_checkpoints import RunCheckpoints, describe_settings
from rollouts_core.stopping import TrainingStop
from rollouts_core.types import Sample
from rollouts_core.warning_rules import SFT_RULES, WarningWatch


async def run_sft_training(
    backend: TrainingBackend,
    samples: Samples,
    config: SFTTrainingConfig,
    metrics_logger: MetricsLogger | None = None,
    *,
    pad_id: int = 0,
    checkpoint_dir: Path | None = None,
    inputs: Mapping[str, str] | None = None,
    events: EventLog | None = None,
    eval_samples: Sequence[Sample] = (),
    is_end_asked: Callable[[], bool] = lambda: False,
    stop: TrainingStop | None = None,
) -> list[Metrics]:
    """Train for `config.num_steps` steps and return the metrics of each step that ran.

    With a `checkpoint_dir`, training resumes from the newest intact checkpoint in it, and writes a checkpoint every
    `checkpoint_every` steps and at the end. On the CPU, a resumed run gives bit for bit the same weights as a run that
    was never stopped.

    If a rule in `config.roll_back_on` raises its warning, the training ends, and the event `rolled_back` names the best
    checkpoint. The backend keeps the weights of the last step.

    Args:
        samples: demonstrations. A sequence is shuffled each epoch; a stream is read in order.
        inputs: digests of the training inputs by name. A checkpoint with other digests is refused.
        eval_samples: demonstrations whose loss is computed every `config.eval_every` steps and at the end.
        is_end_asked: called after every step; a result of True saves a checkpoint and ends the training.
        stop: checked after every step. After a stop request, the step is saved and StoppedError is raised.

    Raises:
        ConfigError: `keep_best` is set without `eval_samples`.
        CheckpointError: the checkpoint has other settings, samples or inputs.
        DataError: a stream ended before the last step.
        NonFiniteError: a loss or gradient is NaN or infinite and `on_nonfinite` is "stop", or too many updates in a row
            were skipped.
        StoppedByRuleError: a rule in `config.stop_on` raised its warning, or a rule in `config.roll_back_on` before any
            checkpoint had a score. The step is saved.
        StoppedError: a stop was requested with `stop`.
    """
    if config.keep_best and not eval_samples:
        raise ConfigError(
            f"keep_best {config.keep_best} compares checkpoints by eval_loss: give eval_samples, or set it to 0"
        )
    known_inputs = with_digests(inputs or {}, samples, eval_samples) if checkpoint_dir else {}
    history: list[Metrics] = []
    async with RunCheckpoints(
        backend,
        checkpoint_dir,
        config,
        settings=describe_settings(config, known_inputs),
        scored_by="eval_loss",
        events=events,
        is_end_asked=is_end_asked,
        before_save=partial(keep_logged, metrics_logger),
        stop=stop,
    ) as checkpoints:
        state: TrainingState = await checkpoints.resume() or {"step": 0}
        if checkpoints.rolled_back:
            return history
        evaluate = partial(compute_eval_loss, backend, eval_samples, config, pad_id=pad_id)
        skips = SkipCounter(config.max_skipped_updates, state.get("num_skipped", 0))
        watch = WarningWatch(None, config.stop_on, config.roll_back_on, rules=SFT_RULES, section="training.sft")
        steps = iterate_sft_steps(samples, config, Cursor(*state["cursor"]) if state["step"] else None)

        def read_cursors() -> dict[str, object]:
            return {"cursor": steps.cursor, "num_skipped": skips.num_in_a_row}

        async def conclude(step: int, metrics: Metrics) -> bool:
            """Evaluate, log and save a trained step. Returns True if the training ends here."""
            if eval_samples and (step % config.eval_every == 0 or step == config.num_steps):
                checkpoints.note_trained(step, metrics, read_cursors)
                metrics["eval_loss"] = await evaluate()
            history.append(metrics)
            is_logged = step % config.log_every == 0 or step in (1, config.num_steps) or "eval_loss" in metrics
            if metrics_logger and is_logged:
                metrics_logger.log(metrics, step)
            watch.after_step(step, metrics, events)
            ends_here = await checkpoints.after_step(
                step, metrics, read_cursors, is_over=watch.is_over, roll_back_rule=watch.roll_back_rule
            )
            if ends_here:
                watch.check(is_rolled_back=checkpoints.rolled_back is not None)
            return ends_here

        await checkpoints.begin()
        if "pending" in state and await conclude(state["step"], dict(state["pending"])):
            return history
        for step, rows in enumerate(itertools.islice(steps, config.num_steps - state["step"]), start=state["step"] + 1):
            began = perf_counter()
            micro_batches = prepare_sft_batch(rows, config, pad_id=pad_id, num_ranks=backend.num_ranks)
            metrics = await update_policy(
                backend, micro_batches, on_nonfinite=config.on_nonfinite, stop=checkpoints.stop
            )
            skips.after_step(step, metrics)
            num_tokens = sum(len(sample.tokens) for row in rows for sample in row)
            metrics |= {"num_tokens": num_tokens, "tokens_per_s": num_tokens / (perf_counter() - began)}
            if await conclude(step, metrics):
                return history
    num_done = state["step"] + len(history) - ("pending" in state)
    if num_done < config.num_steps:
        raise DataError(f"the samples ended after {num_done} of {config.num_steps} steps: give more rows")
    return history


def digest_samples(samples: Sequence[Sample]) -> str:
    """sha256 over the tokens and loss masks of all samples, in order."""
    total = hashlib.sha256()
    for sample in samples:
        total.update(array("q", sample.tokens).tobytes())
        total.update(array("d", sample.loss_mask).tobytes())
    return total.hexdigest()


def with_digests(inputs: Mapping[str, str], samples: Samples, eval_samples: Sequence[Sample]) -> dict[str, str]:
    """Return `inputs` with the digests of the demonstrations added. A stream of demonstrations has no digest."""
    of_samples = {"samples": digest_samples(samples)} if isinstance(samples, Sequence) else {}
    return {**inputs, **of_samples, "eval_samples": digest_samples(eval_samples)}


async def compute_eval_loss(
    backend: TrainingBackend, samples: Sequence[Sample], config: SFTTrainingConfig, *, pad_id: int
) -> float:
    """Mean negative log-likelihood of the trained tokens of all `samples`, nats."""
    rows = list(pack_rows(samples, max_length=config.max_length) if config.packing else ([s] for s in samples))
    total, num_tokens = 0.0, 0.0
    size = config.micro_batch_size * backend.num_ranks
    for start in range(0, len(rows), size):
        batch = collate_batch(rows[start : start + size], pad_id=pad_id)
        scores = await backend.score(batch).result()
        total -= float((scores.logprobs_BT * batch.loss_mask_BT).sum())
        num_tokens += batch.num_loss_tokens
    return total / num_tokens


def prepare_sft_batch(
    rows: Sequence[Sequence[Sample]], config: SFTTrainingConfig, *, pad_id: int, num_ranks: int = 1
) -> list[TrainBatch]:
    """Return the micro-batches of one step. Each micro-batch has the totals of the whole step.

    Args:
        num_ranks: number of devices that share the rows of each micro-batch.
    """
    size = config.micro_batch_size * num_ranks
    chunks = [rows[i : i + size] for i in range(0, len(rows), size)]
    batches = [collate_batch(chunk, pad_id=pad_id) for chunk in chunks]
    return with_step_totals(batches, (sample for row in rows for sample in row))


def collate_batch(rows: Sequence[Sequence[Sample]], *, pad_id: int) -> TrainBatch:
    """Build the tensors of some rows of demonstrations."""
    return build_batch(rows, pad_id=pad_id)
