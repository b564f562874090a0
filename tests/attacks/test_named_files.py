"""Pins that settings name regular files: a FIFO, a socket or a device in place of a file is refused at once.

Without these tests a FIFO that another program left in a folder, or a wrong path, would stop a command without a word.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollouts.infra.environment import read_requirements
from rollouts.infra.errors import LoginError, PermanentInfraError
from rollouts.infra.ssh.host_keys import HostKeyPolicy
from rollouts.infra.ssh.login_keys import _load_key, read_public_key
from rollouts_core.config.files import read_settings
from rollouts_core.data.dataset import load_prompts_from_jsonl
from rollouts_core.data.rows import JsonlRows
from rollouts_core.errors import ConfigError, DataError
from rollouts_core.quickstart import write_quickstart_files
from tests.rollouts_core.make import TINY_SIZE

pytestmark = pytest.mark.timeout(60)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


REPOSITORY = Path(__file__).parents[2]
CORE_ERRORS = (ConfigError, DataError)
"""They name the kind."""
SETTINGS = """
mode = "rl"
[model]
path = "./base_model"
[data]
prompts = "prompts.jsonl"
heldout = "heldout.jsonl"
[rollout]
environment = "arithmetic"
"""
KINDS: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a socket": make_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}
READERS: dict[str, tuple[str, Callable[[Path], object], type[Exception]]] = {
    "settings": ("run.toml", read_settings, ConfigError),
    "settings as JSON": ("run.json", read_settings, ConfigError),
    **{
        name: (name, load_prompts_from_jsonl, DataError)
        for name in ("p.jsonl", "p.json", "p.csv", "p.jsonl.gz", "p.json.zst", "p.csv.xz", "p.parquet", "p", "p.txt")
    },
    "requirements": ("lock.txt", read_requirements, PermanentInfraError),
    "a public key": ("key.pub", lambda p: read_public_key(key_file=str(p)[:-4], key_variable=""), PermanentInfraError),
    "a private key": ("key", lambda path: _load_key(path, "host", ()), LoginError),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_at_once(reader: str, kind: str, tmp_path: Path) -> None:
    name, read, error = READERS[reader]
    KINDS[kind](tmp_path / name)
    with pytest.raises(error, match=f"is {kind}, not a file" if error in CORE_ERRORS else "is .*not a file"):
        read(tmp_path / name)


@pytest.mark.parametrize("kind", KINDS)
def test_known_hosts_are_read_from_files_alone(kind: str, tmp_path: Path) -> None:
    KINDS[kind](tmp_path / "known_hosts")
    hosts = HostKeyPolicy(host="host", port=22, pinned="", known_hosts=(tmp_path / "known_hosts",), first_use_file=None)
    with pytest.raises(PermanentInfraError, match=r"known_hosts cannot be read: it is .*not a file"):
        hosts.known_keys()


def test_a_fifo_that_takes_a_files_place_while_its_rows_are_read_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1?"}\n')
    rows = JsonlRows(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="can no longer be read"):
        rows.read([0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["prompts.jsonl", "base_model/config.json", "base_model/model.safetensors", "run.toml"]
)
def test_validate_ends_at_a_fifo_with_a_sentence(name: str, tmp_path: Path) -> None:
    write_quickstart_files(tmp_path, size=TINY_SIZE)
    (tmp_path / "run.toml").write_text(SETTINGS)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    command = [sys.executable, "-m", "rollouts.flows.cli", "validate", str(tmp_path / "run.toml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=REPOSITORY)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 2 and "Traceback" not in said
    assert "is a FIFO, not a file" in " ".join(said.split())
