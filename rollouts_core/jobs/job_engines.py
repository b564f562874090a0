"""Connect an RL job to its inference engines: clients, leases, and the folder for published weights.

The clients are implemented in engines/. The engines are started by tasks/engine.py and serve_job.py.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from rollouts_core.engines import (
    Endpoint,
    EnginePool,
    InFlightEngine,
    PublishTarget,
    RoutedPool,
    SGLangEngine,
    SGLangRouter,
    create_engine,
)
from rollouts_core.engines.client import EngineClient
from rollouts_core.engines.in_flight import InterruptibleEngine
from rollouts_core.engines.router_process import started_router
from rollouts_core.errors import EngineError, EngineUnavailableError
from rollouts_core.job import EngineAddress, RLJob
from rollouts_core.keys import key_header, read_key
from rollouts_core.run_directory import RunDirectory

LEASE_RENEWAL_S = 5.0
RENEWAL_TIMEOUT_S = 5.0
POOLED_RESTART_TIMEOUT_S = 5.0
"""Seconds to wait for a lost engine if the job has other engines, which take over the lost engine's requests."""


@asynccontextmanager
async def open_engines(job: RLJob, directory: RunDirectory) -> AsyncIterator[list[InFlightEngine]]:
    """Connect to the job's engines, and wait until they are ready. Start a router if the settings ask for one.

    Yields a list with one client, which distributes requests over all engines. The list is empty if the job has no
    engines.

    Args:
        directory: the job's run directory. The output of a started router is written to `router.txt` in this directory.
    """
    engine = job.rollout.engine
    async with AsyncExitStack() as stack:
        route: Route | None = None
        if engine.router_python:
            log = directory.root / "router.txt"
            started = started_router(engine.router_python, log, timeout_s=engine.start_timeout_s)
            process = await stack.enter_async_context(started)
            route = Route(url=process.url, revive=process.revive)
        elif engine.router_url:
            route = Route(url=engine.router_url)
        engines = connect_engines(job, route)
        for each in engines:
            stack.push_async_callback(each.aclose)
        with lapses_named(job.engines):
            for each in engines:
                await each.wait_until_ready(engine.start_timeout_s)
            yield engines


@contextmanager
def lapses_named(addresses: Sequence[EngineAddress]) -> Iterator[None]:
    """Explain an EngineError of the `with` block if an engine on this machine ended because its lease lapsed.

    Raises:
        EngineUnavailableError: an engine ended because its lease was not renewed.
    """
    try:
        yield
    except EngineError as error:
        if lapsed := [address.url for address in addresses if has_lapsed(address)]:
            raise EngineUnavailableError(
                f"the engine {lapsed[0]} ended because its lease was not renewed: the run was killed or blocked before "
                f"this process renewed the lease. Start the run again, which also restarts the engine ({error})"
            ) from error
        raise


def has_lapsed(address: EngineAddress) -> bool:
    """True if an engine on this machine ended because its lease was not renewed, and was not started again."""
    if address.lease_url:  # the engine runs on another machine
        return False
    end = RunDirectory(Path(address.lease_file).parents[1]).last_end()
    return end is not None and bool(end["lease_expired"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A router process that distributes completion requests over the engines."""

    url: str
    """The router's URL."""
    revive: Callable[[], None] = lambda: None
    """Restarts the router if its process has ended."""


def connect_engines(job: RLJob, route: Route | None) -> list[InFlightEngine]:
    """A list with one client for all engines of the job; empty without engines. With `route`, the client sends
    completion requests to this router."""
    is_alone = len(job.engines) == 1 and route is None
    clients = [
        create_engine(
            Endpoint(
                provider=address.kind,
                url=address.url,
                model=job.model.model.path,
                api_key_variable=job.rollout.engine.api_key_variable,
            ),
            request_timeout_s=job.rollout.request_timeout_s,
            silence_timeout_s=job.rollout.silence_timeout_s,
            start_timeout_s=job.rollout.engine.start_timeout_s,
            restart_timeout_s=job.rollout.engine.start_timeout_s if is_alone else POOLED_RESTART_TIMEOUT_S,
        )
        for address in job.engines
    ]
    together: Sequence[InterruptibleEngine] = clients
    if clients and not is_alone:
        pool = EnginePool(clients)
        together = [pool if route is None else connect_router(job, route, clients, pool)]
    return [
        InFlightEngine(engine, job.rollout.in_flight, finish_timeout_s=job.rollout.request_timeout_s)
        for engine in together
    ]


def connect_router(job: RLJob, route: Route, clients: Sequence[EngineClient], pool: EnginePool) -> RoutedPool:
    """A client that sends completions through a router, and weights directly to each engine."""
    router = SGLangRouter(
        route.url,
        request_timeout_s=job.rollout.request_timeout_s,
        api_key=read_key(job.rollout.engine.api_key_variable, "rollout.engine"),
    )
    engines = [client for client in clients if isinstance(client, SGLangEngine)]
    return RoutedPool(router, pool, engines, revive=route.revive)


@contextmanager
def keep_leases(addresses: Sequence[EngineAddress], api_key: str = "") -> Iterator[None]:
    """Renew the leases of the job's engines while the `with` block runs.

    The renewals run in threads, because a training step may block the event loop for minutes.

    Args:
        api_key: the API key for requests to engines on other nodes.
    """
    is_over = threading.Event()

    def renew(address: EngineAddress) -> None:
        while True:
            renew_lease(address, api_key)
            if is_over.wait(LEASE_RENEWAL_S):
                return

    renewals = [
        threading.Thread(target=renew, args=(address,), name=f"lease of {address.url}", daemon=True)
        for address in addresses
    ]
    for renewal in renewals:
        renewal.start()
    try:
        yield
    finally:
        is_over.set()
        for renewal in renewals:
            renewal.join()


def renew_lease(address: EngineAddress, api_key: str) -> None:
    """Renew the lease of an engine once. A failure is ignored, because the next renewal follows soon."""
    with suppress(httpx.TransportError, OSError):
        if not address.lease_url:
            Path(address.lease_file).touch()
            return
        httpx.post(address.lease_url, headers=key_header(api_key), timeout=RENEWAL_TIMEOUT_S, trust_env=False)


def publish_target(job: RLJob, directory: RunDirectory) -> PublishTarget:
    """Settings for publishing weights to the engines. Names of weight versions begin with the job's fingerprint."""
    return PublishTarget(
        weights_dir=directory.weights,
        model_config=Path(job.model.model.path) / "config.json",
        prefix=directory.root.name.rpartition("-")[2][:8],
        temperature=job.rollout.sampling.temperature,
        transfer=job.rollout.engine.weight_transfer,
    )
