"""Reinforcement learning: the training loop and the checks of its rollouts.

    engines --completions--> rollout_manager --groups--> advantages -> micro-batches -> forward_backward -> optim_step
       ^                                                                                                      |
       +---------------------------- weights, by version, verified <------------------------------------------+

With `rollout.max_staleness` 0, engines and trainer take turns, so all samples of a step come from the same weights.
With `rollout.max_staleness` above 0, the trainer runs in its own thread while the engines generate the next batches.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor

from rollouts_core.algorithms.credit import Credit, RolloutScores, assign_credit, trained_samples
from rollouts_core.algorithms.loss import Metrics
from rollouts_core.algorithms.mismatch import ENGINE_METRICS, MISMATCH_METRICS
from rollouts_core.backends.protocol import TrainingBackend, TrainingState
from rollouts_core.backends.threaded import beside_event_loop, run_with
from rollouts_core.backends.training_state import SERVED_WEIGHTS
from rollouts_core.batch import build_batch, place_samples, split_by_sample
from rollouts_core.checks.loss_checks import reads_rollout_logprobs
from rollouts_core.config import RLTrainingConfig, name_of_function
from rollouts_core.config.rl import describe_unranked
from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.engines import InferenceEngine, PublishTarget, memory_handed_over, open_target, publish_weights
from rollouts_core.engines.transfer.weight_sync import EarlierVersion, write_newest_version
from rollouts_core.environments.protocol import Outcome
from rollouts_core.errors import ConfigError, DataError, RewardError
from rollouts_core.metrics import EventLog, MetricsLogger, average_metrics, keep_logged, read_json_lines
from rollouts_core.optimizer_step import SkipCounter, update_policy
from rollouts_core.rl_batch import is_reinforced, places_to_score, plan_rows, prepare_updates
from rollouts_core.rollout.manager import AsyncRolloutManager
from rollouts_core.rollout.offline_rollouts import OfflineRollouts
from rollouts_core.rollout.schedule_replay import Schedule
from rollouts_core.rollout.validity import count_invalid
from rollouts_core.run_checkpoints import FREE_INPUTS, RunCheckpoints, describe_settings, is_same_task
from rollouts_core.signal_watch import SignalWatch
from rollouts_core.stopping import TrainingStop
from rollouts_core.types import RolloutBatch, Sample, Status, trajectory_places
from rollouts_core.warning_rules import WarningWatch

OnBatch = Callable[[int, RolloutBatch], None]
"""(step, batch): called with the rollouts of a step before the trainer trains on them."""
OnCredit = Callable[[int, Credit, RolloutScores], None]
"""(step, credit, scores): called with the advantages of a step's samples, and with the scores computed before the
step's first update."""


