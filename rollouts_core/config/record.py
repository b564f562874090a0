"""The base class of all records of settings. Records are immutable, reject unknown keys and do not convert types."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_core import PydanticKnownError

from rollouts_core.config.secret_addresses import refuse_secrets

PLACEMENT: JsonDict = {"affects_result": False}
"""Marks a field that cannot change a result (paths, intervals, micro-batch sizes), so that fingerprints leave the field
out."""

ALIKE = "gives_same_result_as_default"
"""Key of a mark with a value that gives the same result as the field's default. Fingerprints leave out both values."""

SELECTION: JsonDict = {"affects_weights": False}
"""Marks a field that sets the length of a training or the number of its checkpoints. A resumed training may change a
field with this mark."""

CALLS_FUNCTION: JsonDict = {"needs_trust": "function"}
RUNS_PROGRAM: JsonDict = {"needs_trust": "program"}
SENDS_SECRET: JsonDict = {"needs_trust": "secret"}
"""Marks of fields that contain a function to call, a program or its arguments, or an environment variable whose value
is sent to another machine. A run requested through Prefect may set a field with one of these marks only to values that
the operator trusts (`flows/trusted_code.py`). A field with SENDS_SECRET also has `sent_to`: the name of the field with
the address."""


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"must be a finite number, found {value}")
    return value


def name_of_function(function: str | Callable[..., Any]) -> str:  # Any: user functions of many shapes
    """The name of a function for a configuration.

    A text is returned as it is; a function gives `package.module:function`.
    """
    if isinstance(function, str):
        return function
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def _write_function(function: str | Callable[..., Any]) -> str:  # Any: user functions of many shapes
    if not isinstance(function, str) and (not hasattr(function, "__qualname__") or "<" in function.__qualname__):
        raise ValueError(f"{function!r} cannot be named in a file: define it as a function of a module")
    return name_of_function(function)


PARTS_ALONE = "parts alone"
"""Validation context in which the rules between settings are not checked."""
MAX_INTEGER = 2**63 - 1
Finite = Annotated[float, Field(strict=True), AfterValidator(_finite)]
GpuRank = Annotated[int, Field(ge=0, strict=True)]
FunctionName = Annotated[
    str | Callable[..., Any],  # Any: user functions of many shapes
    PlainSerializer(_write_function, return_type=str),
    WithJsonSchema({"type": "string"}),
    Field(json_schema_extra=CALLS_FUNCTION),
]


def _check_grades(given: Any) -> Any:  # Any: a user's object
    if not callable(getattr(given, "grade", None)):
        raise ValueError(f"expected a name, a class or an object with a method grade, found {given!r:.80}")
    return given


EnvironmentName = Annotated[
    str | Callable[..., Any] | Annotated[Any, AfterValidator(_check_grades)],  # Any: a user's object
    PlainSerializer(_write_function, return_type=str),
    WithJsonSchema({"type": "string"}),
    Field(json_schema_extra=CALLS_FUNCTION),
]
"""Like `FunctionName`, but the value may also be an environment object."""


SCALAR_ERRORS: dict[object, Literal["bool_type", "int_type", "float_type"]] = {
    bool: "bool_type",
    int: "int_type",
    float: "float_type",
}


def _scalar_of(annotation: object) -> object:
    """The type of a field, without its checks and without None."""
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) is Annotated or (len(parts) == 1 and type(None) in get_args(annotation)):
        return _scalar_of(parts[0])
    return annotation


BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
"""Pydantic's names of bounds, with the names that JSON schema and forms use."""


def _name_bounds(schema: JsonDict) -> None:
    """Rename bounds to their names in JSON schema.

    Pydantic does not rename a bound that follows one of this project's validators.
    """
    properties = schema.get("properties")
    assert isinstance(properties, dict), "a record has fields"
    for field in properties.values():
        assert isinstance(field, dict), "schemas are changed in place, so each field needs its own schema"
        for own, name in BOUNDS.items():
            if own in field:
                field[name] = field.pop(own)


class Record(BaseModel):
    """Base class of all settings.

    Records are immutable and reject unknown keys. The docstrings of fields are the help texts.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, json_schema_extra=_name_bounds
    )

    def without_places(self) -> Self:
        """Return the record without the paths in fields that contain a path only in some cases.

        Fields that always contain a path are marked PLACEMENT instead.

        Fingerprints are computed from the result, because paths differ between machines.
        """
        return self

    def _broken_rules(self) -> Iterator[str]:
        """Yield a sentence for each broken rule between settings. Records with rules between settings override this
        method."""
        yield from ()

    @model_validator(mode="after")
    def _check_rules(self, info: ValidationInfo) -> Self:
        broken = [] if info.context == PARTS_ALONE else list(self._broken_rules())
        if broken:
            raise ValueError("\n".join(broken))
        return self

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_conversions(cls, value: Any, info: ValidationInfo) -> Any:  # Any: unchecked input
        """Reject values that pydantic would convert, such as True to 1 or "3" to 3.

        Also reject addresses with passwords or keys, and integers of more than 64 bits, which would make torch or a
        slice fail in the middle of a job.
        """
        assert info.field_name is not None, "only fields are validated"
        refuse_secrets(value)
        kind = SCALAR_ERRORS.get(_scalar_of(cls.model_fields[info.field_name].annotation))
        if kind and (isinstance(value, str) or isinstance(value, bool) != (kind == "bool_type")):
            raise PydanticKnownError(kind)
        if isinstance(value, int) and not -MAX_INTEGER <= value <= MAX_INTEGER:
            raise ValueError(f"must be a number of at most {MAX_INTEGER} (64 bits), found a larger number")
        return value
