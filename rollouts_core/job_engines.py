"""The engines that an RL job samples from: its clients of them, their leases, and where it publishes weights.

Not here: the clients themselves (engines/), starting the servers (tasks/engine.py, serve_job.py).
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
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
    VLLMEngine,
    create_engine,
)
from rollouts_core.engines.in_flight import InterruptibleEngine
from rollouts_core.job import EngineAddress, RLJob
from rollouts_core.keys import key_header, read_key
from rollouts_core.run_directory import RunDirectory

LEASE_RENEWAL_S = 5.0
RENEWAL_TIMEOUT_S = 5.0
POOLED_RESTART_TIMEOUT_S = 5.0
"""With other engines at hand, the completions of one that vanished are asked of them, while it restarts."""


@asynccontextmanager
async def open_engines(job: RLJob) -> AsyncIterator[list[InFlightEngine]]:
    """The client of the job's engine, or the pool of its engines, ready to be asked, also while weights change."""
    router_url = job.rollout.engine.router_url
    is_alone = len(job.engines) == 1 and not router_url
    clients = [
        create_engine(
            Endpoint(
                provider=address.provider,
                url=address.url,
                model=job.model.model.path,
                api_key_variable=job.rollout.engine.api_key_variable,
            ),
            request_timeout_s=job.rollout.request_timeout_s,
            silence_timeout_s=job.rollout.silence_timeout_s,
            restart_timeout_s=job.rollout.engine.start_timeout_s if is_alone else POOLED_RESTART_TIMEOUT_S,
        )
        for address in job.engines
    ]
    together: Sequence[InterruptibleEngine] = clients
    if clients and not is_alone:
        pool = EnginePool(clients)
        together = [route(job, clients, pool) if router_url else pool]
    engines = [
        InFlightEngine(engine, job.rollout.in_flight, finish_timeout_s=job.rollout.request_timeout_s)
        for engine in together
    ]
    try:
        for engine in engines:
            await engine.wait_until_ready(job.rollout.engine.start_timeout_s)
        yield engines
    finally:
        for engine in engines:
            await engine.aclose()


def route(job: RLJob, clients: Sequence[SGLangEngine | VLLMEngine], pool: EnginePool) -> RoutedPool:
    """The job's engines behind the router that it names."""
    engine = job.rollout.engine
    router = SGLangRouter(
        engine.router_url,
        request_timeout_s=job.rollout.request_timeout_s,
        api_key=read_key(engine.api_key_variable, "rollout.engine"),
    )
    return RoutedPool(router, pool, [client for client in clients if isinstance(client, SGLangEngine)])


@contextmanager
def keep_leases(addresses: Sequence[EngineAddress], api_key: str = "") -> Iterator[None]:
    """Renew the engines' leases as long as the block runs: in threads, because a train step may block for minutes.

    Args:
        api_key: what engines on other nodes want requests to carry.
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
    """Say once that the engine is wanted; where that cannot be said, it is tried again soon anyway."""
    with suppress(httpx.TransportError, OSError):
        if not address.lease_url:
            Path(address.lease_file).touch()
            return
        httpx.post(address.lease_url, headers=key_header(api_key), timeout=RENEWAL_TIMEOUT_S, trust_env=False)


def publish_target(job: RLJob, directory: RunDirectory) -> PublishTarget:
    """Where the weights of this job are published: versions carry the start of its fingerprint."""
    return PublishTarget(
        weights_dir=directory.weights,
        model_config=Path(job.model.model.path) / "config.json",
        prefix=directory.root.name.rpartition("-")[2][:8],
        temperature=job.rollout.sampling.temperature,
        transfer=job.rollout.engine.weight_transfer,
    )
