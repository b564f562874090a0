"""Start, follow and end one detached job on a node, and read how the job ended.

A job is identified by its run directory. The functions call the supervisor program on the node (supervisor/). The calls
are idempotent, so they may be repeated.

    start_or_attach ── RUNNING ──┬── FINISHED   result.json exists
         ABSENT ┘                ├── EXITED     it ended without result.json; `exit` says how
                                 └── LOST       its supervisor died (reboot, kill -9); start it again to resume

Not here: connections to nodes (session.py), the job's work.
"""

import base64
import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from rollouts.infra import supervisor
from rollouts.infra.errors import (
    CommandFailedError,
    FileMissingError,
    JobFailedError,
    JobLostError,
    PermanentInfraError,
    TransientInfraError,
)
from rollouts.infra.foreign_text import shown_lines
from rollouts.infra.node_agent import ISOLATED
from rollouts.infra.session import Session, read_answer
from rollouts.infra.supervisor.files import parse_object
from rollouts.infra.supervisor.spec import FIRST_GPU, JobSpec
from rollouts.infra.supervisor.start import ENDING_WAIT_S
from rollouts.infra.supervisor.status import NO_LOG

__all__ = [
    "FIRST_GPU",
    "FollowOffsets",
    "JobExit",
    "JobSpec",
    "JobState",
    "JobStatus",
    "ask_to_finish",
    "cancel_job",
    "describe_exit",
    "describe_saved",
    "follow_job",
    "job_status",
    "raise_failure",
    "read_log_tail",
    "read_result",
    "renew_lease",
    "require_finished",
    "start_or_attach",
]

# Any: programs define the content of their metrics, events and results.
JsonObject = dict[str, Any]

CALL_TIMEOUT_S = 60.0
MAX_GRACE_S = 600.0
"""Default limit on the seconds that a program may take to save its state after its end was requested."""
_CANCEL_LOOK_S = 1.0
"""Seconds for which one call waits for the end of a cancelled job. `cancel_job` repeats the call."""
MAX_BROKEN_STREAMS = 10
"""Number of connections in a row without a received message after which `follow_job` gives up."""
STEADY_S = 600.0
"""A connection that lasted this many seconds counts as working, because a job that waits for a GPU sends no
messages."""
MAX_RECONNECT_PAUSE_S = 10.0
_TAIL_LINES = 20
_SUPERVISOR = Path(supervisor.__file__).parent

logger = logging.getLogger(__name__)


class JobState(StrEnum):
    """The state of a job as the node reports it (see the diagram in the module's docstring)."""

    ABSENT = "ABSENT"
    """The job was never started."""
    RUNNING = "RUNNING"
    """The job's supervisor is alive."""
    FINISHED = "FINISHED"
    """The job has a result.json."""
    EXITED = "EXITED"
    """The job ended without result.json. The exit record says how the job ended."""
    LOST = "LOST"
    """The job's supervisor died without writing an exit record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobExit:
    """How an attempt ended: the content of exit-<n>.json."""

    attempt: int
    code: int
    """The program's exit code. 128 + the signal's number if a signal ended the program."""
    signal: int | None
    cancelled: bool
    timeout: bool
    lease_expired: bool
    oom: bool
    """Whether the kernel killed the program because memory ran out."""
    leftover_processes: int
    """Number of the job's processes that were alive after the program's end and were killed."""
    restarts: int
    seconds: float
    started_at: str
    """Time of the start by the node's clock, in UTC and ISO 8601 format."""
    ended_at: str
    saved_step: int | None = None
    """The last saved step, or 0 if the program saved no step. None if the program does not report its saved step."""
    problem: str = ""
    """Why the program could not save a later step when its end was requested, or "" if the program could save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    run_dir: str
    state: JobState
    attempt: int
    """Number of the latest attempt, from 1, or 0 before the first attempt."""
    attached: bool
    """Whether `start_or_attach` found the job running or finished, and started nothing."""
    pid: int | None
    """Process id of the program on the node, or None while the job waits for GPUs."""
    restarts: int
    waits_for: str
    """The GPU for which the job waits, and the job that holds it, or "" if the job does not wait."""
    log_size: int
    exit: JobExit | None
    reason: str
    """Why the job is LOST, or "" if the job is not LOST."""
    orphans: tuple[int, ...]
    """Process ids of processes that a LOST job left behind. The next start or cancel ends these processes."""
    is_ending: bool = False
    """Whether the job is RUNNING but will end, because its end was requested or a limit is reached. The program may be
    saving its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowOffsets:
    """Numbers of bytes of the files in a run directory that the follower has already received."""

    log: int = 0
    metrics: int = 0
    events: int = 0


