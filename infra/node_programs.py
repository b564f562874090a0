"""Our programs for nodes, each as one text that runs by itself wherever Python is.

A program is a file, or a package whose `verbs.main` gets the command line; both need nothing but the standard library.
Not here: how a text is sent and run (session.py, node_agent.py).
"""

import json
from pathlib import Path

from infra import bundle

_IMPORT_ALL = """
SOURCES = json.loads({sources!r})
sys.meta_path.insert(0, BundledModules(SOURCES))
from {package}.verbs import main
if __name__ == "__main__":
    sys.exit(main(sys.argv))
"""


def read_program(source: Path) -> str:
    """The text of a program.

    Args:
        source: its file, or the folder of its package.
    """
    if source.is_file():
        return source.read_text(encoding="utf-8")
    package = f"{source.parent.name}.{source.name}"
    sources = {f"{package}.{path.stem}": path.read_text(encoding="utf-8") for path in sorted(source.glob("*.py"))}
    sources[package] = sources.pop(f"{package}.__init__")
    sources[source.parent.name] = ""
    del sources[f"{package}.__main__"]
    loader = Path(bundle.__file__).read_text(encoding="utf-8")
    return loader + _IMPORT_ALL.format(sources=json.dumps(sources), package=package)
