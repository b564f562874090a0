"""`retrain` and `schedule`: what a retraining watches and when it looks, beside the settings of the pipeline.

Not here: the other settings (form.py, rollouts_core/config/), what a retraining does (tasks/retraining.py).
"""

from __future__ import annotations

import zoneinfo
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from flows.cron import check_cron
from infra.stores.object_store import is_url
from rollouts_core.config import Config, Record
from rollouts_core.config.record import Finite
from rollouts_core.errors import ConfigError
from tasks.watch import can_change, watched_sources

LINE_PATTERN = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$"


class RetrainConfig(Record):
    """When data is new, and when a model trained on it goes into production."""

    model: str = Field("", pattern=LINE_PATTERN)
    """What the models are called in the registry: small-1, small-2 and so on. Empty takes the name of the run."""
    sources: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Files, folders and URLs (s3://bucket/prefix) that are watched. Empty watches the demonstrations and prompts that
    are trained on."""
    margin: Finite = 0.0
    """The candidate's mean score must be higher than production's by more than this, beyond noise. Below 0 it may be
    that much lower: enough where newer data is worth something by itself."""
    max_p_value: Annotated[Finite, Field(gt=0, le=1)] = 0.01
    """How sure the comparison must be: the highest p-value that counts; 1 promotes everything."""
    approval: bool = False
    """Ask a person, in Prefect's UI, before a better candidate goes into production."""
    force: bool = False
    """Train although no data changed, for example with other settings."""
    max_failures: int = Field(3, ge=1)
    """After so many failed retrainings on the same data in a row, wait for other data."""

    def beside(self, folder: Path) -> Self:
        """The same with its sources made absolute against the folder of its file."""
        absolute = (each if is_url(each) else str((folder / each).resolve()) for each in self.sources)
        return self.model_copy(update={"sources": tuple(absolute)})


class ScheduleConfig(Record):
    """When a retraining looks for new data by itself."""

    cron: str = ""
    """Cron expression of five fields: "0 3 * * *" is every day at three."""
    interval_minutes: Annotated[Finite, Field(ge=1)] | None = None
    """In place of `cron`: so many minutes from one look to the next, counted from midnight."""
    time_zone: str = "UTC"
    """Name of the time zone of `cron`, for example Europe/Berlin."""
    overlap: Literal["queue", "skip"] = "queue"
    """What happens to a look whose predecessor is still at work: it waits, or it is skipped."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.cron) == (self.interval_minutes is not None):
            raise ValueError('a schedule has either cron, as in "0 3 * * *", or interval_minutes')
        if self.cron:
            check_cron(self.cron)
        if self.time_zone not in zoneinfo.available_timezones():
            raise ValueError(f"time_zone {self.time_zone!r} is not known: expected a name like Europe/Berlin or UTC")
        return self


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
