"""Convert the fields `answer` and `id` of a row to text, as they are spelled in the source file.

source                            `answer` of the row
JSON    1.50  (007 is invalid)    "1.50"     as the number is spelled
CSV     007                       "007"      the cell
table   1.5 (float32), 72.0       "1.5" "72" the shortest text of the same number
any     [1.50, "x"]               '[1.50, "x"]', with the type `JsonText`
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

TEXT_FIELDS = ("answer", "id")
"""Fields of a row that always become text, because they are compared as text."""


class SpelledNumber(str):
    """A number as it is spelled in a JSON file, for example 1.50."""

    __slots__ = ()


class JsonText(str):
    """JSON text of an answer or id that is a list or object in the source file."""

    __slots__ = ()


def as_text(value: Any) -> str | None:  # Any: a value of JSON or of a table
    """Convert a value to text; None if the value is missing (null or NaN).

    A float becomes the shortest text that parses to the same number, without ".0".
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping | list | tuple):
        return JsonText(_as_json_text(value))
    return _scalar_text(value)


def _as_json_text(value: Any) -> str:  # Any: see `as_text`
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {_as_json_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_as_json_text, value)) + "]"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "null"
    if isinstance(value, SpelledNumber):
        return str(value)
    if isinstance(value, bool | int | float | Decimal):
        return _scalar_text(value)
    return json.dumps(str(value))


def _scalar_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Decimal):
        text = f"{value:f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    return str(value)
