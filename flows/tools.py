"""Tools, which are deployments that train nothing: their names, the fields of their forms, and their schedules.

    reap      end rented machines that no run uses (reap.py); every hour
    finish    end a run's training early; the run continues with its best checkpoint (finish_flow.py)

Not here: deployments of pipelines (deployments.py). This module must not import prefect, because it runs before
Prefect's environment variables are set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field, model_validator

from rollouts.flows.retrain_settings import ScheduleConfig
from rollouts.flows.store import with_store
from rollouts_core.config import Record, parse_config
from rollouts_core.errors import ConfigError

REAP_FLOW = "reap"
FINISH_FLOW = "finish"
HOURLY = "17 * * * *"
"""Cron expression for once an hour, at a minute when few other hourly jobs start."""


class ReapConfig(Record):
    """Settings of the tool `reap`, which ends rented machines."""

    spare: bool = True
    """Keep machines of killed runs for a restart of the run, until the machines expire. Off: end these machines now.
    Machines that failed runs keep (node.keep_on_failure_minutes) stay for that time in any case."""
    store: str = ".rollouts"
    """Store whose rented machines are checked."""

    _find_store = model_validator(mode="before")(with_store)


class FinishConfig(Record):
    """Settings of the tool `finish`, which ends a run's training early."""

    run: str = Field(min_length=1)
    """The run: its name, as my-run-5793d50a, or its id, which is the last part of the URL of its page."""
    store: str = ".rollouts"
    """Store of the run."""

    _find_store = model_validator(mode="before")(with_store)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A flow that trains nothing. The flow has one record of settings, and one deployment of the same name."""

    name: str
    """The name of the flow, of the deployment, and of the flow's parameter."""
    settings: type[Record]
    description: str
    """Text of the deployment's page, in Markdown."""
    schedule: ScheduleConfig | None = None

    @property
    def defaults(self) -> dict[str, Any]:  # Any: JSON
        """Default values of the form's fields. Users fill in the fields that have no default."""
        fields = self.settings.model_fields.items()
        return {name: field.default for name, field in fields if not field.is_required()}


TOOLS = {
    tool.name: tool
    for tool in (
        Tool(
            name=REAP_FLOW,
            settings=ReapConfig,
            description="End rented machines that no run of this store uses, and list the ended and the remaining "
            "machines. The process that serves the deployments also ends expired machines, every two minutes.",
            schedule=ScheduleConfig(cron=HOURLY, overlap="skip"),
        ),
        Tool(
            name=FINISH_FLOW,
            settings=FinishConfig,
            description="Finish now: a run's SFT or RL ends after the current step, with a checkpoint. The run then "
            "continues with selection, evaluation and sync. Later runs with the same settings train the other steps.",
        ),
    )
}


def overridden_tool(
    name: str, parameters: Mapping[str, Any], assignments: Iterable[str]
) -> dict[str, Any]:  # Any: JSON
    """Replace settings in the parameters of a tool by assignments such as `reap.spare=false`.

    Raises:
        ConfigError: a key is unknown, or a value does not fit.
    """
    settings = dict(parameters.get(name, {}))
    for assignment in assignments:
        key, separator, text = assignment.partition("=")
        section, _, field = key.partition(".")
        if not separator or section != name or not field:
            raise ConfigError(f"{assignment!r} is not of the form {name}.setting=value")
        settings[field] = {"true": True, "false": False}.get(text, text)
    record = parse_config(TOOLS[name].settings, settings, source="command line", table=name)
    return {name: record.model_dump(mode="json")}
