"""Collect the help of every setting: text, type, default, range, reading stage, names in other systems.

Not here: the values of one configuration (shown_settings.py), the definitions of settings (rollouts_core/config/).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from rollouts.flows.evaluate_settings import EvaluateConfig
from rollouts.flows.form import RunOptions
from rollouts.flows.retrain_settings import RetrainConfig, ScheduleConfig
from rollouts.flows.shown_settings import as_json
from rollouts.infra.node import NODE_TYPES
from rollouts_core.config import Config
from rollouts_core.config.foreign_names import FOREIGN_NAMES, STAGE
from rollouts_core.config.messages import nested_record
from rollouts_core.stages import STAGES, TRAININGS

BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
}
"""Phrase for each kind of bound in a JSON schema."""
TYPES = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "array": "list",
    "object": "table",
    "null": "nothing",
}
ACTS: Mapping[str, str] = {
    "mode": "choice of the stages",
    "model": "every stage",
    "data.selection": "stages select",
    "data.heldout": "stage evaluate",
    "data.prepare": "before the first stage, on this machine",
    "rollout": "stages with rewards: sampling and grading",
    "rollout.engine": "engines, which complete prompts",
    "evaluation": "stages select and evaluate",
    "deployment": "placement of trainer and engines on the node",
    "deployment.engine_gpu_ranks": "engines, which complete prompts",
    "report": "the report at the end",
    "hub": "downloads of models and datasets, on this machine",
    "node": "the machine of the stages",
    "run": "the run as a whole, on this machine",
    "retrain": "`rollouts up`: when a model is trained again",
    "schedule": "`rollouts up`: when data are checked",
    "evaluate": "`rollouts evaluate`",
}
"""The stage, machine or command that reads a setting, by a prefix of the setting's name. The longest prefix counts.
`_acts` names the stage that reads a setting of a training."""
EFFECTS = {
    "affects_result": "This setting cannot change a result: a finished stage is reused after the setting changed.",
    "affects_weights": "A resumed training may have another value of this setting than the interrupted training.",
    "needs_trust": "Runs that are started through Prefect may set this only to trusted values.",
}
"""Sentence for each mark of a setting in its JSON schema (rollouts_core/config/record.py)."""
REGISTRY = re.compile(r"`(rollouts_core[a-z_.]*)\.([A-Z_]+)`")
"""Reference of a help text to a mapping. The keys of the mapping are valid values of the setting."""
NAME = re.compile(r"[a-z_]+(?:\.\w+)+")


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingHelp:
    """The complete help of one setting."""

    name: str
    """Dotted name of the setting, as in a file. A setting in a list has no index: rollout.rewards.kind."""
    help: str
    type: str
    default: Any  # Any: JSON
    """None if the setting has no default."""
    is_required: bool
    choices: tuple[str, ...]
    """All allowed values, if the setting accepts only a fixed set of values; otherwise ()."""
    names: tuple[str, ...]
    """Names of the built-in functions that the setting accepts, and of functions in installed plugins. The setting
    also accepts a function of the user."""
    range: str
    """Bounds in words ("" for a setting without bounds)."""
    acts: str
    """The stage, machine or command that reads the setting."""
    effects: tuple[str, ...]
    """Sentences about the effect of a change on results and resumes, and about trust."""
    other_names: tuple[str, ...]
    """Names of the setting in TRL, Transformers, verl, slime and OpenRLHF, and names that users often guess."""

    @property
    def first_sentence(self) -> str:
        """The help up to its first period."""
        return self.help.partition(". ")[0].removesuffix(".")


def setting_helps() -> list[SettingHelp]:
    """The help of all settings of a configuration file, in the order of the records that define them."""
    others = _other_names()
    tables: list[tuple[str, type[BaseModel]]] = [("", Config), *(("node", each) for each in NODE_TYPES.values())]
    tables += [("run", RunOptions), ("retrain", RetrainConfig), ("schedule", ScheduleConfig)]
    tables += [("evaluate", EvaluateConfig)]
    found: dict[str, SettingHelp] = {}
    for prefix, record in tables:
        for each in _helps_of(record, None, prefix, others):
            found.setdefault(each.name, each)
    return list(found.values())


def _helps_of(
    record: type[BaseModel], defaults: BaseModel | None, prefix: str, others: Mapping[str, tuple[str, ...]]
) -> Iterator[SettingHelp]:
    """The help of the settings of a record. `defaults` is the record's value if the file omits the record."""
    properties = record.model_json_schema()["properties"]
    for key, field in record.model_fields.items():
        name = f"{prefix}.{key}" if prefix else key
        given = field.get_default(call_default_factory=True, validated_data={})
        default = getattr(defaults, key) if type(defaults) is record else given
        below = nested_record(record, key)
        is_section = below is field.annotation
        if below is not None and is_section:
            around = default if isinstance(default, BaseModel) else None
            yield from _helps_of(below, around, name, others)
            continue
        schema = properties[key]
        alternatives = [schema, *schema.get("anyOf", ())]
        yield SettingHelp(
            name=name,
            help=" ".join((field.description or "").split()),
            type=_type_of(schema),
            default=None if default is PydanticUndefined else as_json(default),
            is_required=default is PydanticUndefined,
            choices=tuple(str(choice) for each in alternatives for choice in _choices_in(each)),
            names=_registered_names(field.description or ""),
            range=", ".join(
                words.format(each[bound]) for each in alternatives for bound, words in BOUNDS.items() if bound in each
            ),
            acts=_acts(name),
            effects=_effects(name, schema),
            other_names=others.get(name, ()),
        )
        if below is not None:
            yield from _helps_of(below, None, name, others)


