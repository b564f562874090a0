"""The package in `examples/plugin`, installed into a folder of its own, and packages that cannot be used."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollouts_core import plugins

SOURCE = Path(__file__).parents[1] / "examples" / "plugin"
MODULE = "rollouts_example"


def install_example(folder: Path) -> Path:
    """Install the example by pip; returns the folder that goes on `sys.path`."""
    shutil.copytree(SOURCE, folder / "source")  # building leaves files beside what it builds
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(folder / "site"), str(folder / "source")], check=True)
    return folder / "site"


def write_package(site: Path, name: str, group: str, point: str, code: str) -> None:
    """A package of one module as pip leaves it, with one entry point."""
    (site / f"{name}.py").write_text(code)
    about = site / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{point}\n")


@contextmanager
def importable(site: Path) -> Iterator[None]:
    """Have this process find what is installed in the folder, and forget it afterwards."""
    caches = (plugins.find_plugins, plugins.files_about_packages, plugins._packages)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        for each in caches:
            each.cache_clear()
        try:
            yield
        finally:
            sys.modules.pop(MODULE, None)
            for each in caches:
                each.cache_clear()
