"""Pins when checkpoints are written, which stay, and from which training goes on.

Without it a run could go on with settings that its first half never had, lose its best checkpoint, or end while its
last one is half on disk.
"""

import asyncio
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from rollouts_core.algorithms.loss import Metrics, create_cross_entropy_loss
from rollouts_core.backends.protocol import ImmediateTrainFuture, ThreadTrainFuture, TrainingBackend
from rollouts_core.backends.pytorch import create_pytorch_backend
from rollouts_core.checkpoint import list_checkpoints, load_manifest, new_checkpoint, verify_checkpoint
from rollouts_core.config import (
    FilterConfig,
    ModelConfig,
    OptimConfig,
    RewardConfig,
    RLTrainingConfig,
    RolloutConfig,
    SamplingConfig,
    SFTTrainingConfig,
)
from rollouts_core.errors import CheckpointError, ConfigError
from rollouts_core.jobs.rl_job import write_rollouts
from rollouts_core.metrics import EventLog, JSONLLogger, read_json_lines, read_metrics
from rollouts_core.rl import run_rl_training
from rollouts_core.roll_back import RollBack
from rollouts_core.rollout.offline_rollouts import OfflineRollouts
from rollouts_core.rollout.rollout_batch import convert_to_batch
from rollouts_core.run_checkpoints import RunCheckpoints, ScoredBy, check_same_settings, describe_settings
from rollouts_core.run_directory import RunDirectory
from rollouts_core.sft import run_sft_training
from rollouts_core.stopping import TrainingStop
from rollouts_core.types import Sample
from tests.rollouts_core.histories import without_times
from tests.rollouts_core.make import make_groups, make_random_samples
from tests.rollouts_core.test_rl import make_backend

CONFIG = SFTTrainingConfig(num_steps=8, checkpoint_every=2, keep_checkpoints=1)
CONSTANT = OptimConfig(lr=0.01, schedule="constant")


