"""Parse JSON strictly: duplicate keys, NaN, infinities and unpaired surrogates are errors."""

from __future__ import annotations

import json
from typing import Any


def read_strict_json(text: str) -> Any:  # Any: JSON
    """Parse a JSON text.

    Raises:
        ValueError: the text is not valid JSON, or has a duplicate key, NaN, an infinity or an unpaired surrogate.
    """
    value = STRICT_JSON.decode(text.strip())
    if half := find_half_character(value):
        raise ValueError(f"{half} is half of a character")
    return value


def find_half_character(value: Any) -> str:  # Any: JSON
    """The first unpaired surrogate (half of a character) in the texts of a value, in ASCII; "" if there is none."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return ascii(error.object[error.start])
    return ""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:  # Any: JSON
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice in one object")
    return values


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value: write null, or leave the field out")


STRICT_JSON = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
