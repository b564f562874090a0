"""Loader for a package that is sent to nodes as one text (node_programs.py). The loader imports the package's modules
from this text.

The loader is the first part of the text. The loader runs in the node's own interpreter, so it uses only the standard
library and old syntax.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

MIN_PYTHON = (3, 10)


class _BundledModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook for modules whose texts are in `sources`."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name not in self._sources:
            return None
        is_package = any(other.startswith(name + ".") for other in self._sources)
        return importlib.machinery.ModuleSpec(name, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        exec(compile(self._sources[name], name.replace(".", "/") + ".py", "exec"), module.__dict__)

    def get_source(self, name: str) -> str:
        """Return the text of a module, so that `traceback` can show its source lines."""
        return self._sources[name]


def import_main(sources: Mapping[str, str], module: str) -> Any:  # Any: what a program calls its entry
    """Return the function `main` of a module. In an interpreter older than MIN_PYTHON, return a function that reports
    the version."""
    if sys.version_info < MIN_PYTHON:
        return _refuse_interpreter
    sys.meta_path.insert(0, _BundledModules(sources))
    return importlib.import_module(module).main


def _refuse_interpreter(_: list[str]) -> int:
    """Print that this interpreter is too old. Returns the exit code."""
    needed, found = ".".join(map(str, MIN_PYTHON)), sys.version.split()[0]
    problem = f"Python {needed} or newer is needed, {sys.executable} is {found}: name another one as node.python"
    sys.stdout.write(json.dumps({"error": problem}) + "\n")
    return 1