class SlowDiskBackend:
    """Writes checkpoints in a thread that waits for leave to do so; nothing is trained."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.num_in_flight = 0
        self.most_in_flight = 0

    @property
    def as_backend(self) -> TrainingBackend:
        """It has what checkpoints ask of a backend."""
        return cast(TrainingBackend, self)

    def save_checkpoint(self, path: Path, state: Mapping[str, Any]) -> ThreadTrainFuture[None]:
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        return ThreadTrainFuture(lambda: self._write(path, state))

    def load_checkpoint(self, path: Path) -> ImmediateTrainFuture[Mapping[str, Any]]:
        return ImmediateTrainFuture(json.loads((path / "state.json").read_text()))

    def _write(self, path: Path, state: Mapping[str, Any]) -> None:
        assert self.may_write.wait(10)
        with new_checkpoint(
            path, step=state["step"], settings=state["settings"], is_early=state.get("is_early", False)
        ) as directory:
            (directory / "model.safetensors").write_text("weights")
            (directory / "state.json").write_text(json.dumps(state))
        self.num_in_flight -= 1


def run_steps(backend: SlowDiskBackend, directory: Path, config: SFTTrainingConfig = CONFIG, **options: Any) -> None:
    """All steps of a training that only writes checkpoints; the loss of step n is n."""

    async def loop() -> None:
        async with RunCheckpoints(backend.as_backend, directory, config, settings={"lr": 1}, **options) as checkpoints:
            for step in range(1, config.num_steps + 1):
                await checkpoints.after_step(step, {"loss": float(step)})

    asyncio.run(loop())


def test_the_loop_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    backend = SlowDiskBackend()

    async def loop() -> list[str]:
        async with RunCheckpoints(backend.as_backend, tmp_path, CONFIG, settings={}) as checkpoints:
            for step in (1, 2, 3):
                await checkpoints.after_step(step, {"loss": 1.0})
            on_disk = [path.name for path in list_checkpoints(tmp_path)]
            backend.may_write.set()
            return on_disk

    assert asyncio.run(loop()) == []  # three steps were done while nothing could be written
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000002"]


def test_the_loop_goes_on_while_the_weights_that_engines_serve_are_written_as_a_part_of_the_save(
    tmp_path: Path,
) -> None:
    backend, stop, has_turned = SlowDiskBackend(), TrainingStop(), threading.Event()
    backend.may_write.set()

    def write_served() -> None:
        assert has_turned.wait(5), "the event loop stands still"

    async def loop() -> None:
        asyncio.get_running_loop().call_later(0.2, has_turned.set)
        async with RunCheckpoints(
            backend.as_backend, tmp_path, CONFIG, settings={}, write_served=write_served, stop=stop
        ) as checkpoints:
            await checkpoints.after_step(2, {"loss": 1.0})

    asyncio.run(loop())
    assert stop._save_s > 0.15


def test_one_save_is_in_flight_at_most(tmp_path: Path) -> None:
    backend = SlowDiskBackend()
    threading.Timer(0.2, backend.may_write.set).start()
    run_steps(backend, tmp_path)
    assert backend.most_in_flight == 1


def test_the_event_and_retention_follow_the_rename(tmp_path: Path) -> None:
    backend = SlowDiskBackend()
    with EventLog(tmp_path / "e.jsonl") as events:

        async def loop() -> tuple[list[str], list[str]]:
            async with RunCheckpoints(
                backend.as_backend, tmp_path / "c", CONFIG, settings={}, events=events
            ) as checkpoints:
                for step in (1, 2):
                    await checkpoints.after_step(step, {"loss": 1.0})
                early = [line["event"] for line in read_json_lines(tmp_path / "e.jsonl")]
                backend.may_write.set()
            return early, [line["event"] for line in read_json_lines(tmp_path / "e.jsonl")]

        assert asyncio.run(loop()) == ([], ["checkpoint"])


@pytest.mark.parametrize("ending", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_whatever_ends_the_loop_waits_for_the_save(tmp_path: Path, ending: type[BaseException]) -> None:
    backend = SlowDiskBackend()
    threading.Timer(0.2, backend.may_write.set).start()

    async def loop() -> None:
        async with RunCheckpoints(backend.as_backend, tmp_path, CONFIG, settings={}) as checkpoints:
            for step in (1, 2):
                await checkpoints.after_step(step, {"loss": 1.0})
            raise ending

    with pytest.raises(ending):
        asyncio.run(loop())
    verify_checkpoint(tmp_path / "step_000002")


@pytest.mark.parametrize("num_steps", [4, 2])
def test_who_is_cancelled_while_a_save_is_waited_for_waits_for_it(tmp_path: Path, num_steps: int) -> None:
    """At the step that the next save is due at, or at the end."""
    backend = SlowDiskBackend()

    async def loop(events: EventLog) -> None:
        async with RunCheckpoints(backend.as_backend, tmp_path, CONFIG, settings={}, events=events) as checkpoints:
            for step in range(1, num_steps + 1):
                await checkpoints.after_step(step, {"loss": 1.0})

    async def cancelled_while_it_waits() -> list[str]:
        with EventLog(tmp_path / "e.jsonl") as events:
            task = asyncio.create_task(loop(events))
            while not backend.num_in_flight:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            task.cancel()
            threading.Timer(0.2, backend.may_write.set).start()
            with pytest.raises(asyncio.CancelledError):
                await task
            return [path.name for path in list_checkpoints(tmp_path)]

    assert asyncio.run(cancelled_while_it_waits()) == ["step_000002"]
    assert [line["event"] for line in read_json_lines(tmp_path / "e.jsonl")] == ["checkpoint"]


def test_an_error_of_the_writer_ends_the_loop_at_the_next_step(tmp_path: Path) -> None:
    backend = SlowDiskBackend()
    backend.may_write.set()
    (tmp_path / "file").write_text("no folder")
    reached = []

    async def loop() -> None:
        async with RunCheckpoints(backend.as_backend, tmp_path / "file" / "c", CONFIG, settings={}) as checkpoints:
            for step in (1, 2, 3):
                reached.append(step)
                await checkpoints.after_step(step, {"loss": 1.0})
                while checkpoints._saving and not checkpoints._saving.future.done():
                    await asyncio.sleep(0.01)

    with pytest.raises(OSError, match="file"):
        asyncio.run(loop())
    assert reached == [1, 2, 3]


def train_scored(
    directory: Path,
    config: SFTTrainingConfig,
    settings: Mapping[str, Any],
    metric: ScoredBy,
    values: Mapping[int, float],
) -> None:
    """A training, or the rest of one, whose steps have these values of the metric that checkpoints are compared by."""
    backend = SlowDiskBackend()
    backend.may_write.set()

    async def train() -> None:
        async with RunCheckpoints(
            backend.as_backend, directory, config, settings=settings, scored_by=metric
        ) as checkpoints:
            state = await checkpoints.resume() or {"step": 0}
            for step in range(state["step"] + 1, max(values) + 1):
                await checkpoints.after_step(step, {metric: values[step]})

    asyncio.run(train())


def names_in(directory: Path) -> list[str]:
    return [path.name for path in list_checkpoints(directory)]


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        # The completions of step 5 are of the weights after step 4, which are the best, whatever step 4 sampled.
        ("reward", {1: 0.9, 2: 0.9, 3: 0.1, 4: 0.9, 5: 0.8, 6: 0.9, 7: 0.7, 8: 0.0}, "step_000004"),
        ("eval_loss", {1: 0.1, 2: 3.0, 3: 0.1, 4: 2.0, 5: 0.1, 6: 2.5, 7: 0.1, 8: 9.0}, "step_000004"),
        ("eval_loss", {2: 3.0, 4: 2.0, 6: 2.0, 8: 2.0}, "step_000004"),  # of equal scores, the earlier step
        ("reward", {3: float("nan"), 5: 0.1, 7: float("-inf")}, "step_000004"),
    ],
)
def test_a_checkpoint_is_ranked_by_the_score_of_its_own_weights(
    tmp_path: Path, metric: ScoredBy, values: dict[int, float], best: str
) -> None:
    config = CONFIG.model_copy(update={"keep_best": 1})
    train_scored(tmp_path, config, {}, metric, {step: values.get(step, float("nan")) for step in range(1, 9)})
    assert names_in(tmp_path) == [best, "step_000008"]


ROLLING_BACK = CONFIG.model_copy(update={"keep_best": 1, "roll_back_on": ("loss_risen",)})


def roll_back_at(
    directory: Path, last: int, *, metric: ScoredBy = "eval_loss", config: SFTTrainingConfig = ROLLING_BACK
) -> tuple[int, RollBack | None]:
    """Train until the rule loss_risen warns after step `last`; returns the first step and the rollback."""
    backend = SlowDiskBackend()
    backend.may_write.set()
    values = {1: 0.1, 2: 3.0, 3: 0.1, 4: 2.0, 5: 0.7, 6: 2.5, 7: 0.1, 8: 9.0}

    async def train() -> tuple[int, RollBack | None]:
        async with RunCheckpoints(
            backend.as_backend, directory, config, settings={}, scored_by=metric, events=events
        ) as checkpoints:
            state = await checkpoints.resume() or {"step": 0}
            for step in range(state["step"] + 1, 0 if checkpoints.rolled_back else last + 1):
                rule = "loss_risen" if step == last else ""
                await checkpoints.after_step(step, {metric: values[step]}, is_over=bool(rule), roll_back_rule=rule)
            return state["step"] + 1, checkpoints.rolled_back

    with EventLog(directory.with_suffix(".jsonl")) as events:
        return asyncio.run(train())


@pytest.mark.parametrize(
    ("last", "metric", "step", "value"),
    [
        (7, "eval_loss", 4, 2.0),
        (8, "eval_loss", 4, 2.0),  # the last step of the training
        (2, "eval_loss", 2, 3.0),
        (7, "reward", 4, 0.7),  # of the completions of step 5, which the weights of step 4 sampled
    ],
)
def test_a_rule_rolls_back_to_the_checkpoint_with_the_best_score_and_the_last_step_is_saved(
    tmp_path: Path, last: int, metric: ScoredBy, step: int, value: float
) -> None:
    directory = tmp_path / "run"
    _, rolled_back = roll_back_at(directory, last, metric=metric)
    found = RollBack(rule="loss_risen", from_step=last, num_steps=8, step=step, metric=metric, value=value)
    assert rolled_back == found
    assert names_in(directory) == sorted({f"step_{each:06d}" for each in (step, last, last // 2 * 2)})
    [event] = [line for line in read_json_lines(tmp_path / "run.jsonl") if line["event"] == "rolled_back"]
    assert RollBack.model_validate(event) == found
    assert event["message"] == (
        f"the rule loss_risen rolled the training back from step {last} of 8 to the best checkpoint, step {step} "
        f"({metric} {value:g})"
    )


def test_a_rule_without_a_scored_checkpoint_rolls_nothing_back(tmp_path: Path) -> None:
    assert roll_back_at(tmp_path / "run", 2, metric="reward") == (1, None)
    assert names_in(tmp_path / "run") == ["step_000002"]


def test_a_training_that_was_killed_after_its_rollback_trains_no_further_step(tmp_path: Path) -> None:
    """Rules forget the steps before a resume, so the resumed training would otherwise keep its collapsed weights."""
    _, rolled_back = roll_back_at(tmp_path / "run", 7)
    assert rolled_back is not None
    assert roll_back_at(tmp_path / "run", 8) == (8, rolled_back)


@pytest.mark.parametrize("change", [{"roll_back_on": ()}, {"roll_back_on": ("gradient_spikes",)}, {"num_steps": 20}])
def test_a_training_of_other_settings_resumes_from_the_step_at_which_a_rule_rolled_back(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    roll_back_at(tmp_path / "run", 5)
    _, rolled_back = roll_back_at(tmp_path / "run", 7, config=ROLLING_BACK.model_copy(update=change))
    assert rolled_back is not None and rolled_back.from_step == 7


def test_a_rollback_needs_a_directory() -> None:
    with pytest.raises(ConfigError, match="roll_back_on rolls back to a saved checkpoint: give checkpoint_dir"):
        RunCheckpoints(SlowDiskBackend().as_backend, None, ROLLING_BACK, settings={})


@pytest.mark.parametrize("ends", [[2], [3], [4], [5], [2, 3, 4, 5, 6, 7]])
def test_scores_outlive_the_process_that_noted_them(tmp_path: Path, ends: list[int]) -> None:
    """Also where a training ends between a checkpoint and the step that scores it."""
    config = CONFIG.model_copy(update={"keep_best": 2})
    values = {1: 0.0, 2: 0.0, 3: 0.8, 4: 0.1, 5: 0.2, 6: 0.1, 7: 0.5, 8: 0.0}
    for end in [*ends, 8]:
        train_scored(tmp_path, config, {}, "reward", {step: values[step] for step in range(1, end + 1)})
    assert names_in(tmp_path) == ["step_000002", "step_000006", "step_000008"]


@pytest.mark.parametrize(
    ("changed", "kept"),
    [({"rollout.reward_fn": "other"}, ["step_000006", "step_000008"]), ({"lr": 2}, ["step_000002", "step_000008"])],
)
def test_scores_of_another_task_are_not_compared_with_those_after_it(
    tmp_path: Path, changed: dict[str, Any], kept: list[str]
) -> None:
    """Rewards of up to 10 would keep a checkpoint for ever, where those to come are 1 at most."""
    config = CONFIG.model_copy(update={"keep_best": 1, "allow_changed": tuple(changed)})
    train_scored(tmp_path, config, {"lr": 1}, "reward", {1: 9.0, 2: 9.0, 3: 9.0, 4: 5.0})
    train_scored(tmp_path, config, {"lr": 1, **changed}, "reward", {5: 0.4, 6: 0.5, 7: 0.5, 8: 0.1})
    assert names_in(tmp_path) == kept


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        ({"eval_samples": "other rows, or none"}, ["step_000006", "step_000008"]),
        ({"eval_samples": "these"}, ["step_000002", "step_000008"]),
        ({}, ["step_000002", "step_000008"]),  # an earlier version did not say
    ],
)
def test_losses_of_other_evaluation_rows_are_not_compared_and_are_no_reason_to_refuse(
    tmp_path: Path, before: dict[str, str], kept: list[str]
) -> None:
    """Easier rows would keep a checkpoint for ever."""
    config = CONFIG.model_copy(update={"keep_best": 1})
    train_scored(tmp_path, config, before, "eval_loss", {1: 0.1, 2: 0.1, 3: 0.2, 4: 0.2})
    train_scored(tmp_path, config, {"eval_samples": "these"}, "eval_loss", {5: 3.0, 6: 3.0, 7: 4.0, 8: 4.0})
    assert names_in(tmp_path) == kept


def test_without_evaluation_rows_no_checkpoint_is_the_best(base_model: ModelConfig, tmp_path: Path) -> None:
    """The loss of one batch says nothing of the loss on another."""
    with pytest.raises(ConfigError, match="keep_best 1 compares checkpoints by eval_loss: give eval_samples"):
        train(base_model, tmp_path, keep_best=1)


def reward_nothing(sample: Sample) -> float:
    return 0.0


def test_settings_have_the_names_that_the_configuration_gives_them() -> None:
    training = RLTrainingConfig(num_steps=7, checkpoint_every=3, log_every=2, num_minibatches=2)
    rollout = RolloutConfig(batch_size=4, sampling=SamplingConfig(temperature=0.5), reward_fn=reward_nothing)
    settings = describe_settings(training, {"model": "abc"}, rollout=rollout)
    del settings["semantics"]
    assert settings == {
        "num_minibatches": 2,
        "model": "abc",
        "rollout.batch_size": 4,
        "rollout.sampling.temperature": 0.5,
        "rollout.reward_fn": f"{__name__}:reward_nothing",
    }


def test_a_function_that_no_file_could_name_is_no_obstacle() -> None:
    settings = describe_settings(CONFIG, {}, rollout=RolloutConfig(reward_fn=lambda sample: 0.0))
    assert settings["rollout.reward_fn"].endswith("<lambda>")
    several = RolloutConfig(
        rewards=(RewardConfig(name=lambda sample: 0.0), RewardConfig(name=reward_nothing, weight=2.0)),
        filters=(FilterConfig(name=lambda group: True),),
    )
    settings = describe_settings(CONFIG, {}, rollout=several)
    assert [each["name"].rpartition(".")[2] for each in settings["rollout.filters"]] == ["<lambda>"]
    assert settings["rollout.rewards"][1] == {"name": f"{__name__}:reward_nothing", "weight": 2.0}


def test_other_settings_are_refused_by_name_and_value() -> None:
    saved, current = {"batch_size": 4, "optim.lr": 0.01, "seed": 1}, {"batch_size": 8, "optim.lr": 0.01}
    with pytest.raises(CheckpointError, match="batch_size was 4 and is 8; seed was 1 and is its default"):
        check_same_settings(saved, current, allowed=(), checkpoint=Path("c"))


@pytest.mark.parametrize("allowed", [["optim.lr"], ["optim"], ["seed", "optim"]])
def test_differences_that_were_allowed_are_told(allowed: list[str]) -> None:
    saved, current = {"optim.lr": 0.01}, {"optim.lr": 0.1}
    assert check_same_settings(saved, current, allowed=allowed, checkpoint=Path("c")) == ["optim.lr"]


@pytest.mark.parametrize(
    ("allowed", "said"),
    [
        (["optim.lrr"], "in allow_changed (its entries without a match: optim.lrr)"),
        (["seed", "optm", "lr"], "in allow_changed (its entries without a match: optm, lr)"),
        (["seed"], "or name the changed settings in allow_changed"),
    ],
)
def test_a_misspelt_name_of_what_is_allowed_is_told(allowed: list[str], said: str) -> None:
    saved, current = {"optim.lr": 0.01, "seed": 1}, {"optim.lr": 0.1, "seed": 2}
    with pytest.raises(CheckpointError) as caught:
        check_same_settings(saved, current, allowed=allowed, checkpoint=Path("c"))
    assert str(caught.value).endswith(said)


def test_a_part_of_a_name_allows_nothing() -> None:
    with pytest.raises(CheckpointError, match=r"optim\.lr was 0.01 and is 0.1"):
        check_same_settings({"optim.lr": 0.01}, {"optim.lr": 0.1}, allowed=["opt", "lr"], checkpoint=Path("c"))


# What follows trains a real model.

TRAINING = SFTTrainingConfig(num_steps=4, batch_size=2, packing=False, checkpoint_every=4, optim=CONSTANT)
SAMPLES = make_random_samples(12)


def train(
    model: ModelConfig,
    directory: Path,
    samples: list[Sample] = SAMPLES,
    inputs: Mapping[str, str] | None = None,
    eval_samples: Sequence[Sample] = (),
    metrics_logger: JSONLLogger | None = None,
    **changes: Any,
) -> list[Metrics]:
    """Train in a directory, from whatever lies there, with changes to `TRAINING`."""
    config = SFTTrainingConfig.model_validate({**TRAINING.model_dump(), **changes})
    backend = create_pytorch_backend(
        model, config.optim, create_cross_entropy_loss(), num_steps=config.num_steps, device="cpu"
    )
    with EventLog(directory / "events.jsonl") as events:
        return asyncio.run(
            run_sft_training(
                backend,
                samples,
                config,
                metrics_logger,
                checkpoint_dir=directory / "checkpoints",
                inputs=inputs,
                events=events,
                eval_samples=eval_samples,
            )
        )


def events_of(directory: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_json_lines(directory / "events.jsonl") if line["event"] == kind]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batch_size": 4}, "batch_size was 2 and is 4"),
        ({"optim": OptimConfig(lr=0.02, schedule="constant").model_dump()}, r"optim\.lr was 0.01 and is 0.02"),
        ({"packing": True}, "packing was false and is its default"),
        ({"seed": 3}, "seed was its default and is 3"),
        ({"inputs": {"model": "other"}}, 'model was "base" and is "other"'),
        (
            {"inputs": {"model": "base", "plugins": "p"}},
            r'plugins \(the code of rewards, .*\) was its default and is "p"',
        ),
        ({"samples": SAMPLES[:-1]}, 'samples was "[0-9a-f]+" and is "[0-9a-f]+"'),
    ],
)
def test_a_run_of_other_settings_does_not_go_on(
    base_model: ModelConfig, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    train(base_model, tmp_path, num_steps=2, inputs={"model": "base"})
    with pytest.raises(CheckpointError, match=sentence):
        train(base_model, tmp_path, **{"inputs": {"model": "base"}, **changes})


def test_a_checkpoint_of_an_earlier_version_that_names_no_data_goes_on(base_model: ModelConfig, tmp_path: Path) -> None:
    train(base_model, tmp_path, num_steps=2, inputs={"model": "base"})
    train(base_model, tmp_path, num_steps=4, inputs={"model": "base", "data": "today's"})
    assert [event.get("changed") for event in events_of(tmp_path, "resumed")] == [None]
    with pytest.raises(CheckpointError, match='data was "today\'s" and is "others"'):
        train(base_model, tmp_path, num_steps=6, inputs={"model": "base", "data": "others"})


def test_what_decides_only_about_checkpoints_may_change(base_model: ModelConfig, tmp_path: Path) -> None:
    rows = SAMPLES[:2]
    train(base_model, tmp_path, eval_samples=rows, num_steps=2)
    kept: dict[str, Any] = {"checkpoint_every": 3, "keep_checkpoints": 7, "keep_best": 2}
    history = train(base_model, tmp_path, eval_samples=rows, log_every=5, **kept)
    assert len(history) == 2
    assert [event["step"] for event in events_of(tmp_path, "checkpoint")] == [2, 3, 4]


def test_a_difference_that_is_allowed_takes_effect_and_is_told(base_model: ModelConfig, tmp_path: Path) -> None:
    train(base_model, tmp_path, num_steps=2)
    optim = OptimConfig(lr=0.02, schedule="constant").model_dump()
    history = train(base_model, tmp_path, optim=optim, allow_changed=("optim.lr",))
    assert [metrics["lr"] for metrics in history] == [0.02, 0.02]
    assert events_of(tmp_path, "resumed")[0]["changed"] == ["optim.lr"]


def test_a_finished_run_of_a_constant_schedule_is_extended_bit_for_bit(base_model: ModelConfig, tmp_path: Path) -> None:
    straight = train(base_model, tmp_path / "straight", num_steps=6, checkpoint_every=2)
    first = train(base_model, tmp_path / "extended", num_steps=3, checkpoint_every=2)
    second = train(base_model, tmp_path / "extended", num_steps=6, checkpoint_every=2)
    assert without_times([*first, *second]) == without_times(straight)
    ends = [verify_checkpoint(tmp_path / name / "checkpoints" / "step_000006") for name in ("straight", "extended")]
    assert ends[0].files == ends[1].files
    assert events_of(tmp_path / "extended", "extended")[0]["exact"] is True


def test_extending_another_schedule_is_told_to_be_inexact(
    base_model: ModelConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    optim = OptimConfig(lr=0.01, schedule="linear", min_lr_ratio=0.0).model_dump()
    train(base_model, tmp_path, num_steps=2, optim=optim)
    with caplog.at_level(logging.WARNING):
        history = train(base_model, tmp_path, num_steps=5, optim=optim)
    assert "linear schedule covered 2 steps until step 2 and now covers 5" in caplog.text
    assert events_of(tmp_path, "extended")[0]["exact"] is False
    assert [metrics["lr"] for metrics in history] == pytest.approx([0.005, 0.0025, 0.0])  # steps 3 to 5 of 5


def test_a_checkpoint_does_not_have_the_evaluation_loss_of_an_earlier_step(
    base_model: ModelConfig, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"num_steps": 12, "checkpoint_every": 3, "eval_every": 4, "keep_checkpoints": 1}
    train(base_model, tmp_path, eval_samples=SAMPLES[:2], keep_best=1, **changes)
    # only the last one was evaluated: those of steps 3, 6 and 9 have no score
    assert names_in(tmp_path / "checkpoints") == ["step_000012"]


def test_a_training_goes_on_with_other_evaluation_rows_and_says_so(base_model: ModelConfig, tmp_path: Path) -> None:
    train(base_model, tmp_path)
    train(base_model, tmp_path, num_steps=5, eval_samples=SAMPLES[:2])
    train(base_model, tmp_path, num_steps=6, eval_samples=SAMPLES[:2])
    assert [event.get("changed") for event in events_of(tmp_path, "resumed")] == [["eval_samples"], None]


def test_a_run_does_not_go_back(base_model: ModelConfig, tmp_path: Path) -> None:
    train(base_model, tmp_path)
    with pytest.raises(CheckpointError, match="is at step 4, num_steps is 3: raise num_steps"):
        train(base_model, tmp_path, num_steps=3)


def test_another_run_goes_on_from_the_newest_checkpoint_of_the_first(base_model: ModelConfig, tmp_path: Path) -> None:
    straight = train(base_model, tmp_path / "straight", num_steps=6)
    train(base_model, tmp_path / "first")
    second = train(base_model, tmp_path / "second", num_steps=6, resume_from=str(tmp_path / "first"))
    assert without_times(second) == without_times(straight)[4:]
    own = [path.name for path in list_checkpoints(tmp_path / "second" / "checkpoints")]
    assert own == ["step_000004", "step_000006"]  # selection sees where it began
    assert train(base_model, tmp_path / "second", num_steps=6, resume_from=str(tmp_path / "gone")) == []


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_the_metrics_of_a_checkpoints_steps_are_on_disk_before_it_is(
    kind: str, base_model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut nobody logs them again: the training goes on from behind them."""
    metrics, checkpoints = tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
    found: list[tuple[list[float], list[str]]] = []
    synced = os.fsync

    def note_metrics(descriptor: int) -> None:
        synced(descriptor)
        if os.path.samestat(os.fstat(descriptor), metrics.stat()):
            steps = [row["step"] for row in read_metrics(metrics)]
            found.append((steps, [path.name for path in list_checkpoints(checkpoints)]))

    monkeypatch.setattr(os, "fsync", note_metrics)
    with JSONLLogger(metrics) as metrics_logger:
        train_logged(kind, base_model, tmp_path, metrics_logger)
    assert found == [([1, 2], []), ([1, 2, 3, 4], ["step_000002"])]