async def run_rl_training(
    backend: TrainingBackend,
    data_buffer: DataBuffer | None,
    rollout_manager: AsyncRolloutManager | OfflineRollouts,
    inference_engines: Sequence[InferenceEngine],
    config: RLTrainingConfig,
    metrics_logger: MetricsLogger | None = None,
    *,
    target: PublishTarget | None = None,
    pad_id: int = 0,
    checkpoint_dir: Path | None = None,
    inputs: Mapping[str, str] | None = None,
    events: EventLog | None = None,
    on_batch: OnBatch | None = None,
    on_credit: OnCredit | None = None,
    is_colocated: bool = False,
    is_end_asked: Callable[[], bool] = lambda: False,
    stop: TrainingStop | None = None,
) -> list[Metrics]:
    """Train for `config.num_steps` steps and return the metrics of each step that ran.

    If a rule in `config.roll_back_on` raises its warning, the training ends, and the event `rolled_back` names the best
    checkpoint. The backend keeps the weights of the last step.

    With a `checkpoint_dir`, training resumes from the newest intact checkpoint in it. At the start of every attempt,
    the engines load the trainer's weights before any sample is requested. If timing decides which groups a step trains
    on, the groups are written to `events` before the step, and a resumed run uses the same groups.

    Args:
        rollout_manager: source of the batches: completions sampled for the prompts of `data_buffer`, or recorded
            completions, which need no prompts.
        target: directory and version names for published weights. None: unique version names, and a folder in
            `checkpoint_dir` or else a temporary folder.
        on_credit: called with the advantages of each step's samples, and the scores computed before the step's first
            update.
        is_colocated: the engines free their GPU memory while the trainer trains, and weights are published after every
            step.
        inputs: digests of the training inputs by name. A checkpoint with other digests is refused.
        is_end_asked: called after every step; a result of True saves a checkpoint and ends the training.
        stop: checked after every step. After a stop request, the step is saved and StoppedError is raised.
    Raises:
        ConfigError: `keep_best` is set, but a checkpoint's reward would include completions that other weights sampled.
        CheckpointError: the checkpoint has other settings or inputs.
        WeightSyncError: an engine does not take the weights.
        RewardError: a sample has no reward, and the settings do not exclude such samples.
        DataError: a sample lacks the log-probs that the loss needs.
        NonFiniteError: a loss or gradient is NaN or infinite and `on_nonfinite` is "stop", or too many updates in a row
            were skipped.
        NoSignalError: too many steps in a row had no learning signal. The last step is saved.
        StoppedByRuleError: a rule in `config.stop_on` raised its warning, or a rule in `config.roll_back_on` before any
            checkpoint had a score. The step is saved.
        StoppedError: a stop was requested with `stop`.
    """
    rollout = rollout_manager.config
    if problem := describe_unranked(config, rollout, is_recorded=data_buffer is None):
        raise ConfigError(problem)
    history: list[Metrics] = []
    async with (
        open_target(target, backend, inference_engines, rollout, checkpoint_dir=checkpoint_dir) as own_target,
        beside_event_loop(backend, is_needed=rollout.max_staleness > 0) as trainer,
        RunCheckpoints(
            trainer,
            checkpoint_dir,
            config,
            settings=describe_settings(config, inputs or {}, rollout=rollout),
            scored_by="reward_unfiltered" if rollout.is_filtered and data_buffer else "reward",
            events=events,
            is_end_asked=is_end_asked,
            before_save=partial(keep_logged, metrics_logger),
            write_served=partial(write_served, backend, own_target),
            stop=stop,
        ) as checkpoints,
    ):
        handed_over = partial(memory_handed_over, trainer, inference_engines, is_colocated=is_colocated)
        publish = partial(publish_version, trainer, inference_engines, own_target, rollout_manager)
        async with handed_over():  # an engine that cannot free its memory fails here, before the first step
            state, skips, signal = await resume(checkpoints, data_buffer, rollout_manager)
        if checkpoints.rolled_back:
            return history
        cursors = partial(read_cursors, data_buffer, rollout_manager, skips, signal)
        train = partial(train_on_rollouts, config=config, pad_id=pad_id, stop=checkpoints.stop)
        watch = WarningWatch(signal, config.stop_on, config.roll_back_on)
        conclude = partial(conclude_step, checkpoints, watch, cursors, history, metrics_logger)
        began = perf_counter()
        published = await publish(earlier=find_earlier(checkpoints, state, inference_engines))
        # the publication's metrics belong to the saved step, because the next step may publish nothing
        rounded = own_target.rounding.take_metrics()
        await checkpoints.begin()
        if pending := state.get("pending"):  # a stop saved this step before its weights were published
            await conclude(state["step"], {**pending, "publish_s": perf_counter() - began, **rounded})
        for step in range(state["step"] + 1, config.num_steps + 1):
            began = perf_counter()
            batch = await rollout_manager.generate_batch()
            note_batch(step, batch, events, on_batch)
            generated = perf_counter()
            async with handed_over():
                noted = partial(on_credit, step) if on_credit else None
                metrics = await run_with(trainer, partial(train, batch=batch, on_credit=noted))
            skips.after_step(step, metrics)
            trained = perf_counter()
            metrics |= describe_rollouts(batch) | {"generate_s": generated - began, "train_s": trained - generated}
            # Weights are published at every checkpoint, because a run that resumes from the checkpoint first publishes
            # its weights.
            is_publish_due = step % config.sync_every == 0 or checkpoints.is_due(step)
            if is_colocated or (is_publish_due and backend.weight_version != published):
                checkpoints.note_trained(step, metrics, cursors)
                published = await publish(step, events)
            times = {"publish_s": perf_counter() - trained, "idle_s": rollout_manager.take_idle_s()}
            if await conclude(step, metrics | times | own_target.rounding.take_metrics()):
                break
    return history


async def conclude_step(
    checkpoints: RunCheckpoints,
    watch: WarningWatch,
    cursors: Callable[[], Mapping[str, Any]],  # Any: JSON
    history: list[Metrics],
    metrics_logger: MetricsLogger | None,
    step: int,
    metrics: Metrics,
) -> bool:
    """Log and save a step after its weights were published.

    Returns True if the training ends here, before its last step.

    Raises:
        NoSignalError: too many steps in a row had no learning signal. The last step is saved.
        StoppedByRuleError: a rule in `stop_on` raised its warning, or a rule in `roll_back_on` before any checkpoint
            had a score. The step is saved.
        StoppedError: a stop was requested. The step is saved.
    """
    config = checkpoints.config
    history.append(metrics)
    if metrics_logger and (step % config.log_every == 0 or step in (1, config.num_steps)):
        metrics_logger.log(metrics, step)
    watch.after_step(step, metrics, checkpoints.events)
    ends_here = await checkpoints.after_step(
        step, metrics, cursors, is_over=watch.is_over, roll_back_rule=watch.roll_back_rule
    )
    if ends_here:
        watch.check(is_rolled_back=checkpoints.rolled_back is not None)
    return ends_here


