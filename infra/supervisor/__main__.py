"""What `python infra/supervisor VERB RUN_DIR ...` runs, by a path, where nothing of ours need be installed."""

import sys
import types
from pathlib import Path

if __name__ == "__main__":
    # Of the package around this one nothing is known: its other modules may need more than the standard library.
    infra = types.ModuleType("infra")
    infra.__path__ = [str(Path(__file__).parents[1])]
    sys.modules["infra"] = infra
    del sys.path[0]  # this folder, in which modules have names that others may mean

    from infra.supervisor.verbs import main

    sys.exit(main(sys.argv))
