"""Run an attempt of a job to its end: wait for GPUs, run and restart the program, write the exit record.

Not here: one start of the program (program.py), the fork of this process (start.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
import traceback
from datetime import datetime, timezone
from pathlib import Path

from rollouts.infra.supervisor.files import (
    INTERNAL_DIR,
    JsonObject,
    append_event,
    exit_path,
    file_size,
    internal_path,
    read_stop_state,
    write_json,
)
from rollouts.infra.supervisor.gpu_slots import GPUSlots, find_gpu_slots
from rollouts.infra.supervisor.processes import read_boot_id, read_start
from rollouts.infra.supervisor.program import CappedLog, Ending, Program, StopRequests, spawn_program, watch_program
from rollouts.infra.supervisor.spec import JobSpec

GPU_POLL_S = 0.5
_CANNOT_START_CODE = 127
"""Exit code of an attempt whose program could not be started after a wait for GPUs. Shells report a missing command
with the same code."""
MAX_BACKOFF_S = 30.0
MAX_ASKED_RESTARTS = 64
"""Largest number of restarts of an attempt because of `JobSpec.restart_code`."""
_EXIT_RECORD_BYTES = 4096


def _describe_program(program: Program) -> JsonObject:
    """Return the process id and start time of the program. The two fields identify the process even if the system
    reuses the id."""
    return {"pid": program.process.pid, "pid_started": read_start(program.process.pid)}


def supervise(spec: JobSpec, attempt: int, report_fd: int) -> None:
    """Run the program with its restarts, and write exit-<n>.json at the end of the attempt."""
    started_at, started = datetime.now(timezone.utc), time.monotonic()  # noqa: UP017 - Python 3.10 has no datetime.UTC
    log_path = Path(spec.run_dir, "log.txt")
    meta: JsonObject = {
        "attempt": attempt,
        "supervisor_pid": os.getpid(),
        "boot_id": read_boot_id(),
        "started_at": started_at.isoformat(),
        "log_offset": file_size(log_path),
        "pid": None,
        "restarts": 0,
        "waits_for": "",
    }
    try:
        exit_fd = _preallocate_exit_record(spec.run_dir, attempt)
        for name in ("lease", f"spare-{attempt}"):
            internal_path(spec.run_dir, name).touch()
        _write_meta(spec.run_dir, meta)
        log = CappedLog(log_path, spec.max_log_bytes)  # opened before the report, after which clients read the log
        slots = GPUSlots(spec, find_gpu_slots(spec.gpus, os.environ.get("CUDA_VISIBLE_DEVICES")))
        waits_for = slots.take()
        program = None if waits_for else spawn_program(spec, attempt, slots.descriptors)
    except (OSError, ValueError, subprocess.SubprocessError) as error:  # ValueError: an argument has a zero byte
        for name in (f"meta-{attempt}.json", f"exit-{attempt}.json"):
            internal_path(spec.run_dir, name).unlink(missing_ok=True)
        report(report_fd, {"error": f"{spec.argv[0]} cannot be started: {error}"})
        return
    _update_meta(spec.run_dir, {**meta, **(_describe_program(program) if program else {}), "waits_for": waits_for})
    report(report_fd, {})
    with log:
        started_program = program or _wait_and_spawn(spec, meta, slots, waits_for, log)
        if isinstance(started_program, Program):
            ending, restarts = _run_with_restarts(started_program, spec, meta, log, slots)
        else:
            ending, restarts = started_program, 0
    said = read_stop_state(spec.run_dir, attempt)
    slots.release()  # release before the exit record exists, because the next job may then take the GPUs at once
    record = {
        "attempt": attempt,
        "code": ending.code,
        "signal": ending.signal,
        "cancelled": ending.stopped_by == "cancelled",
        "timeout": ending.stopped_by == "timeout",
        "lease_expired": ending.stopped_by == "lease_expired",
        "oom": ending.oom,
        "leftover_processes": ending.leftover_processes,
        "restarts": restarts,
        "saved_step": said.get("saved_step"),
        "problem": said.get("problem", ""),
        "seconds": round(time.monotonic() - started, 3),
        "started_at": started_at.isoformat(),
        "ended_at": datetime.now(timezone.utc).isoformat(),  # noqa: UP017 - Python 3.10 has no datetime.UTC
    }
    _write_exit_record(spec.run_dir, attempt, exit_fd, record)


def _wait_and_spawn(
    spec: JobSpec, meta: JsonObject, slots: GPUSlots, waits_for: str, log: CappedLog
) -> Program | Ending:
    """Start the program when the job's GPUs are free. If the job ends during the wait, return its ending.

    The time limit does not apply while the job waits. The lease applies during the wait, so that a job whose client is
    gone does not wait forever.
    """
    began = time.monotonic()
    requests = StopRequests(dataclasses.replace(spec, timeout_s=0.0), meta["attempt"])
    said, current = "", waits_for
    try:
        while current:
            if current != said:
                said = current
                log.note(current)
                _update_meta(spec.run_dir, {**meta, "waits_for": current})
                append_event(spec.run_dir, meta["attempt"], "waits_for_gpus", message=current)
            if stopped_by := requests.wait(GPU_POLL_S):
                log.note(f"{stopped_by} before its GPUs were free")
                return _ending_without_program(128 + signal.SIGTERM, stopped_by)
            slots.keep_files()
            current = slots.take()
        # Write the event before the program starts, because the program appends to the same file.
        append_event(spec.run_dir, meta["attempt"], "has_gpus", waited_s=round(time.monotonic() - began, 1))
        program = spawn_program(spec, meta["attempt"], slots.descriptors)
    except OSError as error:
        log.note(f"{spec.argv[0]} cannot be started: {error}")
        return _ending_without_program(_CANNOT_START_CODE)
    _update_meta(spec.run_dir, {**meta, **_describe_program(program)})
    return program


def _ending_without_program(code: int, stopped_by: str = "") -> Ending:
    is_stopped = signal.SIGTERM if stopped_by else None
    return Ending(code=code, signal=is_stopped, oom=False, stopped_by=stopped_by, leftover_processes=0)


def _run_with_restarts(
    program: Program, spec: JobSpec, meta: JsonObject, log: CappedLog, slots: GPUSlots
) -> tuple[Ending, int]:
    """Watch the program and restart it when needed. Returns how the last start of the program ended, and the number of
    restarts."""
    requests = StopRequests(spec, meta["attempt"])
    restarts = in_a_row = asked = 0
    while True:
        began = time.monotonic()
        ending = watch_program(program, spec, log, requests, slots.keep_files)
        if time.monotonic() - began >= spec.healthy_s:
            in_a_row = 0
        is_asked = ending.code == spec.restart_code and asked < MAX_ASKED_RESTARTS
        if ending.code == 0 or ending.stopped_by or (in_a_row >= spec.max_restarts and not is_asked):
            return ending, restarts
        pause_s = 0.0 if is_asked else min(spec.restart_backoff_s * 2.0**in_a_row, MAX_BACKOFF_S)
        log.note(f"the program ended with code {ending.code}: restart {restarts + 1} in {pause_s:g} s")
        if stopped_by := requests.wait(pause_s):
            return dataclasses.replace(ending, stopped_by=stopped_by), restarts
        try:
            program = spawn_program(spec, meta["attempt"], slots.descriptors)
        except OSError as error:
            log.note(f"the program cannot be started again: {error}")
            return ending, restarts
        restarts += 1
        asked += is_asked
        in_a_row += not is_asked
        _update_meta(spec.run_dir, {**meta, **_describe_program(program), "restarts": restarts})


def report(report_fd: int, answer: JsonObject) -> None:
    """Send the supervisor's report to the waiting `detach`: an empty answer if the attempt has started, or an error."""
    with contextlib.suppress(BrokenPipeError), os.fdopen(report_fd, "w") as pipe:
        pipe.write(json.dumps(answer))