async def resume(
    checkpoints: RunCheckpoints,
    data_buffer: DataBuffer | None,
    rollout_manager: AsyncRolloutManager | OfflineRollouts,
) -> tuple[TrainingState, SkipCounter, SignalWatch]:
    """Load the newest checkpoint and return its state and its counters. Without a checkpoint, the state is step 0.

    If `allow_changed` permits changed settings, three rules apply:

    - If the data changed, the weights are kept and the data start at their beginning. The old position in the data and
      the unfinished groups have no meaning in the new data.
    - If settings outside `FREE_INPUTS` changed, finished groups are graded again, because their rewards may have
      changed.
    - If the task changed, the count of steps without signal restarts, because rewards of different tasks are not
      comparable. The logged schedules of the earlier attempt are ignored.

    Raises:
        NoSignalError: an earlier attempt ended without learning signal, and `max_steps_without_signal` was not raised
            since.
    """
    config = checkpoints.config
    assert isinstance(config, RLTrainingConfig), "the checkpoints of RL have its settings"
    state: TrainingState = await checkpoints.resume() or {"step": 0}
    are_same_data = "data" not in checkpoints.changed
    signal_state = state.get("signal") if is_same_task(checkpoints.changed) else None
    signal = SignalWatch(config.max_steps_without_signal, signal_state)
    signal.check()
    if state["step"] and are_same_data:
        is_regraded = any(name not in FREE_INPUTS for name in checkpoints.changed)
        rollout_manager.load_state_dict(state["rollout"], is_regraded=is_regraded)
        if data_buffer:
            data_buffer.load_state_dict(state["data_buffer"])
    if checkpoints.events and checkpoints.directory and is_same_task(checkpoints.changed):
        rollout_manager.replay(read_schedules(checkpoints.events.path, after_step=state["step"]))
    return state, SkipCounter(config.max_skipped_updates, state.get("num_skipped", 0)), signal


async def publish_version(
    trainer: TrainingBackend,
    inference_engines: Sequence[InferenceEngine],
    target: PublishTarget,
    rollout_manager: AsyncRolloutManager | OfflineRollouts,
    step: int = 0,
    events: EventLog | None = None,
    *,
    earlier: EarlierVersion | None = None,
) -> int:
    """Publish the trainer's weights to the engines, give the version to the rollout manager, and return it.

    Args:
        events: log to which the event of the publication is written; None writes no event, as when a run starts or
            resumes.
        earlier: a version to publish instead of the trainer's weights.
    """
    version = earlier.number if earlier else trainer.weight_version
    name = await publish_weights(trainer, inference_engines, target, earlier=earlier)
    rollout_manager.weights_published(version)
    if events:
        events.write("weights_published", step=step, version=name)
    return version


def write_served(backend: TrainingBackend, target: PublishTarget) -> Path | None:
    """Write the weights that the engines serve to a file, and return its path.

    Returns None if the trainer has the same weights, because every checkpoint contains the trainer's weights.
    """
    if target.newest.version == target.version_of(backend.weight_version):
        return None
    return write_newest_version(target)


def find_earlier(
    checkpoints: RunCheckpoints, state: TrainingState, inference_engines: Sequence[InferenceEngine]
) -> EarlierVersion | None:
    """The weight version that engines served when the checkpoint was saved; None if they served the checkpoint's own
    weights."""
    if checkpoints.resumed_from is None or "pending" in state:
        return None
    published, file = state["rollout"].get("published"), checkpoints.resumed_from / SERVED_WEIGHTS
    if not published or (inference_engines and not file.is_file()):
        return None
    return EarlierVersion(number=published[-1], file=file)


def note_batch(step: int, batch: RolloutBatch, events: EventLog | None, on_batch: OnBatch | None) -> None:
    """Write the event about a step's rollouts and call `on_batch`, before the trainer trains on them."""
    if events and "completed" in batch.metadata:
        events.write("rollouts_scheduled", step=step, **schedule_of(batch)._asdict())
    if on_batch:
        on_batch(step, batch)


