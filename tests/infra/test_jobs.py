"""Pins the contract of a detached job: started once, its end always known, nothing of it left over.

Without it a retry starts a second training beside the first, a killed one counts as finished, or a GPU stays busy with
processes that nobody knows.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import rollouts.infra.jobs
from rollouts.infra.errors import (
    CompletedCommand,
    JobFailedError,
    JobLostError,
    PermanentInfraError,
    TransientInfraError,
)
from rollouts.infra.jobs import (
    JobState,
    ask_to_finish,
    cancel_job,
    follow_job,
    job_status,
    read_log_tail,
    read_result,
    renew_lease,
    require_finished,
    start_or_attach,
)
from rollouts.infra.session import LocalSession, Session
from rollouts.infra.supervisor.files import read_json
from rollouts.infra.supervisor.supervise import MAX_ASKED_RESTARTS
from tests.infra.shell_jobs import is_alive, kill_follower, read_pid, shell_spec, wait_for_end
from tests.kit.mounts import mounted_tmpfs
from tests.kit.waiting import wait_until

LEASE_S = 10.0
"""Renewing a lease starts a process, which takes a busy machine a while."""
SAVING = "trap 'echo ends; sleep 2; echo saved >> saved; exit 0' TERM; echo up; while :; do sleep 0.05; done"
WRITE_RESULT = """echo '{"loss": 0.5}' > result.part; mv result.part result.json"""


class CutSession(LocalSession):
    """Its first streams end soon, without a word of the job's."""

    num_to_cut = rollouts.infra.jobs.MAX_BROKEN_STREAMS + 2

    @contextmanager
    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Iterator[bytes]]:
        self.num_to_cut -= 1
        if self.num_to_cut >= 0:
            time.sleep(0.02)
            yield iter(())
            return
        with super().stream(argv, stdin=stdin) as lines:
            yield lines


def supervisor_pid(run_dir: Path, attempt: int = 1) -> int:
    meta = read_json(run_dir / ".job" / f"meta-{attempt}.json")
    assert meta is not None
    return int(meta["supervisor_pid"])


@pytest.mark.parametrize("is_steady", [True, False])
def test_a_job_that_says_nothing_is_followed_as_long_as_connections_last(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, is_steady: bool
) -> None:
    """As one that waits for a GPU all night, over a line that is cut every hour."""
    session = CutSession(sys.executable)
    monkeypatch.setattr(rollouts.infra.jobs, "MAX_RECONNECT_PAUSE_S", 0.0)
    monkeypatch.setattr(rollouts.infra.jobs, "STEADY_S", 0.01 if is_steady else 60.0)
    start_or_attach(session, shell_spec(run_dir, WRITE_RESULT))
    seen: list[object] = []
    if is_steady:
        ended = rollouts.infra.jobs.follow_job(session, str(run_dir), on_metrics=seen.append, on_event=seen.append)
        assert ended.state is JobState.FINISHED
    else:
        with pytest.raises(TransientInfraError, match="broke off 10 times in a row"):
            rollouts.infra.jobs.follow_job(session, str(run_dir), on_metrics=seen.append, on_event=seen.append)


class ForeignSession(LocalSession):
    """On its machine something else answers than our supervisor, always the same."""

    def __init__(self, said: bytes) -> None:
        super().__init__(sys.executable)
        self.said = said

    def run(self, argv: Sequence[str], **options: object) -> CompletedCommand:
        return CompletedCommand(argv=tuple(argv), exit_code=0, stdout=self.said, stderr=b"")

    @contextmanager
    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Iterator[bytes]]:
        yield iter([self.said])


@pytest.mark.parametrize(
    "said",
    [
        b"{}",
        b'{"state": "DONE", "exit": null, "orphans": []}',
        b'{"exit": {}, "state": "EXITED"}',
        b'{"log": 1}',
        b'{"log": "a", "offset": 1}',
        b'{"metrics": [], "offset": 1}',
        b'{"event": {}, "offset": {}}',
        b'{"status": {}}',
    ],
)
def test_what_no_supervisor_of_ours_says_is_an_error_in_a_sentence(said: bytes) -> None:
    session = ForeignSession(said + b"\n")
    with pytest.raises(PermanentInfraError, match=r"the (node|machine) "):
        job_status(session, "/run")
    with pytest.raises(PermanentInfraError, match=r"the (node|machine) "):
        read_log_tail(session, "/run")
    with pytest.raises(PermanentInfraError, match="the node "):
        follow_job(session, "/run", on_metrics=print, on_event=print, on_log=print)


