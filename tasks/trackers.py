"""Trackers: where the metrics of trainings are shown besides this project's own pages.

Not here: reading metrics while a training writes them (tracking.py), what they mean (docs/metrics.md).
"""

from __future__ import annotations

import importlib.util
import netrc
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol
from urllib.parse import urlsplit

from pydantic import BaseModel

from rollouts_core.config.messages import first_line
from rollouts_core.errors import ConfigError
from rollouts_core.plugins import KeyOf, Registry, find_fault_of_callable

TRACKERS = {
    "tensorboard": "rollouts.tasks.trackers:TensorBoardTracker",
    "wandb": "rollouts.tasks.trackers:WandbTracker",
}
"""The class or function that opens each tracker: see `OpenTracker`."""
WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
WANDB_URL = "https://api.wandb.ai"


ALL_TRACKERS: Registry[OpenTracker] = Registry("rollouts.trackers", TRACKERS, find_fault_of_callable)
"""Also those of installed packages."""
TrackerName = Annotated[str, KeyOf(ALL_TRACKERS)]


class TrackedStage(BaseModel):
    """A training whose metrics are shown; no secrets, which trackers take from the environment."""

    tracker: TrackerName
    run: str
    """The pipeline's run, as its folder is called."""
    run_name: str
    """What people call the pipeline."""
    stage: str
    metrics: Path
    """The file that the training appends to."""
    store: Path
    settings: dict[str, Any]
    """The job; JSON."""

    @property
    def name(self) -> str:
        """Unique among all trainings: a run has each stage once."""
        return f"{self.run}-{self.stage}"

    @property
    def state(self) -> Path:
        """The file that says how far it was sent."""
        return self.store / "tracked" / f"{self.name}-{self.tracker}.json"


class Tracker(Protocol):
    """Shows the metrics of one training."""

    shown_at: str
    """Where people see them; in words."""
    next_step: int
    """The first step that it does not have."""

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Take the metrics of a step.

        Args:
            time_s: when it was made, seconds since 1970.
        """
        ...

    def flush(self) -> None:
        """Keep what was logged, whatever happens to this process."""
        ...

    def close(self) -> None:
        """Return when all of it has arrived."""
        ...


OpenTracker = Callable[[TrackedStage, int, Callable[[str], None]], Tracker]
"""Opens the tracker of a training from a step on. The last argument takes sentences for the run's log."""


class TensorBoardTracker:
    """Event files in `<store>/tensorboard/<run>/<stage>`."""

    def __init__(self, tracked: TrackedStage, next_step: int, say: Callable[[str], None]) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.next_step = next_step
        self.shown_at = f"metrics by: tensorboard --logdir {tracked.store / 'tensorboard'}"
        self._writer = EventFileWriter(str(tracked.store / "tensorboard" / tracked.run / tracked.stage))

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Take the metrics of a step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(step=step, wall_time=time_s, summary=Summary(value=numbers)))

    def flush(self) -> None:
        """Write it to the file."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases, in the group of the pipeline's run; `WANDB_...` variables count as they always do."""

    def __init__(self, tracked: TrackedStage, next_step: int, say: Callable[[str], None]) -> None:
        import wandb

        settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True)
        options: dict[str, Any] = {  # Any: as many types as wandb.init takes
            "project": os.environ.get("WANDB_PROJECT", tracked.run_name),
            "id": tracked.name,
            "name": tracked.name,
            "group": tracked.run,
            "job_type": tracked.stage,
            "resume": "allow",
            "dir": os.environ.get("WANDB_DIR", str(tracked.store)),
            "config": tracked.settings,
            "settings": settings,
        }
        Path(options["dir"]).mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(**options)
        except wandb.errors.CommError as error:
            say(f"W&B does not answer ({first_line(error)})")
            wandb.teardown()  # it has the run's id
            self._run = wandb.init(**options, mode="offline")
        folder = Path(self._run.dir).parent
        is_kept_here = self._run.settings.mode == "offline"
        if os.environ.get("WANDB_MODE") == "disabled":
            self.shown_at = "metrics nowhere, because WANDB_MODE is disabled"
        elif is_kept_here:
            self.shown_at = f"metrics kept for: wandb sync {folder}"
        else:
            self.shown_at = f"metrics at {self._run.url}"
        # A server that has some of it knows best how much.
        self.next_step = int(self._run.step) if self._run.resumed else next_step

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Take the metrics of a step."""
        self._run.log({**values, "_timestamp": time_s}, step=step, commit=True)

    def flush(self) -> None:
        """Nothing: its own process keeps them."""

    def close(self) -> None:
        """Return when the server has them, or the file without a server."""
        self._run.finish()


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Raise ConfigError when a tracker is not installed here, or has no key."""
    for name in names:
        if name in TRACKERS and importlib.util.find_spec(name) is None:
            raise ConfigError(f'run.report_to: {name} is not installed here: pip install "rollouts[{name}]"')
    if "wandb" in names and not _has_wandb_key():
        raise ConfigError(
            "run.report_to: W&B has no key here: set WANDB_API_KEY, or run `wandb login`, or keep its files here with "
            "WANDB_MODE=offline"
        )


def _has_wandb_key() -> bool:
    """Whether W&B is used without its server, or finds a key."""
    if os.environ.get("WANDB_MODE", "online") != "online" or any(os.environ.get(name) for name in WANDB_KEYS):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", WANDB_URL)).netloc
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
