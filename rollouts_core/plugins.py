"""Registries that installed packages extend by entry points: built-in rows first, then those of packages.

    [project.entry-points."rollouts.objectives"]         group of the registry
    mine = "my_package.losses:MINE"                      name in a configuration = where its value is

A name that is built in is looked up without reading what is installed. Any other name imports the package of
its entry point, and no other package. A package that cannot be used is left out, with one warning.

`infra/plugins.py` is a link to this file: infra imports nothing of rollouts_core, and nodes have rollouts_core alone.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

PREFIX = "rollouts."
"""Begins the name of each group."""
ENTRY_POINTS = "entry_points.txt"
ABOUT = (ENTRY_POINTS, "METADATA")
"""The files by which Python finds the entry points of an installed package, and its name."""
ValueT = TypeVar("ValueT")

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Plugin:
    """An entry point of an installed package."""

    point: EntryPoint
    package: str
    version: str
    is_loaded: bool = False
    value: Any = None  # Any: of every group
    problem: str = field(default="", kw_only=True)
    """Why it is left out; known after loading."""


class Registry(Mapping[str, ValueT], Generic[ValueT]):
    """Built-in values by name, and those of the group's entry points.

    Args:
        built_in: a text stands for a value that is imported late: `package.module:name`.
        find_fault: returns why a package's value of a name cannot be used; "" if it can.
    """

    def __init__(
        self,
        group: str,
        built_in: Mapping[str, ValueT | str],
        find_fault: Callable[[str, Any], str],  # Any: whatever a package names
    ) -> None:
        self.group, self.built_in, self._find_fault = group, built_in, find_fault

    def __getitem__(self, name: str) -> ValueT:
        if name in self.built_in:
            row = self.built_in[name]
            if not isinstance(row, str):
                return row
            module, _, attribute = row.partition(":")
            found: ValueT = getattr(importlib.import_module(module), attribute)
            return found
        plugin = self._find(name)
        if plugin is None or self._load(plugin).problem:
            raise KeyError(name)
        added: ValueT = plugin.value
        return added

    def __iter__(self) -> Iterator[str]:
        yield from self.built_in
        yield from (plugin.point.name for plugin in self._plugins() if not self._load(plugin).problem)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def locate(self, name: str) -> str:
        """The name as `package.module:name` if a package has it; any other name as it is. Nothing is imported."""
        plugin = None if name in self.built_in or ":" in name else self._find(name)
        return plugin.point.value if plugin else name

    def describe_plugins(self) -> list[dict[str, str]]:
        """A row for each entry point of the group; `problem` says why it is left out, and is "" otherwise."""
        return [
            {
                "group": self.group,
                "name": plugin.point.name,
                "package": plugin.package,
                "version": plugin.version,
                "value": plugin.point.value,
                "problem": self._load(plugin).problem,
            }
            for plugin in self._plugins()
        ]

    def _plugins(self) -> list[Plugin]:
        return [plugin for plugin in find_plugins() if plugin.point.group == self.group]

    def _find(self, name: str) -> Plugin | None:
        return next((plugin for plugin in self._plugins() if plugin.point.name == name), None)

    def _load(self, plugin: Plugin) -> Plugin:
        if plugin.is_loaded:
            return plugin
        plugin.is_loaded = True
        name, kind = plugin.point.name, self.group.removeprefix(PREFIX).removesuffix("s")
        try:
            if name in self.built_in:
                plugin.problem = f"the built-in {kind} has this name"
            elif (first := self._find(name)) is not plugin and first is not None:
                plugin.problem = f"the package {first.package} has another {kind} of this name"
            else:
                plugin.value = plugin.point.load()
                plugin.problem = self._find_fault(name, plugin.value)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a package that is broken must not break `status`
            plugin.problem = repr(error)
        if plugin.problem:
            logger.warning("the %s %s of the package %s is left out (%s)", kind, name, plugin.package, plugin.problem)
        return plugin


def find_fault_of_callable(name: str, value: object) -> str:
    """For groups whose values are called."""
    return "" if callable(value) else f"it is {value!r:.80}, which cannot be called"


@cache
def find_plugins() -> tuple[Plugin, ...]:
    """The entry points of all groups, in the order in which Python finds their packages; nothing is imported."""
    return tuple(
        Plugin(point, package.name, package.version)
        for package in _packages()
        for point in package.entry_points
        if point.group.startswith(PREFIX)
    )


@cache
def files_about_packages() -> dict[str, dict[str, Path]]:
    """For each top-level name of a package with entry points for us, the files that Python finds these by.

    The files have the names that they need below a folder of `sys.path`.
    """
    about: dict[str, dict[str, Path]] = {}
    for package in _packages():
        files = package.files or []
        kept = {str(file): Path(str(file.locate())) for file in files if file.name in ABOUT and len(file.parts) == 2}
        points = [plugin.point for plugin in find_plugins() if plugin.package == package.name]
        names = {point.module.partition(".")[0] for point in points}
        names |= {Path(file.parts[0]).stem for file in files if points and file.suffix == ".py"}
        about |= dict.fromkeys(names, kept)
    return about


@cache
def _packages() -> tuple[Distribution, ...]:
    """The installed packages with entry points of our groups, each from the first folder of `sys.path` that has one."""
    found: dict[str, Distribution] = {}
    for package in distributions():
        if f"[{PREFIX}" in (package.read_text(ENTRY_POINTS) or ""):
            found.setdefault(package.name, package)
    return tuple(found.values())


@dataclass(frozen=True, eq=False)  # no hash of the registry, which has none
class KeyOf:
    """Marks a text as a key of a registry. The keys are looked up when a setting is read, and a form shows them."""

    registry: Mapping[str, object]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:  # Any: a type
        return core_schema.no_info_plain_validator_function(
            self._check, serialization=core_schema.to_string_ser_schema()
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self.registry), "type": "string"}

    def _check(self, value: object) -> str:
        if not isinstance(value, str) or value not in self.registry:
            *others, last = map(repr, self.registry)
            raise PydanticKnownError("literal_error", {"expected": f"{', '.join(others)} or {last}"})
        return value
