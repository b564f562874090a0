"""Parse HTTP responses of servers. Any bytes give either a value or a ValueError."""

from __future__ import annotations

import json
from typing import Any

import orjson

_MAX_BYTES_OF_CHARACTER = 4


def parse_json(content: bytes) -> Any:  # Any: JSON
    """Parse the body of a response as JSON.

    Raises:
        ValueError: the body is not JSON, not UTF-8, or nested too deeply for the parser.
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
    """The first characters of a response's body, for messages. The body is decoded as UTF-8 with replacements."""
    return content[: _MAX_BYTES_OF_CHARACTER * max_characters].decode(errors="replace")[:max_characters]
