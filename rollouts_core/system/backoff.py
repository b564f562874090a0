"""How long to wait before a server is asked again that was away or has too much to do.

Not here: which answers mean that (http_service.py, engines/http.py).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
MAX_RETRY_AFTER_S = 300.0
"""A service that asks for more patience than this is asked again after it all the same."""


def draw_backoff(attempt: int) -> float:
    """Seconds to pause after an attempt, counted from 1: twice as long each time, and not the same for everybody."""
    return random.uniform(0.5, 1.0) * min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (attempt - 1))


def read_retry_after(headers: Mapping[str, str]) -> float:
    """The seconds for which a service asks to be left alone, by a number or a date; 0 where it does not say."""
    text = headers.get("Retry-After", "").strip()
    try:
        is_number = text.isdecimal()
        wanted_s = float(text) if is_number else (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):  # nothing, or no date, or one without a time zone
        return 0.0
    return min(max(wanted_s, 0.0), MAX_RETRY_AFTER_S)