def read_cursors(
    data_buffer: DataBuffer | None,
    rollout_manager: AsyncRolloutManager | OfflineRollouts,
    skips: SkipCounter,
    signal: SignalWatch,
) -> dict[str, Any]:  # Any: JSON
    """The state that a resumed run needs: the position in the data, unfinished groups and counters."""
    return {
        "data_buffer": data_buffer.state_dict() if data_buffer else None,
        "rollout": rollout_manager.state_dict(),
        "num_skipped": skips.num_in_a_row,
        "signal": signal.state_dict(),
    }


def schedule_of(batch: RolloutBatch) -> Schedule:
    """The groups of a batch that completed, in order, and the groups that were dropped because of an outage."""
    return Schedule(batch.metadata["completed"], batch.metadata["unavailable"])


def read_schedules(events: Path, *, after_step: int) -> list[Schedule]:
    """The logged schedules of the steps after `after_step`, up to the last step that an earlier attempt reached."""
    by_step = {
        line["step"]: Schedule(line["completed"], line.get("unavailable", ()))
        for line in read_json_lines(events)
        if line["event"] == "rollouts_scheduled"
    }
    later = [step for step in by_step if step > after_step]
    return [by_step.get(step, Schedule(())) for step in range(after_step + 1, max(later, default=after_step) + 1)]


async def train_on_rollouts(
    backend: TrainingBackend,
    batch: RolloutBatch,
    config: RLTrainingConfig,
    *,
    pad_id: int,
    stop: TrainingStop | None = None,
    on_credit: Callable[[Credit, RolloutScores], None] | None = None,
) -> Metrics:
    """Make the optimizer updates of one batch of rollouts. A batch without learning signal gives no update.

    Args:
        stop: makes a stop request wait while the weights change.
        on_credit: called with the advantages, and the scores computed before the first update.

    Raises:
        RewardError: a sample has no reward, and the settings do not exclude such samples.
        DataError: a sample lacks the log-probs that the loss needs.
    """
    check_scored(batch.samples, config)
    check_logprobs(batch.samples, config)
    scores = await score_rollouts(backend, batch, config, pad_id=pad_id)
    if on_credit:
        on_credit(assign_credit(batch.samples, batch.rewards, config, scores), scores)
    updates = prepare_updates(
        batch,
        batch.rewards,
        config,
        num_updates=config.num_minibatches,
        pad_id=pad_id,
        scores=scores,
        num_ranks=backend.num_ranks,
    )
    tried = [
        await update_policy(backend, micro_batches, on_nonfinite=config.on_nonfinite, stop=stop)
        for micro_batches in updates * config.num_epochs
        if micro_batches
    ]
    done = [metrics for metrics in tried if not metrics["num_nonfinite"]]
    counts = {
        "skipped": float(not done),
        "without_signal": float(not tried or not is_reinforced(batch.samples, batch.rewards, config)),
        "num_updates": float(len(done)),
        "num_nonfinite": float(len(tried) - len(done)),
    }
    if not done:
        return counts
    averaged = average_metrics(done)
    # the mismatch is measured only in the first update, because later updates see a changed trainer
    if not scores.old_logprobs:
        averaged |= {name: value for name, value in done[0].items() if name in MISMATCH_METRICS}
    if find_silent(batch.samples):  # these metrics counted missing log-probs as 0
        averaged = {name: value for name, value in averaged.items() if name not in ENGINE_METRICS}
    return {**averaged, **counts}


def check_scored(samples: Sequence[Sample], config: RLTrainingConfig) -> None:
    """Raise RewardError for the first valid sample without a reward, unless the settings exclude such samples."""
    if config.advantage.unscored == "exclude":
        return
    unscored = [sample for sample in samples if sample.reward is None and sample.status is not Status.INVALID]
    if unscored:
        raise RewardError(
            f"{len(unscored)} of {len(samples)} completions have no reward (first: prompt "
            f"{unscored[0].metadata.get('prompt_id', '?')!r}): the reward function returned None. To train on the "
            'other completions, set training.rl.advantage.unscored = "exclude"'
        )


def check_logprobs(samples: Sequence[Sample], config: RLTrainingConfig) -> None:
    """Raise DataError if a trained sample lacks the log-probs that the loss needs.

    Without this check, missing log-probs would count as 0, as if every sampled token had had probability 1.
    """
    silent = find_silent(samples)
    if not silent or not (reads_rollout_logprobs(config) if config.loss_fn else config.needs_rollout_logprobs):
        return
    other_way = 'set training.rl.loss.ratio_base = "old", without loss.mismatch'
    if config.loss_fn:
        other_way = f"change {name_of_function(config.loss_fn)}, which reads batch.rollout_logprobs_BT"
    raise DataError(
        f"{len(silent)} of {len(samples)} completions have no rollout_log_probs (first: prompt "
        f"{silent[0].metadata.get('prompt_id', '?')!r}): the generate function must set the log-prob of each sampled "
        f"token; or {other_way}"
    )


