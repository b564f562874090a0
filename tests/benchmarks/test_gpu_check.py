"""benchmarks/gpu_check.py without a GPU: the whole command on the CPU, and what it says of machines it cannot run on.

Without it the one command that is run on a rented GPU would meet its first fault there, at the GPU's price.
"""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.kit.waiting import wait_until

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_check  # noqa: E402
from gpu_parts.checking import (  # noqa: E402
    BrokenError,
    Check,
    NotHereError,
    Place,
    hold,
    run_check,
    run_checks,
    why_skipped,
)
from gpu_parts.device import Facts, find_problem  # noqa: E402
from gpu_parts.record import Outcome, Record, Row  # noqa: E402
from gpu_wheels import find_missing, read_packages  # noqa: E402

MAX_FILES, MAX_FILE_BYTES = 8, 16 << 20
"""The most files that the check writes, and the most bytes of one, so that they are quickly copied."""
ABOUT: dict[str, Any] = {  # Any: JSON
    "is_rehearsal": True,
    "device": "a CPU",
    "packages": {},
    "python": "3.12",
    "commit": "0",
    "date": "2026-01-01",
}
H100: dict[str, Any] = {  # Any: fields of Facts
    "torch": "2.11.0",
    "cuda": "13.0",
    "name": "NVIDIA H100",
    "capability": (9, 0),
    "kernels": ("sm_80", "sm_90"),
    "packages": {},
    "python": "3.12",
}


@pytest.mark.slow
@pytest.mark.promise
def test_the_rehearsal_runs_every_check(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--rehearse", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    for part in gpu_check.BUDGETS_S:
        assert_ran(part, load_rows(tmp_path))
    assert "only on a GPU" in (tmp_path / "gpu_check.md").read_text()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) <= MAX_FILES and max(sizes) <= MAX_FILE_BYTES


def load_rows(folder: Path) -> list[Row]:
    record = Record.load(folder)
    assert record is not None
    return record.rows


def checks_of(part: str) -> list[Check]:
    checks: list[Check] = importlib.import_module(f"gpu_parts.{part}").CHECKS
    return checks


def assert_ran(part: str, rows: Sequence[Row]) -> None:
    """Each check of the part has a row, and only those that a rehearsal cannot run are skipped."""
    found = {row.check: (row.outcome, row.detail) for row in rows if row.part == part}
    place = Place(device="cpu", folder=Path(), models=Path())
    for check in checks_of(part):
        reason = why_skipped(check, place)
        assert found.pop(check.name) == (("skipped", reason) if reason else (success_of(check), ""))
        assert reason in ("", "only on a GPU") or reason.endswith("is not installed")
    assert not found, "these rows have no check"


def success_of(check: Check) -> Outcome:
    return "measured" if check.is_measurement else "held"


def test_the_parts_take_eight_minutes_at_most() -> None:
    assert sum(gpu_check.BUDGETS_S.values()) <= gpu_check.TOTAL_S == 8 * 60


def test_engines_are_started_only_if_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert gpu_check.read_options().only == list(gpu_check.BUDGETS_S)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--only", "engines,speed"])
    assert gpu_check.read_options().only == ["speed", "engines"]


@pytest.mark.slow
def test_an_engine_starts_within_the_limit_of_its_part() -> None:
    from gpu_parts.engines import ENGINE_START_S

    assert all(ENGINE_START_S[kind] < gpu_check.EXTRA_BUDGETS_S["engines"] for kind in ("sglang", "vllm"))


@pytest.mark.slow
def test_an_engine_that_fails_shows_the_end_of_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gpu_parts.engines import served
    from gpu_parts.models import write_small_model

    place = Place(device="cpu", folder=tmp_path, models=tmp_path)
    model = write_small_model(place)
    (Path(model.path) / "config.json").write_text("{}")
    log = tmp_path / "serve-embedded/log.txt"
    with pytest.raises(OSError, match="no answer"), served("embedded", model, place):
        wait_until(lambda: "config.json is not a complete config" in log.read_text(), what="its error")
        raise OSError("no answer")
    shown = capsys.readouterr().err
    assert "the end of the log of embedded:\n" in shown and "config.json" in shown


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rocm": "6.4", "cuda": ""}, "built for ROCm 6.4: only NVIDIA GPUs are supported"),
        ({"cuda": "", "has_mps": True}, "Apple's MPS is not supported"),
        ({"cuda": ""}, "has no CUDA"),
        (
            {"error": "The NVIDIA driver on your system is too old (found version 11040)"},
            "install a driver for CUDA 13.0",
        ),
        ({"name": "Tesla V100", "capability": (7, 0)}, "compute capability 7.0, the check needs 8.0"),
        ({"kernels": ("sm_80", "sm_86")}, "has no kernels for NVIDIA H100"),
    ],
)
def test_an_unsupported_device_gets_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    assert sentence in find_problem(Facts(**{**H100, **changes}))


