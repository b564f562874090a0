"""Import modules from their texts: the head of a package that is sent to nodes as one text (node_programs.py).

Standard library only, and old syntax: whoever runs it has nothing else of ours.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json  # noqa: F401 - for what node_programs.py appends
import sys  # noqa: F401
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class BundledModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads modules whose texts are given by their full names."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        """Where a module is; None for those of others."""
        if name not in self._sources:
            return None
        is_package = any(other.startswith(name + ".") for other in self._sources)
        return importlib.machinery.ModuleSpec(name, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        """Run a module's text."""
        name = module.__name__
        exec(compile(self._sources[name], name.replace(".", "/") + ".py", "exec"), module.__dict__)

    def get_source(self, name: str) -> str:
        """The text, for whoever prints a traceback."""
        return self._sources[name]
