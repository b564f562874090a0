"""Pins what a fresh machine has to show: GPUs that compute, also together, a link fast in both directions, a disk.

Without it an hour of checkpoints over a slow link, or an environment on a machine with a dead GPU, is paid for before
anybody notices. The driver is a stand-in: that a GPU passes is seen on a machine with one, by
`python infra/renting/gpu_trial.py`; what GPUs do together over NCCL, two processes do over gloo.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from rollouts.infra.errors import TransientInfraError, UnfitMachineError
from rollouts.infra.renting import acceptance
from rollouts.infra.renting.acceptance import require_gpus, require_peers, require_speed
from rollouts.infra.session import LocalSession, Session
from rollouts.infra.supervisor.processes import JOB_VARIABLE, find_processes
from tests.kit.excuses import ExcusedSkip
from tests.kit.nvidia_smi import install_nvidia_smi
from tests.kit.waiting import wait_until


def test_what_is_fast_enough_is_measured_and_leaves_nothing(session: Session, tmp_path: Path) -> None:
    root = tmp_path / "root"
    speed = require_speed(session, str(root), min_link_mbit_s=0.1, min_disk_mb_s=0.1)
    assert min(speed.upload_mbit_s, speed.download_mbit_s) > 0.1 and speed.disk_mb_s > 0.1
    assert list(root.iterdir()) == []


@pytest.mark.parametrize(("link", "disk"), [(1e9, 0.1), (0.1, 1e9)])
def test_what_is_slower_is_refused_with_what_was_measured(link: float, disk: float, tmp_path: Path) -> None:
    with pytest.raises(
        UnfitMachineError, match=r"too slow \(\d+ Mbit/s to it and \d+ from it, its disk writes \d+ MB/s"
    ):
        require_speed(LocalSession(sys.executable), str(tmp_path), min_link_mbit_s=link, min_disk_mb_s=disk)


@pytest.mark.slow
@pytest.mark.parametrize("slow", ["stdin", "urandom(int", "fsync"])
def test_one_that_is_slow_in_one_way_only_is_not_waited_for(
    slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *"{slow}"*) sleep 600 ;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(acceptance, "ALLOWANCE_S", 3.0)
    with pytest.raises(UnfitMachineError, match="too slow"):
        require_speed(LocalSession(str(python)), str(tmp_path / "root"), min_link_mbit_s=100.0, min_disk_mb_s=100.0)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a library that answers as a driver does, by what the environment says."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler on this machine")
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("stub_driver.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(source)], check=True)
    return folder


def machine_with(driver: Path, folder: Path, **variables: int | str) -> Session:
    """A machine whose driver has such GPUs."""
    python = folder / "python"
    given = " ".join(f"{name}='{value}'" for name, value in variables.items())
    python.write_text(f'#!/bin/sh\nexec env LD_LIBRARY_PATH={driver} {given} {sys.executable} "$@"\n')
    python.chmod(0o755)
    return LocalSession(str(python))


def test_gpus_that_compute_are_named(driver: Path, tmp_path: Path) -> None:
    assert require_gpus(machine_with(driver, tmp_path, STUB_GPUS=8), 8) == "8x Stub GPU"


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"STUB_GPUS": 1}, r"1 of its 2 GPUs can compute \(the driver has no more\)"),
        ({"STUB_GPUS": 2, "STUB_FORGETS": 1}, r"0 of its 2 .*\(GPU 0: its memory does not hold what it wrote\)"),
        ({"STUB_GPUS": 2, "STUB_SECOND": 46}, r"1 of its 2 .*\(GPU 1: cuDevicePrimaryCtxRetain answers 46 \(unknown"),
        ({"STUB_GPUS": 2, "STUB_INIT": 100}, r"0 of its 2 .*\(GPU 0: cuInit answers 100"),
    ],
)
def test_a_machine_whose_gpus_cannot_compute_is_refused(
    driver: Path, tmp_path: Path, variables: dict[str, int], reason: str
) -> None:
    with pytest.raises(UnfitMachineError, match=reason):
        require_gpus(machine_with(driver, tmp_path, **variables), 2)


H100: dict[str, int | str] = {"STUB_GPUS": 2, "STUB_NAME": "NVIDIA H100 80GB HBM3"}


@pytest.mark.parametrize(
    ("gpu_type", "gigabytes", "reason"),
    [
        ("H100 SXM", 85, ""),
        ("H100 SXM", 73, ""),
        ("H100 SXM", 71, r"\(2x NVIDIA H100 80GB HBM3\) have 71 GB of memory, but 80 GB were offered"),
        ("A100 PCIE", 85, r"it has 2x NVIDIA H100 80GB HBM3, but 2x A100 PCIE was offered"),
    ],
)
def test_other_gpus_than_were_offered_are_refused(
    driver: Path, tmp_path: Path, gpu_type: str, gigabytes: int, reason: str
) -> None:
    machine = machine_with(driver, tmp_path, **H100, STUB_GB=gigabytes)
    with pytest.raises(UnfitMachineError, match=reason) if reason else nullcontext():
        assert require_gpus(machine, 2, gpu_type=gpu_type, vram_gb=80.0) == "2x NVIDIA H100 80GB HBM3"


def test_gpus_that_are_not_ready_are_asked_again(driver: Path, tmp_path: Path) -> None:
    with pytest.raises(TransientInfraError, match=r"not ready .*802 \(system not yet initialized\)") as refusal:
        require_gpus(machine_with(driver, tmp_path, STUB_GPUS=8, STUB_INIT=802), 8)
    assert not isinstance(refusal.value, UnfitMachineError)


def test_a_machine_without_the_driver_is_left_to_the_check_of_its_environment(session: Session) -> None:
    assert require_gpus(session, 1) == "no NVIDIA driver, so its GPUs were not tested"


def test_gpus_that_are_listed_and_that_no_program_can_use_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_nvidia_smi(tmp_path / "bin", monkeypatch)
    reason = r"its 2 GPUs cannot compute \(nvidia-smi lists 2, but libcuda\.so\.1: cannot open.*no such file"
    with pytest.raises(UnfitMachineError, match=f"(?i){reason}"):
        require_gpus(LocalSession(sys.executable), 2)


def test_a_driver_in_which_the_trial_crashes_is_refused(driver: Path, tmp_path: Path) -> None:
    with pytest.raises(UnfitMachineError, match=r"its GPUs cannot be tested \(the test ended with code -11\)"):
        require_gpus(machine_with(driver, tmp_path, STUB_GPUS=1, STUB_CRASHES=1), 1)


@pytest.mark.slow
def test_gpus_that_do_not_answer_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nsleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(acceptance, "GPU_TIMEOUT_S", 0.5)
    with pytest.raises(UnfitMachineError, match="did not answer within"):
        require_gpus(LocalSession(str(python)), 1)


@pytest.mark.slow
def test_processes_that_sum_up_together_pass(session: Session) -> None:
    assert require_peers(session, sys.executable, 2, backend="gloo") == "its 2 GPUs compute together"


IN_THE_SECOND = """
import os, time
fork, pids = os.fork, []

