"""Pins what SGLang's own router is relied on for, with the real one: it spreads completions, and no stale one counts.

Without it an engine that was started anew would sample from its start weights, because the router asks it as soon as it
answers a health check.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import anyio
import httpx
import pytest

from rollouts.infra.ports import find_free_port
from rollouts.infra.session import LocalSession
from rollouts_core.config import EngineKind
from rollouts_core.engines import Completion, EnginePool, RoutedPool, SGLangEngine, SGLangRouter
from rollouts_core.engines.router_process import RouterProcess, started_router
from rollouts_core.engines.silence import SILENCE_TIMEOUT_S
from rollouts_core.errors import EngineUnavailableError
from rollouts_core.metrics import read_metrics
from tests.engines.asking import LOGPROB_TOLERANCE, ask, num_running, versions_of, worst_gap
from tests.engines.asking import REQUESTS as LONG_REQUESTS
from tests.engines.models import SavedModel
from tests.engines.servers import Server, engine_python, serving
from tests.flows.conftest import prefect_home, rollouts, served_home
from tests.kit.commands import Rollouts
from tests.kit.small_pipeline import write_small_pipeline

__all__ = ["prefect_home", "rollouts", "served_home"]  # fixtures of another folder

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

ResultT = TypeVar("ResultT")
REQUESTS = [ask([4, 8, place], seed=place) for place in range(2, 14)]


@dataclass
class Router:
    """One router process, which can be killed and started again on its port."""

    folder: Path
    port: int = field(default_factory=lambda: find_free_port(LocalSession(sys.executable)))
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it without engines, and return when it answers."""
        metrics_port = find_free_port(LocalSession(sys.executable))
        command = [
            *(str(engine_python("sglang")), "-m", "sglang_router.launch_router", "--policy", "round_robin"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
            # By default it asks an engine that had failed again a minute later.
            *("--cb-timeout-duration-secs", "2"),
        ]
        with (self.folder / "router.txt").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

        async def wait() -> None:
            async with SGLangRouter(self.url) as client:
                await client.wait_until_ready(60.0)

        asyncio.run(wait())

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def wait_for_workers(self, servers: list[Server]) -> None:
        """Return when it asks these engines and no others."""
        deadline = time.monotonic() + 60
        while True:
            answer = httpx.get(f"{self.url}/workers", timeout=30.0).json()
            found = {each["url"] for each in answer["workers"] if each["is_healthy"]}
            if found == {server.url for server in servers}:
                return
            assert time.monotonic() < deadline, answer
            time.sleep(0.1)

    def num_generated(self) -> int:
        """Requests for completions that it passed on."""
        return (self.folder / "router.txt").read_text(errors="replace").count("/generate")


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    started = Router(tmp_path)
    try:
        started.start()
        yield started
    finally:
        started.kill()


@pytest.fixture(scope="module", params=["embedded", pytest.param("sglang", marks=pytest.mark.matrix)])
def pair(
    request: pytest.FixtureRequest, start: SavedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Server]]:
    """Two servers of a kind."""
    kind: EngineKind = request.param
    engine_python("sglang")  # has the router
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("pair")
        yield [stack.enter_context(serving(kind, start.directory, folder / name)) for name in ("one", "two")]


def with_pool(
    router: Router,
    servers: list[Server],
    use: Callable[[RoutedPool], Awaitable[ResultT]],
    *,
    silence_timeout_s: float = SILENCE_TIMEOUT_S,
) -> ResultT:
    """What `use` returns of the servers behind the router."""

    async def run() -> ResultT:
        engines = [
            SGLangEngine(server.url, restart_timeout_s=5.0, silence_timeout_s=silence_timeout_s) for server in servers
        ]
        pool = EnginePool(engines, retry_s=0.2)
        async with RoutedPool(SGLangRouter(router.url), pool, engines) as routed:
            await routed.wait_until_ready(60.0)
            return await use(routed)

    return asyncio.run(run())


