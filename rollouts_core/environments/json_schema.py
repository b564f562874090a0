"""The task to write JSON that matches the row's `schema`. If the row has an `answer`, the JSON must also equal it."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import extend
from jsonschema_specifications import REGISTRY as SPECIFICATIONS
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from rollouts_core.environments.code import find_last_block
from rollouts_core.environments.grading_limit import GradingLimit
from rollouts_core.system.time_limits import OutOfTimeError, interrupt_after_computing
from rollouts_core.types import Sample

MAX_CHECK_S = 2.0
"""Time limit for checking a completion against its schema, seconds. Some patterns and recursive schemas take years."""
MAX_SHOWN_CHARS = 200
REFERENCES = {"$ref", "$dynamicRef"}
BOOLEANS = {"True": True, "False": False}
"""Python's text for the JSON answers true and false. Answers of rows are always converted to text."""


def _check_multiple(_: Any, divisor: float, number: Any, __: Any) -> Iterator[ValidationError]:  # Any: JSON
    """Check `multipleOf` in decimal arithmetic. With floats, 19.99 would not be a multiple of 0.01."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return
    is_finite = number not in (math.inf, -math.inf)
    if not is_finite or Fraction(str(number)) % Fraction(str(divisor)):
        yield ValidationError(f"{number!r} is not a multiple of {divisor}")


def _check_unique(_: Any, is_unique: bool, items: Any, __: Any) -> Iterator[ValidationError]:  # Any: JSON
    """Check `uniqueItems` in one pass. jsonschema compares all pairs, which takes minutes for thousands of objects."""
    if is_unique and isinstance(items, list):
        keys = [json.dumps(_with_equal_numbers(item), sort_keys=True) for item in items]
        if len(set(keys)) < len(keys):
            yield ValidationError(f"{textwrap.shorten(repr(items), MAX_SHOWN_CHARS)} has non-unique elements")


def _with_equal_numbers(value: Any) -> Any:  # Any: JSON
    """Convert a JSON value so that equal numbers, such as 1 and 1.0, have the same text."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_equal_numbers(each) for each in value]
    if isinstance(value, dict):
        return {name: _with_equal_numbers(each) for name, each in value.items()}
    return value


SchemaValidator = extend(Draft202012Validator, {"multipleOf": _check_multiple, "uniqueItems": _check_unique})


class JSONSchemaEnvironment:
    """Rewards a completion whose JSON matches the row's schema and, if given, the row's answer."""

    row_fields = ("schema",)

    def __init__(self) -> None:
        self.grading_limit = GradingLimit(MAX_CHECK_S)

    def check_row(self, row: Mapping[str, Any]) -> None:  # Any: JSON
        """Raise ValueError if the row's schema is invalid, or if the row's answer does not match it."""
        try:
            Draft202012Validator.check_schema(row["schema"])
        except SchemaError as error:
            raise ValueError(f"`schema` is not a JSON Schema: {error.message}") from error
        _check_references(row["schema"])
        if not (answer := row.get("answer")):
            return
        validator = SchemaValidator(row["schema"], registry=Registry())
        try:
            with interrupt_after_computing(MAX_CHECK_S):
                problem = next(validator.iter_errors(_as_json(answer)), None)
        except RecursionError as error:
            raise ValueError("the answer cannot be checked: `schema` refers to itself without end") from error
        except OutOfTimeError as error:
            raise ValueError(
                f"the answer cannot be checked within {MAX_CHECK_S:g} s: give `schema` simpler patterns and references"
            ) from error
        if problem is not None:
            raise ValueError(f"the answer does not match the row's own schema: {problem.message}")

    def grade(self, sample: Sample) -> float:
        """1 for JSON that matches the row's schema and equals the row's answer (if any), else 0.

        A completion that takes too long to check also gets 0, and `grading_limit` counts it.

        Raises:
            SchemaError: the row's schema is invalid.
        """
        return self.grading_limit.call(sample, self._grade, sample)

    def _grade(self, sample: Sample) -> float:
        schema, answer = sample.metadata["schema"], sample.metadata.get("answer")
        # The empty registry prevents jsonschema from fetching a `$ref` from a URL.
        Draft202012Validator.check_schema(schema)
        validator = SchemaValidator(schema, registry=Registry())
        try:
            found = parse_json(sample.response)
        except (ValueError, RecursionError):
            return 0.0
        try:
            return float(validator.is_valid(found) and (not answer or _equals(found, _as_json(answer))))
        except RecursionError:  # the completion is nested too deeply for a recursive schema
            return 0.0


def _check_references(schema: Any) -> None:  # Any: JSON
    """Raise ValueError if a schema has a reference that cannot be resolved. A validator would raise an error only when
    it needs the reference for a completion."""
    root = DRAFT202012.create_resource(schema)
    pending = [(root, SPECIFICATIONS.combine(Registry()).resolver_with_root(root))]
    while pending:
        resource, resolver = pending.pop()
        keywords = REFERENCES & resource.contents.keys() if isinstance(resource.contents, Mapping) else set()
        for reference in (resource.contents[keyword] for keyword in keywords):
            try:
                resolver.lookup(reference)
            except Unresolvable as error:
                raise ValueError(
                    f"`schema` refers to {reference!r}, but does not contain it: include the definition, because "
                    "references are not fetched"
                ) from error
        pending += [(each, resolver.in_subresource(each)) for each in resource.subresources()]


def parse_json(text: str) -> Any:  # Any: JSON
    """Parse the last fenced block marked as JSON in a text. Fallbacks are the last fenced block, then the whole text.

    Raises:
        ValueError: the text is not JSON.
    """
    return json.loads(find_last_block(text, ["json"]), parse_constant=_refuse_constant)


def _equals(found: Any, expected: Any) -> bool:  # Any: JSON
    """True if two JSON values are equal. 1 equals 1.0. The number 1 does not equal true, although it does in Python."""
    return bool(Draft202012Validator({"const": expected}).is_valid(found))


def _as_json(answer: Any) -> Any:  # Any: JSON, or its text in a row's answer
    if not isinstance(answer, str):
        return answer
    if answer in BOOLEANS:  # how Python spells true and false
        return BOOLEANS[answer]
    try:
        return json.loads(answer)
    except ValueError as error:
        raise ValueError(
            f"the answer {answer!r} is not JSON ({error}): if it is a string, write it with its own quotes, "
            f"{json.dumps(json.dumps(answer))}"
        ) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