def forked():
    pids.append(fork())
    if len(pids) == 2 and pids[1] == 0:
        {does}
    return pids[-1]

os.fork = forked
"""
HANGS = "import torch.distributed; torch.distributed.all_reduce = lambda numbers: time.sleep(600)"
ERRS = "import torch.distributed; torch.distributed.all_reduce = lambda numbers: numbers.add_(1)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "timeout_s", "reason"),
    [
        ("time.sleep(600)", 3.0, r"after 3 s rank 0 did not \w+ .*, rank 1 did not begin"),
        pytest.param(HANGS, 30.0, r"after 30 s rank 0 did not .*, rank 1 did not .*", marks=pytest.mark.matrix),
        (ERRS, 240.0, r"rank \d: \w+: .*"),
        ("os._exit(1)", 240.0, r"rank 1 ended and did not begin"),
    ],
    ids=["never begins", "hangs in the sum", "sums up wrong", "dies"],
)
def test_a_machine_where_they_cannot_is_refused_in_time_with_what_to_try(
    does: str, timeout_s: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(IN_THE_SECOND.format(does=does))
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\nexec env PYTHONPATH='{tmp_path}' {JOB_VARIABLE}='{tmp_path}' '{sys.executable}' \"$@\"\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(acceptance, "PEER_TIMEOUT_S", timeout_s)
    refusal = rf"its 2 GPUs cannot compute together \({reason}\).*NCCL_P2P_DISABLE=1"
    with pytest.raises(UnfitMachineError, match=refusal):
        require_peers(LocalSession(sys.executable), str(python), 2, backend="gloo")
    wait_until(lambda: find_processes(str(tmp_path)) == [], what="the end of what was tried")


@pytest.mark.parametrize(("more", "backend"), [("-S", "gloo"), ("", "nccl")])
def test_without_torch_or_a_driver_nothing_is_tried(more: str, backend: str, tmp_path: Path) -> None:
    if not more and shutil.which("nvidia-smi"):
        raise ExcusedSkip("this machine has a driver")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' {more} \"$@\"\n")
    python.chmod(0o755)
    said = require_peers(LocalSession(sys.executable), str(python), 2, backend=backend)
    assert said == "torch cannot use its 2 GPUs yet, so they were not tested together"
