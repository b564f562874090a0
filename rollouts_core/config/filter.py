"""`rollout.filters`: several filters of groups, or one filter with its own limits.

Not here: the filters (rollouts_core/filters.py).
"""

from __future__ import annotations

from pydantic import Field

from rollouts_core.config.record import Finite, FunctionName, Record


class FilterConfig(Record):
    """One of several filters, all of which must keep a group."""

    name: FunctionName
    """A name of `rollouts_core.filters.FILTERS` or `package.module:function`."""
    settings: dict[str, Finite | int] = Field(default_factory=dict)
    """Numbers that the filter takes by keyword, as in `{ max_tokens = 512 }`."""
