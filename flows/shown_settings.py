"""List the settings of a pipeline with value, default and origin: the file, the default, or an algorithm.

Not here: reading a file (form.py), the help of settings (setting_help.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from rollouts.flows.assignments import ALGORITHM
from rollouts.flows.form import Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting of a pipeline, with its value."""

    name: str
    """The setting's dotted name, as in a file: training.rl.num_steps."""
    value: Any  # Any: JSON
    default: Any  # Any: JSON
    """None if the setting has no default."""
    is_default: bool
    is_required: bool
    origin: str
    """Origin of the value: "file", "default", or the name of the setting that filled in the value."""


def settings_of(pipeline: Pipeline) -> list[Setting]:
    """All settings of a pipeline, in the order of the records that define them."""
    given = pipeline.settings
    tables: list[tuple[str, BaseModel | None]] = [
        ("", pipeline.config),
        ("node", pipeline.node),
        ("run", pipeline.run),
        ("retrain", pipeline.retrain),
        ("schedule", pipeline.schedule),
        ("evaluate", pipeline.evaluate),
    ]
    return [each for prefix, record in tables if record is not None for each in _settings(record, None, prefix, given)]


def _settings(
    record: BaseModel,
    defaults: BaseModel | None,
    prefix: str,
    given: Mapping[str, Any],  # Any: file content
) -> Iterator[Setting]:
    """The settings of a record. `defaults` is the record's value if the file omits the record."""
    for key, field in type(record).model_fields.items():
        name = f"{prefix}.{key}" if prefix else key
        value = getattr(record, key)
        default = (
            getattr(defaults, key)
            if type(defaults) is type(record)
            else field.get_default(call_default_factory=True, validated_data={})
        )
        if isinstance(value, BaseModel):
            yield from _settings(value, default if isinstance(default, BaseModel) else None, name, given)
            continue
        is_required = default is PydanticUndefined
        shown = as_json(value)
        kept = None if is_required else as_json(default)
        is_default = not is_required and shown == kept
        origin = "file" if _is_given(name, given) else "default" if is_default else ALGORITHM
        yield Setting(
            name=name, value=shown, default=kept, is_default=is_default, is_required=is_required, origin=origin
        )


def _is_given(name: str, given: Mapping[str, Any]) -> bool:  # Any: file content
    """Whether the file contains the setting. True for every setting of a Python file, whose content is not kept."""
    section: Any = given
    for part in name.split("."):
        if not isinstance(section, Mapping) or part not in section:
            return not given
        section = section[part]
    return True


def as_json(value: object) -> Any:  # Any: JSON
    """Convert the value to JSON types. A function becomes its dotted name."""
    return json.loads(json.dumps(to_jsonable_python(value, fallback=_name_of)))


def _name_of(value: object) -> str:
    """The name of a function, as module:function."""
    return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', repr(value))}"
