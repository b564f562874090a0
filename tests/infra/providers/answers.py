"""Answers that an OpenAPI document admits: the least, the fullest, without each field, with each enumerated value.

Not here: who reads them (test_cloud_answers.py). Only what the providers' documents use of JSON Schema is known;
whether an answer is what its document admits is for ContractTransport to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Json = Any  # Any: JSON
Place = tuple[str, ...]
Size = Literal["usual", "least", "largest"]
TOMORROW = "a_value_of_tomorrow"
UNKNOWN_FIELDS = {"a_field_of_tomorrow": {"with": [1, None]}}
STRINGS = {
    "date-time": "2026-11-20T12:00:00Z",
    "uuid": "00000000-0000-4000-8000-000000000001",
    r"^\d+\.\d+$": "12.8",
}
"""Of formats and patterns."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer, and what is special about it."""

    title: str
    content: Json
    is_admitted: bool = True
    """The document admits it; it does not where the provider is newer than its document."""


@dataclass(kw_only=True)
class _Maker:
    """Makes one answer, and notes where its document enumerates values."""

    document: Mapping[str, Json]
    is_full: bool = True
    """With the fields that need not be there, but for `absent`."""
    is_null: bool = False
    """Whatever may be null is; of a full answer `null` alone."""
    absent: Place | None = None
    null: Place | None = None
    numbers: Size = "usual"
    strings: Size = "usual"
    num_items: int = 1
    chosen: Mapping[Place, Json] = field(default_factory=dict)
    unknown_fields: Mapping[str, Json] = field(default_factory=dict)
    enumerated: dict[Place, list[Json]] = field(default_factory=dict)
    limits: dict[Place, list[Json]] = field(default_factory=dict)
    optional: list[Place] = field(default_factory=list)
    nullable: list[Place] = field(default_factory=list)

    def make(self, schema: Mapping[str, Json], place: Place = ()) -> Json:
        """A value of the schema; `place` is where it stands in the answer."""
        schema = _whole(self.document, schema)
        choices = [_whole(self.document, each) for each in schema.get("anyOf", schema.get("oneOf", [schema]))]
        kinds = [kind for each in choices for kind in _kinds(each)]
        if "null" in kinds or schema.get("nullable"):
            self.nullable.append(place)
            if self.is_null or self.null == place or set(kinds) == {"null"}:
                return None
        others = [each for each in choices if _kinds(each) != ["null"]]
        either = (*place, "either")
        if len(others) > 1:
            self.enumerated[either] = list(range(len(others)))
        number = self.chosen.get(either, 0)
        if others[number] is not schema:
            return self.make(others[number], place if len(others) == 1 else (*place, str(number)))
        return self._of_kind(next(kind for kind in _kinds(schema) if kind != "null"), schema, place)

    def _of_kind(self, kind: str, schema: Mapping[str, Json], place: Place) -> Json:
        if place in self.chosen:
            return self.chosen[place]
        if "enum" in schema or "const" in schema:
            values = [value for value in schema.get("enum", [schema.get("const")]) if value is not None]
            self.enumerated[place] = values
            return next((value for value in values if value == _example(schema)), values[0])
        if kind == "object":
            return self._object(schema, place)
        if kind == "array":
            items = max(self.num_items, schema.get("minItems", 0))
            return [self.make(schema["items"], (*place, "[]")) for _ in range(items)]
        if kind == "boolean":
            return self.numbers != "least"
        return self._string(schema) if kind == "string" else self._number(kind, schema, place)

    def _object(self, schema: Mapping[str, Json], place: Place) -> Json:
        properties = schema.get("properties", {})
        required = schema.get("required", ())
        self.optional += [(*place, name) for name in properties if name not in required]
        names = properties if self.is_full else [name for name in properties if name in required]
        made = {n: self.make(properties[n], (*place, n)) for n in names if (*place, n) != self.absent}
        of_others = schema.get("additionalProperties")
        if isinstance(of_others, dict) and of_others and not properties:
            return {"whatever": self.make(of_others, (*place, "*"))} if self.num_items else {}
        return {**made, **self.unknown_fields}

    def _string(self, schema: Mapping[str, Json]) -> Json:
        kind = schema.get("format", schema.get("pattern", ""))
        if kind in STRINGS:
            return STRINGS[kind]
        example = _example(schema)
        if self.strings == "usual" and isinstance(example, str):
            return example
        length = {"usual": 6, "least": 0, "largest": 300}[self.strings]
        return "x" * min(max(length, schema.get("minLength", 0)), schema.get("maxLength", 300))

    def _number(self, kind: str, schema: Mapping[str, Json], place: Place) -> Json:
        least, example = schema.get("minimum", 0), _example(schema)
        usual = example if isinstance(example, float | int) else max(1, least)
        largest = schema.get("maximum", 2**63 - 1 if kind == "integer" else 1e308)
        self.limits[place] = [least, largest]
        return {"usual": int(usual) if kind == "integer" else usual, "least": least, "largest": largest}[self.numbers]


