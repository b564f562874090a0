"""Pins that machines that train together end together: none computes for one that is gone, and who is gone is named.

Without it a machine that is lost leaves the others waiting for it in a collective for ever, with their GPUs.

Here all of them are this one: each has a folder of its own, and they talk over the loopback address. On machines that
share nothing: tests/flows/test_trainer_nodes.py.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollouts_core.backends import multi_node
from rollouts_core.backends.launch import agent_arguments, needs_launcher
from rollouts_core.backends.multi_node import LeaderUnit, Link, Meeting, find_interface, follow, lead, network_variables
from rollouts_core.backends.process_group import join_store
from rollouts_core.config import ModelConfig, SFTTrainingConfig
from rollouts_core.errors import MachineLostError
from rollouts_core.fingerprint import digest_model, fingerprint_job
from rollouts_core.job import FurtherTrainer, InputModel, SFTJob
from rollouts_core.keys import OWN_KEY_VARIABLE
from rollouts_core.less_memory import FULL_GPU_CODE
from rollouts_core.metrics import read_json_lines
from tests.kit.waiting import wait_until
from tests.rollouts_core.backends.test_launch import (
    ENDLESS,
    SFT,
    TWO,
    find_processes,
    finish,
    is_training,
    sft_job,
    started,
    write_job,
)
from tests.rollouts_core.small_gpu import lowered_in, use_small_gpu

KEY = "known-to-all-machines"
ONE_EACH = TWO.model_copy(update={"trainer_processes": 1})


@pytest.fixture(scope="module")
def base(base_model: ModelConfig) -> InputModel:
    return InputModel(name="base", model=base_model, digest=digest_model(base_model))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def trainer(run_dir: str = "/there") -> FurtherTrainer:
    return FurtherTrainer(name="me@far:22", host="127.0.0.1", port=free_port(), run_dir=run_dir)


def write_unit(folder: Path, base: InputModel, training: SFTTrainingConfig) -> tuple[Path, Path]:
    """The run directories of two machines that train together, the leader's first."""
    further = trainer(str(folder / "further"))
    job = sft_job(base, training, ONE_EACH).model_copy(update={"further_trainers": (further,)})
    leader = write_job(folder / "leader", job)
    return leader, write_job(folder / "further", job.model_copy(update={"node_rank": 1}))


@contextmanager
def both_started(
    directories: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
    monkeypatch.setenv(OWN_KEY_VARIABLE, KEY)
    with started(directories[1]) as further, started(directories[0]) as leader:
        yield leader, further


def test_who_trains_together_is_no_part_of_a_jobs_identity(base: InputModel) -> None:
    alone = sft_job(base, SFT, ONE_EACH)
    together = alone.model_copy(update={"further_trainers": (trainer(),), "node_rank": 1})
    assert fingerprint_job("sft", together) == fingerprint_job("sft", alone)
    assert [needs_launcher(job) for job in (alone, together)] == [False, True]
    assert isinstance(together, SFTJob)


def test_torchrun_is_told_where_the_machines_meet() -> None:
    meeting = Meeting(num_nodes=3, node_rank=1, store_port=4711, own_address="10.0.0.2")
    arguments = agent_arguments(meeting)
    values = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert values == {
        "--nnodes": "3",
        "--node-rank": "1",
        "--master-addr": "127.0.0.1",
        "--master-port": "4711",
        "--local-addr": "10.0.0.2",
    }


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are found on Linux alone")
def test_gloo_and_nccl_talk_by_the_interface_with_the_units_address() -> None:
    assert find_interface("127.0.0.1") == "lo" and find_interface("10.99.99.99") == ""
    assert network_variables("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


@pytest.mark.slow
def test_a_machine_that_does_not_come_is_named_with_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_node, "JOIN_S", 0.5)
    with pytest.raises(MachineLostError) as caught, lead([trainer()], KEY):
        pass
    assert "me@far:22 was not reachable for training at 127.0.0.1:" in str(caught.value)
    assert "its log: /there/log.txt there" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
def test_launchers_meet_by_their_key_and_each_beat_renews_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_node, "BEAT_S", 0.05)
    lease, further, met = tmp_path / "lease", trainer(), []
    lease.touch()
    os.utime(lease, (1.0, 1.0))

    def be_further() -> None:
        with follow(further, node_rank=1, key=KEY, lease_file=lease) as joined:
            met.append(joined.meeting)
            join_store("127.0.0.1", joined.meeting.store_port, size=1).set("from", "afar")
            wait_until(lambda: lease.stat().st_mtime > 1.0)
            joined.conclude(0)

    waiting = threading.Thread(target=be_further)
    waiting.start()
    with monkeypatch.context() as impatient:
        impatient.setattr(multi_node, "JOIN_S", 1.0)
        with pytest.raises(MachineLostError, match="other end does not know the key"), lead([further], "other"):
            pass
    assert lease.stat().st_mtime == 1.0 and met == []
    with socket.create_connection((further.host, further.port)), lead([further], KEY) as joined:  # one says nothing
        assert join_store("127.0.0.1", joined.meeting.store_port, size=1).get("from") == b"afar"
        wait_until(lambda: lease.stat().st_mtime > 1.0)
        joined.conclude(0)
    waiting.join()
    [meeting] = met
    assert meeting.store_port != joined.meeting.store_port
    assert (meeting.num_nodes, meeting.node_rank, meeting.own_address) == (2, 1, "127.0.0.1")


