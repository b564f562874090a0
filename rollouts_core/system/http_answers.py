"""Parse answers of servers: any bytes give a value or a ValueError."""

from __future__ import annotations

import json
from typing import Any

import orjson

_MAX_BYTES_OF_CHARACTER = 4


def parse_json(content: bytes) -> Any:  # Any: JSON
    """Parse an answer as JSON.

    Raises:
        ValueError: the answer is not JSON, not UTF-8, or nested too deeply for the parser.
    """
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(content)  # also accepts NaN, which some servers write
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def shown_beginning(content: bytes, max_characters: int) -> str:
    """The beginning of an answer for a message, as UTF-8: the encoding that a server names may be unusable."""
    return content[: _MAX_BYTES_OF_CHARACTER * max_characters].decode(errors="replace")[:max_characters]