def start_or_attach(session: Session, spec: JobSpec) -> JobStatus:
    """Start the job unless it is finished or running. Concurrent callers start the job only once.

    If the end of the job was requested or a limit is reached, the call waits for the job's end and starts the next
    attempt.

    Raises:
        PermanentInfraError: the command cannot be run, or a job whose end was requested does not end.
    """
    assert PurePosixPath(spec.run_dir).is_absolute(), f"run_dir is {spec.run_dir!r}, not an absolute path"
    timeout_s = CALL_TIMEOUT_S + ENDING_WAIT_S + spec.max_grace_s
    status = _parse_status(_call(session, "start", spec.run_dir, stdin=_render_spec(spec), timeout_s=timeout_s))
    logger.info("%s %s, attempt %d", "found" if status.attached else "started", spec.run_dir, status.attempt)
    return status


def job_status(session: Session, run_dir: str) -> JobStatus:
    return _parse_status(_call(session, "status", run_dir))


def cancel_job(
    session: Session,
    run_dir: str,
    grace_s: float,
    *,
    max_grace_s: float = MAX_GRACE_S,
    store: str = "",
    on_wait: Callable[[], None] = lambda: None,
    is_impatient: Callable[[], bool] = lambda: False,
) -> JobStatus:
    """End the job with all its processes. Returns the job's final status. The call is idempotent.

    The job's processes get SIGTERM, and SIGKILL after `grace_s` seconds. A program may ask for more time to save, at
    most `max_grace_s` seconds.

    Args:
        store: identity of the caller's ledger. A job that runs of other ledgers follow keeps running. Without `store`,
            the job is always ended.
        on_wait: called once if the job has not ended after a second.
        is_impatient: returns True to stop waiting for the job, which still saves its state and ends. If the wait was
            stopped, the status is RUNNING with `is_ending`.
    """
    on_behalf = (store,) if store else ()
    limits = (str(grace_s), str(max_grace_s), str(_CANCEL_LOOK_S))
    attempt = 0
    while True:
        asked = (*limits, str(attempt), *on_behalf)
        status = _parse_status(_call(session, "cancel", run_dir, *asked, timeout_s=grace_s + CALL_TIMEOUT_S))
        if not status.is_ending or is_impatient():
            return status
        if not attempt:
            attempt = status.attempt
            on_wait()


def ask_to_finish(session: Session, run_dir: str, asked_by: str) -> JobStatus:
    """Ask the job to finish early with its present result. Returns the job's status at once.

    The job finds `asked_by` in the file finish-<attempt> of its directory. The job may ignore the request.
    """
    return _parse_status(_call(session, "finish", run_dir, asked_by))


def renew_lease(session: Session, run_dir: str) -> JobStatus:
    """Renew the lease of a job. Returns the job's status.

    A process on the same node can also renew the lease by touching the file `.job/lease` in the run directory.
    """
    return _parse_status(_call(session, "renew", run_dir))


def read_result(session: Session, run_dir: str) -> JsonObject | None:
    """Return the content of result.json, or None while the job is not finished."""
    try:
        return parse_object(session.read_file(f"{run_dir}/result.json"))
    except FileMissingError:
        return None


def read_log_tail(session: Session, run_dir: str, *, max_bytes: int = 16384) -> str:
    """Return the end of the job's log as printable text. Invalid UTF-8 is replaced."""
    answer = _call(session, "tail", run_dir, str(max_bytes))
    return shown_lines(_decoded(answer["log"]).decode(errors="replace"))


