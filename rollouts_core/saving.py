"""The checkpoints of one training run: going on from the newest, writing beside the training, keeping the right ones.

Not here: the format of a checkpoint (checkpoint.py), what a backend puts into one (backends/pytorch.py).

    resume  ->  same settings?  ->  load            step, step, step ...
                     \\-> refused, by name            after_step -> due? -> copy -> [thread: write, fsync, rename]
                                                     next step  <- event "checkpoint", retention <- renamed ---+
"""

from __future__ import annotations

import asyncio
import json
import logging
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
from rollouts_core.errors import CheckpointError
from rollouts_core.fingerprint import SEMANTICS_VERSION, training_settings
from rollouts_core.metrics import EventLog
from rollouts_core.stopping import StoppedError, TrainingStop, describe_problem
from rollouts_core.system.concurrency import in_short_thread
from rollouts_core.system.files import remove_partial_directories

logger = logging.getLogger(__name__)

ScoredBy = Literal["reward", "reward_unfiltered", "eval_loss", "loss"]
"""Which metric the checkpoints of a run are compared by: the same for all of them."""

TASK_INPUTS = ("data", "samples", "plugins", "eval_samples")
"""Inputs that decide what a score is of."""
FREE_INPUTS = ("eval_samples", "policy.attention")
"""Inputs that decide no weights, or change them by rounding alone: a training that goes on may have others."""
MEANINGS = {"plugins": "plugins (the code of rewards, filters and environments, and models that grade)"}
"""Names of inputs that do not say what they are of."""
LATER_INPUTS = ("data", "eval_samples")
"""Inputs that checkpoints of RL, or of SFT, by earlier versions do not name: they pass for those of today."""


class _Save(NamedTuple):
    """A checkpoint that is being written."""

    path: Path
    step: int
    future: TrainFuture[None]
    began_at: float
    """Seconds since 1970."""


