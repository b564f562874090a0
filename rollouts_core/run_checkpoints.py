"""Manage the checkpoints of a training run: resume from the newest, save while training continues, delete old
checkpoints.

`checkpoint.py` defines the format of a checkpoint, `backends/training_state.py` its content.

    resume  ->  same settings?  ->  load            step, step, step ...
                     \\-> refused, settings named    after_step -> due? -> copy -> [thread: write, fsync, rename]
                                                     next step  <- event "checkpoint", retention <- renamed ---+
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter, time
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import anyio
from pydantic import BaseModel

from rollouts_core.algorithms.loss import Metrics
from rollouts_core.backends.protocol import TrainFuture, TrainingBackend, TrainingState
from rollouts_core.backends.random_state import RandomState, get_random_state, remembered
from rollouts_core.backends.threaded import without_thread
from rollouts_core.backends.training_state import SERVED_FILE
from rollouts_core.checkpoint import (
    adopt_checkpoint,
    find_checkpoint,
    list_checkpoints,
    load_manifest,
    prune_checkpoints,
    set_damaged_aside,
    step_directory,
)
from rollouts_core.config import RLTrainingConfig, SFTTrainingConfig
from rollouts_core.errors import CheckpointError, ConfigError
from rollouts_core.fingerprint import SEMANTICS_VERSION, training_settings
from rollouts_core.metrics import EventLog
from rollouts_core.roll_back import ROLLED_BACK, RollBack, read_roll_back
from rollouts_core.stopping import StoppedError, TrainingStop, describe_problem
from rollouts_core.system.concurrency import in_short_thread
from rollouts_core.system.files import remove_partial_directories

logger = logging.getLogger(__name__)

ScoredBy = Literal["reward", "reward_unfiltered", "eval_loss"]
"""Metric that ranks the checkpoints of a run. All checkpoints of the run use the same metric."""

TASK_INPUTS = ("data", "samples", "plugins", "eval_samples")
"""Inputs that define a training's task. Scores of two trainings are comparable only if these inputs are equal."""
FREE_INPUTS = ("eval_samples", "policy.attention")
"""Inputs that change the weights at most by rounding, so a resumed training may change them."""
MEANINGS = {"plugins": "plugins (the code of rewards, filters and environments, and models that grade)"}
"""Longer names of inputs for error messages, if an input's own name is not clear."""
LATER_INPUTS = ("data", "eval_samples")
"""Inputs that checkpoints of earlier versions do not record. If a checkpoint lacks such an input, the input counts as
unchanged."""


class _Save(NamedTuple):
    """A checkpoint that is being written."""

    path: Path
    step: int
    future: TrainFuture[None]
    began_at: float
    """Start of the save, seconds since 1970."""
    scores: Mapping[int, float]
    """Scores of checkpoints by step, as known when the save began."""