@pytest.mark.parametrize(
    "changes", [{}, {"capability": (8, 9)}, {"kernels": ("sm_80", "compute_80")}, {"kernels": ("sm_90a",)}]
)
def test_a_supported_device_gets_none(changes: dict[str, Any]) -> None:
    assert find_problem(Facts(**{**H100, **changes})) == ""


@pytest.mark.slow
def test_without_a_gpu_the_command_says_why_and_ends_with_code_2(tmp_path: Path) -> None:
    import torch

    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--out", str(tmp_path)]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpu_check: ")
    assert "--rehearse" in line or torch.version.cuda is not None or torch.version.hip is not None
    assert not list(tmp_path.iterdir()), "a record begins only where the check can run"


def checks_that_fail() -> list[Check]:
    def fail(_: Place) -> dict[str, float | str]:
        hold(1 > 2, "1 is not more than 2")
        return {}

    def crash(_: Place) -> dict[str, float | str]:
        raise OSError("no disk")

    return [
        Check(name="holds", run=lambda _: {"figure": 1.0}),
        Check(name="fails", run=fail),
        Check(name="crashes", run=crash),
        Check(name="measures nothing", run=crash, is_measurement=True),
        Check(name="needs a GPU", run=fail, needs_gpu=True),
        Check(name="needs a package", run=fail, needs=("no_such_package",)),
    ]


def test_each_check_gets_a_row_whatever_happens_to_it(tmp_path: Path) -> None:
    record = Record(tmp_path, ABOUT)
    run_checks("part", checks_that_fail(), record, "cpu")
    found = {row.check: (row.outcome, row.detail) for row in load_rows(tmp_path)}
    assert found == {
        "holds": ("held", ""),
        "fails": ("failed", "1 is not more than 2"),
        "crashes": ("failed", "OSError: no disk"),
        "measures nothing": ("not measured", "OSError: no disk"),
        "needs a GPU": ("skipped", "only on a GPU"),
        "needs a package": ("skipped", "no_such_package is not installed"),
    }
    assert {row.check for row in record.failures()} == {"fails", "crashes"}


def test_a_measurement_that_breaks_off_is_listed_and_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [each for each in checks_that_fail() if each.is_measurement]
    record = Record(tmp_path, ABOUT)
    run_checks("part", checks, record, "cpu")
    capsys.readouterr()
    assert gpu_check.conclude(tmp_path, ["part"], seconds=1.0) == 0
    assert "\nnot measured: part: measures nothing: OSError: no disk\n" in capsys.readouterr().out
    assert not record.is_settled("part", "measures nothing")


def test_figures_that_are_no_number_are_written(tmp_path: Path) -> None:
    figures: dict[str, float | str] = {"loss": math.nan, "limit": math.inf, "tensors": 12, "s": 0.25}
    record = Record(tmp_path, ABOUT)
    record.put(Row(part="part", check="check", outcome="held", figures=figures))
    assert "loss nan, limit inf, tensors 12, s 0.25" in (tmp_path / "gpu_check.md").read_text()
    assert math.isnan(float(load_rows(tmp_path)[0].figures["loss"]))


def test_a_repeated_run_keeps_what_held_and_runs_the_rest(tmp_path: Path) -> None:
    ran: list[str] = []

    def note(name: str, _: Place) -> dict[str, float | str]:
        ran.append(name)
        return {}

    checks = [Check(name=name, run=partial(note, name)) for name in ("old", "failed", "new")]
    record = Record(tmp_path, ABOUT)
    record.put(Row(part="part", check="old", outcome="held"))
    record.put(Row(part="part", check="failed", outcome="failed"))
    run_checks("part", checks, record, "cpu")
    assert ran == ["failed", "new"]
    assert [row.outcome for row in record.rows] == ["held"] * 3


