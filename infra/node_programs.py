"""Read the texts of the programs that are sent to nodes. Each program is one text and runs in the node's own
interpreter.

A program is a file, or a package whose `verbs.main` gets the command line. A package may import other modules of
`infra` that use only the standard library.

Not here: sending and running a text (session.py, node_agent.py).
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from rollouts.infra import bundle

_RUN = """
main = import_main({sources!r}, "{package}.verbs")
if __name__ == "__main__":
    sys.exit(main(sys.argv))
"""


def read_program(source: Path) -> str:
    """Return the text of a program.

    Args:
        source: the file of the program, or the folder of its package.
    """
    return source.read_text(encoding="utf-8") if source.is_file() else _read_package(source)


@cache
def _read_package(source: Path) -> str:
    package = f"rollouts.infra.{source.name}"
    sources = {"rollouts": "", "rollouts.infra": "", package: (source / "__init__.py").read_text(encoding="utf-8")}
    _add_imported(f"{package}.verbs", source.parent, sources)
    loader = Path(bundle.__file__).read_text(encoding="utf-8")
    return loader + _RUN.format(sources=sources, package=package)


def _add_imported(module: str, root: Path, sources: dict[str, str]) -> None:
    """Add a module of `infra` to `sources`, and recursively the modules of `infra` that the module imports. `root` is
    infra's folder."""
    if module in sources:
        return
    path = root.joinpath(*module.split(".")[2:]).with_suffix(".py")
    sources[module] = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(sources[module])):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rollouts.infra."):
            _add_imported(str(node.module), root, sources)