class RunCheckpoints:
    """The checkpoints of one run in one directory. Leaving the `async with` block waits for the last save.

    At most one save runs at a time. When the new checkpoint is complete on disk, the event `checkpoint` is written and
    old checkpoints are deleted. If a save fails, the error is raised at the next step or at the end.

    Args:
        directory: folder of the checkpoints. None disables saving and resuming.
        settings: the result of `describe_settings`. A checkpoint with other settings is refused.
        scored_by: metric that is a checkpoint's score (`score_of_weights`). A checkpoint without it has no score.
        is_end_asked: called after every step; a result of True saves a checkpoint and ends the training.
        before_save: called after the steps of a checkpoint were logged, before the checkpoint is written.
        write_served: called in a thread before a save. If the engines serve weights of an earlier step, the function
            returns a file with these weights, otherwise None.
        stop: checked after every step. After a stop request, the step is saved and StoppedError is raised.

    Raises:
        ConfigError: `config.roll_back_on` is set without a directory.
    """

    def __init__(
        self,
        backend: TrainingBackend,
        directory: Path | None,
        config: SFTTrainingConfig | RLTrainingConfig,
        *,
        settings: Mapping[str, Any],  # Any: JSON
        scored_by: ScoredBy = "eval_loss",
        events: EventLog | None = None,
        is_end_asked: Callable[[], bool] = lambda: False,
        before_save: Callable[[], None] = lambda: None,
        write_served: Callable[[], Path | None] = lambda: None,
        stop: TrainingStop | None = None,
    ) -> None:
        if config.roll_back_on and directory is None:
            raise ConfigError("roll_back_on rolls back to a saved checkpoint: give checkpoint_dir, or leave it empty")
        self.backend = backend
        self.directory = directory
        self.config = config
        self.settings = settings
        self.scored_by = scored_by
        self.events = events
        self.is_end_asked = is_end_asked
        self.before_save = before_save
        self.write_served = write_served
        self.stop = stop or TrainingStop(can_abandon=False)
        self.changed: list[str] = []
        """Settings and inputs that differ between the resumed checkpoint and this run, and that `allow_changed`
        permits."""
        self.resumed_from: Path | None = None
        """The checkpoint that `resume` loaded."""
        self.rolled_back: RollBack | None = None
        """The rollback that ended the training, in this attempt or in the attempt that `resume` loaded."""
        self._saving: _Save | None = None
        self._scores: dict[int, float] = {}
        self._step_began = perf_counter()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop.hold()
        with anyio.CancelScope(shield=True):
            try:
                await self._settle(wait=True)
            except asyncio.CancelledError:  # the cancellation that a signal causes is not blocked by the shield
                await self._settle(wait=True)
                raise

    async def resume(self) -> TrainingState | None:
        """Load the newest intact checkpoint, or `config.resume_from` if there is none.

        Returns None if the run has no checkpoint and `config.resume_from` is empty.

        Raises:
            CheckpointError: the checkpoint has other settings, another model, or a step beyond `config.num_steps`.
        """
        state = await self._load_newest()
        self.stop.note_saved(state["step"] if state else 0)
        return state

    async def begin(self) -> None:
        """Mark the start of the first step. From now on, a stop request waits for the running step.

        Raises:
            StoppedError: a stop was requested before the first step.
        """
        await asyncio.sleep(0)
        self.stop.is_training = True
        if self.stop.is_asked:
            raise StoppedError(self.stop.saved_step)
        self._step_began = perf_counter()

    async def _load_newest(self) -> TrainingState | None:
        if self.directory is None or (checkpoint := self._find_checkpoint(self.directory)) is None:
            return None
        manifest = load_manifest(checkpoint)
        self.changed = check_same_settings(
            self._with_later_inputs(manifest.settings),
            self.settings,
            allowed=self.config.allow_changed,
            checkpoint=checkpoint,
        )
        check_step(manifest.step, self.config.num_steps, checkpoint=checkpoint)
        state = await self.backend.load_checkpoint(checkpoint).result()
        self.resumed_from = checkpoint
        if is_same_task(self.changed):
            on_disk = list_checkpoints(self.directory)
            self._scores = {
                step: score
                for step, score in state.get("scores", ())
                if step_directory(self.directory, step) in on_disk
            }
        details = {"changed": self.changed} if self.changed else {}
        self._write_event("resumed", step=manifest.step, checkpoint=checkpoint.name, **details)
        self._tell_of_extension(manifest.step, state["num_steps"])
        if (earlier := read_roll_back(state)) and self._is_still_meant(earlier):
            self._note_roll_back(earlier)
        return state

    def is_due(self, step: int) -> bool:
        """Return True if a checkpoint is to be written after this step."""
        if self.directory is None:
            return False
        return step > 0 and (step % self.config.checkpoint_every == 0 or step == self.config.num_steps)

    def note_trained(self, step: int, metrics: Metrics, cursors: Callable[[], Mapping[str, Any]]) -> None:  # Any: JSON
        """Record that a step's weights are final. The step's publication or evaluation may still take long.

        A stop request that cannot wait for the publication or evaluation saves the step with `metrics` as `pending`.
        The resumed run then publishes or evaluates the step.
        """
        if not self.stop.is_watched or self.directory is None:
            return
        state = self._state_of(step, cursors())
        self._let_go(step, {**state, "is_early": True, "pending": dict(metrics)})

    async def after_step(
        self,
        step: int,
        metrics: Metrics,
        cursors: Callable[[], Mapping[str, Any]] = dict,  # Any: JSON
        *,
        is_over: bool = False,
        roll_back_rule: str = "",
    ) -> bool:
        """Conclude the running save if its checkpoint is on disk, and start a new save if this step needs a checkpoint.

        Returns True if the training ends before its last step.

        Args:
            cursors: returns the state, besides the step number, that a resumed run needs.
            is_over: True if the training loop ends the training after this step, for example because of a rule in
                `stop_on`.
            roll_back_rule: the rule in `roll_back_on` that raised its warning; empty without one. If a checkpoint has a
                score, the best checkpoint becomes the training's result (`rolled_back`).

        Raises:
            StoppedError: a stop was requested. The step is saved.
        """
        await asyncio.sleep(0)  # lets a cancellation reach a training loop that never waits
        self.stop.hold()
        self.stop.note_step(perf_counter() - self._step_began)
        await self._settle(wait=False)
        is_last = step == self.config.num_steps
        is_asked = not is_last and self.is_end_asked()
        ends_here = is_asked or (not is_last and is_over)
        if is_asked:
            self._write_event("finished_early", step=step, num_steps=self.config.num_steps)
        if self.directory is None:
            if self.stop.is_asked:
                raise StoppedError(0)
            return ends_here
        self._note_score(step, metrics)
        if roll_back_rule and self._scores:
            self._note_roll_back(self._roll_back_to_best(step, roll_back_rule))
        is_saved = ends_here or self.is_due(step)
        if is_saved:
            await self._begin_save(step, cursors)
        if self.stop.is_asked and not ends_here and not is_last:
            await self._stop_here(step, cursors, is_saved=is_saved)
        if self.stop.is_watched:
            self._let_go(step, self._state_of(step, cursors()))
        self._step_began = perf_counter()
        return ends_here

    async def _begin_save(self, step: int, cursors: Callable[[], Mapping[str, Any]]) -> None:  # Any: JSON
        """Start to write the checkpoint of a finished step, after waiting for a save that still runs."""
        assert self.directory is not None, "saving needs a directory"
        await self._settle(wait=True)
        began_at = time()
        self.before_save()
        served = await in_short_thread(self.write_served)
        state = self._state_of(step, cursors())
        self._saving = self._save(self.backend, step, state, served=served, began_at=began_at)

    def _save(
        self, backend: TrainingBackend, step: int, state: Mapping[str, Any], *, served: Path | None, began_at: float
    ) -> _Save:  # Any: JSON
        """Start the backend's write of a checkpoint, and return the running save."""
        assert self.directory is not None, "saving needs a directory"
        path = step_directory(self.directory, step)
        whole_state = {**state, SERVED_FILE: str(served)} if served else state
        return _Save(path, step, backend.save_checkpoint(path, whole_state), began_at, dict(self._scores))

    def _note_score(self, step: int, metrics: Metrics) -> None:
        """Record the score in a step's metrics. Drop the scores of checkpoints that are neither among the newest nor
        among the best."""
        scored = score_of_weights(step, metrics, self.scored_by)
        if not self.config.keep_best or scored is None or not self.is_due(scored.step):
            return
        self._scores[scored.step] = scored.score
        newest = sorted(self._scores)[-self.config.keep_checkpoints :]
        best = rank_steps(self._scores)[: self.config.keep_best]
        self._scores = {each: self._scores[each] for each in sorted({*newest, *best})}

    def _roll_back_to_best(self, step: int, rule: str) -> RollBack:
        best = rank_steps(self._scores)[0]
        score = self._scores[best]
        return RollBack(
            rule=rule,
            from_step=step,
            num_steps=self.config.num_steps,
            step=best,
            metric=self.scored_by,
            value=-score if self.scored_by == "eval_loss" else score,
        )

    def _note_roll_back(self, roll_back: RollBack) -> None:
        self.rolled_back = roll_back
        logger.warning("%s", roll_back.sentence)
        self._write_event("rolled_back", **roll_back.model_dump(), message=roll_back.sentence)

    def _is_still_meant(self, earlier: RollBack) -> bool:
        """True if a resumed training has the same rollback as its checkpoint. An attempt that was killed before it
        wrote its result was rolled back; a training that is extended or resumed with other settings was not."""
        assert self.directory is not None, "a training resumes from a directory"
        return (
            earlier.rule in self.config.roll_back_on
            and earlier.num_steps == self.config.num_steps
            and not self.changed
            and step_directory(self.directory, earlier.step) in list_checkpoints(self.directory)
        )

    def _state_of(self, step: int, cursors: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
        """The state that a checkpoint contains besides the weights."""
        return {
            "step": step,
            "num_steps": self.config.num_steps,
            "scores": list(self._scores.items()),
            "settings": dict(self.settings),
            **({"is_early": True} if not self.is_due(step) else {}),
            **({ROLLED_BACK: self.rolled_back.model_dump()} if self.rolled_back else {}),
            **cursors,
        }

    async def _stop_here(
        self, step: int, cursors: Callable[[], Mapping[str, Any]], *, is_saved: bool
    ) -> None:  # Any: JSON
        try:
            if not is_saved:
                await self._begin_save(step, cursors)
            await self._settle(wait=True)
        except Exception as error:
            self.stop.note_problem(describe_problem(error))
            raise
        raise StoppedError(step)

    def _let_go(self, step: int, state: Mapping[str, Any]) -> None:  # Any: JSON
        """Allow a stop request to save this step, in its current state, if the next step would outlast the grace
        period."""
        self.stop.let_go(partial(self._save_whole, step, state, get_random_state()))

    def _save_whole(
        self,
        step: int,
        state: Mapping[str, Any],
        random: RandomState,
    ) -> None:
        """Write the checkpoint of the last finished step while the next step runs. The process ends afterwards."""
        if self._saving is not None:
            asyncio.run(_result_of(self._saving.future))
            self._note_saved(self._saving)
        if self.stop.saved_step == step and "pending" not in state:
            return
        began_at = time()
        self.before_save()
        served = None if "pending" in state else self.write_served()
        with remembered(random):  # a resumed run then repeats the running step with the same random numbers
            saving = self._save(without_thread(self.backend), step, state, served=served, began_at=began_at)
        asyncio.run(_result_of(saving.future))
        self._note_saved(saving)

    def _note_saved(self, saving: _Save) -> None:
        self.stop.note_saved(saving.step, max(0.0, saving.path.stat().st_ctime - saving.began_at))
        self._write_event("checkpoint", step=saving.step)

    def _find_checkpoint(self, directory: Path) -> Path | None:
        """The run's newest intact checkpoint. A run without checkpoints gets a copy of `config.resume_from`."""
        remove_partial_directories(directory)
        if damaged := set_damaged_aside(directory):
            self._write_event("damaged_checkpoints", set_aside=[path.name for path in damaged])
        if checkpoints := list_checkpoints(directory):
            return checkpoints[-1]
        if not self.config.resume_from:
            return None
        source = find_checkpoint(Path(self.config.resume_from))
        self._write_event("adopted", checkpoint=str(source))
        return adopt_checkpoint(source, directory)

    def _tell_of_extension(self, step: int, saved_num_steps: int) -> None:
        if saved_num_steps == self.config.num_steps:
            return
        is_exact = self.config.optim.schedule == "constant"
        self._write_event(
            "extended", step=step, from_steps=saved_num_steps, to_steps=self.config.num_steps, exact=is_exact
        )
        if not is_exact:
            logger.warning(
                "the %s schedule covered %d steps until step %d and now covers %d: the result differs from "
                'one run of %d steps (schedule = "constant" avoids this)',
                self.config.optim.schedule,
                saved_num_steps,
                step,
                self.config.num_steps,
                self.config.num_steps,
            )

    async def _settle(self, *, wait: bool) -> None:
        """Conclude the running save if its checkpoint is on disk: delete old checkpoints and write the event. With
        `wait`, first wait until the checkpoint is on disk."""
        saving = self._saving
        if saving is None or not (wait or saving.future.done()):
            return
        try:
            await saving.future.result()
        except Exception:
            self._saving = None  # so that the error of a save is raised only once
            raise
        self._saving = None  # cleared after the wait, because a cancelled caller calls _settle again
        prune_checkpoints(
            saving.path.parent,
            newest=saving.path,
            keep=self.config.keep_checkpoints,
            best=rank_steps(saving.scores)[: self.config.keep_best],
        )
        self._note_saved(saving)

    def _with_later_inputs(self, settings: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
        unnamed = {name: value for name, value in self.settings.items() if name in LATER_INPUTS}
        return {**unnamed, **settings}

    def _write_event(self, event: str, **details: Any) -> None:  # Any: JSON
        if self.events:
            self.events.write(event, **details)


async def _result_of(future: TrainFuture[None]) -> None:
    await future.result()


def describe_settings(
    training: SFTTrainingConfig | RLTrainingConfig, inputs: Mapping[str, str], **sections: BaseModel
) -> dict[str, Any]:  # Any: JSON
    """The identity of a training: its settings that differ from the defaults, and digests of its inputs, by name.

    Args:
        inputs: digests of the training inputs, by name.
        sections: further records of settings. A record's section is the prefix of its settings' names in the result.
    """
    named = {**training_settings(training), **inputs, "semantics": SEMANTICS_VERSION}
    for section, record in sections.items():
        named |= {f"{section}.{name}": value for name, value in training_settings(record).items()}
    as_json: dict[str, Any] = json.loads(json.dumps(named))  # Any: JSON
    return as_json


def check_step(step: int, num_steps: int, *, checkpoint: Path) -> None:
    """Raise CheckpointError if the checkpoint's step is beyond the training's last step."""
    if step > num_steps:
        raise CheckpointError(
            f"{checkpoint} is at step {step}, num_steps is {num_steps}: raise num_steps to train further, or start a "
            "new run"
        )


def check_same_settings(
    saved: Mapping[str, Any],  # Any: JSON
    current: Mapping[str, Any],  # Any: JSON
    *,
    allowed: Sequence[str],
    checkpoint: Path,
) -> list[str]:
    """Return the names of the settings that differ.

    Each differing setting must be in `FREE_INPUTS`, or `allowed` must contain its name or section.

    Raises:
        CheckpointError: another setting differs. The message has both values of each such setting, and the entries of
            `allowed` that match no changed setting.
    """
    changed = changed_settings(saved, current)
    refused = [
        setting
        for setting in changed
        if setting not in FREE_INPUTS and not any(_names(name, setting) for name in allowed)
    ]
    if refused:
        differences = "; ".join(
            f"{MEANINGS.get(name, name)} was {_show(saved, name)} and is {_show(current, name)}" for name in refused
        )
        unused = [name for name in allowed if not any(_names(name, setting) for setting in changed)]
        raise CheckpointError(
            f"{checkpoint} was trained with other settings, and a resumed training would match neither the old nor the "
            f"new settings: {differences}. Restore the old settings, start a new run, or name the changed settings in "
            "allow_changed" + f" (its entries without a match: {', '.join(unused)})" * bool(unused)
        )
    return changed


def changed_settings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:  # Any: JSON
    """The names of the settings and inputs that differ, in order."""
    return [name for name in sorted(saved.keys() | current.keys()) if saved.get(name) != current.get(name)]


def is_same_task(changed: Sequence[str]) -> bool:
    """True if no changed setting or input affects prompts, sampling or grading."""
    return not any(name in TASK_INPUTS or name.startswith("rollout.") for name in changed)


def _names(allowed: str, setting: str) -> bool:
    """Return True if an entry of `allow_changed` is the setting or a section that contains the setting."""
    return setting == allowed or setting.startswith(f"{allowed}.")


class ScoredWeights(NamedTuple):
    """The score of the weights after a step; higher is better."""

    step: int
    score: float


def score_of_weights(step: int, metrics: Metrics, scored_by: ScoredBy) -> ScoredWeights | None:
    """The score in the metrics of a step, and the step whose weights have that score.

    An evaluation loss belongs to the weights after the step. A reward belongs to the weights before the step, which
    sampled the step's completions. Returns None if the metrics have no finite score.
    """
    value = metrics.get(scored_by, math.nan)
    if not math.isfinite(value):
        return None
    return ScoredWeights(step, -value) if scored_by == "eval_loss" else ScoredWeights(step - 1, value)


def rank_steps(scores: Mapping[int, float]) -> list[int]:
    """The steps in order of their scores, the best first. If scores are equal, the earlier step comes first."""
    return sorted(scores, key=lambda step: (-scores[step], step))


def _show(settings: Mapping[str, Any], name: str) -> str:  # Any: JSON
    return json.dumps(settings[name]) if name in settings else "its default"
