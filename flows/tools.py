"""Deployments that train nothing: their names, the fields of their forms, and their schedules.

    reap      end rented machines that no run wants (reap.py); every hour
    finish    end a run's training early, so that the run goes on with its best checkpoint (finish_flow.py)

Not here: deployments of pipelines (deployments.py). This module does not import prefect: it runs before Prefect's
environment is set.
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
"""Once an hour, at a minute at which few other hourly jobs start."""


class ReapConfig(Record):
    """Rented machines to end."""

    spare: bool = True
    """Keep machines of killed runs for the runs' next start, until the machines expire. Off: end these machines now.
    Machines that failed runs keep (node.keep_on_failure_minutes) stay until that time is over in any case."""
    store: str = ".rollouts"
    """Folder whose ledger knows what is rented."""

    _find_store = model_validator(mode="before")(with_store)


class FinishConfig(Record):
    """The run whose training ends early."""

    run: str = Field(min_length=1)
    """The run that trains: its name, my-run-5793d50a, or its id, the end of its page's address."""
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
            description="End rented machines that no run of this store wants, and show what was ended, what stays, and "
            "why. The process that serves the deployments also ends expired machines by itself, every two minutes.",
            schedule=ScheduleConfig(cron=HOURLY, overlap="skip"),
        ),
        Tool(
            name=FINISH_FLOW,
            settings=FinishConfig,
            description="Finish now: a run's present SFT or RL ends after the step under way, with a checkpoint, and "
            "the run goes on with selection, evaluation and sync. Later runs with the same settings train the rest.",
        ),
    )
}


def overridden_tool(
    name: str, parameters: Mapping[str, Any], assignments: Iterable[str]
) -> dict[str, Any]:  # Any: JSON
    """The parameters of a tool with settings replaced by assignments such as `reap.spare=false`.

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
