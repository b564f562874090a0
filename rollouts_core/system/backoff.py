"""How long to wait before asking again a server that was unreachable or overloaded.

Which answers count as overload is decided in http_service.py and engines/http.py.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
MAX_RETRY_AFTER_S = 300.0
"""Longest accepted Retry-After; a longer one is shortened to this."""


def draw_backoff(attempt: int) -> float:
    """Seconds to pause after an attempt, counted from 1: doubles each time, with a random factor to spread requests."""
    return random.uniform(0.5, 1.0) * min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (attempt - 1))


def read_retry_after(headers: Mapping[str, str]) -> float:
    """Seconds from the header Retry-After, which gives a number or a date; 0 without one."""
    text = headers.get("Retry-After", "").strip()
    try:
        is_number = text.isdecimal()
        wanted_s = float(text) if is_number else (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):  # missing, not a date, or without a time zone
        return 0.0
    return min(max(wanted_s, 0.0), MAX_RETRY_AFTER_S)
