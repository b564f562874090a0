"""What benchmarks/run_all.py does where a benchmark cannot run.

Without it a machine without an SSH server would stop half-way, or lose the figures of another one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from run_all import RUNS, run_section  # noqa: E402

OVER_SSH = [(title, command) for title, command in RUNS if command.startswith(("transfer.py", "attach.py"))]


@pytest.mark.slow
def test_benchmarks_over_ssh_are_skipped_with_a_reason_where_programs_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert len(OVER_SSH) == 3
    monkeypatch.setenv("PATH", str(tmp_path))
    for title, command in (OVER_SSH[0], OVER_SSH[-1]):
        assert run_section(title, command, quick=True, num_threads=1) is None
        assert f"{command.split()[0]} is skipped: " in (said := capfd.readouterr().err) and "ssh" in said


def test_a_benchmark_that_fails_is_no_benchmark_that_is_skipped() -> None:
    with pytest.raises(Exception, match="returned non-zero exit status 2"):
        run_section("Files over SSH", "transfer.py --no-such-option", quick=True, num_threads=1)
