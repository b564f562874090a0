"""Registries of named values. Installed packages can add values through entry points, after the built-in values.

    [project.entry-points."rollouts.objectives"]         the registry's group
    mine = "my_package.losses:MINE"                      name for a configuration = where the value is defined

To look up a built-in name, no installed package is read. To look up the name of an entry point, only the package with
this entry point is imported. An entry point that cannot be used is left out with one warning.

`infra/plugins.py` is a symbolic link to this file, because infra must not import rollouts_core, and a rented machine
has only the package rollouts_core.
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
"""Prefix of the name of each entry point group."""
ENTRY_POINTS = "entry_points.txt"
ABOUT = (ENTRY_POINTS, "METADATA")
"""Files of an installed package that contain its entry points and its name."""
ValueT = TypeVar("ValueT")

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Plugin:
    """An entry point of an installed package."""

    point: EntryPoint
    package: str
    version: str
    is_loaded: bool = False
    value: Any = None  # Any: the type depends on the group
    problem: str = field(default="", kw_only=True)
    """The reason why the plugin is left out; "" if it can be used. The reason is known only after loading."""


class Registry(Mapping[str, ValueT], Generic[ValueT]):
    """Built-in values by name, and the values of the entry points in the registry's group.

    Args:
        built_in: the built-in values. A string `package.module:name` is imported when it is first looked up.
        find_fault: takes a name and the value of a package; returns why the value cannot be used, or "" if it can.
    """

    def __init__(
        self,
        group: str,
        built_in: Mapping[str, ValueT | str],
        find_fault: Callable[[str, Any], str],  # Any: a package can define any value
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
        """Translate the name of an entry point to `package.module:name`.

        Other names are returned unchanged. Nothing is imported.
        """
        plugin = None if name in self.built_in or ":" in name else self._find(name)
        return plugin.point.value if plugin else name

    def describe_plugins(self) -> list[dict[str, str]]:
        """One row for each entry point of the group. `problem` is the reason why the entry point is left out, or ""."""
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
    """The `find_fault` of registries whose values are functions."""
    return "" if callable(value) else f"it is {value!r:.80}, which cannot be called"


@cache
def find_plugins() -> tuple[Plugin, ...]:
    """The entry points of all groups, in the order in which Python finds the packages. Nothing is imported."""
    return tuple(
        Plugin(point, package.name, package.version)
        for package in _packages()
        for point in package.entry_points
        if point.group.startswith(PREFIX)
    )


@cache
def files_about_packages() -> dict[str, dict[str, Path]]:
    """For each top-level module of the packages with our entry points: the files with the entry points and the
    package's name.

    The keys of the inner dict are paths relative to a folder of `sys.path`; the values are the files on this machine.
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
    """The installed packages with entry points of our groups.

    If two packages have the same name, the first on `sys.path` is used.
    """
    found: dict[str, Distribution] = {}
    for package in distributions():
        if f"[{PREFIX}" in (package.read_text(ENTRY_POINTS) or ""):
            found.setdefault(package.name, package)
    return tuple(found.values())


@dataclass(frozen=True, eq=False)  # a registry cannot be hashed
class KeyOf:
    """Marks a text setting whose value must be a name in a registry. The registry is read when a value is checked."""

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