class RunCheckpoints:
    """The checkpoints of one run in one directory; used with `async with`, whose end waits for the last save.

    At most one save is in flight. Retention and the event `checkpoint` follow once it is whole on disk; an error of
    it is raised at the next step, or at the end.

    Args:
        directory: where they lie; None neither writes nor goes on from any.
        settings: what `describe_settings` gave: a checkpoint of others is refused.
        scored_by: what `score_steps` reads; a checkpoint of steps that do not have it has no score.
        is_end_asked: looked at after every step; True ends the training there, with a checkpoint.
        before_save: called before a checkpoint is written, when its steps are done and logged.
        write_served: called then in a thread; the file of the weights that engines serve if those are of an earlier
            step.
        stop: asked after every step, too; then the training is saved there, and ends by StoppedError.
    """

    def __init__(
        self,
        backend: TrainingBackend,
        directory: Path | None,
        config: SFTTrainingConfig | RLTrainingConfig,
        *,
        settings: Mapping[str, Any],  # Any: JSON
        scored_by: ScoredBy = "loss",
        events: EventLog | None = None,
        is_end_asked: Callable[[], bool] = lambda: False,
        before_save: Callable[[], None] = lambda: None,
        write_served: Callable[[], Path | None] = lambda: None,
        stop: TrainingStop | None = None,
    ) -> None:
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
        """Settings and inputs that differ, as is allowed, from those of the checkpoint that `resume` went on from."""
        self.resumed_from: Path | None = None
        """The checkpoint that `resume` went on from."""
        self._saving: _Save | None = None
        self._window: list[Metrics] = []
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
            except asyncio.CancelledError:  # a signal arrived meanwhile, which no shield keeps off
                await self._settle(wait=True)
                raise

    async def resume(self) -> TrainingState | None:
        """Go on from the newest intact checkpoint, or `config.resume_from`; None where there is neither.

        Raises:
            CheckpointError: it is of other settings, of another model, or of a step beyond `config.num_steps`.
        """
        state = await self._load_newest()
        self.stop.note_saved(state["step"] if state else 0)
        return state

    async def begin(self) -> None:
        """Begin with the steps: from here on a stop waits for the one under way.

        Raises:
            StoppedError: the training is to stop already.
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
        self._window = list(state["window"]) if is_same_task(self.changed) else []
        details = {"changed": self.changed} if self.changed else {}
        self._write_event("resumed", step=manifest.step, checkpoint=checkpoint.name, **details)
        self._tell_of_extension(manifest.step, state["num_steps"])
        return state

    def is_due(self, step: int) -> bool:
        """True when a checkpoint is written after this step."""
        if self.directory is None:
            return False
        return step % self.config.checkpoint_every == 0 or step == self.config.num_steps

    def note_trained(self, step: int, metrics: Metrics, cursors: Callable[[], Mapping[str, Any]]) -> None:  # Any: JSON
        """Take note that the weights of a step are whole, and that what belongs to it besides may take long.

        A stop that cannot wait for that saves the step with `metrics` as its `pending`: the run that goes on does the
        rest of the step first.
        """
        if not self.stop.is_watched or self.directory is None:
            return
        state = self._state_of(step, self._window, cursors())
        self._let_go(step, {**state, "is_early": True, "score": None, "pending": dict(metrics)})

    async def after_step(
        self,
        step: int,
        metrics: Metrics,
        cursors: Callable[[], Mapping[str, Any]] = dict,  # Any: JSON
        *,
        is_over: bool = False,
    ) -> bool:
        """Finish a save that is done; begin one when it is due. True when the training ends here, before its last step.

        Args:
            cursors: what the loop needs to go on from here besides the step.
            is_over: the loop has a reason of its own to end here.

        Raises:
            StoppedError: the training was asked to stop; the step is saved.
        """
        await asyncio.sleep(0)  # the only place where a loop that never waits can be cancelled
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
        self._window.append({name: value for name, value in metrics.items() if name == self.scored_by})
        is_saved = ends_here or self.is_due(step)
        if is_saved:
            await self._begin_save(step, cursors)
        if self.stop.is_asked and not ends_here and not is_last:
            await self._stop_here(step, cursors, is_saved=is_saved)
        if self.stop.is_watched:
            self._let_go(step, self._state_of(step, self._window, cursors()))
        self._step_began = perf_counter()
        return ends_here

    async def _begin_save(self, step: int, cursors: Callable[[], Mapping[str, Any]]) -> None:  # Any: JSON
        """Begin to write the checkpoint of a step that is done; at most one is in flight."""
        assert self.directory is not None, "nothing is written without a directory"
        await self._settle(wait=True)
        began_at = time()
        self.before_save()
        served = await in_short_thread(self.write_served)
        window = list(self._window)
        if step % self.config.checkpoint_every == 0:
            self._window = []
        state = {**self._state_of(step, window, cursors()), "window": list(self._window)}
        self._saving = self._save(self.backend, step, state, served=served, began_at=began_at)

    def _save(
        self, backend: TrainingBackend, step: int, state: Mapping[str, Any], *, served: Path | None, began_at: float
    ) -> _Save:  # Any: JSON
        """Have the backend begin to write a checkpoint."""
        assert self.directory is not None, "nothing is written without a directory"
        path = step_directory(self.directory, step)
        whole_state = {**state, SERVED_FILE: str(served)} if served else state
        return _Save(path, step, backend.save_checkpoint(path, whole_state), began_at)

    def _state_of(
        self, step: int, window: Sequence[Metrics], cursors: Mapping[str, Any]
    ) -> dict[str, Any]:  # Any: JSON
        """What a checkpoint of a step says besides the weights."""
        return {
            "step": step,
            "num_steps": self.config.num_steps,
            "score": score_steps(window, self.scored_by),
            "settings": dict(self.settings),
            "window": list(window),
            **({"is_early": True} if not self.is_due(step) else {}),
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
        """Have a stop save this step, as it is now, where it cannot wait for the next one."""
        self.stop.let_go(partial(self._save_whole, step, state, get_random_state()))

    def _save_whole(
        self,
        step: int,
        state: Mapping[str, Any],
        random: RandomState,
    ) -> None:
        """Write the checkpoint of a step that is done, while the next one is under way: the process ends afterwards."""
        if self._saving is not None:
            asyncio.run(_result_of(self._saving.future))
            self._note_saved(self._saving)
        if self.stop.saved_step == step and "pending" not in state:
            return
        began_at = time()
        self.before_save()
        served = None if "pending" in state else self.write_served()
        with remembered(random):  # what the step under way has taken from it, it takes again
            saving = self._save(without_thread(self.backend), step, state, served=served, began_at=began_at)
        asyncio.run(_result_of(saving.future))
        self._note_saved(saving)

    def _note_saved(self, saving: _Save) -> None:
        self.stop.note_saved(saving.step, max(0.0, saving.path.stat().st_ctime - saving.began_at))
        self._write_event("checkpoint", step=saving.step)

    def _find_checkpoint(self, directory: Path) -> Path | None:
        """The run's newest whole checkpoint, after giving it that of `config.resume_from` where it has none."""
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
                "the %s schedule spanned %d steps until step %d and spans %d from there on: the result differs from "
                'that of one run of %d steps (with schedule = "constant" it would not)',
                self.config.optim.schedule,
                saved_num_steps,
                step,
                self.config.num_steps,
                self.config.num_steps,
            )

    async def _settle(self, *, wait: bool) -> None:
        """Finish the save in flight if it is done, or after waiting for it."""
        saving = self._saving
        if saving is None or not (wait or saving.future.done()):
            return
        try:
            await saving.future.result()
        except Exception:
            self._saving = None  # its error is told once
            raise
        self._saving = None  # not before: who is cancelled while it waits has it still to finish
        prune_checkpoints(
            saving.path.parent,
            newest=saving.path,
            keep=self.config.keep_checkpoints,
            keep_best=self.config.keep_best,
            is_comparable=self._is_comparable,
        )
        self._note_saved(saving)

    def _is_comparable(self, settings: Mapping[str, Any]) -> bool:  # Any: JSON
        """Whether the score of a checkpoint of these settings is of the same as those to come."""
        return is_same_task(changed_settings(self._with_later_inputs(settings), self.settings))

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
    """What makes a checkpoint one of this training, by name: settings that differ from their defaults, and inputs.

    Args:
        inputs: digests of what the training reads, by name.
        sections: further settings, whose names begin with the section's.
    """
    named = {**training_settings(training), **inputs, "semantics": SEMANTICS_VERSION}
    for section, record in sections.items():
        named |= {f"{section}.{name}": value for name, value in training_settings(record).items()}
    as_json: dict[str, Any] = json.loads(json.dumps(named))  # Any: JSON
    return as_json


