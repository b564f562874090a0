"""The short form in Prefect's UI: fields for the usual settings, and one text with all other settings as TOML.

    Pipeline ──form_values──> name, model, data, ..., budget, more_settings ──tables_of──> the tables of a file

Not here: the flow with these parameters (short_form_flow.py), the full form and the reading of tables (form.py). This
module must not import modules with settings, which are slow: `rollouts status` uses it to read parameters of runs.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from rollouts_core.algorithms.presets import ALGORITHMS
from rollouts_core.errors import ConfigError

if TYPE_CHECKING:
    from rollouts.flows.form import Pipeline

SOURCE = "the form"
"""Source of a setting in error messages, in place of a file's path."""
MORE = "more_settings"
"""The parameter with all settings that have no field. Only runs with the short form have this parameter."""
DATA, BUDGET, ALGORITHM = "data", "budget", "algorithm"
MAX_SHOWN_VALUE = 60
READ_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "name": str,
    "store": str,
    "credentials": str,
    "restarts": int,
    "stop_timeout_s": (int, float),
}
"""The types of the settings in [run] that commands and the serving process read before a run has checked them."""
LIST = re.compile(r"\[\n((?: {4}.*,\n)+)\]")
"""Matches a list of simple values in the output of tomli_w, which writes each value on its own line."""
MAX_LIST_CHARS = 80


@dataclass(frozen=True, slots=True)
class FormField:
    """A field of the short form."""

    title: str
    setting: str
    """The dotted name of the setting in a file. The field `data` contains the table [data] as TOML."""


FIELDS = {
    "name": FormField("Name", "run.name"),
    "model": FormField("Model", "model.path"),
    DATA: FormField("Data", "data"),
    "mode": FormField("Mode", "mode"),
    "sft_steps": FormField("SFT steps", "training.sft.num_steps"),
    "sft_learning_rate": FormField("SFT learning rate", "training.sft.optim.lr"),
    "sft_batch": FormField("SFT batch", "training.sft.batch_size"),
    "rl_steps": FormField("RL steps", "training.rl.num_steps"),
    "rl_learning_rate": FormField("RL learning rate", "training.rl.optim.lr"),
    "rl_batch": FormField("RL batch", "rollout.batch_size"),
    ALGORITHM: FormField("Algorithm", "training.rl.algorithm"),
    "environment": FormField("Environment", "rollout.environment"),
    "reward": FormField("Reward", "rollout.reward_fn"),
    "engine": FormField("Engine", "rollout.engine.kind"),
    "node": FormField("Node", "node.kind"),
    BUDGET: FormField("Budget", "node.max_usd"),
}
"""The fields in the order of the form, by the names of the flow's parameters."""
MORE_TITLE = "More settings"

Values = Mapping[str, Any]  # Any: JSON
"""Values of the form's fields, by parameter."""
Tables = dict[str, Any]  # Any: settings of every type
"""The tables of a file."""


def is_short(parameters: Mapping[str, Any]) -> bool:  # Any: JSON
    """Whether the parameters of a run or deployment have the short form."""
    return MORE in parameters


def form_values(pipeline: Pipeline) -> dict[str, Any]:  # Any: JSON
    """The values of the short form's fields for a pipeline. `run.store` is left out.

    Raises:
        TypeError: a setting contains null, which TOML lacks.
    """
    records = {"node": pipeline.node, "run": pipeline.run}
    every: Tables = pipeline.config.model_dump(mode="json")
    every |= {name: record.model_dump(mode="json") for name, record in records.items()}
    others: Tables = pipeline.config.model_dump(mode="json", exclude_defaults=True)
    others |= {name: record.model_dump(mode="json", exclude_defaults=True) for name, record in records.items()}
    _take(others, "run.store")
    values: dict[str, Any] = {}
    for name, field in FIELDS.items():
        taken = _take(others, field.setting)
        values[name] = _write_toml(taken or {}) if name == DATA else _find(every, field.setting)
    values[BUDGET] = values[BUDGET] or 0.0  # only rented nodes have a limit
    values[ALGORITHM] = _named_algorithm(pipeline.settings)
    if values[ALGORITHM]:
        _leave_to_algorithm(values[ALGORITHM], others, every)
    others = {name: table for name, table in others.items() if table != {}}
    return values | {MORE: _write_toml(others)}


def _named_algorithm(settings: Mapping[str, Any]) -> str:  # Any: file content
    """The algorithm that a file names ("" without one). The records of a pipeline do not keep the algorithm's name."""
    named = _find(settings, FIELDS[ALGORITHM].setting)
    return named if isinstance(named, str) else ""


def _leave_to_algorithm(algorithm: str, others: Tables, every: Tables) -> None:
    """Remove settings that the algorithm fills in, and add settings whose values differ from the algorithm's."""
    for setting, usual in _leaves(ALGORITHMS[algorithm].settings, "training.rl"):
        _take(others, setting)
        value = _find(every, setting)
        if value != usual:
            _put(others, setting, value)


