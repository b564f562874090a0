"""The verbs of the supervisor's command line, described in the package's docstring, and the end of a job."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable

from rollouts.infra.supervisor.cancel import CancelRequest, ask_to_finish, cancel_job
from rollouts.infra.supervisor.files import JsonObject
from rollouts.infra.supervisor.follow import follow_job, marked_as_followed
from rollouts.infra.supervisor.spec import JobError, parse_spec
from rollouts.infra.supervisor.start import start_job
from rollouts.infra.supervisor.status import read_log_tail, read_status, renew_lease


def main(argv: list[str]) -> int:
    """Carry out one verb; returns the exit code."""
    verb, run_dir, parameters = argv[1], os.path.realpath(argv[2]), argv[3:]
    if verb == "follow":
        with contextlib.suppress(BrokenPipeError), marked_as_followed(run_dir, *parameters[3:]):
            follow_job(run_dir, *(int(offset) for offset in parameters[:3]))
        return 0
    verbs: dict[str, Callable[[], JsonObject]] = {
        "start": lambda: start_job(dataclasses.replace(parse_spec(sys.stdin.buffer.read()), run_dir=run_dir)),
        "status": lambda: read_status(run_dir),
        "cancel": lambda: cancel_job(run_dir, CancelRequest.parse(parameters), *parameters[4:]),
        "renew": lambda: renew_lease(run_dir),
        "finish": lambda: ask_to_finish(run_dir, parameters[0]),
        "tail": lambda: read_log_tail(run_dir, int(parameters[0])),
    }
    try:
        answer, exit_code = verbs[verb](), 0
    except (JobError, OSError) as error:
        answer, exit_code = {"error": f"{verb} of {run_dir}: {error}"}, 1
    sys.stdout.write(json.dumps(answer) + "\n")
    return exit_code