def train_logged(kind: str, model: ModelConfig, directory: Path, metrics_logger: JSONLLogger) -> None:
    """Four steps, each logged, with a checkpoint after two."""
    if kind == "sft":
        train(model, directory, metrics_logger=metrics_logger, log_every=1, checkpoint_every=2)
        return
    config = RLTrainingConfig(num_steps=4, checkpoint_every=2)
    write_rollouts(RunDirectory(directory), 1, convert_to_batch(make_groups(2, 4)), temperature=1.0)
    source = OfflineRollouts(directory / "samples", RolloutConfig())
    backend, checkpoints = make_backend(model, config), directory / "checkpoints"
    asyncio.run(run_rl_training(backend, None, source, [], config, metrics_logger, checkpoint_dir=checkpoints))


def test_leftovers_of_a_killed_save_are_removed(base_model: ModelConfig, tmp_path: Path) -> None:
    leftover = tmp_path / "checkpoints" / ".step_000002.partial-abc"
    leftover.mkdir(parents=True)
    train(base_model, tmp_path, num_steps=1)
    assert not leftover.exists()


def test_a_training_that_is_ended_saves_where_it_is_and_whoever_goes_on_ends_with_the_usual_checkpoints(
    tmp_path: Path,
) -> None:
    backend = SlowDiskBackend()
    backend.may_write.set()
    config = CONFIG.model_copy(update={"keep_checkpoints": 2})

    def train(folder: Path, begin: int, ask_at: int = 0) -> list[int]:
        async def loop() -> list[int]:
            asked: list[int] = []
            async with RunCheckpoints(
                backend.as_backend, folder, config, settings={}, is_end_asked=lambda: asked[-1] == ask_at
            ) as checkpoints:
                for step in range(begin, config.num_steps + 1):
                    asked.append(step)
                    if await checkpoints.after_step(step, {"loss": 1.0}):
                        break
            return asked

        return asyncio.run(loop())

    def steps_of(folder: Path) -> list[int]:
        return [load_manifest(path).step for path in list_checkpoints(folder)]

    assert train(tmp_path / "ended", 1, ask_at=5) == [1, 2, 3, 4, 5]
    assert steps_of(tmp_path / "ended") == [2, 4, 5]
    assert [load_manifest(path).is_early for path in list_checkpoints(tmp_path / "ended")] == [False, False, True]
    train(tmp_path / "ended", 6)
    train(tmp_path / "straight", 1)
    assert steps_of(tmp_path / "ended") == steps_of(tmp_path / "straight") == [6, 8]
    assert train(tmp_path / "last", 1, ask_at=8) == list(range(1, 9))
    assert not any(load_manifest(path).is_early for path in list_checkpoints(tmp_path / "last"))