def follow_job(
    session: Session,
    run_dir: str,
    *,
    on_metrics: Callable[[JsonObject], None],
    on_event: Callable[[JsonObject], None],
    on_log: Callable[[bytes], None] | None = None,
    offsets: FollowOffsets = FollowOffsets(),
    store: str = "",
) -> JobStatus:
    """Deliver the job's log, metrics and events until the job has ended. Returns the job's final status.

    Each record is delivered exactly once. After a broken connection, delivery continues at the same offsets. Incomplete
    lines are not delivered.

    Args:
        on_log: called with pieces of the log. Without `on_log`, the log is not transferred.
        store: identity of the caller's ledger. While this call runs, runs of other ledgers do not end the job.

    Raises:
        TransientInfraError: the node did not answer MAX_BROKEN_STREAMS times in a row. The job may still be running.
    """
    position = offsets if on_log else dataclasses.replace(offsets, log=NO_LOG)
    broken_streams = 0
    while broken_streams < MAX_BROKEN_STREAMS:
        began = time.monotonic()
        with contextlib.closing(_messages(session, run_dir, position, store)) as messages:
            for message in messages:
                broken_streams = 0
                if "status" in message:
                    return _parse_status(message["status"])
                offset = message["offset"]
                if "log" in message and on_log:
                    on_log(_decoded(message["log"]))
                    position = dataclasses.replace(position, log=offset)
                elif "metrics" in message:
                    on_metrics(message["metrics"])
                    position = dataclasses.replace(position, metrics=offset)
                elif "event" in message:
                    on_event(message["event"])
                    position = dataclasses.replace(position, events=offset)
                else:
                    logger.warning("skipped a line of %s/%s that is not a record", run_dir, message["skipped"])
        broken_streams = 1 if time.monotonic() - began > STEADY_S else broken_streams + 1
        time.sleep(min(0.1 * 2.0**broken_streams, MAX_RECONNECT_PAUSE_S))
    raise TransientInfraError(
        f"following {run_dir} broke off {MAX_BROKEN_STREAMS} times in a row; the job may still run: try again"
    )


def require_finished(session: Session, status: JobStatus) -> JobStatus:
    """Return the status if the job is FINISHED.

    Raises:
        JobLostError: the job is LOST. Starting the job again resumes the work.
        PermanentInfraError: the job is ABSENT, because its directory was moved or deleted.
        JobFailedError: the job is EXITED or RUNNING. The error's text says why, and ends with the log's last lines.
    """
    if status.state != JobState.FINISHED:
        raise_failure(session, status, wanted=JobState.FINISHED)
    return status


def raise_failure(
    session: Session, status: JobStatus, *, wanted: JobState, explain_log: Callable[[str], str] = lambda log: ""
) -> NoReturn:
    """Raise the error for a job that is not in the wanted state.

    Args:
        explain_log: returns a sentence with the cause of the failure, given the end of the job's log. Returns "" if the
            log does not show the cause.

    Raises:
        JobLostError: the job's supervisor died.
        PermanentInfraError: the job's directory is missing.
        JobFailedError: in all other cases. The error's text contains the reason and the log's last lines.
    """
    if status.state == JobState.LOST:
        raise JobLostError(status.run_dir, status.attempt, status.reason)
    if status.state == JobState.ABSENT:
        raise PermanentInfraError(
            f"{status.run_dir} was moved or deleted while its job was running: put it back and start again to resume "
            "it; without its directory the next start begins from the beginning"
        )
    if status.exit is None:
        raise JobFailedError(status.run_dir, status.attempt, -1, f"it is {status.state}, not {wanted}")
    log = read_log_tail(session, status.run_dir)
    lines = log.splitlines()[-_TAIL_LINES:]
    reason = explain_log(log) or describe_exit(status.exit)
    message = "\n".join([reason, *(["The last lines of its log:", *lines] if lines else [])])
    raise JobFailedError(status.run_dir, status.attempt, status.exit.code, message)


