"""Registries that installed packages extend by entry points: built-in rows first, then those of packages.

    [project.entry-points."rollouts.objectives"]         group of the registry
    mine = "my_package.losses:MINE"                      name in a configuration = location of its value

A built-in name is looked up without reading the installed packages. Any other name imports the package of its entry
point, and no other package. An unusable package is left out with one warning.

`infra/plugins.py` is a symbolic link to this file: infra must not import rollouts_core, and a rented machine has only
the package rollouts_core.
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
"""Prefix of each group's name."""
ENTRY_POINTS = "entry_points.txt"
ABOUT = (ENTRY_POINTS, "METADATA")
"""Files with the entry points and the name of an installed package."""
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
    """Reason why the plugin is left out; known after loading."""


class Registry(Mapping[str, ValueT], Generic[ValueT]):
    """Built-in values by name, and the values of the group's entry points.

    Args:
        built_in: a string is a value to import late: `package.module:name`.
        find_fault: returns why a package's value cannot be used; "" if it can.
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
        """Translate a package's name to `package.module:name`; other names stay. Nothing is imported."""
        plugin = None if name in self.built_in or ":" in name else self._find(name)
        return plugin.point.value if plugin else name

    def describe_plugins(self) -> list[dict[str, str]]:
        """A row for each entry point of the group. `problem` has the reason if it is left out, else ""."""
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
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a broken package must not break `status`
            plugin.problem = repr(error)
        if plugin.problem:
            logger.warning("the %s %s of the package %s is left out (%s)", kind, name, plugin.package, plugin.problem)
        return plugin


def find_fault_of_callable(name: str, value: object) -> str:
    """Check for groups whose values are functions."""
    return "" if callable(value) else f"it is {value!r:.80}, which cannot be called"


@cache
def find_plugins() -> tuple[Plugin, ...]:
    """The entry points of all groups, in the order of Python's search; nothing is imported."""
    return tuple(
        Plugin(point, package.name, package.version)
        for package in _packages()
        for point in package.entry_points
        if point.group.startswith(PREFIX)
    )


@cache
def files_about_packages() -> dict[str, dict[str, Path]]:
    """For each top-level name of a package with entry points for us, the files with its entry points.

    Keys of the inner dict are the paths that the files need below a folder of `sys.path`.
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
    """The installed packages with entry points of our groups; the first on `sys.path` wins."""
    found: dict[str, Distribution] = {}
    for package in distributions():
        if f"[{PREFIX}" in (package.read_text(ENTRY_POINTS) or ""):
            found.setdefault(package.name, package)
    return tuple(found.values())


@dataclass(frozen=True, eq=False)  # no hash: the registry has none
class KeyOf:
    """Marks a string setting as a key of a registry, which is read when a value is checked; a form offers the keys."""

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
