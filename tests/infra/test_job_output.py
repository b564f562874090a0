"""Pins that what a job writes reaches who follows it: every byte once, over broken connections, and within its limit.

Without it a metric is missing or counted twice after a reconnect, or a program that writes much fills a disk or waits.
"""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollouts.infra.jobs import (
    FollowOffsets,
    JobState,
    follow_job,
    job_status,
    start_or_attach,
)
from rollouts.infra.session import Session
from tests.infra.shell_jobs import kill_follower, shell_spec, wait_for_end


def test_the_log_keeps_its_beginning_and_its_end_within_the_limit(session: Session, run_dir: Path) -> None:
    script = "echo first; yes 0123456789 | head -n 10000; echo last"
    start_or_attach(session, shell_spec(run_dir, script, max_log_bytes=4000))
    wait_for_end(session, run_dir)
    log = (run_dir / "log.txt").read_text()
    note = "[supervisor] the log has reached 4000 bytes: from here on only its end is kept\n"
    assert log.startswith("first\n") and log.endswith("last\n") and log.count(note) == 1
    [left_out] = re.findall(r"\n?\[supervisor\] (\d+) bytes are left out here\n", log)
    kept = re.sub(r"\[supervisor\] .*\n", "", log)
    assert len(kept) in (4000, 4001) and int(left_out) == len("first\nlast\n") + 110_000 - 4000


@pytest.mark.slow
def test_a_program_that_writes_200_megabytes_without_a_newline_is_not_held_up(session: Session, run_dir: Path) -> None:
    script = "head -c 200000000 /dev/zero | tr '\\0' '\\r'"  # a second without anybody who reads it
    start_or_attach(session, shell_spec(run_dir, script, max_log_bytes=1 << 20, timeout_s=300.0))
    status = wait_for_end(session, run_dir)
    assert status.exit is not None and status.exit.code == 0 and not status.exit.timeout
    log = (run_dir / "log.txt").read_bytes()
    assert log.startswith(b"\r" * 1000) and log.endswith(b"\r" * 1000) and len(log) < (1 << 20) + 300
    assert f"{200_000_000 - (1 << 20)} bytes are left out here".encode() in log


def test_the_log_is_raw_bytes(session: Session, run_dir: Path) -> None:
    start_or_attach(session, shell_spec(run_dir, r"printf '\377\000\rno newline'; printf err >&2"))
    wait_for_end(session, run_dir)
    assert (run_dir / "log.txt").read_bytes() == b"\xff\x00\rno newlineerr"


@pytest.mark.slow
def test_follow_is_byte_exact_and_exactly_once_over_broken_connections(session: Session, run_dir: Path) -> None:
    script = (
        "for i in $(seq 1 150); do printf 'line %d \\n' $i; echo '{\"step\": '$i'}' >> metrics.jsonl; "
        '[ $((i % 10)) = 0 ] && echo \'{"name": "checkpoint"}\' >> events.jsonl; sleep 0.01; done; exit 0'
    )
    start_or_attach(session, shell_spec(run_dir, script))
    log = bytearray()
    steps: list[int] = []
    events: list[object] = []
    kills: list[int] = []

    def on_metrics(record: dict[str, int]) -> None:
        steps.append(record["step"])
        if record["step"] % 40 == 0:  # break the connection from outside, in the middle of things
            kills.append(kill_follower(run_dir))

    status = follow_job(session, str(run_dir), on_metrics=on_metrics, on_event=events.append, on_log=log.extend)
    assert status.state == JobState.EXITED
    assert bytes(log) == (run_dir / "log.txt").read_bytes()
    assert steps == list(range(1, 151)) and len(events) == 15 and sum(kills) >= 1


def test_follow_goes_on_at_the_offsets_it_is_given(session: Session, run_dir: Path) -> None:
    start_or_attach(session, shell_spec(run_dir, "printf 'äöü'; printf '{}\\n{\"step\": 2}\\n' > metrics.jsonl"))
    wait_for_end(session, run_dir)
    log = bytearray()
    metrics: list[object] = []
    offsets = FollowOffsets(log=3, metrics=3)
    follow_job(session, str(run_dir), on_metrics=metrics.append, on_event=print, on_log=log.extend, offsets=offsets)
    assert bytes(log) == "äöü".encode()[3:] and metrics == [{"step": 2}]


def test_a_log_that_nobody_asks_for_stays_on_the_node(
    session: Session, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[bytes] = []
    stream = session.stream

    def note(line: bytes) -> bytes:
        received.append(line)
        return line

    @contextmanager
    def counted(argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Iterator[bytes]]:
        with stream(argv, stdin=stdin) as lines:
            yield map(note, lines)

    monkeypatch.setattr(session, "stream", counted)
    script = "head -c 1000000 /dev/zero; echo '{\"step\": 1}' > metrics.jsonl; exit 3"
    start_or_attach(session, shell_spec(run_dir, script))
    metrics: list[object] = []
    status = follow_job(session, str(run_dir), on_metrics=metrics.append, on_event=print)
    assert (metrics, status.log_size) == ([{"step": 1}], 1_000_000)
    assert sum(map(len, received)) < 10_000


def test_a_half_written_line_is_not_delivered_and_garbage_is_skipped(session: Session, run_dir: Path) -> None:
    script = 'printf \'{"step": 1}\\ngarbage\\n{"step": 2}\\n{"step"\' > metrics.jsonl'
    start_or_attach(session, shell_spec(run_dir, script))
    metrics: list[dict[str, int]] = []
    follow_job(session, str(run_dir), on_metrics=metrics.append, on_event=print, on_log=bytearray().extend)
    assert metrics == [{"step": 1}, {"step": 2}]


def test_follow_ends_on_the_node_when_its_client_is_gone(session: Session, run_dir: Path) -> None:
    start_or_attach(session, shell_spec(run_dir, "echo up; sleep 60"))
    program = session.place_program(Path("infra/supervisor").absolute())
    argv = [sys.executable, "-I", program, "follow", str(run_dir), "0", "0", "0"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as follower:
        assert follower.stdout is not None and follower.stdin is not None
        assert b"log" in follower.stdout.readline()
        follower.stdin.close()
        assert follower.wait(timeout=5) == 0
    assert job_status(session, str(run_dir)).state == JobState.RUNNING
