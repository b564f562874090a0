"""The schedule of a deployment in Prefect, and the rule for runs that overlap.

Not here: the settings of a schedule (retrain_settings.py), the process that registers deployments (serving.py).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events import DeploymentEventTrigger, ResourceSpecification
from prefect.exceptions import ObjectNotFound
from prefect.schedules import Cron, Interval, Schedule

from rollouts.flows.deployments import RETRAIN_FLOW, Deployment, retraining_name
from rollouts.flows.retrain_settings import ScheduleConfig

ANCHOR = datetime(2020, 1, 1)
"""Time from which intervals are counted. The time is fixed, so that a restart does not shift the intervals."""
SLUG = "new-data"
DATA_UPDATED = "data.updated"
"""Name of the event in Prefect after which retrainings check their data immediately."""
DATA_RESOURCE = "rollouts.data"
"""Resource of the event `data.updated` for all retrainings. The resource with `.NAME` added is only for the retraining
of the configuration NAME."""


async def schedule_options(deployment: Deployment) -> dict[str, Any]:  # Any: keywords of Prefect's
    """Arguments for `Runner.aadd_flow`: schedules, triggers, tags and concurrency limit.

    A deployment with a schedule or trigger gets the concurrency limit 1. A paused schedule stays paused. Registration
    would remove the schedules, tags and concurrency limit that users set in Prefect, so they are passed again.
    """
    known = await known_deployment(deployment)
    schedules = known_schedules(known) if known else []
    of_people = [schedule for schedule in schedules if schedule.slug != SLUG]
    kept: dict[str, Any] = {"tags": list(dict.fromkeys([*deployment.tags, *(known.tags if known else [])]))}
    if deployment.flow != RETRAIN_FLOW and not deployment.schedule:
        if of_people:
            kept |= {"schedules": of_people, "paused": False}
        if known and (at_once := known.global_concurrency_limit):
            overlap = known.concurrency_options.model_dump() if known.concurrency_options else {}
            kept["concurrency_limit"] = ConcurrencyLimitConfig(limit=at_once.limit, **overlap)
        return kept
    is_active = all(schedule.active for schedule in schedules if schedule.slug == SLUG)
    settings = ScheduleConfig.model_validate(deployment.schedule) if deployment.schedule else None
    return kept | {
        "concurrency_limit": ConcurrencyLimitConfig(limit=1, collision_strategy=_overlap_strategy(settings)),
        "triggers": [data_trigger(deployment)] if deployment.flow == RETRAIN_FLOW else [],
        "paused": False,  # Prefect paused the deployment when the serving process ended
        "schedules": [*([] if settings is None else [build_schedule(settings, is_active=is_active)]), *of_people],
    }


def yaml_schedule_options(deployment: Deployment) -> dict[str, Any]:  # Any: YAML
    """Schedule, trigger and concurrency limit for a prefect.yaml. A repeated `prefect deploy` resumes a paused
    schedule."""
    settings = ScheduleConfig.model_validate(deployment.schedule) if deployment.schedule else None
    options: dict[str, Any] = {
        "concurrency_limit": {"limit": 1, "collision_strategy": _overlap_strategy(settings).value},
        "triggers": [data_trigger(deployment).model_dump(mode="json", include={"type", "name", "match", "expect"})],
        "schedules": [],
    }
    if settings is None:
        return options
    schedule = build_schedule(settings)
    when: dict[str, Any] = {"cron": schedule.cron}
    if schedule.interval is not None:
        assert schedule.anchor_date is not None, "intervals are counted from a fixed time"
        when = {"interval": schedule.interval.total_seconds(), "anchor_date": schedule.anchor_date.isoformat()}
    return options | {"schedules": [{**when, "timezone": schedule.timezone, "slug": SLUG}]}


def data_trigger(deployment: Deployment) -> DeploymentEventTrigger:
    """A trigger that starts the retraining after an event `data.updated` for this or for all configurations."""
    configuration = deployment.name.partition("@")[0].removesuffix(retraining_name(""))
    own = f"{DATA_RESOURCE}.{configuration}"
    return DeploymentEventTrigger(
        name=f"{DATA_UPDATED}: {deployment.name}",
        expect={DATA_UPDATED},
        match=ResourceSpecification({"prefect.resource.id": [DATA_RESOURCE, own]}),
    )


async def known_deployment(deployment: Deployment) -> DeploymentResponse | None:
    """The deployment as it is registered in Prefect (None if it is not registered)."""
    async with get_client() as client:
        try:
            return await client.read_deployment_by_name(f"{deployment.flow}/{deployment.name}")
        except ObjectNotFound:
            return None


def known_schedules(known: DeploymentResponse) -> list[DeploymentScheduleCreate]:
    """The schedules of a deployment in Prefect, as arguments to set the same schedules again."""
    kept = set(DeploymentScheduleCreate.model_fields)
    return [DeploymentScheduleCreate(**schedule.model_dump(include=kept)) for schedule in known.schedules]


def build_schedule(settings: ScheduleConfig, *, is_active: bool = True) -> Schedule:
    """Convert the settings to a schedule of Prefect."""
    if settings.cron:
        return Cron(settings.cron, timezone=settings.time_zone, slug=SLUG, active=is_active)
    assert settings.interval_minutes is not None, "a schedule has cron or an interval"
    anchor = ANCHOR.replace(tzinfo=ZoneInfo(settings.time_zone)).astimezone(UTC)
    every = timedelta(minutes=settings.interval_minutes)
    return Interval(every, anchor_date=anchor, timezone=settings.time_zone, slug=SLUG, active=is_active)


def _overlap_strategy(settings: ScheduleConfig | None) -> ConcurrencyLimitStrategy:
    is_skipped = settings is not None and settings.overlap == "skip"
    return ConcurrencyLimitStrategy.CANCEL_NEW if is_skipped else ConcurrencyLimitStrategy.ENQUEUE


async def drop_schedule(deployment_id: UUID) -> None:
    """Delete the schedule from the deployment's earlier configuration. Registering the deployment without a schedule
    would keep the earlier schedule."""
    async with get_client() as client:
        for schedule in await client.read_deployment_schedules(deployment_id):
            if schedule.slug == SLUG:
                await client.delete_deployment_schedule(deployment_id, schedule.id)