def test_completions_come_through_the_router_and_are_of_the_published_weights(
    router: Router, pair: list[Server], start: SavedModel, trained: SavedModel
) -> None:
    async def publish_twice(pool: RoutedPool) -> tuple[list[Completion], list[Completion], list[Completion]]:
        await pool.load_weights(start.directory, "start-1")
        before = await pool.generate(REQUESTS)
        await pool.load_weights(trained.directory, "trained-1")
        return before, await pool.generate(REQUESTS), await pool.pool.generate(REQUESTS)

    before, after, direct = with_pool(router, pair, publish_twice)
    router.wait_for_workers(pair)
    assert router.num_generated() >= 2 * len(REQUESTS)
    assert (versions_of(before), versions_of(after)) == ({"start-1"}, {"trained-1"})
    for request, early, late in zip(REQUESTS, before, after, strict=True):
        assert worst_gap(start, request, early) < LOGPROB_TOLERANCE
        assert worst_gap(trained, request, late) < LOGPROB_TOLERANCE
    if pair[0].job.engine.kind == "embedded":  # which has seeds: the router passes them on
        assert [each.logprobs for each in after] == [each.logprobs for each in direct]


def test_an_engine_that_dies_is_done_without_and_asked_again_when_it_serves_the_version(
    router: Router, pair: list[Server], trained: SavedModel
) -> None:
    """Meanwhile it answers health checks, with its start weights."""
    [_, dying] = pair

    async def generate_around_a_kill(pool: RoutedPool) -> list[Completion]:
        await pool.load_weights(trained.directory, "trained-2")
        completions = await pool.generate(REQUESTS)
        await asyncio.to_thread(dying.kill)
        completions += await pool.generate(REQUESTS)
        await asyncio.to_thread(dying.start)
        with anyio.fail_after(90):
            while True:
                completions += await pool.generate(REQUESTS[:4])
                async with dying.client() as client:
                    try:
                        is_back = await client.weight_version() == "trained-2"
                    except EngineUnavailableError:
                        is_back = False
                if is_back and not pool.pool.quarantined:
                    return completions + await pool.generate(REQUESTS)
                await anyio.sleep(0.1)

    completions = with_pool(router, pair, generate_around_a_kill)
    assert versions_of(completions) == {"trained-2"}
    router.wait_for_workers(pair)


def test_an_engine_that_stands_still_amid_requests_of_the_routers_is_done_without(
    router: Router, pair: list[Server], trained: SavedModel
) -> None:
    """The router waits for it for ten minutes."""
    [_, still] = pair
    assert still.process is not None
    process_group = still.process.pid

    async def generate_around_a_stop(pool: RoutedPool) -> list[Completion]:
        await pool.load_weights(trained.directory, "trained-4")
        completions = await pool.generate(REQUESTS)
        for _ in range(10):
            under_way = asyncio.ensure_future(pool.generate(LONG_REQUESTS))
            with anyio.fail_after(60):
                while not await asyncio.to_thread(num_running, still):
                    if under_way.done():  # before anybody looked
                        under_way = asyncio.ensure_future(pool.generate(LONG_REQUESTS))
            os.killpg(process_group, signal.SIGSTOP)
            answered = await asyncio.wait_for(under_way, 120)
            if pool.pool.quarantined:
                break
            os.killpg(process_group, signal.SIGCONT)  # all of them had ended a moment before
        assert pool.pool.quarantined.keys() == {still.url}
        completions += answered
        completions += await pool.generate(REQUESTS)
        os.killpg(process_group, signal.SIGCONT)
        with anyio.fail_after(90):
            while pool.pool.quarantined:
                await anyio.sleep(0.1)
        return completions + await pool.generate(REQUESTS)

    try:
        completions = with_pool(router, pair, generate_around_a_stop, silence_timeout_s=6.0)
    finally:
        os.killpg(process_group, signal.SIGCONT)
    assert len(completions) == 3 * len(REQUESTS) + len(LONG_REQUESTS)
    assert versions_of(completions) == {"trained-4"}
    router.wait_for_workers(pair)


def test_without_the_router_the_engines_are_asked_and_with_it_again_when_it_is_back(
    router: Router, pair: list[Server], trained: SavedModel
) -> None:
    async def generate_around_a_kill(pool: RoutedPool) -> tuple[list[Completion], int]:
        await pool.load_weights(trained.directory, "trained-3")
        completions = await pool.generate(REQUESTS)
        await asyncio.to_thread(router.kill)
        completions += await pool.generate(REQUESTS)
        await asyncio.to_thread(router.start)
        num_before = router.num_generated()
        return completions + await pool.generate(REQUESTS), num_before

    completions, num_before = with_pool(router, pair, generate_around_a_kill)
    assert versions_of(completions) == {"trained-3"}
    assert router.num_generated() > num_before
    router.wait_for_workers(pair)


