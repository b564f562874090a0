"""`retrain` and `schedule`: the watched data and the times of checks, beside the settings of the pipeline.

Not here: the other settings (form.py, rollouts_core/config/), what a retraining does (tasks/retraining.py).
"""

from __future__ import annotations

import zoneinfo
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field

from rollouts.flows.cron import check_cron
from rollouts.infra.stores.object_store import is_url
from rollouts.tasks.watch import can_change, watched_sources
from rollouts_core.config import Config, Record
from rollouts_core.config.record import Finite
from rollouts_core.errors import ConfigError

LINE_PATTERN = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$"


class RetrainConfig(Record):
    """Conditions for training again, and for promoting the new model."""

    model: str = Field("", pattern=LINE_PATTERN)
    """Name of the models in the registry: small-1, small-2 and so on. Empty: the run's name."""
    sources: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Files, folders and URLs (s3://bucket/prefix) to watch. Empty: the demonstrations and prompts of the training."""
    margin: Finite = 0.0
    """The candidate's mean score must exceed production's by more than this, beyond noise. A negative margin accepts a
    slightly worse model, if newer data is valuable by itself."""
    max_p_value: Annotated[Finite, Field(gt=0, le=1)] = 0.01
    """Highest p-value of the comparison; 1 promotes every candidate."""
    approval: bool = False
    """Ask for approval in Prefect's UI before a better candidate goes into production."""
    force: bool = False
    """Train although no data changed, for example with other settings."""
    max_failures: int = Field(3, ge=1)
    """After this many failed retrainings in a row on the same data, wait for other data."""

    def beside(self, folder: Path) -> Self:
        """The same with its sources made absolute against the folder of its file."""
        absolute = (each if is_url(each) else str((folder / each).resolve()) for each in self.sources)
        return self.model_copy(update={"sources": tuple(absolute)})


class ScheduleConfig(Record):
    """Schedule of the checks for changed data."""

    cron: str = ""
    """Cron expression of five fields: "0 3 * * *" is every day at three."""
    interval_minutes: Annotated[Finite, Field(ge=1)] | None = None
    """Instead of `cron`: minutes between two checks, counted from midnight."""
    time_zone: str = "UTC"
    """Name of the time zone of `cron`, for example Europe/Berlin."""
    overlap: Literal["queue", "skip"] = "queue"
    """For a check that is due while the previous one still runs. queue: it waits. skip: it is skipped."""

    def _broken_rules(self) -> Iterator[str]:
        if bool(self.cron) == (self.interval_minutes is not None):
            yield 'a schedule has either cron, as in "0 3 * * *", or interval_minutes'
        if self.cron:
            try:
                check_cron(self.cron)
            except ValueError as error:
                yield str(error)
        if self.time_zone not in zoneinfo.available_timezones():
            yield f"time_zone {self.time_zone!r} is not known: expected a name like Europe/Berlin or UTC"


def check_retraining(
    config: Config, retrain: RetrainConfig | None, schedule: ScheduleConfig | None, *, source: str
) -> None:
    """Raise ConfigError for a schedule of nothing, and for data that is not there or can never change."""
    if retrain is None:
        if schedule is not None:
            raise ConfigError(f"{source}: a schedule needs something to retrain: add a table [retrain]")
        return
    if schedule is not None and not can_change(watched_sources(config, retrain.sources)):
        raise ConfigError(
            f"{source}: the schedule has no data that could change: every dataset is held to a commit; leave out its "
            "revision, or name files or folders in retrain.sources"
        )
