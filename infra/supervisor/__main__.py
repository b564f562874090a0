"""Entry point of `python infra/supervisor VERB RUN_DIR ...`. The command works without an installation of this
project."""

import sys
import types
from pathlib import Path

if __name__ == "__main__":
    # Replace the parent packages by empty packages, because the parents' modules may need other libraries.
    sys.modules["rollouts"] = types.ModuleType("rollouts")
    infra = sys.modules["rollouts.infra"] = types.ModuleType("rollouts.infra")
    infra.__path__ = [str(Path(__file__).parents[1])]
    del sys.path[0]  # this folder's modules have common names and would hide other modules

    from rollouts.infra.supervisor.verbs import main

    sys.exit(main(sys.argv))