def find_silent(samples: Sequence[Sample]) -> list[Sample]:
    """The trained samples without rollout log-probs."""
    return [sample for sample in samples if sample.rollout_log_probs is None and any(sample.loss_mask[1:])]


async def score_rollouts(
    backend: TrainingBackend, batch: RolloutBatch, config: RLTrainingConfig, *, pad_id: int
) -> RolloutScores:
    """Compute the log-probs of the trainer before its first update, and of the reference model, if the settings need
    them.

    With one update per step, the update's forward pass computes the trainer's log-probs, so this function does not.
    """
    old: dict[int, Tensor] = {}
    ref: dict[int, Tensor] = {}
    values: dict[int, Tensor] = {}
    samples = trained_samples(batch.samples, config.reward_shaping)
    places = places_to_score(batch.samples, batch.rewards, config)
    asked = []
    for rows in plan_rows(places, samples, config, num_ranks=backend.num_ranks):
        in_rows = [[samples[place] for place in row] for row in rows]
        layouts = [place_samples(row, share_prompts=config.shares_prompts) for row in in_rows]
        micro_batch = build_batch(in_rows, pad_id=pad_id, share_prompts=config.shares_prompts)
        policy = backend.score(micro_batch) if config.needs_old_scores else None
        reference = backend.score(micro_batch, reference=True) if config.with_reference else None
        asked.append((list(itertools.chain(*rows)), layouts, policy, reference))
    for in_order, layouts, policy, reference in asked:  # the GPU computes later scores while earlier scores are read
        if policy is not None:
            scores = await policy.result()
            old |= zip(in_order, itertools.chain(*split_by_sample(scores.logprobs_BT, layouts)), strict=True)
            if scores.values_BT is not None:
                values |= zip(in_order, itertools.chain(*split_by_sample(scores.values_BT, layouts)), strict=True)
        if reference is not None:
            scores = await reference.result()
            ref |= zip(in_order, itertools.chain(*split_by_sample(scores.logprobs_BT, layouts)), strict=True)
    return RolloutScores(old_logprobs=old, ref_logprobs=ref, values=values)


def describe_rollouts(batch: RolloutBatch) -> Metrics:
    """Metrics of a step's rollouts. If no completion has a reward, the metrics of rewards are left out.

    A trajectory counts once, even if it has several samples.
    """
    lasts = [batch.samples[places[-1]] for places in trajectory_places(batch.samples)]
    scored = [sample.reward for sample in lasts if sample.reward is not None]
    groups = [[sample.reward for sample in group if sample.reward is not None] for group in batch.groups]
    rewards = {"reward": statistics.fmean(scored), "reward_std": statistics.pstdev(scored)} if scored else {}
    invalid = count_invalid(batch.samples)
    return {
        **rewards,
        "num_unscored": float(len(lasts) - len(scored) - invalid.total()),
        **{f"invalid/{reason}": float(count) for reason, count in invalid.items()},
        "response_tokens": sum(batch.response_lengths) / len(lasts),
        "truncated_share": sum(sample.status is Status.TRUNCATED for sample in lasts) / len(lasts),
        "signal_share": sum(len(set(rewards_G)) > 1 for rewards_G in groups) / len(groups),
        "num_dropped_groups": float(batch.metadata.get("num_dropped_groups", 0)),
        **{f"dropped/{reason}": float(count) for reason, count in batch.metadata.get("drops", {}).items()},
        **describe_conversations(lasts),
        **batch.metadata.get("reward_metrics", {}),
        **batch.metadata.get("staleness", {}),
        **{name: batch.metadata[name] for name in ("reward_unfiltered", "paused_s") if name in batch.metadata},
    }


def describe_conversations(samples: Sequence[Sample]) -> Metrics:
    """The mean number of turns per conversation, and the shares of failed turns.

    The result is empty if no sample is a conversation.
    """
    outcomes = [sample.metadata["outcomes"] for sample in samples if "outcomes" in sample.metadata]
    if not outcomes:
        return {}
    turns = Counter(itertools.chain(*outcomes))
    wrong = (Outcome.PARSE_FAILURE, Outcome.TOOL_ERROR, Outcome.TIMEOUT)
    return {
        "num_turns": turns.total() / len(outcomes),
        **{f"{outcome}_share": turns[outcome] / turns.total() for outcome in wrong},
    }