def _kinds(schema: Mapping[str, Json]) -> list[str]:
    kind = schema.get("type", "object")
    return list(kind) if isinstance(kind, list) else [kind]


def _example(schema: Mapping[str, Json]) -> Json:
    return next(iter(schema.get("examples", ())), schema.get("example", schema.get("default")))


def make_answers(document: Mapping[str, Json], schema: Mapping[str, Json]) -> Iterator[Answer]:
    """All answers of the schema that differ in kind."""

    def make(**how: Any) -> Json:
        return _Maker(document=document, **how).make(schema)

    yield Answer(title="least", content=make(is_full=False, is_null=True))
    yield Answer(title="least, not null", content=make(is_full=False))
    yield Answer(title="null wherever it may be", content=make(is_null=True))
    yield Answer(title="empty lists", content=make(num_items=0))
    yield Answer(title="least numbers", content=make(numbers="least"))
    yield Answer(title="largest numbers", content=make(numbers="largest"))
    yield Answer(title="shortest strings", content=make(strings="least"))
    yield Answer(title="longest strings", content=make(strings="largest"))
    fullest = _Maker(document=document)
    yield Answer(title="fullest", content=fullest.make(schema))
    yield Answer(title="more fields", content=make(unknown_fields=UNKNOWN_FIELDS), is_admitted=False)
    for place in fullest.optional:
        yield Answer(title=f"without {'.'.join(place)}", content=make(absent=place))
    for place in fullest.nullable:
        yield Answer(title=f"{'.'.join(place)}: null", content=make(null=place))
    for place, values in (fullest.enumerated | fullest.limits).items():
        for value in values:
            yield Answer(title=f"{'.'.join(place)}: {value}", content=make(chosen={place: value}))
        if place in fullest.enumerated and place[-1] != "either":
            yield Answer(title=f"{'.'.join(place)}: new", content=make(chosen={place: TOMORROW}), is_admitted=False)


def schemas_of(document: Mapping[str, Json], method: str, path: str) -> Iterator[tuple[int, str, Mapping[str, Json]]]:
    """The status, the kind and the schema of each answer in JSON to an operation, but for those that ask to wait."""
    for status, named in document["paths"][path][method.lower()]["responses"].items():
        response = _whole(document, named)
        number = 400 if status == "default" else int(status)
        for kind, content in response.get("content", {}).items():
            if kind.endswith("json") and number < 500 and number != 429:
                yield number, kind, content["schema"]
                if isinstance(content.get("example"), dict):
                    yield number, kind, _schema_like(content["example"], content["schema"])


def _schema_like(example: Json, written: Mapping[str, Json]) -> Mapping[str, Json]:
    """A schema of answers like the example, for documents that do not list the fields; any value in it may be null."""
    if written.get("type") == "array" and not isinstance(example, list):
        example = [example]  # one document shows one where its schema wants several
    if isinstance(example, dict):
        shown = written.get("properties", {})
        return {"properties": {name: _schema_like(each, shown.get(name, {})) for name, each in example.items()}}
    if isinstance(example, list):
        return {"type": "array", "items": _schema_like(example[0], written.get("items", {})) if example else {}}
    names = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    return {"type": [names[type(example)], "null"], "example": example}


def _whole(document: Mapping[str, Json], part: Mapping[str, Json]) -> Mapping[str, Json]:
    """The part with what it refers to and what it is put together from, properties of all in one."""
    if "$ref" in part:
        found: Json = document
        for key in part["$ref"].removeprefix("#/").split("/"):
            found = found[key.replace("~1", "/").replace("~0", "~")]
        return _whole(document, found)
    if "allOf" not in part:
        return part
    whole: dict[str, Json] = {key: value for key, value in part.items() if key != "allOf"}
    for each in part["allOf"]:
        piece = _whole(document, each)
        joined = {"properties": {**whole.get("properties", {}), **piece.get("properties", {})}}
        required = {"required": [*whole.get("required", ()), *piece.get("required", ())]}
        whole = {**piece, **whole, **(joined if joined["properties"] else {}), **required}
    return whole
