"""What `python infra/supervisor VERB RUN_DIR ...` runs, by a path, where nothing of ours need be installed."""

import sys
import types
from pathlib import Path

if __name__ == "__main__":
    # Of the packages around this one nothing is known: their other modules may need more than the standard library.
    sys.modules["rollouts"] = types.ModuleType("rollouts")
    infra = sys.modules["rollouts.infra"] = types.ModuleType("rollouts.infra")
    infra.__path__ = [str(Path(__file__).parents[1])]
    del sys.path[0]  # this folder, in which modules have names that others may mean

    from rollouts.infra.supervisor.verbs import main

    sys.exit(main(sys.argv))
