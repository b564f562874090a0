"""Compute pauses before a request to an unreachable or overloaded server is retried.

http_service.py and engines/http.py decide which failures are retried.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
MAX_RETRY_AFTER_S = 300.0
"""Longest pause in seconds that a server can request by the header Retry-After."""


def draw_backoff(attempt: int) -> float:
    """Seconds to pause after a failed attempt (1, 2, ...).

    The pause doubles with each attempt. A random factor spreads the retries of many requests.
    """
    return random.uniform(0.5, 1.0) * min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (attempt - 1))


def read_retry_after(headers: Mapping[str, str]) -> float:
    """The pause in seconds that a server requests by the header Retry-After (a number or a date). 0 without it."""
    text = headers.get("Retry-After", "").strip()
    try:
        is_number = text.isdecimal()
        wanted_s = float(text) if is_number else (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):  # missing, not a date, or without a time zone
        return 0.0
    return min(max(wanted_s, 0.0), MAX_RETRY_AFTER_S)
