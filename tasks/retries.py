"""Which failures Prefect may try again by itself."""

from __future__ import annotations

from typing import Any

from prefect.client.schemas.objects import State

from infra.errors import TransientInfraError


def is_worth_a_retry(task: Any, task_run: Any, state: State[Any]) -> bool:  # Any: Prefect's signature
    """True for failures of machines that may pass; never for a user's mistake or a failed training."""
    failure = state.result(raise_on_failure=False)
    return isinstance(failure, TransientInfraError)
