"""Trackers: TensorBoard, Trackio, W&B, or another service to which the metrics of a training are sent.

Not here: reading metrics while a training writes them (tracking.py), the meaning of the metrics (docs/metrics.md).
"""

from __future__ import annotations

import importlib.util
import netrc
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any, Protocol
from urllib.parse import urlsplit

from pydantic import BaseModel

from rollouts_core.config.messages import first_line
from rollouts_core.errors import ConfigError
from rollouts_core.plugins import KeyOf, Registry, find_fault_of_callable

TRACKERS = {
    "tensorboard": "rollouts.tasks.trackers:TensorBoardTracker",
    "trackio": "rollouts.tasks.trackers:TrackioTracker",
    "wandb": "rollouts.tasks.trackers:WandbTracker",
}
"""The built-in trackers, each with the class or function that opens the tracker (`OpenTracker`)."""
TRACKIO_TIMEOUT_S = 30.0
WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
WANDB_URL = "https://api.wandb.ai"


ALL_TRACKERS: Registry[OpenTracker] = Registry("rollouts.trackers", TRACKERS, find_fault_of_callable)
"""All known trackers: the built-in trackers, and trackers that installed packages add by entry points."""
TrackerName = Annotated[str, KeyOf(ALL_TRACKERS)]


class TrackedStage(BaseModel):
    """A training whose metrics are sent to a tracker. Trackers read their secrets from the environment."""

    tracker: TrackerName
    run: str
    """The name of the run's folder."""
    run_name: str
    """The run's name, as the user chose it."""
    stage: str
    metrics: Path
    """The metrics.jsonl to which the training appends."""
    store: Path
    settings: dict[str, Any]
    """The content of the training's job.json."""

    @property
    def name(self) -> str:
        """A unique name of the training: a run has each stage only once."""
        return f"{self.run}-{self.stage}"

    @property
    def state(self) -> Path:
        """The file that stores which step must be sent to the tracker next."""
        return self.store / "tracked" / f"{self.name}-{self.tracker}.json"


class Tracker(Protocol):
    """The connection to a service that shows the metrics of one training."""

    shown_at: str
    """Text for users: where they find the metrics, such as "metrics at <URL>"."""
    next_step: int
    """The first step that the tracker does not have yet."""

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Send the metrics of a training step.

        Args:
            time_s: when the training made the step, in seconds since 1970.
        """
        ...

    def flush(self) -> None:
        """Save the logged metrics, so that they are not lost if this process is killed."""
        ...

    def close(self) -> None:
        """Wait until all logged metrics have arrived, and close the connection."""
        ...


OpenTracker = Callable[[TrackedStage, int, Callable[[str], None]], Tracker]
"""Opens a tracker for a training. Arguments: the training, the first step to send, and a function for messages."""


class TensorBoardTracker:
    """Writes event files for TensorBoard to `<store>/tensorboard/<run>/<stage>`."""

    def __init__(self, tracked: TrackedStage, next_step: int, say: Callable[[str], None]) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.next_step = next_step
        self.shown_at = f"metrics by: tensorboard --logdir {tracked.store / 'tensorboard'}"
        self._writer = EventFileWriter(str(tracked.store / "tensorboard" / tracked.run / tracked.stage))

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(step=step, wall_time=time_s, summary=Summary(value=numbers)))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class TrackioTracker:
    """A Trackio run in a database on this machine: in `TRACKIO_DIR`, or in `<store>/trackio`. It sends no requests."""

    def __init__(self, tracked: TrackedStage, next_step: int, say: Callable[[str], None]) -> None:
        for remote in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            os.environ.pop(remote, None)
        os.environ["HF_HUB_OFFLINE"] = "1"  # Trackio would ask the Hub for the user's name
        folder = os.environ.setdefault("TRACKIO_DIR", str(tracked.store / "trackio"))
        with redirect_stdout(sys.stderr):  # the output of this process is messages for the user
            import trackio

            self._project, self._name, self._logged = tracked.run_name, tracked.name, -1
            self._trackio = trackio
            self._run = trackio.init(
                project=self._project,
                name=self._name,
                group=tracked.run,
                config=tracked.settings,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        self.shown_at = f"metrics by: TRACKIO_DIR={folder} trackio show --project {self._project}"
        self.next_step = self._saved_step() + 1 or next_step

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)
        self._logged = step

    def flush(self) -> None:
        """Wait until Trackio's thread has saved the logged metrics.

        Raises:
            OSError: the metrics are not saved in time, for example because the disk is full. Trackio only prints a
                warning.
        """
        deadline = time.monotonic() + TRACKIO_TIMEOUT_S
        while self._logged >= 0 and self._saved_step() < self._logged:
            if time.monotonic() > deadline:
                raise OSError(f"Trackio has not saved step {self._logged} within {TRACKIO_TIMEOUT_S:g} s")
            time.sleep(0.1)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._trackio.finish()

    def _saved_step(self) -> int:
        """The last step in the database (-1 without any)."""
        from trackio.sqlite_storage import SQLiteStorage

        step = SQLiteStorage.get_last_step(self._project, self._name)
        return -1 if step is None else int(step)


class WandbTracker:
    """A W&B run, configured by `WANDB_...` variables. The trainings of one pipeline run form a W&B group."""

    def __init__(self, tracked: TrackedStage, next_step: int, say: Callable[[str], None]) -> None:
        import wandb

        settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True)
        options: dict[str, Any] = {  # Any: arguments of wandb.init have many types
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
            wandb.teardown()  # the failed connection still holds the run's id
            self._run = wandb.init(**options, mode="offline")
        folder = Path(self._run.dir).parent
        is_kept_here = self._run.settings.mode == "offline"
        if os.environ.get("WANDB_MODE") == "disabled":
            self.shown_at = "no metrics, because WANDB_MODE is disabled"
        elif is_kept_here:
            self.shown_at = f"metrics kept for: wandb sync {folder}"
        else:
            self.shown_at = f"metrics at {self._run.url}"
        # If W&B already has steps of this training, W&B's next step replaces the locally stored next step.
        self.next_step = int(self._run.step) if self._run.resumed else next_step

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        self._run.log({**values, "_timestamp": time_s}, step=step, commit=True)

    def flush(self) -> None:
        """Do nothing. W&B's own process keeps the logged metrics if this process is killed."""

    def close(self) -> None:
        """Wait until the W&B server (in offline mode: a local file) has all metrics."""
        self._run.finish()


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Raise ConfigError if a tracker's package is not installed on this machine, or if W&B has no API key."""
    for name in names:
        if name in TRACKERS and importlib.util.find_spec(name) is None:
            raise ConfigError(f'run.report_to: {name} is not installed here: pip install "rollouts[{name}]"')
    if "wandb" in names and not _has_wandb_key():
        raise ConfigError(
            "run.report_to: W&B has no API key here: set WANDB_API_KEY, or run `wandb login`, or keep its files here "
            "with WANDB_MODE=offline"
        )


def _has_wandb_key() -> bool:
    """True if W&B finds an API key, or is used without its server (`WANDB_MODE`)."""
    if os.environ.get("WANDB_MODE", "online") != "online" or any(os.environ.get(name) for name in WANDB_KEYS):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", WANDB_URL)).netloc
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
