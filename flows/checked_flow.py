"""Flows whose runs fail with a sentence per mistake if their parameters do not fit.

    a run's parameters ──> names: CheckedFlow ──> values: form.py, short_form_flow.py ──> the flow function

Not here: the settings within a parameter (form.py).

A program can start a run over Prefect's HTTP API with any parameters. Before a run begins, Prefect binds the
parameters to the flow function. If the names do not fit, the run's process ends there, and the run becomes Crashed with
an exit code as the only message. Importing this module replaces Prefect's binding: such parameters go to the
validation. Prefect writes errors of the validation into the state Failed.
"""

# No `from __future__ import annotations`: Prefect pickles the flow by value, without the names to resolve annotations.

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import prefect.flow_engine
from prefect import Flow
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ParameterBindError, SignatureMismatchError

from rollouts.flows.form import check_names

FlowP = ParamSpec("FlowP")
ResultT = TypeVar("ResultT")
_bind: Callable[..., dict[str, Any]] | None = getattr(prefect.flow_engine, "_flow_parameters", None)
"""Prefect's binding, which has no public hook. None in a version of Prefect without this function."""


class CheckedFlow(Flow[FlowP, ResultT]):
    """A flow that validates the names of its parameters with the words of `rollouts validate`."""

    def validate_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:  # Any: JSON, and records
        """The parameters as records.

        Raises:
            ConfigError: a name is unknown, or a parameter is missing.
            ParameterTypeError: a value does not fit.
        """
        known = inspect.signature(self.fn).parameters.values()
        check_names(parameters, {each.name: each.default is each.empty for each in known})
        return super().validate_parameters(parameters)


def checked_flow(**options: Any) -> Callable[[Callable[FlowP, ResultT]], Flow[FlowP, ResultT]]:  # Any: Prefect's
    """Decorate a flow function, as `prefect.flow` with these options. The flow's result is not persisted."""
    return lambda function: CheckedFlow(function, persist_result=False, **options)


def _bind_or_pass(
    flow: Flow[..., Any],  # Any: the result of the flow
    flow_run: FlowRun | None,
    parameters: dict[str, Any] | None,  # Any: JSON
) -> dict[str, Any]:  # Any: JSON
    """The parameters of a run with the defaults of its flow, or the run's parameters if they do not fit the flow."""
    assert _bind is not None
    try:
        return _bind(flow, flow_run, parameters)
    except (ParameterBindError, SignatureMismatchError):
        if flow_run is None:
            raise
        return flow_run.parameters


if _bind is not None:
    prefect.flow_engine._flow_parameters = _bind_or_pass
