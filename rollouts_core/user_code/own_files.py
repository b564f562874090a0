"""Find the files of the user's own code that settings name as `package.module:function`.

The content of these files enters the fingerprint of a stage (fingerprint.py). The files are copied to other machines
(tasks/upload_inputs.py).

    module of a setting ── its top-level name ── on sys.path ──┬── a package: its folder
                                                               ├── a folder without __init__.py: its Python files
                                                               └── a single file
    imports in these files are looked up in the same way, recursively

Installed packages are left out, except packages with entry points for this project (plugins.py). The import statements
are parsed, so no code is executed here.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from rollouts_core.plugins import files_about_packages
from rollouts_core.user_code.code_folders import use_code_folders
from rollouts_core.user_code.failures import INSTALLED_FOLDERS, STANDARD_LIBRARY

OF_PROJECT = (__name__.partition(".")[0], "rollouts")
"""Packages of this project, which are not searched. rollouts_core is uploaded separately, and jobs do not import the
other package."""
_KEY_NAMES = ("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519")
_KEY_ENDINGS = (".pem", ".key", ".p12", ".pfx", ".kdbx")
_OF_TOOLS = frozenset({"__pycache__", "node_modules"})
_VIRTUAL_ENVIRONMENT = "pyvenv.cfg"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCode:
    """Code of the user with one top-level name: a package, a folder without __init__.py, or a single file."""

    name: str
    """The top-level name, as in `import NAME`."""
    package: Path | None = None
    """A folder with __init__.py. All its files belong to the code, except hidden files and private keys."""
    folders: tuple[Path, ...] = ()
    """Folders without __init__.py. Only their Python files belong to the code, because the folders may contain data."""
    file: Path | None = None
    """A single Python file."""
    about: Mapping[str, Path] = field(default_factory=dict)
    """Metadata files of an installed package with entry points for this project."""

    @property
    def sent(self) -> dict[str, Path]:
        """The files to copy to another machine, by their names there: the code, and metadata with entry points."""
        return {**self.files, **self.about}

    @property
    def files(self) -> dict[str, Path]:
        """The files of the code, by their names relative to the folder on sys.path."""
        if self.file is not None:
            return {self.file.name: self.file.resolve()}
        if self.package is not None:
            return dict(_below(self.package, self.name))
        python = (pair for folder in reversed(self.folders) for pair in _below(folder, self.name))
        return {name: path for name, path in python if path.suffix == ".py"}


def find_code(name: str) -> OwnCode | None:
    """Find the code that Python would import for a top-level name. None if Python finds no such name, or if the name
    has no files."""
    use_code_folders()
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    about = files_about_packages().get(name, {})
    if spec.origin is None:
        folders = tuple(Path(each) for each in spec.submodule_search_locations or ())
        return OwnCode(name=name, folders=folders, about=about) if folders else None
    origin = Path(spec.origin)
    if origin.name == "__init__.py":
        return OwnCode(name=name, package=origin.parent, about=about)
    return OwnCode(name=name, file=origin, about=about)


def own_code(modules: Iterable[str]) -> list[OwnCode]:
    """Find the user's code with these modules, and all user code that it imports. Sorted by name.

    This project, and installed packages without entry points for this project, are neither returned nor searched for
    imports.
    """
    found: dict[str, OwnCode] = {}
    pending = deque(sorted({module.partition(".")[0] for module in modules}))
    seen = set(pending)
    while pending:
        name = pending.popleft()
        code = find_code(name) if name not in OF_PROJECT and name not in sys.stdlib_module_names else None
        if code is None or (_is_installed(code) and not code.about) or not code.files:
            continue
        found[name] = code
        for path in code.files.values():
            new = _imports_of_file(path) - seen
            seen |= new
            pending.extend(sorted(new))
    return [found[name] for name in sorted(found)]


def _is_installed(code: OwnCode) -> bool:
    places = [place for place in (code.package, code.file, *code.folders) if place is not None]
    return all(
        not INSTALLED_FOLDERS.isdisjoint(place.parts) or place.is_relative_to(STANDARD_LIBRARY) for place in places
    )


def _imports_of_file(path: Path) -> frozenset[str]:
    """The top-level names in all import statements of a file. Empty for a file that is not Python."""
    if path.suffix != ".py":
        return frozenset()
    try:
        found = path.stat()
    except OSError:
        return frozenset()
    return _imports_of(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=4096)
def _imports_of(path: Path, mtime_ns: int, size: int) -> frozenset[str]:
    """Parse a file for `_imports_of_file`. The result is cached by modification time and size of the file."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.append(node.module)
    return frozenset(name.partition(".")[0] for name in names)


def _below(folder: Path, name: str) -> Iterator[tuple[str, Path]]:
    """Yield the files below a folder that may be copied to another machine, with their names there."""
    for parent, folders, files in os.walk(folder, followlinks=True):
        if _VIRTUAL_ENVIRONMENT in files:
            folders.clear()
            continue
        folders[:] = sorted(
            each
            for each in folders
            if not each.startswith(".") and each not in _OF_TOOLS and _is_followed(Path(parent, each), folder)
        )
        for file in sorted(files):
            path = Path(parent, file)
            if path.is_file() and not is_private(file):
                yield f"{name}/{path.relative_to(folder).as_posix()}", path.resolve()


def _is_followed(folder: Path, top: Path) -> bool:
    """False for a symlink to a folder without Python files, such as data, and for a symlink to an enclosing folder.

    Args:
        top: the folder in which the search started.
    """
    if not folder.is_symlink():
        return True
    target = folder.resolve()
    around = [each for each in folder.parents if each.is_relative_to(top)]
    return any(target.glob("*.py")) and not any(each.resolve().is_relative_to(target) for each in around)


def is_private(name: str) -> bool:
    """True for names of hidden files, such as .env, and of private keys, which are never copied to another machine."""
    return name.startswith((".", *_KEY_NAMES)) or name.endswith(_KEY_ENDINGS)
