"""Run SGLang's router as a child process of the training job. The router starts without engines. If it dies, it is
restarted.

started ── answers ── dies ── engines are asked directly ── restarted at the same port ── gets the engines again
             └── ends with the job, for whatever reason
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rollouts_core.engines.router import SGLangRouter
from rollouts_core.errors import ConfigError, EngineUnavailableError
from rollouts_core.system import parent_death
from rollouts_core.system.listening import bind_port

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
LOOK_S = 1.0
"""Seconds between two checks of a router that does not answer yet."""
RESTART_PAUSE_S = 10.0
"""Minimum time between two starts, seconds, in case the router always ends at once."""
GRACE_S = 5.0
"""Seconds between asking the router to end and killing it. The router first waits for running requests."""
FAILED_ENGINE_S = 2
"""Seconds for which the router avoids an engine after a failure. The router's default is a minute."""
TAIL_BYTES = 4096


class RouterProcess:
    """One router on a free port of this machine, reachable only from this machine. The constructor starts the router.

    Args:
        python: interpreter of an environment with sglang-router.
        log: file for the router's output.
    """

    def __init__(self, python: str, log: Path) -> None:
        self._python = python
        self.log = log
        with bind_port(LOOPBACK, 0) as listener, bind_port(LOOPBACK, 0) as of_metrics:
            self._port, self._metrics_port = listener.getsockname()[1], of_metrics.getsockname()[1]
        self.process = self._start()

    @property
    def url(self) -> str:
        """The URL at which the router listens."""
        return f"http://{LOOPBACK}:{self._port}"

    def revive(self) -> None:
        """Restart the router if it has ended, without waiting for an answer. Call this in the thread that started
        it."""
        if self.process.poll() is None or time.monotonic() < self._started_at + RESTART_PAUSE_S:
            return
        logger.warning("the router ended by itself (%s), so it is restarted", self.explain_end())
        self.process = self._start()

    def explain_end(self) -> str:
        """The exit code of the router and the last line of its output."""
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
        return f"exit code {self.process.returncode}: {lines[-1] if lines else 'it printed nothing'}"

    def stop(self) -> None:
        """End the router."""
        self.process.terminate()
        try:
            self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        self._started_at = time.monotonic()
        command = [
            *(self._python, "-P", "-m", "sglang_router.launch_router", "--host", LOOPBACK, "--port", str(self._port)),
            *("--prometheus-host", LOOPBACK, "--prometheus-port", str(self._metrics_port)),
            *("--cb-timeout-duration-secs", str(FAILED_ENGINE_S), "--log-level", "warn"),
        ]
        tied = [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid())]
        with self.log.open("ab") as output:
            return subprocess.Popen(
                [*tied, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )


@asynccontextmanager
async def started_router(python: str, log: Path, *, timeout_s: float) -> AsyncIterator[RouterProcess]:
    """A running router that ends with the block.

    Raises:
        ConfigError: the interpreter does not exist, or its environment has no router.
        EngineUnavailableError: the router ended, or did not answer in time.
    """
    router = RouterProcess(python, log)
    try:
        await _wait_until_ready(router, python, time.monotonic() + timeout_s)
        yield router
    finally:
        router.stop()


async def _wait_until_ready(router: RouterProcess, python: str, deadline: float) -> None:
    async with SGLangRouter(router.url) as client:
        while True:
            try:
                return await client.wait_until_ready(LOOK_S)
            except EngineUnavailableError:
                if router.process.poll() is not None:
                    raise _explain_start(router, python) from None
                if time.monotonic() > deadline:
                    raise


def _explain_start(router: RouterProcess, python: str) -> ConfigError | EngineUnavailableError:
    reason = router.explain_end()
    if router.process.returncode == parent_death.NO_PROGRAM or "No module named" in reason:
        return ConfigError(
            f"rollout.engine.router_python: {python} cannot start the router ({reason}): give the interpreter of an "
            "environment with sglang-router"
        )
    return EngineUnavailableError(f"SGLang's router ended while starting ({reason}): see {router.log}")
