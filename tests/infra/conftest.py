"""A session on this machine, run directories whose jobs are gone when the test is over, and a disk of 2 MB."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.jobs import cancel_job
from infra.session import LocalSession
from infra.supervisor import find_processes


@pytest.fixture
def session() -> LocalSession:
    return LocalSession(sys.executable)


@pytest.fixture
def run_dir(tmp_path: Path, session: LocalSession) -> Iterator[Path]:
    path = tmp_path / "sft-0123"
    yield path
    cancel_job(session, str(path), grace_s=0.2)
    assert find_processes(str(path)) == [], "the test left processes behind"


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux can mount a small disk")
    path = tmp_path / "tiny"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)
