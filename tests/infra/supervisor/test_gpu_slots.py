"""Pins that a GPU is one job's at a time, for as long as any process of that job lives, and that waiting is no trouble.

Without it two trainings on one GPU run out of memory, one that was killed leaves a GPU that nobody may use, two runs
wait for each other for ever, or a job is ended for having waited.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollouts.infra import jobs, locks, supervisor
from rollouts.infra.jobs import (
    FIRST_GPU,
    JobSpec,
    JobState,
    cancel_job,
    follow_job,
    job_status,
    renew_lease,
    require_finished,
    start_or_attach,
)
from rollouts.infra.session import LocalSession
from rollouts.infra.supervisor.files import internal_path, read_json
from rollouts.infra.supervisor.gpu_slots import GPU_LOCKS_VARIABLE, find_gpu_slots
from rollouts.infra.supervisor.processes import find_processes
from tests.infra.shell_jobs import is_alive, read_pid, shell_spec, wait_for_end
from tests.kit.nvidia_smi import install_nvidia_smi
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.slow

SESSION = LocalSession(sys.executable)
HOLD = "echo has it; while [ ! -e end ]; do sleep 0.02; done; echo '{}' > result.json"
"""Use the GPU until the test writes the file `end`."""
JobMaker = Callable[..., JobSpec]


@pytest.fixture
def make_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobMaker]:
    """Makes specs of jobs that are gone when the test is over, on a machine whose GPUs nobody has."""
    monkeypatch.setenv(GPU_LOCKS_VARIABLE, str(tmp_path / "locks"))
    run_dirs = []

    def make(name: str, *gpus: str, script: str = HOLD, **settings: object) -> JobSpec:
        run_dirs.append(tmp_path / name)
        return shell_spec(run_dirs[-1], script, gpus=gpus, run_name=f"run-of-{name}", **settings)

    yield make
    for run_dir in run_dirs:
        cancel_job(SESSION, str(run_dir), grace_s=0.2)
        assert find_processes(str(run_dir)) == []


def start(spec: JobSpec) -> str:
    """What the job waits for when it was started."""
    status = start_or_attach(SESSION, spec)
    assert status.state is JobState.RUNNING and (status.pid is None) == bool(status.waits_for)
    return status.waits_for


def end(spec: JobSpec) -> None:
    Path(spec.run_dir, "end").touch()
    require_finished(SESSION, wait_for_end(SESSION, Path(spec.run_dir)))


def wait_until_it_has_its_gpus(spec: JobSpec) -> None:
    wait_until(lambda: job_status(SESSION, spec.run_dir).pid is not None)


def events_of(spec: JobSpec) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    status = follow_job(
        SESSION, spec.run_dir, on_metrics=lambda line: None, on_event=found.append, on_log=lambda chunk: None
    )
    assert status.state is not JobState.RUNNING
    return found


def supervisor_pid(spec: JobSpec) -> int:
    meta = read_json(internal_path(spec.run_dir, "meta-1.json"))
    assert meta is not None
    return int(meta["supervisor_pid"])


def test_the_second_job_says_who_has_the_gpu_and_runs_when_that_has_ended(make_job: JobMaker) -> None:
    first, second = make_job("first", "0"), make_job("second", "0")
    assert start(first) == ""
    waits_for = start(second)
    assert waits_for.startswith(f"waits for GPU 0, held by run run-of-first (job {first.run_dir}) since 20")
    assert job_status(SESSION, second.run_dir).waits_for == start(second) == waits_for
    end(first)
    wait_until_it_has_its_gpus(second)
    assert job_status(SESSION, second.run_dir).waits_for == ""
    end(second)
    [waiting, having] = events_of(second)
    assert (waiting["event"], waiting["message"], waiting["attempt"]) == ("waits_for_gpus", waits_for, 1)
    assert having["event"] == "has_gpus"
    assert Path(second.run_dir, "log.txt").read_text().endswith("has it\n")


def test_jobs_of_other_gpus_and_of_none_do_not_wait(make_job: JobMaker) -> None:
    specs = [make_job("a", "0"), make_job("b", "1", "2"), make_job("c"), make_job("d")]
    assert [start(spec) for spec in specs] == [""] * 4
    for spec in specs:
        end(spec)


def test_a_trainer_and_its_engine_have_their_gpus_together_and_others_wait_for_both(make_job: JobMaker) -> None:
    engine, trainer = (make_job(name, "0", "1", gpu_group="rl-1") for name in ("engine", "trainer"))
    other = make_job("other", "1", gpu_group="rl-2")
    assert [start(engine), start(trainer)] == ["", ""]
    assert "held by run run-of-trainer" in start(other)
    end(trainer)
    assert start(make_job("again", "0", "1", gpu_group="rl-1")) == ""
    end(engine)
    assert job_status(SESSION, other.run_dir).pid is None
    end(make_job("again", "0", "1", gpu_group="rl-1"))
    wait_until_it_has_its_gpus(other)
    end(other)


def test_jobs_take_their_gpus_in_one_order_whatever_they_are_told_so_that_two_never_wait_for_each_other(
    make_job: JobMaker,
) -> None:
    first = make_job("first", "1")
    forwards, backwards = make_job("forwards", "0", "1"), make_job("backwards", "1", "0")
    assert start(first) == ""
    assert "GPU 1, held by run run-of-first" in start(forwards)
    assert "GPU 0, held by run run-of-forwards" in start(backwards)
    end(first)
    for spec in (forwards, backwards):
        wait_until_it_has_its_gpus(spec)
        end(spec)


def test_a_job_that_waits_keeps_what_it_has_so_that_it_is_not_passed_by_for_ever(make_job: JobMaker) -> None:
    first, wide, narrow = make_job("first", "1"), make_job("wide", "0", "1"), make_job("narrow", "0")
    assert start(first) == ""
    assert "GPU 1, held by run run-of-first" in start(wide)
    assert "GPU 0, held by run run-of-wide" in start(narrow)
    end(first)
    wait_until_it_has_its_gpus(wide)
    end(wide)
    wait_until_it_has_its_gpus(narrow)
    end(narrow)


def test_a_job_that_waits_can_be_cancelled_and_its_program_is_never_started(make_job: JobMaker) -> None:
    first, second = make_job("first", "0"), make_job("second", "0")
    start(first), start(second)
    status = cancel_job(SESSION, second.run_dir, grace_s=5)
    assert status.state is JobState.EXITED and status.exit is not None
    assert (status.exit.attempt, status.exit.cancelled, status.exit.code) == (1, True, 128 + signal.SIGTERM)
    assert "has it" not in Path(second.run_dir, "log.txt").read_text()
    end(first)
    assert start(second) == ""
    assert job_status(SESSION, second.run_dir).attempt == 2
    end(second)


def test_the_time_limit_begins_when_the_gpus_are_there(make_job: JobMaker) -> None:
    first, second = make_job("first", "0"), make_job("second", "0", script="sleep 60", timeout_s=0.3)
    start(first), start(second)
    with pytest.raises(AssertionError, match="waited 1 s for it"):
        wait_until(lambda: job_status(SESSION, second.run_dir).state is not JobState.RUNNING, timeout_s=1.0)
    end(first)
    ended = wait_for_end(SESSION, Path(second.run_dir))
    assert ended.exit is not None and ended.exit.timeout


def test_a_job_that_nobody_wants_any_more_does_not_wait(make_job: JobMaker) -> None:
    first, second = make_job("first", "0"), make_job("second", "0", lease_s=3.0)
    start(first), start(second)
    assert renew_lease(SESSION, second.run_dir).state is JobState.RUNNING
    ended = wait_for_end(SESSION, Path(second.run_dir))
    assert ended.exit is not None and ended.exit.lease_expired
    end(first)


def test_a_program_that_cannot_be_started_when_its_gpus_are_free_has_failed(make_job: JobMaker) -> None:
    first = make_job("first", "0")
    spec = make_job("second", "0")
    second = JobSpec(run_dir=spec.run_dir, argv=("/nowhere/python",), job={}, gpus=("0",))
    start(first), start(second)
    end(first)
    ended = wait_for_end(SESSION, Path(second.run_dir))
    assert ended.exit is not None and (ended.state, ended.exit.code) == (JobState.EXITED, 127)
    assert "/nowhere/python cannot be started" in Path(second.run_dir, "log.txt").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a child together with its parent")
def test_kill_9_of_the_supervisor_frees_the_gpu_when_nothing_of_the_job_lives(make_job: JobMaker) -> None:
    first, second = make_job("first", "0"), make_job("second", "0")
    start(first), start(second)
    os.kill(supervisor_pid(first), signal.SIGKILL)
    wait_until_it_has_its_gpus(second)
    assert job_status(SESSION, first.run_dir).state is JobState.LOST
    end(second)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a child together with its parent")
@pytest.mark.parametrize("inherits", [True, False], ids=["with the lock", "without the lock"])
def test_a_gpu_that_a_killed_supervisors_processes_still_use_is_not_given_away(
    make_job: JobMaker, inherits: bool
) -> None:
    program = (
        f"import subprocess; stray = subprocess.Popen(['sleep', '60'], close_fds={not inherits}, "
        "start_new_session=True); open('stray', 'w').write(f'{stray.pid}\\n')"
    )
    script = f'{sys.executable} -I -c "{program}"; {HOLD}'
    first, second = make_job("first", "0", script=script), make_job("second", "0")
    start(first)
    stray = read_pid(Path(first.run_dir, "stray"))
    os.kill(supervisor_pid(first), signal.SIGKILL)
    wait_until(lambda: job_status(SESSION, first.run_dir).state is JobState.LOST)
    wait_until(lambda: job_status(SESSION, first.run_dir).orphans == (stray,))
    waits_for = start(second)
    assert "run-of-first" in waits_for and (str(stray) in waits_for) is not inherits
    assert is_alive(stray)
    cancel_job(SESSION, first.run_dir, grace_s=0.2)
    wait_until_it_has_its_gpus(second)
    end(second)


def test_what_outlives_the_program_is_ended_before_the_next_job_gets_the_gpu(make_job: JobMaker) -> None:
    script = f"(trap '' TERM; exec setsid sleep 60) & echo $! > stray; {HOLD}"
    first, second = make_job("first", "0", script=script), make_job("second", "0")
    start(first)
    stray = read_pid(Path(first.run_dir, "stray"))
    start(second)
    end(first)
    wait_until_it_has_its_gpus(second)
    assert not is_alive(stray)
    end(second)


def test_a_restarted_program_never_lets_go_of_its_gpu(make_job: JobMaker) -> None:
    script = f"echo >> starts; [ $(wc -l < starts) = 2 ] || exit 3; {HOLD}"
    first = make_job("first", "0", script=script, max_restarts=1, restart_backoff_s=1.0)
    second = make_job("second", "0", script="echo '{}' > result.json")
    start(first)
    assert "run-of-first" in start(second)
    wait_until(lambda: Path(first.run_dir, "log.txt").read_text().endswith("has it\n"))
    assert job_status(SESSION, second.run_dir).pid is None
    end(first)
    require_finished(SESSION, wait_for_end(SESSION, Path(second.run_dir)))


def test_an_event_goes_behind_whole_lines_alone(make_job: JobMaker) -> None:
    first, second = make_job("first", "0"), make_job("second", "0")
    Path(second.run_dir).mkdir()
    whole = json.dumps({"event": "started", "attempt": 1}) + "\n"
    Path(second.run_dir, "events.jsonl").write_text(whole + '{"event": "check')
    start(first), start(second)
    end(first)
    end(second)
    assert [event["event"] for event in events_of(second)] == ["started", "waits_for_gpus", "has_gpus"]


def test_a_folder_of_locks_that_somebody_else_made_is_refused(
    make_job: JobMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    monkeypatch.setenv(GPU_LOCKS_VARIABLE, str(tmp_path / "link"))
    with pytest.raises(Exception, match="is not a folder of yours: remove it, or name another one"):
        start(make_job("job", "0"))


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for nvidia-smi that knows two."""
    install_nvidia_smi(tmp_path / "bin", monkeypatch)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("wanted", "visible", "expected"),
    [
        (("0", "1"), None, [("GPU-a7c2", "GPU 1"), ("GPU-b0a1", "GPU 0")]),
        ((FIRST_GPU,), None, [("GPU-b0a1", "GPU 0")]),
        ((FIRST_GPU, "0"), None, [("GPU-b0a1", "GPU 0")]),
        ((FIRST_GPU,), "1,0", [("GPU-a7c2", "GPU 1")]),
        ((FIRST_GPU,), "GPU-a7c2", [("GPU-a7c2", "GPU 1")]),
        ((FIRST_GPU,), "GPU-a,GPU-b", [("GPU-a7c2", "GPU 1")]),
        ((FIRST_GPU,), "", []),
        ((FIRST_GPU,), "-1", []),
        ((), None, []),
        (("7",), None, [("number-7", "GPU 7")]),
    ],
)
def test_a_gpu_is_known_by_its_uuid(
    wanted: tuple[str, ...], visible: str | None, expected: list[tuple[str, str]]
) -> None:
    assert [(slot.name, slot.label) for slot in find_gpu_slots(wanted, visible)] == expected


