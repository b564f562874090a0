"""Nodes of a pipeline behind a real SSH server of this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.infra.ssh_server import SSHServer

SHORTER = {
    "training__sft__num_steps": 20,
    "training__sft__checkpoint_every": 10,
    "training__rl__num_steps": 2,
    "training__rl__checkpoint_every": 1,
}


def node_settings(server: SSHServer, root: Path) -> dict[str, Any]:
    """The section `node` for a node with this root folder."""
    access = server.access
    return {
        "kind": "ssh",
        "host": f"{access.user}@127.0.0.1:{access.port}",
        "key_file": access.key_file,
        "host_key": access.host_key,
        "root": str(root),
        "python": sys.executable,
        "min_free_gb": 0.1,
    }


def stages_of(store: Path) -> dict[str, Path]:
    """The run directories of a store or node by their stage."""
    return {path.name.rpartition("-")[0]: path for path in (store / "stages").iterdir()}
