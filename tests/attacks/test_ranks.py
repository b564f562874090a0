"""Pins that no stranger on the network can run code in, or join, the processes that train one model together.

torch's stores and groups ask nobody for a key. Without these tests a training with two processes could open a port on
all interfaces again, and torch would unpickle what a stranger writes there.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from rollouts_core.backends.process_group import join_store, open_store
from rollouts_core.backends.ranks import Ranks
from rollouts_core.backends.store_tunnel import MAX_UNPROVEN, opened_gate, opened_tunnel
from rollouts_core.config import DeploymentConfig, ModelConfig, SFTTrainingConfig
from rollouts_core.data.rows import digest_path
from rollouts_core.errors import TrainingError
from rollouts_core.fingerprint import digest_model
from rollouts_core.job import InputDataset, InputModel, SFTJob
from rollouts_core.quickstart import write_quickstart_files
from tests.kit.waiting import wait_until
from tests.rollouts_core.make import TINY_SIZE

KEY = "key-of-the-run"
LISTENING = "0A"
LOOPBACK_ADDRESSES = {"0100007F", "00000000000000000000000001000000"}


class Payload:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._path,)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A real SFT with two processes, which ends with the test."""
    write_quickstart_files(tmp_path / "files", size=TINY_SIZE)
    model, rows = ModelConfig(path=str(tmp_path / "files" / "base_model")), tmp_path / "files" / "sft.jsonl"
    job = SFTJob(
        model=InputModel(name="base", model=model, digest=digest_model(model)),
        data=(InputDataset(path=str(rows), digest=digest_path(str(rows))),),
        training=SFTTrainingConfig(num_steps=1_000_000, checkpoint_every=1_000_000, batch_size=4, log_every=1),
        deployment=DeploymentConfig(trainer_processes=2, trainer_threads=1),
    )
    (tmp_path / "job.json").write_text(job.model_dump_json())
    command = [sys.executable, "-m", "rollouts_core", "sft", str(tmp_path / "job.json")]
    with (
        (tmp_path / "log.txt").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True) as process,
    ):
        try:
            wait_until(lambda: (tmp_path / "metrics.jsonl").exists() or process.poll() is not None, timeout_s=120)
            assert process.poll() is None, (tmp_path / "log.txt").read_text()
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def listening_addresses(session: int) -> dict[str, int]:
    """The sockets of a session's processes that listen for TCP: address and port in hex, and a process."""
    owners: dict[str, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[3]) == session:
                links = [str(link.readlink()) for link in (stat.parent / "fd").iterdir()]
                owners |= {link[8:-1]: int(stat.parent.name) for link in links if link.startswith("socket:[")}
        except OSError:
            continue  # the process ended
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1]: owners[row[9]] for row in rows if row[3] == LISTENING and row[9] in owners}


def read_to_end(connection: socket.socket) -> bytes:
    """What comes until the other end closes the connection, in whatever way."""
    content = b""
    with suppress(ConnectionResetError):
        while chunk := connection.recv(4096):
            content += chunk
    return content


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc shows sockets on Linux alone")
def test_two_trainer_processes_listen_on_loopback_alone(training: subprocess.Popen[bytes]) -> None:
    addresses = listening_addresses(training.pid)
    assert training.pid in addresses.values(), "the launcher has the store"
    assert {address.partition(":")[0] for address in addresses} <= LOOPBACK_ADDRESSES


@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_a_rank_runs_no_code_that_comes_by_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    buffer = io.BytesIO()
    if form == "pickle":
        pickle.dump(Payload(tmp_path / "harm"), buffer)
    else:
        torch.save([Payload(tmp_path / "harm")], buffer)
    _, port = store = open_store("127.0.0.1")
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**place, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    ranks = Ranks(device="cpu")
    try:
        assert ranks.gather({"loss": 1.0, "tokens": [1, 2]}) == [{"loss": 1.0, "tokens": [1, 2]}]
        monkeypatch.setattr(
            "rollouts_core.backends.ranks._pack", lambda _: torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        )
        with pytest.raises(TrainingError, match="a rank received an unexpected object"):
            ranks.gather("anything")
        with pytest.raises(TrainingError, match="a rank received an unexpected object"):
            ranks.scatter(["anything"])
    finally:
        torch.distributed.destroy_process_group()
        del store
    assert not (tmp_path / "harm").exists()


def test_a_store_between_machines_is_reached_with_the_key_alone() -> None:
    store, port = open_store("127.0.0.1")
    listener = socket.create_server(("127.0.0.1", 0))
    host, gate_port = listener.getsockname()
    with (
        opened_gate(listener, port, KEY),
        opened_tunnel(host, gate_port, KEY) as own,
        opened_tunnel(host, gate_port, "guess") as other,
    ):
        join_store("127.0.0.1", own, size=1).set("ours", "1")
        assert store.get("ours") == b"1"
        for stranger in (gate_port, other):
            with socket.create_connection(("127.0.0.1", stranger)) as connection:
                connection.settimeout(20)
                connection.sendall(b"\x00" * 64)
                assert len(read_to_end(connection)) <= 64, "no more than a nonce and a proof"
    assert store.num_keys() == 2, "the key and the count of members"


def test_strangers_that_say_nothing_hold_nobody_up_for_long() -> None:
    store, port = open_store("127.0.0.1")
    listener = socket.create_server(("127.0.0.1", 0))
    host, gate_port = listener.getsockname()
    with opened_gate(listener, port, KEY), opened_tunnel(host, gate_port, KEY) as own:
        silent = [socket.create_connection((host, gate_port)) for _ in range(MAX_UNPROVEN // 2)]
        join_store("127.0.0.1", own, size=1).set("ours", "1")
        for connection in silent:
            connection.close()
    assert json.loads(store.get("ours")) == 1
