"""Parse settings on the command line, such as training.rl.num_steps=10, and set them in a configuration's tables.

Not here: reading a file (form.py), replacing parameters of a deployment (deployments.py).
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from datetime import date, time
from typing import Any

from rollouts_core.algorithms.presets import ALGORITHMS
from rollouts_core.errors import ConfigError

COMMAND_LINE = "command line"
ALGORITHM = "training.rl.algorithm"
Resolve = Callable[[dict[str, Any]], dict[str, Any]]  # Any: unchecked input
ASSIGNMENT = re.compile(r"[A-Za-z_][\w.]*=")


def is_assignment(text: str) -> bool:
    """True if an argument begins with a name and an equals sign. A path such as a=b.toml must be written ./a=b.toml."""
    return ASSIGNMENT.match(text) is not None


def check_assignments(given: Sequence[str]) -> None:
    """Raise ConfigError if an argument after the configuration is not of the form key=value."""
    if others := [each for each in given if not is_assignment(each)]:
        raise ConfigError(f"expected settings as key=value after the configuration, found {others[0]}: leave it out")


def key_of(assignment: str) -> str:
    """The dotted key of `key=value`."""
    return assignment.partition("=")[0]


def assign(
    settings: dict[str, Any],  # Any: unchecked file content
    assignment: str,
    *,
    resolve: Resolve = dict,
) -> None:
    """Set one setting in the tables of a configuration.

    Args:
        assignment: `key=value`, with the setting's dotted name as the key.
        resolve: makes the paths in tables absolute. It is called with tables that contain only the assigned setting.

    Raises:
        ConfigError: the assignment has another form, or a section in its key is a value, not a table.
    """
    key, separator, text = assignment.partition("=")
    if not separator or not key:
        raise ConfigError(f"{assignment!r} is not of the form key=value, like training.rl.num_steps=10")
    node = settings.get("node")
    if key == "node.kind" and isinstance(node, dict) and text != node.get("kind"):
        settings["node"] = {}  # settings of the former kind of node do not fit the new kind
    *sections, last = key.split(".")
    section = settings
    for name in sections:
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{key}: {name} is a value, not a table of settings")
    tables: dict[str, Any] = {last: assigned_value(text)}
    for name in reversed(sections):
        tables = {name: tables}
    found: Any = resolve(tables)
    for name in (*sections, last):
        found = found[name]
    section[last] = found


def assigned_value(text: str) -> Any:  # Any: JSON
    """Parse the value of `key=value` as TOML, else as JSON, else as text."""
    try:
        table = tomllib.loads(f"value = {text}")
    except ValueError:
        table = {}
    if table.keys() == {"value"} and not isinstance(table["value"], date | time):  # no setting is a date
        return table["value"]
    try:
        return json.loads(text)
    except ValueError:
        return text


def forget_algorithm(settings: Mapping[str, Any]) -> None:  # Any: JSON
    """Remove all settings that any algorithm fills in, so that settings of two algorithms are never mixed."""
    rl = settings.get("training", {}).get("rl", {})
    for name in {name for preset in ALGORITHMS.values() for name in preset.settings}:
        rl.pop(name, None)
