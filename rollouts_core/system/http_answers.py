"""What a server answered, read so that whatever it sends is an answer, or one that cannot be read, and nothing else.

Not here: asking for it (http_service.py, engines/http.py), what it means.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

_MAX_BYTES_OF_CHARACTER = 4


def parse_json(content: bytes) -> Any:  # Any: JSON
    """The JSON that an answer is.

    Raises:
        ValueError: it is none, no UTF-8, or nested more deeply than anything that is meant.
    """
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(content)  # some servers write NaN, which JSON does not have
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def shown_beginning(content: bytes, max_characters: int) -> str:
    """The beginning of an answer for a message: as UTF-8, for a server may name an encoding that is none of text."""
    return content[: _MAX_BYTES_OF_CHARACTER * max_characters].decode(errors="replace")[:max_characters]