SLEEPER = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
command = [sys.executable, "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen(command, start_new_session=alone) for alone in (False, True)]
folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
(folder / "unfinished").write_text(" ".join(str(child.pid) for child in children))
(folder / "unfinished").rename(folder / "pids")
time.sleep(600)
"""
"""A part that heeds no interrupt, with a child in its process group and one in a session of its own."""
RUN_SLEEPER = """
import argparse, pathlib, sys
folder, seconds, gpu_check_folder = sys.argv[1:]
sys.path.insert(0, gpu_check_folder)
import gpu_check
gpu_check.__file__ = str(pathlib.Path(folder, "sleeper.py"))
gpu_check.GRACE_S = 0.2
gpu_check.end_after(["speed"], argparse.Namespace(out=pathlib.Path(folder), rehearse=True), seconds=float(seconds))
"""


@pytest.mark.slow
def test_a_part_at_its_limit_is_ended_with_its_descendants(tmp_path: Path) -> None:
    """Run in a process of its own, because all descendants of that process are ended."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    for seconds in (1, 5, 25):  # on a busy machine a part may need longer to start its children
        command = [sys.executable, "-c", RUN_SLEEPER, str(tmp_path), str(seconds), str(BENCHMARKS)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        assert f"speed reached its limit of {seconds} s" in done.stdout and "cannot be killed" not in done.stdout
        if (tmp_path / "pids").exists():
            break
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2 and not [pid for pid in pids if is_alive(pid)]


def is_alive(pid: str) -> bool:
    """Whether a process runs; the parent that adopts an ended one may not have waited for it yet."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().split()[2] != "Z"


@pytest.mark.parametrize(
    ("facts", "commit", "is_rehearsal"),
    [
        ({"packages": {"torch": "2.12.0"}}, "0", False),
        ({"python": "3.13"}, "0", False),
        ({"name": "NVIDIA A100"}, "0", False),
        ({}, "1", False),
        ({}, "0", True),
    ],
    ids=["torch", "python", "device", "commit", "rehearsal"],
)
def test_a_record_of_something_else_is_begun_anew(
    facts: dict[str, Any], commit: str, is_rehearsal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_record(commit: str, *, is_rehearsal: bool = False, **changes: Any) -> Record:
        monkeypatch.setattr(gpu_check, "describe_machine", lambda _: {"cpu": "a CPU", "commit": commit})
        return gpu_check.open_record(tmp_path, Facts(**{**H100, **changes}), is_rehearsal=is_rehearsal, again=False)

    open_record("0").put(Row(part="part", check="check", outcome="held"))
    assert open_record("0").rows
    assert not open_record(commit, is_rehearsal=is_rehearsal, **facts).rows


def test_missing_packages_are_found_with_what_they_need() -> None:
    has = read_packages("# a machine\ntorch==2.11.0\nnumpy\nTyping_Inspection\ntyping-extensions==4.0.0\n")
    missing = find_missing([Requirement("pydantic>=2"), Requirement("torch>=2.6")], has, python="3.12")
    assert {"pydantic", "pydantic-core", "annotated-types"} <= missing.keys()
    assert "typing-extensions" in missing, "it is older there than pydantic allows"
    assert not {"torch", "numpy", "typing-inspection"} & missing.keys()
    assert has["torch"] == Version("2.11.0") and has["numpy"] is None


def test_a_torch_that_is_too_old_on_the_machine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        find_missing([Requirement("torch>=2.6")], read_packages("torch==2.1.0"), python="3.12")
    assert "the machine has torch 2.1.0, the project needs >=2.6: upgrade it there" in capsys.readouterr().err


@pytest.fixture
def idle() -> Iterator[Any]:  # Any: a function of a module that loads torch
    from gpu_parts.speed import idle_share

    yield idle_share


@pytest.mark.slow
def test_the_idle_share_counts_gaps_between_kernels_alone(idle: Any) -> None:
    assert idle([(0.0, 4.0), (2.0, 6.0), (8.0, 10.0)]) == pytest.approx(0.2)
    assert idle([(5.0, 6.0)]) == 0.0
    assert idle([]) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A40", 150),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA RTX A4000", math.nan),
        ("NVIDIA A10G", math.nan),
    ],
)
def test_the_peak_of_a_gpu_is_found_by_whole_words(name: str, teraflops: float) -> None:
    from sft_speed import peak_flops

    assert peak_flops(name) == pytest.approx(1e12 * teraflops, nan_ok=True)


@pytest.mark.slow
def test_a_kernel_that_refuses_the_model_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without the kernel skips the check instead."""
    from gpu_parts import correctness

    from rollouts_core.config import ModelConfig
    from rollouts_core.model import varlen

    model = ModelConfig(path="small")
    with pytest.raises(BrokenError, match="varlen refuses the model: it needs an NVIDIA GPU"):
        correctness.expect_varlen(model, device_type="cpu")
    for module in (correctness, varlen):
        monkeypatch.setattr(module, "find_varlen_attn", lambda: None)
    with pytest.raises(NotHereError, match="has no varlen_attn"):
        correctness.expect_varlen(model, device_type="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["first", "second"])
def test_a_tensor_of_nan_is_the_largest_difference(wrong: str) -> None:
    import torch
    from gpu_parts.models import largest_difference

    expected = {"first": torch.ones(2), "second": torch.ones(2)}
    share, name = largest_difference({**expected, wrong: torch.full((2,), torch.nan)}, expected)
    assert math.isnan(share) and name == wrong


def test_a_check_writes_its_traceback_beside_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = run_check("part", checks_that_fail()[2], Place(device="cpu", folder=tmp_path, models=tmp_path))
    assert row.outcome == "failed" and "Traceback" in capsys.readouterr().err