def _choices_in(schema: Mapping[str, Any]) -> list[object]:  # Any: a JSON schema
    return list(schema.get("enum", [schema["const"]] if "const" in schema else []))


def _registered_names(text: str) -> tuple[str, ...]:
    """The keys of the registry that a help text refers to."""
    found = REGISTRY.search(text)
    return tuple(getattr(import_module(found[1]), found[2])) if found else ()


def _type_of(schema: Mapping[str, Any]) -> str:  # Any: a JSON schema
    """The type in words, such as "text, or list: each a whole number"."""
    if alternatives := schema.get("anyOf"):
        return ", or ".join(dict.fromkeys(map(_type_of, alternatives)))
    kind = TYPES.get(str(schema.get("type", "")), "table" if "$ref" in schema else "any value")
    items = schema.get("items")
    return f"list: each a {_type_of(items)}" if kind == "list" and items else kind


def _acts(name: str) -> str:
    for stage, kind in TRAININGS.items():
        if f"{name}.".startswith(f"training.{stage}."):
            return f"stage {stage}: {kind.title}"
    data = name.removeprefix("data.").partition(".")[0]
    readers = [stage for stage, kind in STAGES.items() if name.startswith("data.") and data in kind.reads]
    around = [each for each in ACTS if f"{name}.".startswith(f"{each}.")]
    of_data = f"stage {' and '.join(readers)}: the rows that it reads" if readers else "stages that read data"
    return ACTS[max(around, key=len)] if around else of_data


def _effects(name: str, schema: Mapping[str, Any]) -> tuple[str, ...]:  # Any: a JSON schema
    marks = [mark for mark in EFFECTS if mark in schema]
    kinds = [kind for kind, record in NODE_TYPES.items() if name.removeprefix("node.") in record.model_fields]
    is_of_some = name.startswith("node.") and 0 < len(kinds) < len(NODE_TYPES)
    only = f"Only for node.kind = {' or '.join(json_text(kind) for kind in kinds)}."
    return ((only,) if is_of_some else ()) + tuple(EFFECTS[mark] for mark in marks)


def json_text(text: str) -> str:
    """The text in double quotes, as in a configuration file."""
    return f'"{text}"'


def _other_names() -> dict[str, tuple[str, ...]]:
    """The names in other systems, by the dotted name of the setting here."""
    found: dict[str, list[str]] = {}
    for foreign, hint in FOREIGN_NAMES.items():
        for stage in TRAININGS:
            for setting in NAME.findall(hint.partition(": ")[0].replace(STAGE, f"training.{stage}")):
                names = found.setdefault(setting, [])
                if foreign not in names:
                    names.append(foreign)
    return {setting: tuple(names) for setting, names in found.items()}


def find_settings(asked: str, known: list[SettingHelp]) -> list[SettingHelp]:
    """Find settings by their name, by the name of their section, or by words in them.

    Settings whose names contain the words come first, then settings with the words in their help or choices.
    """
    name = ".".join(part for part in asked.strip().split(".") if not part.isdecimal())
    if exact := [each for each in known if each.name == name]:
        below = [each for each in known if each.name.startswith(f"{name}.")]
        return exact + below
    if section := [each for each in known if each.name.startswith(f"{name}.")]:
        return section
    words = name.lower()
    if foreign := [each for each in known if words in each.other_names]:
        return foreign
    searches = (
        lambda each: words == each.name.rpartition(".")[2],
        lambda each: words in each.name or any(words in other for other in each.other_names),
        lambda each: words in each.help.lower() or words in each.choices,
    )
    return list({each.name: each for fits in searches for each in known if fits(each)}.values())