def _write_meta(run_dir: str, meta: JsonObject) -> None:
    write_json(run_dir, f"{INTERNAL_DIR}/meta-{meta['attempt']}.json", meta)


def _update_meta(run_dir: str, meta: JsonObject) -> None:
    """Write meta-<n>.json. A failure is only logged, because a full disk must not end a healthy program."""
    try:
        _write_meta(run_dir, meta)
    except OSError:
        with contextlib.suppress(OSError):  # the supervisor's own output may be on the same full disk
            traceback.print_exc()


def _preallocate_exit_record(run_dir: str, attempt: int) -> int:
    """Reserve disk space for exit-<n>.json, so that the supervisor can write this file even on a full disk. Returns the
    open descriptor."""
    path = internal_path(run_dir, f"exit-{attempt}.json")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    os.write(descriptor, b" " * _EXIT_RECORD_BYTES)
    os.fsync(descriptor)
    return descriptor


def _write_exit_record(run_dir: str, attempt: int, descriptor: int, record: JsonObject) -> None:
    """Write the exit record into the reserved file, and move the file to the run directory."""
    text = json.dumps(record, indent=2).encode() + b"\n"
    assert len(text) <= _EXIT_RECORD_BYTES, f"{len(text)} bytes, {_EXIT_RECORD_BYTES} are reserved"
    os.pwrite(descriptor, text, 0)
    os.ftruncate(descriptor, len(text))
    os.fsync(descriptor)
    os.close(descriptor)
    internal_path(run_dir, f"exit-{attempt}.json").rename(exit_path(run_dir, attempt))