def tables_of(values: Values) -> Tables:
    """Convert the values of the short form to the tables of a file. *More settings* overrides the fields.

    Raises:
        ConfigError: a text is not valid TOML.
    """
    more = _read_toml(values, MORE, MORE_TITLE)
    tables: Tables = {}
    for setting, name, value in _given(values):
        if name != DATA:
            _put(tables, setting, value)
    if data := _read_toml(values, DATA, FIELDS[DATA].title):  # set as a whole, because keys of [data] may contain dots
        if isinstance(data.get(DATA), dict):
            raise ConfigError(f"{SOURCE}: {FIELDS[DATA].title} begins with [{DATA}]: remove the heading, keep its keys")
        tables[DATA] = data
    _merge(tables, more)
    kind = _find(tables, FIELDS["node"].setting)
    if kind != "rented" and _find(more, FIELDS[BUDGET].setting) is None:
        _take(tables, FIELDS[BUDGET].setting)  # nodes of other kinds cost nothing
    return tables


def check_doubled(values: Values, offered: Callable[[], Values]) -> None:
    """Raise ConfigError if a field that the user changed and *More settings* give a setting different values.

    Args:
        offered: returns the deployment's default values, to find the changed fields. The function is called only if a
            setting has two values.
    """
    more = _read_toml(values, MORE, MORE_TITLE)
    doubled = [
        (setting, name, value, found)
        for setting, name, value in _given(values)
        if (found := _find(more, setting)) not in (None, value)
    ]
    before = offered() if doubled else {}
    lines = [
        f"{SOURCE}: {setting} is {_shown(value)} in the field {FIELDS[name].title} and {_shown(found)} in "
        f"{MORE_TITLE}: remove it from {MORE_TITLE}, or restore the field's former value"
        for setting, name, value, found in doubled
        if name not in before or values[name] != before[name]
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def held_tables(parameters: Mapping[str, Any]) -> Mapping[str, Any]:  # Any: JSON
    """The settings of a run as tables, from its parameters of the full form or the short form.

    Empty if the TOML of the short form is invalid. Settings in [run] of a wrong type are left out: Prefect checks types
    only when it starts a run. A run with such mistakes failed before it used jobs or machines.
    """
    try:
        tables = tables_of(parameters) if is_short(parameters) else parameters
    except ConfigError:
        return {}
    held = {name: table for name, table in tables.items() if isinstance(table, Mapping)}
    run = {
        name: value for name, value in held.get("run", {}).items() if isinstance(value, READ_TYPES.get(name, object))
    }
    return held | {"run": run}


def with_named_store(values: Values, store: Path) -> dict[str, Any]:  # Any: JSON
    """Set `run.store` in the values of a deployment."""
    more = tomllib.loads(values[MORE])
    _put(more, "run.store", str(store))
    return {**values, MORE: _write_toml(more)}


def _given(values: Values) -> Iterator[tuple[str, str, Any]]:  # Any: JSON
    """Yield the setting, the parameter and the value of each field that is not empty."""
    for name, field in FIELDS.items():
        if name == DATA:
            for key, value in _read_toml(values, DATA, field.title).items():
                yield f"{field.setting}.{key}", name, value
        elif values.get(name) not in (None, "") and (name != BUDGET or values[name]):
            yield field.setting, name, values[name]


def _read_toml(values: Values, name: str, title: str) -> Tables:
    text = values.get(name) or ""
    if not isinstance(text, str):
        raise ConfigError(f"{SOURCE}: {title} is {_shown(text)}: expected a text in TOML")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{SOURCE}: {title} is not valid TOML: {error}") from error


def _write_toml(tables: Tables) -> str:
    """Format the tables as TOML, with each short list on one line."""
    return LIST.sub(_on_one_line, tomli_w.dumps(tables))


def _on_one_line(written: re.Match[str]) -> str:
    items = (line.strip().removesuffix(",") for line in written[1].splitlines())
    line = f"[{', '.join(items)}]"
    return line if len(line) <= MAX_LIST_CHARS else written[0]


def _shown(value: Any) -> str:  # Any: a setting
    text = json.dumps(value, default=str)
    return text if len(text) <= MAX_SHOWN_VALUE else f"{text[:MAX_SHOWN_VALUE]}..."


def _find(tables: Mapping[str, Any], setting: str) -> Any:  # Any: a setting, None without one
    """The value of a setting by its dotted name."""
    found: Any = tables
    for part in setting.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _put(tables: Tables, setting: str, value: Any) -> None:  # Any: a setting
    *sections, last = setting.split(".")
    for part in sections:
        tables = tables.setdefault(part, {})
    tables[last] = value


def _take(tables: Tables, setting: str) -> Any:  # Any: a setting, None without one
    """Remove a setting and the tables that become empty, and return its value."""
    section, _, rest = setting.partition(".")
    if not rest:
        return tables.pop(section, None)
    below = tables.get(section)
    if not isinstance(below, dict):
        return None
    taken = _take(below, rest)
    if not below:
        del tables[section]
    return taken


def _merge(tables: Tables, others: Mapping[str, Any]) -> None:  # Any: settings of every type
    """Set all settings of `others` in the tables."""
    for name, value in others.items():
        if isinstance(value, dict) and isinstance(tables.get(name), dict):
            _merge(tables[name], value)
        else:
            tables[name] = value


def _leaves(table: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:  # Any: settings of every type
    """Yield the settings in a table and its subtables, with their dotted names."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{place}.{name}")
        else:
            yield f"{place}.{name}", value