def test_brackets_without_end_are_no_record(session: Session, run_dir: Path) -> None:
    write = """(head -c 100000 /dev/zero | tr '\\0' '['; echo; echo '{"step": 1}') > metrics.jsonl"""
    start_or_attach(session, shell_spec(run_dir, f"{write}; {WRITE_RESULT}"))
    found: list[dict[str, object]] = []
    status = follow_job(session, str(run_dir), on_metrics=found.append, on_event=print)
    assert (status.state, found) == (JobState.FINISHED, [{"step": 1}])


def test_a_job_that_was_never_started_is_absent_and_looking_leaves_no_trace(session: Session, run_dir: Path) -> None:
    assert job_status(session, str(run_dir)).state == JobState.ABSENT
    assert cancel_job(session, str(run_dir), grace_s=1).state == JobState.ABSENT
    assert read_result(session, str(run_dir)) is None
    assert not run_dir.exists()


def test_a_job_with_a_result_is_finished_and_not_started_again(session: Session, run_dir: Path) -> None:
    spec = shell_spec(run_dir, f"echo once >> count; {WRITE_RESULT}")
    start_or_attach(session, spec)
    status = require_finished(session, wait_for_end(session, run_dir))
    again = start_or_attach(session, spec)
    assert (again.state, again.attached, again.attempt) == (JobState.FINISHED, True, 1)
    assert (run_dir / "count").read_text() == "once\n"
    assert status.exit is not None and status.exit.code == 0
    assert read_result(session, str(run_dir)) == {"loss": 0.5}
    assert json.loads((run_dir / "job.json").read_text()) == dict(spec.job)


def test_a_job_whose_log_cannot_be_made_does_not_start_and_says_why(session: Session, run_dir: Path) -> None:
    (run_dir / "log.txt").mkdir(parents=True)
    with pytest.raises(PermanentInfraError, match=r"cannot be started: .*Is a directory: '.*/log\.txt'"):
        start_or_attach(session, shell_spec(run_dir, "touch begun"))
    (run_dir / "log.txt").rmdir()
    assert not (run_dir / "begun").exists()
    assert not start_or_attach(session, shell_spec(run_dir, "echo up")).attached, "to the failed start"
    assert wait_for_end(session, run_dir).attempt == 1
    assert (run_dir / "log.txt").read_text() == "up\n"


def test_a_start_while_the_job_runs_attaches(session: Session, run_dir: Path) -> None:
    spec = shell_spec(run_dir, "sleep 60")
    first = start_or_attach(session, spec)
    second = start_or_attach(session, spec)
    assert (first.attached, second.attached) == (False, True)
    assert first.pid == second.pid is not None


@pytest.mark.slow
def test_a_start_while_the_job_is_being_cancelled_waits_for_its_end_and_is_the_next_attempt(
    session: Session, run_dir: Path
) -> None:
    start_or_attach(session, shell_spec(run_dir, SAVING))
    wait_until(lambda: (run_dir / "log.txt").read_text() != "")
    with ThreadPoolExecutor(1) as pool:
        cancelled = pool.submit(cancel_job, session, str(run_dir), 20.0)
        wait_until(lambda: (run_dir / ".job/cancel-1").exists())
        again = start_or_attach(session, shell_spec(run_dir, "sleep 60"))
        assert (again.state, again.attempt, again.attached) == (JobState.RUNNING, 2, False)
        assert (run_dir / "saved").read_text() == "saved\n", "the first attempt came to its end"
        ended = cancelled.result()
    assert ended.exit is not None and (ended.state, ended.attempt) == (JobState.EXITED, 1) and ended.exit.cancelled
    assert job_status(session, str(run_dir)).state == JobState.RUNNING


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["timeout_s", "lease_s"])
def test_a_start_while_the_job_is_ended_by_a_limit_waits_for_its_end_and_is_the_next_attempt(
    session: Session, run_dir: Path, limit: str
) -> None:
    start_or_attach(session, shell_spec(run_dir, SAVING, **{limit: 2.0}))
    wait_until(lambda: (run_dir / "log.txt").read_text().endswith("ends\n"))
    again = start_or_attach(session, shell_spec(run_dir, "sleep 60"))
    assert (again.state, again.attempt, again.attached) == (JobState.RUNNING, 2, False)
    assert (run_dir / "saved").read_text() == "saved\n", "the first attempt came to its end"