def describe_exit(exit_record: JobExit) -> str:
    if exit_record.cancelled:
        return f"it was cancelled{describe_saved(exit_record)}."
    if exit_record.timeout:
        return (
            f"it was ended by its time limit after {exit_record.seconds:.0f} s: raise "
            "deployment.stage_timeout_minutes, or start the run again, which resumes from its last checkpoint."
        )
    if exit_record.lease_expired:
        return "it was ended because its lease was not renewed."
    if exit_record.oom:
        return "the kernel killed it because memory ran out: use smaller batches or a node with more memory."
    if exit_record.signal is not None:
        return f"signal {exit_record.signal} killed it, and its supervisor did not send that signal."
    if exit_record.code == 0:
        return "it ended without an error, but also without writing result.json."
    return f"it failed by itself after {exit_record.seconds:.0f} s."


def describe_saved(exit_record: JobExit) -> str:
    """Return a phrase about the saved step, for the end of a sentence about a job, or "" if the step is unknown."""
    if exit_record.saved_step is None:
        return ""
    problem = f": {exit_record.problem}" if exit_record.problem else ""
    return (
        f"{problem}, step {exit_record.saved_step} is saved"
        if exit_record.saved_step
        else f"{problem}, no step is saved"
    )


def _render_spec(spec: JobSpec) -> bytes:
    return json.dumps(dataclasses.asdict(spec)).encode()


def _parse_status(document: JsonObject) -> JobStatus:
    """Parse the status that the supervisor prints.

    Raises:
        PermanentInfraError: the object is not a job's status.
    """
    try:
        exit_document = document["exit"]
        return JobStatus(
            **{
                **document,
                "state": JobState(document["state"]),
                "exit": None if exit_document is None else JobExit(**exit_document),
                "orphans": tuple(document["orphans"]),
            }
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PermanentInfraError(
            f"the node sent no status of a job ({type(error).__name__}: {str(error)[:80]})"
        ) from error


def _call(
    session: Session, verb: str, run_dir: str, *arguments: str, stdin: bytes = b"", timeout_s: float = CALL_TIMEOUT_S
) -> JsonObject:
    """Call one verb of the supervisor on the node, and parse the last line of its output."""
    parameters = (verb, run_dir, *arguments)
    if verb == "start":  # the new process becomes the supervisor, so it must not be forked by an agent
        argv = [session.python, ISOLATED, session.place_program(_SUPERVISOR), *parameters]
        completed = session.run(argv, stdin=stdin, timeout_s=timeout_s, check=False, may_repeat=True)
    else:
        completed = session.run_program(
            _SUPERVISOR, parameters, stdin=stdin, timeout_s=timeout_s, check=False, may_repeat=True
        )
    answer = read_answer(completed)
    if "error" in answer:
        raise PermanentInfraError(answer["error"])
    return answer


def _is_message(message: JsonObject) -> bool:
    contents = {"log": str, "metrics": dict, "event": dict, "skipped": str}
    if isinstance(message.get("status"), dict):
        return True
    has_content = any(isinstance(message.get(name), kind) for name, kind in contents.items())
    return has_content and isinstance(message.get("offset"), int)


def _decoded(log: Any) -> bytes:  # Any: JSON
    try:
        return base64.b64decode(log)
    except (TypeError, ValueError) as error:
        raise PermanentInfraError(f"the node sends a log that cannot be decoded ({error})") from error


def _messages(session: Session, run_dir: str, position: FollowOffsets, store: str) -> Generator[JsonObject]:
    """Yield the messages of one connection. If the connection breaks, the iterator ends without an exception."""
    parameters = [run_dir, str(position.log), str(position.metrics), str(position.events), *([store] if store else [])]
    argv = [session.python, ISOLATED, session.place_program(_SUPERVISOR), "follow", *parameters]
    try:
        with session.stream(argv) as lines:
            for line in lines:
                message = parse_object(line) if line.endswith(b"\n") else None
                if message is not None and not _is_message(message):
                    raise PermanentInfraError(
                        f"the node sent {str(message)[:80]} about {run_dir}, which is not a message of a supervisor"
                    )
                if message is not None:
                    yield message
    except (TransientInfraError, CommandFailedError) as error:
        logger.warning("the connection that followed %s broke: %s", run_dir, error)