def test_an_engine_that_is_taken_away_is_none_of_the_routers_any_more_when_it_was_told(
    router: Router, pair: list[Server]
) -> None:
    """It only takes note of a removal when it is told, and goes on asking the engine until it comes to that."""

    async def take_away_and_give_back() -> list[set[str]]:
        left: list[set[str]] = []
        async with SGLangRouter(router.url) as client:
            for _ in range(5):
                await client.use([server.url for server in pair])
                await client.use([pair[0].url])
                left.append(set(await client._workers()))
        return left

    assert asyncio.run(take_away_and_give_back()) == [{pair[0].url}] * 5


def test_a_router_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    async def wait() -> None:
        async with SGLangRouter("http://127.0.0.1:9") as client:
            await client.wait_until_ready(0.5)

    with pytest.raises(EngineUnavailableError, match=r"127\.0\.0\.1:9, the router, did not answer within 0\.5 s"):
        asyncio.run(wait())


def test_a_router_of_a_jobs_own_is_started_again_when_it_dies_and_ends_with_the_job(
    pair: list[Server], trained: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollouts_core.engines.router_process.RESTART_PAUSE_S", 0.0)

    async def generate_around_a_kill() -> tuple[list[Completion], list[float], int]:
        clients = [client for server in pair if isinstance(client := server.client(), SGLangEngine)]
        log = tmp_path / "router.txt"
        async with started_router(str(engine_python("sglang")), log, timeout_s=120.0) as process:
            pool = EnginePool(clients, retry_s=0.2)
            async with RoutedPool(SGLangRouter(process.url), pool, clients, revive=process.revive) as routed:
                await routed.wait_until_ready(60.0)
                await routed.load_weights(trained.directory, "trained-5")
                completions = await routed.generate(REQUESTS)
                routed_before = [num_routed(process)]
                first = process.process
                os.killpg(first.pid, signal.SIGKILL)
                first.wait()
                completions += await routed.generate(REQUESTS)
                assert process.process is not first, "it is started again by the request that missed it"
                await routed.router.wait_until_ready(60.0)
                completions += await routed.generate(REQUESTS)
                return completions, [*routed_before, num_routed(process)], process.process.pid

    completions, routed, pid = asyncio.run(generate_around_a_kill())
    assert versions_of(completions) == {"trained-5"} and len(completions) == 3 * len(REQUESTS)
    assert all(number >= len(REQUESTS) for number in routed), "before and after"
    assert not Path(f"/proc/{pid}").exists()


def num_routed(process: RouterProcess) -> float:
    """Completions that it answered, by its own count."""
    lines = httpx.get(f"http://127.0.0.1:{process._metrics_port}/metrics", timeout=30.0).text.splitlines()
    counts = [line for line in lines if line.startswith("smg_http_requests_total{") and "/generate" in line]
    return sum(float(line.rpartition(" ")[2]) for line in counts)


def small_rl(folder: Path, **engine: object) -> Path:
    return write_small_pipeline(
        folder,
        mode="rl",
        rollout__engine=engine,
        rollout__reward_fn="tests.rollouts_core.kill_rewards:grade_even_digits",
        training__rl__optim__lr=1e-2,
        deployment__num_engines=2,
    )


def check_small_rl(rollouts: Rollouts) -> Path:
    """The directory of its RL, which trained on what was sampled by the policy."""
    (rl,) = rollouts.store.glob("stages/rl-*")
    steps = read_metrics(rl / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert max(abs(step["mismatch_kl"]) for step in steps) < 1e-6
    return rl


def test_a_run_samples_through_a_router_that_it_starts(rollouts: Rollouts, tmp_path: Path) -> None:
    config = small_rl(tmp_path / "small", router_python=str(engine_python("sglang")))
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    rl = check_small_rl(rollouts)
    assert (rl / "router.txt").exists() and "asked directly" not in (rl / "log.txt").read_text()
    assert "sglang_router" not in subprocess.run(["ps", "ax", "-o", "args="], capture_output=True, text=True).stdout


@pytest.mark.matrix
def test_a_run_samples_through_the_router_that_it_names(router: Router, rollouts: Rollouts, tmp_path: Path) -> None:
    code, output = rollouts.run("run", str(small_rl(tmp_path / "small", router_url=router.url)))
    assert code == 0, output
    check_small_rl(rollouts)
    assert router.num_generated() > 0
