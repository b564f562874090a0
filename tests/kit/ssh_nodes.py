"""Nodes of a pipeline behind a real SSH server of this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.infra.ssh_server import SSHServer, running_server

SHORTER = {
    "training__sft__num_steps": 20,
    "training__sft__checkpoint_every": 10,
    "training__rl__num_steps": 2,
    "training__rl__checkpoint_every": 1,
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SSHServer]:
    with running_server(tmp_path / "sshd") as server:
        yield server


@pytest.fixture
def node_root(tmp_path: Path) -> Path:
    return tmp_path / "node"


def node_settings(server: SSHServer, root: Path) -> dict[str, Any]:
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
    return {path.name.rpartition("-")[0]: path for path in (store / "stages").iterdir()}