def test_a_start_that_attaches_renews_the_lease(session: Session, run_dir: Path) -> None:
    spec = shell_spec(run_dir, "sleep 60", lease_s=LEASE_S)
    start_or_attach(session, spec)
    os.utime(run_dir / ".job/lease", (0, 0))
    assert start_or_attach(session, spec).attached
    assert (run_dir / ".job/lease").stat().st_mtime > 0


def test_a_start_after_a_failure_is_the_next_attempt(session: Session, run_dir: Path) -> None:
    spec = shell_spec(run_dir, "echo attempt $ROLLOUTS_ATTEMPT; exit 3")
    start_or_attach(session, spec)
    first = wait_for_end(session, run_dir)
    start_or_attach(session, spec)
    second = wait_for_end(session, run_dir)
    assert first.exit is not None and second.exit is not None
    assert (first.state, first.exit.attempt, first.exit.code) == (JobState.EXITED, 1, 3)
    assert (second.attempt, second.exit.attempt) == (2, 2)
    assert (run_dir / "log.txt").read_text() == "attempt 1\nattempt 2\n"
    assert (run_dir / "exit-1.json").exists() and (run_dir / "exit-2.json").exists()


@pytest.mark.slow
def test_eight_concurrent_starts_start_exactly_one(session: Session, run_dir: Path) -> None:
    spec = shell_spec(run_dir, "echo started; sleep 60")
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda _: start_or_attach(session, spec), range(8)))
    assert [status.attached for status in statuses].count(False) == 1
    assert len({status.pid for status in statuses}) == 1
    wait_until(lambda: (run_dir / "log.txt").read_text() != "")
    assert (run_dir / "log.txt").read_text() == "started\n"


@pytest.mark.parametrize(
    ("name", "value", "seen"),
    [
        ("PYTHONPATH", ".:/opt/x:own", "{here}:/opt/x:{here}/own"),
        ("PYTHONPATH", "/opt/x:", "/opt/x:{here}"),
        ("HF_HOME", "models", "{here}/models"),
        ("HF_HOME", "~/models", "~/models"),
    ],
)
def test_a_job_finds_what_relative_paths_of_its_environment_meant_here(
    name: str, value: str, seen: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, value)
    local = LocalSession(sys.executable)
    start_or_attach(local, shell_spec(run_dir, f'echo "${name}"'))
    wait_for_end(local, run_dir)
    assert (run_dir / "log.txt").read_text() == seen.format(here=tmp_path) + "\n"


def test_a_job_can_be_started_from_a_folder_that_was_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    local = LocalSession(sys.executable)
    start_or_attach(local, shell_spec(run_dir, WRITE_RESULT))
    assert wait_for_end(local, run_dir).state == JobState.FINISHED


def test_the_next_attempt_gets_its_own_job_document(session: Session, run_dir: Path) -> None:
    start_or_attach(session, shell_spec(run_dir, "exit 3"))
    wait_for_end(session, run_dir)
    moved = dataclasses.replace(shell_spec(run_dir, "true"), job={"port": 31001})
    start_or_attach(session, moved)
    assert json.loads((run_dir / "job.json").read_text()) == {"port": 31001}


def test_an_attach_leaves_the_job_document_of_the_running_job(session: Session, run_dir: Path) -> None:
    spec = shell_spec(run_dir, "sleep 60")
    start_or_attach(session, spec)
    start_or_attach(session, dataclasses.replace(spec, job={"port": 31001}))
    assert json.loads((run_dir / "job.json").read_text()) == dict(spec.job)


