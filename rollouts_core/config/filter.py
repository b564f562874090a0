"""`rollout.filters`: several filters of groups, or one filter with its own limits."""

from __future__ import annotations

from pydantic import Field

from rollouts_core.config.record import Finite, FunctionName, Record


class FilterConfig(Record):
    """One of several group filters. A group is kept only if all filters keep it."""

    name: FunctionName
    """The filter: a name of `rollouts_core.filters.FILTERS` or `package.module:function`."""
    settings: dict[str, Finite | int] = Field(default_factory=dict)
    """Numeric keyword arguments of the filter, as in `{ max_tokens = 512 }`."""
