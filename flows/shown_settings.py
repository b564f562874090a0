"""The settings of a pipeline with their defaults, and the origin of each value: the file, a default, or an algorithm.

Not here: reading a file (form.py), what settings mean (rollouts_core/config/).
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
    """A setting of a pipeline."""

    name: str
    """The setting's dotted name, as in a file: training.rl.num_steps."""
    value: Any  # Any: JSON
    default: Any  # Any: JSON
    """None for a setting without a default."""
    is_default: bool
    is_required: bool
    origin: str
    """Origin of the value: file, default, or the setting that filled the value in."""


def settings_of(pipeline: Pipeline) -> list[Setting]:
    """All settings of a pipeline, in the order of its records."""
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
    """The settings of a record; `defaults` is the record that stands there when the file says nothing."""
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
    """Whether the file has the setting. A Python file counts as having all settings, because its content is not
    kept."""
    section: Any = given
    for part in name.split("."):
        if not isinstance(section, Mapping) or part not in section:
            return not given
        section = section[part]
    return True


def as_json(value: object) -> Any:  # Any: JSON
    """The value as JSON has it."""
    return json.loads(json.dumps(to_jsonable_python(value, fallback=_name_of)))


def _name_of(value: object) -> str:
    """A function by its dotted name."""
    return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', repr(value))}"
