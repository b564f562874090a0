"""What the tests of copies share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.infra.ssh_server import SSHServer
from tests.infra.sync.noting import NotingLocalSession, NotingSession, session_on


@pytest.fixture(params=["local", pytest.param("ssh", marks=pytest.mark.slow)])
def noting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NotingSession]:
    """A session that counts by which way files go."""
    if request.param == "local":
        yield NotingLocalSession(sys.executable)
        return
    server: SSHServer = request.getfixturevalue("ssh_server")
    with session_on(server, tmp_path) as session:
        yield session


@pytest.fixture
def client_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `ssh` that is installed here is none."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text("#!/bin/sh\necho no such option >&2; exit 255\n")
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
