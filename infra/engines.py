"""Wait until an inference engine, started as a job on a node, really generates; say why when it does not.

Not here: starting it (an engine is a job like others, jobs.py), renewing its lease, its clients, its weights. An engine
that dies is restarted by its supervisor on the same port; an engine whose lease lapses ends by itself (jobs.py).

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
COMPLETION_TIMEOUT_S = 40.0
"""One request for a token. The first completion of a big engine compiles kernels and may take several."""
RESUME_TIMEOUT_S = 10.0
CHECK_TIMEOUT_S = 60.0
ROUTER_PACKAGE = "sglang_router"
Probe = tuple[str, Mapping[str, object]]
"""Path and body of a request for one token."""

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
    """Return once the engine has generated a token; its health endpoints promise less than that.

    Args:
        resume_paths: where it is told to go on after a pause, and to take its memory back.
        port: where it listens on the node.
        host: the same.
        trainer: the session of the node from which it is asked, where that is another one.
        on_wait: takes a sentence about the GPU that the engine waits for, whenever that changes.
        api_key: what it wants requests to carry; empty for an engine without.
        explain_log: finds out from the end of its log why it ended, a sentence; "" where that tells nothing.
        is_idle: no trainer uses the engine, so a pause was left behind by one that was killed, and is ended.

    Raises:
        JobFailedError: the engine ended first; the message says why, as far as its log tells.
        JobLostError: the same, by a reboot or a kill -9 of its supervisor.
        PermanentInfraError: it wants another key.
        TransientInfraError: it was not ready in time, from when it had its GPUs; it still runs.
    """
    started = time.monotonic()
    deadline = started + timeout_s
    waited_for = ""
    # No proxy leads to loopback.
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
            if has_generated(client, probe, url, timeout_s=min(COMPLETION_TIMEOUT_S, remaining_s)):
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
    """Find out whether an interpreter on the node has an engine's package.

    Args:
        python: the interpreter; empty takes the session's.

    Raises:
        PermanentInfraError: one sentence about what is missing.
    """
    interpreter = python or session.python
    if not _has_package(session, interpreter, package, setting="rollout.engine.python"):
        raise PermanentInfraError(
            f"{interpreter} has no {package}, which this rollout.engine.kind needs: install it, and name the "
            "interpreter of its environment as rollout.engine.python"
        )


def engine_version(session: Session, package: str, *, python: str) -> str:
    """The version of an engine's package; empty if its files do not say it.

    Args:
        python: the interpreter that has it; empty takes the session's.
    """
    find = (
        "from importlib.metadata import packages_distributions, version\n"
        f"print(version(packages_distributions()[{package!r}][0]))"
    )
    found = session.run([python or session.python, "-c", find], timeout_s=CHECK_TIMEOUT_S, check=False, may_repeat=True)
    return found.stdout.decode().strip().rpartition("\n")[2] if found.exit_code == 0 else ""


def check_router_installed(session: Session, python: str) -> None:
    """Raise PermanentInfraError where an interpreter on the node, rollout.engine.router_python, has no router."""
    if not _has_package(session, python, ROUTER_PACKAGE, setting="rollout.engine.router_python"):
        raise PermanentInfraError(
            f"rollout.engine.router_python is {python!r}, which has no {ROUTER_PACKAGE}: install sglang-router there"
        )


def _has_package(session: Session, interpreter: str, package: str, *, setting: str) -> bool:
    """Whether an interpreter on the node finds a package; PermanentInfraError where there is no such interpreter."""
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        session.run([interpreter, "-c", find], timeout_s=CHECK_TIMEOUT_S, may_repeat=True)
    except PermanentInfraError as error:
        if _is_program(session, interpreter):
            return False
        raise PermanentInfraError(
            f"{setting} is {interpreter!r}, and there is no such program on the node: name the interpreter of an "
            f"environment that has {package}"
        ) from error
    return True


def _is_program(session: Session, interpreter: str) -> bool:
    """True if a path, or a name on the PATH, is a program that the node can start."""
    find = ["/bin/sh", "-c", 'found=$(command -v -- "$1") && test -f "$found" && test -x "$found"', "sh", interpreter]
    return session.run(find, timeout_s=CHECK_TIMEOUT_S, check=False, may_repeat=True).exit_code == 0


def has_generated(client: httpx.Client, probe: Probe, url: str, *, timeout_s: float) -> bool:
    """True if the engine answered a request for one token with a completion.

    Raises:
        PermanentInfraError: it wants another key, now and later.
    """
    path, request = probe
    try:
        response = client.post(f"{url}{path}", json=request, timeout=timeout_s)
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise PermanentInfraError(
                "the engine of this stage is there already and wants another key: it was started with another value of "
                "rollout.engine.api_key_variable, or by the run of another store, whose own key it has. Run again with "
                "that key, or when the engine has ended: within a minute after its run"
            )
        return response.status_code == httpx.codes.OK and isinstance(response.json(), dict)
    except (httpx.TransportError, ValueError):  # not listening yet, or something else answers with no JSON
        return False


def resume_generation(client: httpx.Client, paths: Sequence[str], url: str) -> None:
    """End a pause of the engine; one that is not paused, or does not answer, stays as it is."""
    with suppress(httpx.TransportError):
        for path in paths:
            client.post(f"{url}{path}", json={}, timeout=RESUME_TIMEOUT_S)
