"""Write JSON that keeps to a schema. A row has `schema`, and may have `answer`, the only JSON that is right."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema_specifications import REGISTRY as SPECIFICATIONS
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from rollouts_core.environments.code import find_last_block
from rollouts_core.types import Sample

BOOLEANS = {"True": True, "False": False}
"""What is left of a row's `"answer": true` and `false`, since the answer of a prompt is text."""


class JSONSchemaEnvironment:
    """Rewards a completion that is valid JSON of the row's schema."""

    row_fields = ("schema",)

    def check_row(self, row: Mapping[str, Any]) -> None:  # Any: JSON
        """Raise ValueError for a schema that is none, or an answer that is no JSON of it."""
        try:
            Draft202012Validator.check_schema(row["schema"])
        except SchemaError as error:
            raise ValueError(f"`schema` is no JSON Schema: {error.message}") from error
        try:
            _check_references(row["schema"])
        except Unresolvable as error:
            raise ValueError(f"`schema` refers to {error.ref!r}, which is not in it, and nothing is fetched") from error
        if not (answer := row.get("answer")):
            return
        validator = Draft202012Validator(row["schema"], registry=Registry())
        if (problem := next(validator.iter_errors(_as_json(answer)), None)) is not None:
            raise ValueError(f"the answer does not keep to the row's own schema: {problem.message}")

    def grade(self, sample: Sample) -> float:
        """1 for JSON that keeps to the schema, and equals the answer where the row has one, else 0.

        Raises:
            SchemaError: the row's schema is none.
        """
        schema, answer = sample.metadata["schema"], sample.metadata.get("answer")
        # The empty registry keeps a `$ref` to some URL from being fetched.
        Draft202012Validator.check_schema(schema)
        validator = Draft202012Validator(schema, registry=Registry())
        try:
            found = parse_json(sample.response)
        except (ValueError, RecursionError):
            return 0.0
        try:
            return float(validator.is_valid(found) and (not answer or _equals(found, _as_json(answer))))
        # A schema that refers to itself follows the response as deep as that goes, and `multipleOf` divides numbers
        # that a float cannot hold.
        except (RecursionError, OverflowError):
            return 0.0


def _check_references(schema: Any) -> None:  # Any: JSON
    """Raise Unresolvable for a `$ref` that leads to nothing, which a validator sees when it comes to it."""
    root = DRAFT202012.create_resource(schema)
    pending = [(root, SPECIFICATIONS.combine(Registry()).resolver_with_root(root))]
    while pending:
        resource, resolver = pending.pop()
        if isinstance(resource.contents, Mapping) and "$ref" in resource.contents:
            resolver.lookup(resource.contents["$ref"])
        pending += [(each, resolver.in_subresource(each)) for each in resource.subresources()]


def parse_json(text: str) -> Any:  # Any: JSON
    """The JSON that a text is, or its last fenced block that calls itself JSON, else its last one.

    Raises:
        ValueError: neither is JSON.
    """
    return json.loads(find_last_block(text, ["json"]), parse_constant=_refuse_constant)


def _equals(found: Any, expected: Any) -> bool:  # Any: JSON
    """Whether two JSON values are the same: 1 is 1.0 and, unlike in Python, not true."""
    return bool(Draft202012Validator({"const": expected}).is_valid(found))


def _as_json(answer: Any) -> Any:  # Any: JSON, as text where it is a row's answer
    if not isinstance(answer, str):
        return answer
    if answer in BOOLEANS:  # none of which is JSON
        return BOOLEANS[answer]
    try:
        return json.loads(answer)
    except ValueError as error:
        raise ValueError(
            f"the answer {answer!r} is no JSON ({error}): where it is a text, write it with quotes of its own, "
            f"{json.dumps(json.dumps(answer))}"
        ) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