def check_step(step: int, num_steps: int, *, checkpoint: Path) -> None:
    """Raise CheckpointError for a checkpoint of a later step than training is to have."""
    if step > num_steps:
        raise CheckpointError(
            f"{checkpoint} is of step {step}, num_steps is {num_steps}: raise num_steps to train on, or start a new run"
        )


def check_same_settings(
    saved: Mapping[str, Any],  # Any: JSON
    current: Mapping[str, Any],  # Any: JSON
    *,
    allowed: Sequence[str],
    checkpoint: Path,
) -> list[str]:
    """The names of the settings that differ, all of them free or in `allowed` by themselves or by their section.

    Raises:
        CheckpointError: others differ; it names them with both values, and what in `allowed` is the name of none.
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
            f"{checkpoint} was trained with other settings, so going on would train something that neither settings "
            f"describe: {differences}. Restore them, start a new run, or name them in allow_changed"
            + f": {', '.join(unused)} there names none of them"
            * bool(unused)
        )
    return changed


def changed_settings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:  # Any: JSON
    """The names of the settings and inputs that differ, in order."""
    return [name for name in sorted(saved.keys() | current.keys()) if saved.get(name) != current.get(name)]


def is_same_task(changed: Sequence[str]) -> bool:
    """True where none of the settings and inputs that changed is about what is asked, sampled and graded."""
    return not any(name in TASK_INPUTS or name.startswith("rollout.") for name in changed)


def _names(allowed: str, setting: str) -> bool:
    """Whether a name of `allow_changed` means a setting: by itself, or as its section."""
    return setting == allowed or setting.startswith(f"{allowed}.")


def score_steps(window: Sequence[Metrics], scored_by: ScoredBy) -> float | None:
    """How good the policy was over some steps, higher is better: what keep-best goes by.

    The mean reward, minus the mean training loss, or minus the evaluation loss after the last step. None if no step
    has one, or if the last step was not evaluated: the loss of an earlier step is of other weights.
    """
    values = [metrics[scored_by] for metrics in window if scored_by in metrics]
    if not values:
        return None
    if scored_by == "eval_loss":
        return -window[-1][scored_by] if scored_by in window[-1] else None
    mean = sum(values) / len(values)
    return -mean if scored_by == "loss" else mean


def _show(settings: Mapping[str, Any], name: str) -> str:  # Any: JSON
    return json.dumps(settings[name]) if name in settings else "its default"
