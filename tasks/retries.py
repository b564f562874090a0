"""Decide which failures of tasks Prefect retries, and after which delays."""

from __future__ import annotations

from typing import Any

from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from rollouts.infra.errors import TransientInfraError


def is_worth_a_retry(task: Any, task_run: Any, state: State[Any]) -> bool:  # Any: Prefect's signature
    """True for temporary failures of machines. False for a user's mistake or a failed training."""
    failure = state.result(raise_on_failure=False)
    return isinstance(failure, TransientInfraError)


RETRY_DELAYS_S = [10, 60, 300]
TRIED_AGAIN: dict[str, Any] = {  # Any: keywords of prefect.task
    "cache_policy": NO_CACHE,
    "retries": len(RETRY_DELAYS_S),
    "retry_delay_seconds": RETRY_DELAYS_S,
    "retry_condition_fn": is_worth_a_retry,
}
"""Options of Prefect tasks that use a service which may be unreachable for minutes, such as an object store."""