def test_a_command_that_does_not_exist_is_said_at_once_and_is_no_attempt(session: Session, run_dir: Path) -> None:
    spec = shell_spec(run_dir, "true")
    broken = type(spec)(run_dir=spec.run_dir, argv=("/nowhere/python",), job=spec.job)
    with pytest.raises(PermanentInfraError, match="/nowhere/python cannot be started"):
        start_or_attach(session, broken)
    assert job_status(session, str(run_dir)).state == JobState.ABSENT
    assert start_or_attach(session, spec).attempt == 1


def test_a_zero_byte_in_an_argument_is_an_error_and_no_attempt(session: Session, run_dir: Path) -> None:
    with pytest.raises(PermanentInfraError, match="embedded null byte"):
        start_or_attach(session, shell_spec(run_dir, "echo \x00"))
    assert job_status(session, str(run_dir)).state == JobState.ABSENT


def test_a_directory_that_is_moved_away_amid_its_job_is_said_and_found_when_it_is_back(
    session: Session, run_dir: Path
) -> None:
    started = start_or_attach(session, shell_spec(run_dir, "sleep 60"))
    elsewhere = run_dir.with_name("elsewhere")
    run_dir.rename(elsewhere)
    with pytest.raises(PermanentInfraError, match=f"{run_dir} was moved or deleted while its job was running: put"):
        require_finished(session, wait_for_end(session, run_dir))
    elsewhere.rename(run_dir)
    assert job_status(session, str(run_dir)).pid == started.pid


def test_kill_9_of_the_program_is_recorded_with_its_signal(session: Session, run_dir: Path) -> None:
    status = start_or_attach(session, shell_spec(run_dir, "sleep 60"))
    assert status.pid is not None
    os.kill(status.pid, signal.SIGKILL)
    ended = wait_for_end(session, run_dir)
    assert ended.exit is not None
    assert (ended.exit.code, ended.exit.signal, ended.exit.oom) == (137, signal.SIGKILL, False)
    with pytest.raises(JobFailedError, match="signal 9 killed it"):
        require_finished(session, ended)


