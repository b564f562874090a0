"""Wait until an inference engine, which runs as a job on a node, has generated a token. If the engine fails, find the
reason in its log.

If an engine dies, its supervisor restarts it on the same port. If the job's lease expires, the supervisor ends the
engine (jobs.py).

Not here: starting the engine (jobs.py), and the engine's lease, clients and weights.

    start_or_attach ── job RUNNING ── loading ── answers with one token: ready
                            └── ended before that: JobFailedError with the reason found in its log
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import httpx

from rollouts.infra.errors import PermanentInfraError, TransientInfraError
from rollouts.infra.jobs import JobState, job_status, raise_failure, read_log_tail
from rollouts.infra.session import LOOPBACK, Session

POLL_S = 0.5
_COMPLETION_TIMEOUT_S = 40.0
"""Time limit of one request for a token. A large engine compiles kernels for its first completion and may need several
requests."""
_RESUME_TIMEOUT_S = 10.0
CHECK_TIMEOUT_S = 60.0
_ROUTER_PACKAGE = "sglang_router"
Probe = tuple[str, Mapping[str, object]]
"""Path and body of a request that generates one token."""

logger = logging.getLogger(__name__)


def wait_until_engine_ready(
    session: Session,
    *,
    probe: Probe,
    resume_paths: Sequence[str],
    port: int,
    host: str = LOOPBACK,
    trainer: Session | None = None,
    run_dir: str,
    timeout_s: float,
    on_wait: Callable[[str], None] = lambda sentence: None,
    is_idle: bool = False,
    explain_log: Callable[[str], str] = lambda log: "",
    api_key: str = "",
    transport: httpx.BaseTransport | None = None,
) -> None:
    """Return once the engine has generated a token, because a health check would not prove that the engine can
    generate.

    Args:
        resume_paths: API paths that end a pause and restore released memory.
        trainer: session of the node that will send requests to the engine. None if this is the engine's own node.
        on_wait: called with a sentence about the GPU for which the engine waits, whenever this GPU changes.
        api_key: the key for requests. Empty if the engine requires no key.
        explain_log: returns a sentence with the cause of a crash, given the end of the engine's log. Returns "" if the
            cause is unknown.
        is_idle: whether no trainer uses the engine. If `is_idle` is true, a pause that a killed trainer has left is
            ended.

    Raises:
        JobFailedError: the engine ended. The error's text has the cause if the log shows the cause.
        JobLostError: a reboot, or a kill -9 of the supervisor, ended the engine.
        PermanentInfraError: the engine requires another API key.
        TransientInfraError: the engine was not ready within `timeout_s` after it got its GPUs, and is still running.
    """
    started = time.monotonic()
    deadline = started + timeout_s
    waited_for = ""
    # trust_env=False, because a proxy from the environment cannot reach this loopback address.
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with (
        (trainer or session).forward(port, host) as local_port,
        httpx.Client(transport=transport, trust_env=False, headers=headers) as client,
    ):
        url = f"http://{LOOPBACK}:{local_port}"
        while time.monotonic() < deadline:
            if is_idle:
                resume_generation(client, resume_paths, url)
            remaining_s = deadline - time.monotonic()
            if has_generated(client, probe, url, timeout_s=min(_COMPLETION_TIMEOUT_S, remaining_s)):
                logger.info("engine %s was ready after %.1f s", run_dir, time.monotonic() - started)
                return
            status = job_status(session, run_dir)
            if status.state != JobState.RUNNING:
                raise_failure(session, status, wanted=JobState.RUNNING, explain_log=explain_log)
            if status.waits_for:
                deadline = time.monotonic() + timeout_s
            if status.waits_for not in ("", waited_for):
                waited_for = status.waits_for
                on_wait(waited_for)
            time.sleep(POLL_S)
    last_line = read_log_tail(session, run_dir).strip().rpartition("\n")[2]
    raise TransientInfraError(
        f"the engine at port {port} did not generate within {timeout_s:g} s; the last line of its log is {last_line!r}"
    )


def check_engine_installed(session: Session, package: str, *, python: str) -> None:
    """Check that an interpreter on the node has an engine's package.

    Args:
        python: the interpreter. If `python` is empty, the session's interpreter is checked.

    Raises:
        PermanentInfraError: the interpreter or the package is missing.
    """
    interpreter = python or session.python
    if not _has_package(session, interpreter, package, setting="rollout.engine.python"):
        raise PermanentInfraError(
            f"{interpreter} has no {package}, which this rollout.engine.kind needs: install it, and name the "
            "interpreter of its environment as rollout.engine.python"
        )


def engine_version(session: Session, package: str, *, python: str) -> str:
    """Return the version of an engine's package, or "" if the interpreter or the package does not report a version.

    Args:
        python: the interpreter that has the package. If `python` is empty, the session's interpreter is used.
    """
    find = (
        "from importlib.metadata import packages_distributions, version\n"
        f"print(version(packages_distributions()[{package!r}][0]))"
    )
    found = session.run([python or session.python, "-c", find], timeout_s=CHECK_TIMEOUT_S, check=False, may_repeat=True)
    return found.stdout.decode().strip().rpartition("\n")[2] if found.exit_code == 0 else ""


def check_router_installed(session: Session, python: str) -> None:
    """Raise PermanentInfraError if the interpreter rollout.engine.router_python on the node has no router."""
    if not _has_package(session, python, _ROUTER_PACKAGE, setting="rollout.engine.router_python"):
        raise PermanentInfraError(
            f"rollout.engine.router_python is {python!r}, which has no {_ROUTER_PACKAGE}: install sglang-router there"
        )


def _has_package(session: Session, interpreter: str, package: str, *, setting: str) -> bool:
    """Return whether an interpreter on the node finds a package. Raises PermanentInfraError if the interpreter is
    missing."""
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        session.run([interpreter, "-c", find], timeout_s=CHECK_TIMEOUT_S, may_repeat=True)
    except PermanentInfraError as error:
        if _is_program(session, interpreter):
            return False
        raise PermanentInfraError(
            f"{setting} is {interpreter!r}, which is not a program on the node: name the interpreter of an "
            f"environment that has {package}"
        ) from error
    return True


def _is_program(session: Session, interpreter: str) -> bool:
    """Return whether a path, or a name on the PATH, is a program that the node can start."""
    find = ["/bin/sh", "-c", 'found=$(command -v -- "$1") && test -f "$found" && test -x "$found"', "sh", interpreter]
    return session.run(find, timeout_s=CHECK_TIMEOUT_S, check=False, may_repeat=True).exit_code == 0


def has_generated(client: httpx.Client, probe: Probe, url: str, *, timeout_s: float) -> bool:
    """Return whether the engine answered a request for one token with a completion.

    Raises:
        PermanentInfraError: the engine requires another API key.
    """
    path, request = probe
    try:
        response = client.post(f"{url}{path}", json=request, timeout=timeout_s)
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise PermanentInfraError(
                "the engine of this stage already runs and requires another key: it was started with another value of "
                "rollout.engine.api_key_variable, or by a run of another store with its own key. Run again with "
                "that key, or wait until the engine ends: within a minute after its run"
            )
        return response.status_code == httpx.codes.OK and isinstance(response.json(), dict)
    except (httpx.TransportError, ValueError):  # no server listens yet, or another server answers
        return False


def resume_generation(client: httpx.Client, paths: Sequence[str], url: str) -> None:
    """End a pause of the engine. The call has no effect if the engine is not paused or does not answer."""
    with suppress(httpx.TransportError):
        for path in paths:
            client.post(f"{url}{path}", json={}, timeout=_RESUME_TIMEOUT_S)