@contextmanager
def linked(monkeypatch: pytest.MonkeyPatch, sent: list[int]) -> Iterator[tuple[Link, socket.socket]]:
    """A link whose other end is ours; signals that it sends to this process are kept."""
    monkeypatch.setattr(multi_node, "BEAT_S", 0.05)
    monkeypatch.setattr(multi_node, "SILENCE_S", 2.0)
    monkeypatch.setattr(multi_node, "LEAVE_S", 0.1)
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    monkeypatch.setattr(signal, "getsignal", lambda number: print)
    ours, theirs = socket.socketpair()
    with theirs, Link("me@far:22", ours) as link:
        yield link, theirs


@pytest.mark.slow
def test_a_machine_that_falls_silent_ends_what_this_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    with linked(monkeypatch, sent) as (link, theirs):
        for _ in range(30):
            theirs.sendall(b"\n")
            time.sleep(0.1)
        assert not link.wait_for_end(0.0) and sent == []
        assert link.wait_for_end(60.0) and "sent no heartbeat" in link.problem
        wait_until(lambda: sent == [signal.SIGTERM])


@pytest.mark.parametrize(
    ("said", "code", "problem"),
    [(b"", None, "was ended or killed"), (b'\n{"exit_code": 1}\n', 1, ""), (b'{"exit_code": 143}\n', 143, "was asked")],
)
def test_how_a_machine_ended_is_heard(
    monkeypatch: pytest.MonkeyPatch, said: bytes, code: int | None, problem: str
) -> None:
    with linked(monkeypatch, []) as (link, theirs):
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_RDWR)
        assert link.wait_for_end(60.0)
    assert link.exit_code == code and link.problem.startswith(problem) and bool(link.problem) == bool(problem)


@pytest.mark.slow
def test_the_first_of_several_machines_that_is_lost_is_named_while_others_are_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They wait for it themselves; what this one started has ended, so nothing is left to be signalled."""
    sent: list[int] = []
    monkeypatch.setattr(multi_node, "SETTLE_S", 4.0)
    with linked(monkeypatch, sent) as (first, gone), linked(monkeypatch, sent) as (second, _):
        monkeypatch.setattr(multi_node, "LEAVE_S", 0.5)
        gone.shutdown(socket.SHUT_RDWR)
        assert first.wait_for_end(60.0)
        joined = LeaderUnit(
            Meeting(num_nodes=3, node_rank=0, store_port=1, own_address=""), [trainer()] * 2, [first, second]
        )
        with pytest.raises(MachineLostError, match="was ended or killed"):
            joined.conclude(1)
        time.sleep(0.2)
    assert sent == []


@pytest.mark.slow
def test_two_machines_leave_what_two_processes_of_one_leave(
    base: InputModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = write_job(tmp_path / "together", sft_job(base, SFT))
    assert finish(together) == 0, (together / "log.txt").read_text()
    directories = write_unit(tmp_path, base, SFT)
    with both_started(directories, monkeypatch) as processes:
        assert [process.wait(90) for process in processes] == [0, 0], (directories[0] / "log.txt").read_text()
    assert {path.name for path in directories[1].iterdir()} == {"job.json", "log.txt"}, "only the leader writes"
    assert not (directories[0] / "torchrun").exists()
    weights = [load_file(each / "checkpoints/step_000004/model.safetensors") for each in (together, directories[0])]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


@pytest.mark.matrix
@pytest.mark.slow
def test_when_the_leaders_launcher_is_killed_the_other_machine_ends(
    base: InputModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, further = write_unit(tmp_path, base, ENDLESS)
    with both_started((leader, further), monkeypatch) as processes:
        wait_until(lambda: is_training(leader))
        processes[0].kill()
        processes[1].wait(120)
        wait_until(lambda: not find_processes(leader) and not find_processes(further), timeout_s=60)


@pytest.mark.matrix
@pytest.mark.slow
def test_when_another_machines_launcher_is_killed_the_leader_ends_and_names_it(
    base: InputModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, further = write_unit(tmp_path, base, ENDLESS)
    with both_started((leader, further), monkeypatch) as processes:
        wait_until(lambda: is_training(leader))
        processes[1].kill()
        assert processes[0].wait(120) == multi_node.MACHINE_LOST_CODE
        wait_until(lambda: not find_processes(leader) and not find_processes(further), timeout_s=60)
    (failure,) = [line["message"] for line in read_json_lines(leader / "events.jsonl") if line["event"] == "failed"]
    assert failure.startswith("me@far:22 was ended or killed during the training (its log: ")
    assert (leader / "log.txt").read_text().splitlines()[-1] == f"rollouts: {failure}"


@pytest.mark.matrix
@pytest.mark.slow
def test_a_process_of_another_machine_that_is_killed_ends_the_job_and_its_machine_is_in_the_log(
    base: InputModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, further = write_unit(tmp_path, base, ENDLESS)
    with both_started((leader, further), monkeypatch) as processes:
        wait_until(lambda: is_training(leader))
        (worker,) = set(find_processes(further)) - {processes[1].pid}
        os.kill(worker, signal.SIGKILL)
        assert [process.wait(120) for process in processes] == [1, -signal.SIGKILL]
    assert f"me@far:22 ended with code -9 (its log: {further}/log.txt there)" in (leader / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.matrix
def test_when_another_machines_gpu_is_full_the_leader_lowers_a_setting_for_both(
    base: InputModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_gpu(monkeypatch, 1, RANK=1)
    directories = write_unit(tmp_path, base, SFT)
    with both_started(directories, monkeypatch) as processes:
        assert processes[0].wait(120) == FULL_GPU_CODE, (directories[0] / "log.txt").read_text()
        processes[1].wait(120)
    # A pass has one row already.
    assert lowered_in(directories[0]) == [("policy.activation_checkpointing", False, True)]
    assert not (directories[1] / "events.jsonl").exists()