def test_what_a_failed_job_wrote_is_shown_as_a_terminal_would_leave_it_and_moves_no_cursor(
    session: Session, run_dir: Path
) -> None:
    bar = "for n in $(seq 40); do printf '\\rloading: %s/40' $n; done; echo"
    script = rf"echo begins; {bar}; printf '\033]0;a title\007\033[2J\033[31mno memory\033[0m\r\n'; exit 1"
    start_or_attach(session, shell_spec(run_dir, script))
    with pytest.raises(JobFailedError) as caught:
        require_finished(session, wait_for_end(session, run_dir))
    assert str(caught.value).splitlines()[1:] == ["The last lines of its log:", "begins", "loading: 40/40", "no memory"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a child together with its parent")
def test_kill_9_of_the_supervisor_kills_the_program_and_the_job_can_be_started_again(
    session: Session, run_dir: Path
) -> None:
    spec = shell_spec(run_dir, "(trap '' TERM; setsid sleep 60) & echo $! > stray; sleep 60")
    status = start_or_attach(session, spec)
    assert status.pid is not None
    stray = read_pid(run_dir / "stray")
    os.kill(supervisor_pid(run_dir), signal.SIGKILL)
    wait_until(lambda: not is_alive(status.pid or 0))
    lost = job_status(session, str(run_dir))
    assert (lost.state, lost.reason) == (JobState.LOST, "its supervisor was killed")
    assert stray in lost.orphans
    with pytest.raises(JobLostError):
        require_finished(session, lost)
    again = start_or_attach(session, spec)
    assert (again.state, again.attempt, again.attached) == (JobState.RUNNING, 2, False)
    assert not is_alive(stray)


def test_a_job_of_an_earlier_boot_is_lost_by_reboot(session: Session, run_dir: Path) -> None:
    start_or_attach(session, shell_spec(run_dir, "exec sleep 60"))
    os.kill(supervisor_pid(run_dir), signal.SIGKILL)
    wait_until(lambda: job_status(session, str(run_dir)).state == JobState.LOST)
    meta_path = run_dir / ".job" / "meta-1.json"
    meta_path.write_text(json.dumps({**json.loads(meta_path.read_text()), "boot_id": "another"}))
    assert job_status(session, str(run_dir)).reason == "the node was rebooted"


@pytest.mark.slow
def test_cancel_ends_a_tree_with_a_grandchild_that_left_its_session_and_ignores_sigterm(
    session: Session, run_dir: Path
) -> None:
    grandchild = "import os, signal, time; os.setsid(); signal.signal(15, signal.SIG_IGN); "
    grandchild += "open('stray', 'w').write(f'{os.getpid()}\\n'); time.sleep(60)"
    script = f'env -i {sys.executable} -I -c "{grandchild}" & sleep 60'
    start_or_attach(session, shell_spec(run_dir, script))
    stray = read_pid(run_dir / "stray")
    status = cancel_job(session, str(run_dir), grace_s=0.5)
    assert not is_alive(stray)
    assert status.state == JobState.EXITED and status.exit is not None
    assert status.exit.cancelled and not status.exit.timeout and status.exit.leftover_processes == 1
    assert cancel_job(session, str(run_dir), grace_s=0.5) == status


@contextmanager
def followed(session: Session, run_dir: Path, store: str) -> Iterator[None]:
    """A process follows the job for a store, as long as the block runs."""
    program = session.place_program(Path("infra/supervisor").absolute())
    argv = [session.python, "-I", program, "follow", str(run_dir), "0", "0", "0", store]
    with session.stream(argv) as lines:
        assert b'"log"' in next(lines)
        yield


@pytest.mark.slow
def test_a_job_that_a_run_of_another_store_follows_is_left_until_nobody_does(session: Session, run_dir: Path) -> None:
    start_or_attach(session, shell_spec(run_dir, "echo up; sleep 60"))
    with followed(session, run_dir, "store-a"), followed(session, run_dir, "store-b"):
        assert cancel_job(session, str(run_dir), 0.5, store="store-a").state is JobState.RUNNING
        kill_follower(run_dir, "store-b")
        status = cancel_job(session, str(run_dir), 0.5, store="store-a")
    assert status.exit is not None and status.exit.cancelled


@pytest.mark.slow
def test_of_two_stores_that_cancel_a_job_at_once_not_each_leaves_it_to_the_other(
    session: Session, run_dir: Path
) -> None:
    start_or_attach(session, shell_spec(run_dir, "echo up; sleep 60"))
    with ThreadPoolExecutor(2) as pool:
        with followed(session, run_dir, "store-a"), followed(session, run_dir, "store-b"):
            asked = [pool.submit(cancel_job, session, str(run_dir), 0.5, store=f"store-{name}") for name in "ab"]
            time.sleep(0.5)
        assert [each.result().state for each in asked] == [JobState.EXITED] * 2


@pytest.mark.slow
def test_a_job_is_ended_on_behalf_of_nobody_whoever_follows_it(session: Session, run_dir: Path) -> None:
    start_or_attach(session, shell_spec(run_dir, "echo up; sleep 60"))
    with followed(session, run_dir, "store-b"):
        assert cancel_job(session, str(run_dir), 0.5).state is JobState.EXITED


@pytest.mark.slow
def test_a_cancelled_program_has_time_to_save_its_work(session: Session, run_dir: Path) -> None:
    script = "trap 'sleep 0.3; echo saved; exit 0' TERM; echo ready; while true; do sleep 0.05; done"
    start_or_attach(session, shell_spec(run_dir, script))
    wait_until(lambda: (run_dir / "log.txt").read_text() == "ready\n")
    status = cancel_job(session, str(run_dir), grace_s=10)
    assert status.exit is not None and status.exit.cancelled and status.exit.code == 0
    assert read_log_tail(session, str(run_dir)).endswith("saved\n")


TELLING = """
sh -c 'trap "echo told >> child; exit 0" TERM; while :; do sleep 0.05; done' &
printf '{"attempt": 1, "pid": %d, "grace_s": 20, "saved_step": 7, "problem": ""}' $$ > stop.json
trap 'cat stop-1 > granted; sleep 1; test ! -e child && echo alone > alone; exit 3' TERM
echo up; while :; do sleep 0.05; done
"""


@pytest.mark.slow
def test_a_program_that_says_how_long_it_needs_has_that_long_and_its_children_go_on_meanwhile(
    session: Session, run_dir: Path
) -> None:
    start_or_attach(session, shell_spec(run_dir, TELLING))
    wait_until(lambda: (run_dir / "log.txt").read_text() == "up\n")
    status = cancel_job(session, str(run_dir), grace_s=0.2)
    assert status.exit is not None and status.exit.cancelled
    assert (status.exit.code, status.exit.saved_step) == (3, 7)
    assert status.exit.leftover_processes > 0
    assert (run_dir / "granted").read_text() == "20"
    assert (run_dir / "alone").exists() and (run_dir / "child").exists(), "the child was told before it was left over"


@pytest.mark.slow
def test_the_caller_limits_how_long_a_program_has_and_need_not_wait(session: Session, run_dir: Path) -> None:
    start_or_attach(session, shell_spec(run_dir, TELLING.replace("sleep 1;", "sleep 60;")))
    wait_until(lambda: (run_dir / "log.txt").read_text() == "up\n")
    status = cancel_job(session, str(run_dir), 0.2, max_grace_s=30, is_impatient=lambda: True)
    assert status.state is JobState.RUNNING and status.is_ending
    ended = cancel_job(session, str(run_dir), 0.2, max_grace_s=2)  # what is asked later may leave less time
    assert ended.exit is not None and (ended.exit.signal, ended.exit.saved_step) == (signal.SIGKILL, 7)


@pytest.mark.slow
def test_a_program_that_runs_is_asked_to_finish_and_learns_by_whom(session: Session, run_dir: Path) -> None:
    assert ask_to_finish(session, str(run_dir), "run 7").state == JobState.ABSENT
    assert not run_dir.exists()
    script = f"echo ready; until [ -e finish-1 ]; do sleep 0.05; done; cp finish-1 asked; {WRITE_RESULT}"
    start_or_attach(session, shell_spec(run_dir, script))
    assert ask_to_finish(session, str(run_dir), "run 7").state == JobState.RUNNING
    require_finished(session, wait_for_end(session, run_dir))
    assert (run_dir / "asked").read_text() == "run 7"
    assert ask_to_finish(session, str(run_dir), "run 8").state == JobState.FINISHED
    assert (run_dir / "finish-1").read_text() == "run 7"


def test_what_a_program_leaves_running_is_ended(session: Session, run_dir: Path) -> None:
    start_or_attach(session, shell_spec(run_dir, f"setsid sleep 60 & echo $! > stray; {WRITE_RESULT}"))
    status = wait_for_end(session, run_dir)
    assert not is_alive(read_pid(run_dir / "stray"))
    assert status.state == JobState.FINISHED and status.exit is not None and status.exit.leftover_processes == 1


@pytest.mark.slow
def test_the_time_limit_ends_a_job(session: Session, run_dir: Path) -> None:
    start_or_attach(session, shell_spec(run_dir, "sleep 60", timeout_s=0.4, grace_s=1.0))
    status = wait_for_end(session, run_dir)
    assert status.exit is not None and status.exit.timeout and not status.exit.cancelled
    with pytest.raises(JobFailedError, match=r"time limit after .* raise deployment\.stage_timeout") as failure:
        require_finished(session, status)
    assert "log" not in str(failure.value).partition("time limit")[2]  # it is empty


@pytest.mark.slow
def test_a_job_lives_while_its_lease_is_renewed_and_ends_when_it_is_not(session: Session, run_dir: Path) -> None:
    start_or_attach(session, shell_spec(run_dir, "sleep 600", lease_s=LEASE_S))
    for _ in range(6):  # each far sooner than it must be, together longer than the lease
        time.sleep(LEASE_S / 5)
        assert renew_lease(session, str(run_dir)).state == JobState.RUNNING
    status = wait_for_end(session, run_dir)
    assert status.exit is not None and status.exit.lease_expired and not status.exit.cancelled
    assert status.exit.seconds > 2 * LEASE_S


@pytest.mark.slow
def test_a_lease_is_renewed_by_any_change_of_its_time_whatever_the_clocks_say(tmp_path: Path) -> None:
    session, run_dir = LocalSession(sys.executable), tmp_path / "sft-0123"
    start_or_attach(session, shell_spec(run_dir, "sleep 3600", lease_s=LEASE_S))
    for off in (3600, -3600, 3601, -3601):
        time.sleep(LEASE_S * 0.3)
        moment = time.time() + off
        os.utime(run_dir / ".job/lease", (moment, moment))
        assert job_status(session, str(run_dir)).state == JobState.RUNNING
    status = wait_for_end(session, run_dir)  # a time to come renews it no longer than any other
    assert status.exit is not None and status.exit.lease_expired and 2 * LEASE_S < status.exit.seconds < 1000


def test_a_program_that_dies_is_restarted_until_the_limit(session: Session, run_dir: Path) -> None:
    spec = shell_spec(run_dir, "echo up; exit 7", max_restarts=2, restart_backoff_s=0.05)
    start_or_attach(session, spec)
    status = wait_for_end(session, run_dir)
    assert status.exit is not None
    assert (status.exit.code, status.exit.restarts, status.attempt) == (7, 2, 1)
    log = (run_dir / "log.txt").read_text()
    assert log.count("up\n") == 3 and log.count("[supervisor] the program ended with code 7") == 2


def test_a_program_that_asks_for_a_restart_gets_it_at_once_and_no_other_failure_does(
    session: Session, run_dir: Path
) -> None:
    script = 'echo up; echo >> starts; [ "$(grep -c "" starts)" -lt 3 ] && exit 76; exit 7'
    start_or_attach(session, shell_spec(run_dir, script, restart_code=76, restart_backoff_s=600.0))
    status = wait_for_end(session, run_dir)
    assert status.exit is not None
    assert (status.exit.code, status.exit.restarts, status.attempt) == (7, 2, 1)


def test_a_program_that_asks_for_restarts_without_end_is_ended(session: Session, run_dir: Path) -> None:
    start_or_attach(session, shell_spec(run_dir, "exit 76", restart_code=76))
    status = wait_for_end(session, run_dir)
    assert status.exit is not None and (status.exit.code, status.exit.restarts) == (76, MAX_ASKED_RESTARTS)


@pytest.mark.slow
def test_after_a_program_ran_for_long_its_restarts_are_counted_anew(tmp_path: Path) -> None:
    session, run_dir = LocalSession(sys.executable), tmp_path / "serve-0123"
    # One that dies, one that runs for long and dies, and from then on ones that die.
    script = 'echo >> starts; [ "$(grep -c "" starts)" = 2 ] && sleep 4; exit 7'
    start_or_attach(session, shell_spec(run_dir, script, max_restarts=1, healthy_s=3.0, restart_backoff_s=0.05))
    status = wait_for_end(session, run_dir)
    assert status.exit is not None
    assert (status.exit.code, status.exit.restarts) == (7, 2)


def test_a_program_that_ends_well_is_not_restarted(session: Session, run_dir: Path) -> None:
    start_or_attach(session, shell_spec(run_dir, "echo up", max_restarts=3, restart_backoff_s=0.05))
    wait_for_end(session, run_dir)
    assert (run_dir / "log.txt").read_text() == "up\n"


def test_a_cancel_during_the_pause_before_a_restart_is_heard(session: Session, run_dir: Path) -> None:
    start_or_attach(session, shell_spec(run_dir, "exit 7", max_restarts=1, restart_backoff_s=60))
    wait_until(lambda: "restart 1" in (run_dir / "log.txt").read_text())
    status = cancel_job(session, str(run_dir), grace_s=1)
    assert status.exit is not None and status.exit.cancelled and status.exit.restarts == 0


def test_a_secret_reaches_the_program_and_no_command_line_or_file(session: Session, run_dir: Path) -> None:
    secret = "canary-4711"
    spec = shell_spec(run_dir, 'test "$TOKEN" = canary-"4711" && echo known; sleep 60', env={"TOKEN": secret})
    start_or_attach(session, spec)
    wait_until(lambda: (run_dir / "log.txt").read_text() == "known\n")
    command_lines = subprocess.run(
        ["ps", "-A", "-ww", "-o", "args="], capture_output=True, text=True, check=True
    ).stdout
    assert secret not in command_lines
    cancel_job(session, str(run_dir), grace_s=1)
    for path in run_dir.rglob("*"):
        assert path.is_dir() or secret.encode() not in path.read_bytes(), path
    assert secret not in repr(spec)


def test_the_programs_environment_is_minimal(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = LocalSession(sys.executable)  # over SSH a program inherits nothing of ours at all
    monkeypatch.setenv("PREFECT_API_KEY", "not for programs")
    monkeypatch.setenv("HF_HOME", "/models")
    start_or_attach(session, shell_spec(run_dir, "env; pwd"))
    wait_for_end(session, run_dir)
    lines = (run_dir / "log.txt").read_text().splitlines()
    assert not any("PREFECT_API_KEY" in line for line in lines)
    assert "HF_HOME=/models" in lines and f"ROLLOUTS_JOB={run_dir}" in lines and str(run_dir) in lines


def test_an_interrupt_at_the_terminal_does_not_reach_the_job(session: Session, run_dir: Path) -> None:
    status = start_or_attach(session, shell_spec(run_dir, "sleep 60"))
    assert status.pid is not None
    assert os.getsid(status.pid) == status.pid != os.getsid(0)
    assert os.getsid(supervisor_pid(run_dir)) not in (os.getsid(0), status.pid)


def test_a_shutdown_signal_to_the_supervisor_does_not_keep_it_from_writing_the_end(
    session: Session, run_dir: Path
) -> None:
    status = start_or_attach(session, shell_spec(run_dir, "trap '' TERM; exec sleep 60"))
    assert status.pid is not None
    os.kill(supervisor_pid(run_dir), signal.SIGTERM)
    os.kill(status.pid, signal.SIGKILL)
    ended = wait_for_end(session, run_dir)
    assert ended.exit is not None and ended.exit.signal == signal.SIGKILL


@pytest.mark.slow
def test_a_full_disk_loses_log_and_not_the_end_of_the_job(session: Session, tiny_disk: Path) -> None:
    run_dir = tiny_disk / "sft-0123"
    start_or_attach(session, shell_spec(run_dir, "yes | head -c 4000000; exit 9"))
    status = wait_for_end(session, run_dir)
    assert status.exit is not None and status.exit.code == 9
    assert 0 < status.log_size < 4_000_000
    with pytest.raises(PermanentInfraError, match="No space left"):
        start_or_attach(session, shell_spec(run_dir, "yes | head -c 4000000; exit 9"))


def test_a_program_that_has_filled_the_disk_is_restarted(session: Session, tiny_disk: Path, tmp_path: Path) -> None:
    run_dir, marker = tiny_disk / "serve-0123", tmp_path / "started-before"
    script = f"[ -e {marker} ] && exit 5; touch {marker}; yes | head -c 4000000; exit 9"
    start_or_attach(session, shell_spec(run_dir, script, max_restarts=1, restart_backoff_s=0.05))
    status = wait_for_end(session, run_dir)
    assert status.exit is not None and (status.exit.code, status.exit.restarts) == (5, 1)


def test_a_job_can_be_cancelled_on_a_disk_that_takes_no_more_files(session: Session, tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "disk", "size=8m,nr_inodes=100") as disk:
        run_dir = disk / "sft-0123"
        start_or_attach(session, shell_spec(run_dir, "sleep 60"))
        with pytest.raises(OSError, match="No space left"):
            for number in range(100):
                (disk / str(number)).touch()
        status = cancel_job(session, str(run_dir), 5.0)
    assert status.exit is not None and status.exit.cancelled


def test_a_broken_result_does_not_count_as_finished(session: Session, run_dir: Path) -> None:
    start_or_attach(session, shell_spec(run_dir, "printf '{\"loss\"' > result.json"))
    status = wait_for_end(session, run_dir)
    assert status.state == JobState.EXITED
    with pytest.raises(JobFailedError, match=r"without writing result\.json"):
        require_finished(session, status)