def test_without_nvidia_smi_gpus_are_numbers_and_the_first_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [slot.name for slot in find_gpu_slots(("1", "0", FIRST_GPU), None)] == ["number-0", "number-1"]


@pytest.mark.usefixtures("two_gpus")
def test_the_first_gpu_and_its_number_are_the_same_gpu(make_job: JobMaker) -> None:
    first, second = make_job("first", FIRST_GPU), make_job("second", "0")
    assert start(first) == ""
    assert "waits for GPU 0, held by run run-of-first" in start(second)
    end(first)
    end(second)


def test_the_file_of_a_lock_that_is_held_stays_new_so_that_no_cleaner_of_tmp_takes_it_away(
    make_job: JobMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty = tmp_path / "supervisor"
    shutil.copytree(Path(supervisor.__file__).parent, hasty)
    shutil.copy(str(locks.__file__), tmp_path)
    text = (hasty / "gpu_slots.py").read_text()
    (hasty / "gpu_slots.py").write_text(text.replace("GPU_FILES_NEW_S = 3600.0", "GPU_FILES_NEW_S = 0.2"))
    assert (hasty / "gpu_slots.py").read_text() != text
    monkeypatch.setattr(jobs, "_SUPERVISOR", hasty)
    holder, waiting = make_job("holder", "1"), make_job("waiting", "0", "1")
    assert start(holder) == "" and "GPU 1" in start(waiting)
    files = [tmp_path / "locks" / name for name in ("number-0.json", "number-1.json")]
    for file in files:
        os.utime(file, (0, 0))
    wait_until(lambda: all(file.stat().st_mtime > time.time() - 60 for file in files))
    end(holder)
    end(waiting)
