"""Pins that several engines are used as one, and that none is sampled from before it proved the current version.

Without it one engine that fell behind feeds samples of old weights into every batch, or one that died ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from rollouts_core.config import SamplingConfig
from rollouts_core.engines import (
    EnginePool,
    InFlightEngine,
    RoutedPool,
    SGLangEngine,
    SGLangRouter,
    sync_weights_to_engines,
)
from rollouts_core.engines.completion import Completion, GenerationRequest
from rollouts_core.engines.pool import MAX_LEAD
from rollouts_core.engines.protocol import SegmentAccess
from rollouts_core.engines.transfer.canary import Canary
from rollouts_core.errors import (
    CheckpointError,
    EngineAnswerError,
    EngineError,
    EngineUnavailableError,
    NoNumbersError,
    WeightSyncError,
)
from rollouts_core.types import Sample, Status
from tests.rollouts_core.served_engine import served_engine

if TYPE_CHECKING:
    from rollouts_core.engines.protocol import Weights

REQUEST = GenerationRequest(prompt_tokens=[4, 8], sampling=SamplingConfig(max_new_tokens=2), stop_token_ids=(), seed=0)


class FakeEngine:
    """An engine whose faults a test chooses: what the pool does with them is what is tested."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = "start"
        self.num_calls = 0
        self.failure: Exception | None = None
        self.resume_failure: Exception | None = None
        self.num_aborts = 0
        self.is_broken_off = asyncio.Event()
        self.permits: asyncio.Semaphore | None = None
        """Lets loads end, one for each release; without it they end at once."""
        self.loading = ""
        """The version that is being loaded."""
        self.is_released = False
        self.canaries: list[Canary | None] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_waits = 0
        self.may_be_ready = asyncio.Event()
        self.may_be_ready.set()

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        self.num_calls += 1
        await self.may_answer.wait()
        if self.failure:
            raise self.failure
        completion = Completion(
            tokens=[5, 6],
            logprobs=[-1.0, -1.0],
            status=Status.TRUNCATED,
            finish_reason="length",
            version_spans=((self.version, 0, 2),),
        )
        return [completion for _ in requests]

    async def segment_access(self) -> SegmentAccess:
        return SegmentAccess.NONE

    async def load_weights(self, weights: Weights, version: str, canary: Canary | None = None) -> None:
        self.canaries.append(canary)
        self.loading = version
        if self.permits:
            await self.permits.acquire()
        self.loading = ""
        if self.failure:
            raise self.failure
        self.version = version

    async def abort_running(self) -> None:
        self.num_aborts += 1
        self.is_broken_off.set()

    async def pause(self) -> None:
        return None

    async def resume(self) -> None:
        failure, self.resume_failure = self.resume_failure, None
        if failure:
            raise failure

    async def release_memory(self) -> None:
        if self.failure:
            raise self.failure
        self.is_released = True

    async def resume_memory(self) -> None:
        if self.failure:
            raise self.failure
        self.is_released = False

    async def wait_until_ready(self, timeout_s: float) -> None:
        self.num_waits += 1
        await self.may_be_ready.wait()
        if self.failure:
            raise self.failure

    async def aclose(self) -> None:
        return None


async def wait_until(condition: Callable[[], object]) -> None:
    """Return when the condition holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def lost(name: str) -> EngineUnavailableError:
    return EngineUnavailableError(f"{name}/generate: ReadError")


def test_a_group_goes_to_the_engine_with_the_fewest_requests_under_way() -> None:
    async def share() -> list[int]:
        engines = [FakeEngine("a"), FakeEngine("b")]
        pool = EnginePool(engines)
        engines[0].may_answer.clear()
        long = asyncio.ensure_future(pool.generate([REQUEST] * 4))
        await asyncio.sleep(0)
        for _ in range(3):
            await pool.generate([REQUEST])
        engines[0].may_answer.set()
        await long
        return [engine.num_calls for engine in engines]

    assert asyncio.run(share()) == [1, 3]


@pytest.mark.parametrize(
    ("num_busy", "is_away", "expected"),
    [(0, False, [4, 0]), (MAX_LEAD, False, [5, 0]), (MAX_LEAD + 1, False, [1, 4]), (0, True, [1, 4])],
)
def test_the_turns_of_a_group_go_to_one_engine_unless_it_is_busy_or_away(
    num_busy: int, is_away: bool, expected: list[int]
) -> None:
    """Its cache has what was said before."""

    async def converse() -> list[int]:
        engines = [FakeEngine("a"), FakeEngine("b")]
        both = EnginePool(engines)
        engines[0].may_answer.clear()
        busy = asyncio.ensure_future(both.generate([REQUEST] * num_busy)) if num_busy else None
        await asyncio.sleep(0)
        engines[0].may_answer.set()
        engines[0].failure = lost("a") if is_away else None
        for _ in range(4):
            await both.generate([replace(REQUEST, affinity=2)])
        if busy:
            await busy
        await both.aclose()
        return [engine.num_calls for engine in engines]

    assert asyncio.run(converse()) == expected


def test_a_group_whose_engine_answers_nonsense_is_sampled_by_another_and_a_refusal_ends_it() -> None:
    async def ask(failure: Exception) -> tuple[list[int], dict[str, str]]:
        engines = [FakeEngine("a"), FakeEngine("b")]
        engines[0].failure = failure
        async with EnginePool(engines) as both:
            await both.generate([REQUEST])
            return [engine.num_calls for engine in engines], both.quarantined

    nonsense = EngineAnswerError("a answered log-probs that are not finite numbers")
    assert asyncio.run(ask(nonsense)) == ([1, 1], {"a": str(nonsense)})
    with pytest.raises(EngineError, match="the input is too long"):
        asyncio.run(ask(EngineError("the input is too long")))


def test_that_no_engine_has_numbers_is_told_from_that_none_is_there() -> None:
    async def ask(*failures: Exception) -> None:
        engines = [FakeEngine(f"engine-{number}") for number, _ in enumerate(failures)]
        for engine, failure in zip(engines, failures, strict=True):
            engine.failure = failure
        async with EnginePool(engines) as pool:
            await pool.generate([REQUEST])

    nan, away = NoNumbersError("its weights may hold NaN"), EngineUnavailableError("it is away")
    with pytest.raises(NoNumbersError, match=r"no engine is left: engine-0: its .*; engine-1: its weights may hold"):
        asyncio.run(ask(nan, nan))
    with pytest.raises(EngineUnavailableError, match=r"no engine is left: engine-0: its .*; engine-1: it is away"):
        asyncio.run(ask(nan, away))


def test_an_engine_without_numbers_is_not_asked_again_before_it_has_other_weights() -> None:
    """It answers, so that it would be taken back, and two such engines would be asked in turns for ever."""

    async def ask() -> tuple[int, int]:
        engine, other = FakeEngine("a"), FakeEngine("b")
        engine.failure = NoNumbersError("its weights may hold NaN")
        async with EnginePool([engine, other], retry_s=0.01) as both:
            await both.generate([REQUEST])
            await asyncio.sleep(0.2)
            assert both.quarantined.keys() == {"a"}
            num_calls = engine.num_calls
            engine.failure = None
            await both.load_weights(Path("v1"), "v1")
            while both.quarantined:
                await asyncio.sleep(0.01)
            await both.generate([replace(REQUEST, affinity=0)])
            return num_calls, engine.num_calls

    assert asyncio.run(asyncio.wait_for(ask(), 20)) == (1, 2)


class HoldingEngine(FakeEngine):
    """An engine whose first two calls last until they are broken off, and whose other answers are nonsense."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        if self.num_calls >= 2:
            self.failure = EngineAnswerError(f"{self.name} answered no JSON")
            return await super().generate(requests)
        completions = await super().generate(requests)
        await self.is_broken_off.wait()
        return [replace(each, status=Status.ABORTED) for each in completions]


def test_what_is_under_way_at_an_engine_that_is_quarantined_goes_to_another_and_holds_no_publication_up() -> None:
    async def publish_amid() -> tuple[list[Status], int, str]:
        engines = [HoldingEngine("a"), FakeEngine("b")]
        async with EnginePool(engines, retry_s=60.0) as both:
            guarded = InFlightEngine(both, "abort", finish_timeout_s=600.0)
            await guarded.load_weights(Path("v1"), "v1")
            asked = [asyncio.create_task(guarded.generate([replace(REQUEST, affinity=0)])) for _ in range(3)]
            await asked[2]
            assert both.quarantined.keys() == {"a"}
            await asyncio.wait_for(guarded.load_weights(Path("v2"), "v2"), 20)
            completions = await asyncio.wait_for(asyncio.gather(*asked), 20)
            return [completion.status for [completion] in completions], engines[1].num_calls, engines[1].version

    assert asyncio.run(publish_amid()) == ([Status.TRUNCATED] * 3, 3, "v2")


def test_an_engine_that_is_quarantined_ends_what_others_asked_it_for() -> None:
    """A router's requests are no calls of the pool, and would hold a publication up just as well."""

    async def leave_out() -> list[int]:
        engines = [FakeEngine("a"), FakeEngine("b")]
        async with EnginePool(engines) as both:
            both.quarantine(engines[0], "it served v0")
            await asyncio.wait_for(engines[0].is_broken_off.wait(), 20)
            return [engine.num_aborts for engine in engines]

    assert asyncio.run(leave_out()) == [1, 0]


def test_a_group_of_an_engine_that_died_is_sampled_by_another() -> None:
    async def lose_one() -> tuple[int, dict[str, str]]:
        engines = [FakeEngine("a"), FakeEngine("b")]
        engines[0].failure = lost("a")
        pool = EnginePool(engines)
        completions = [await pool.generate([REQUEST]) for _ in range(3)]
        await pool.aclose()
        return len(completions), pool.quarantined

    assert asyncio.run(lose_one()) == (3, {"a": "a/generate: ReadError"})


def test_an_engine_that_did_not_take_a_version_is_not_asked_until_it_did() -> None:
    async def fall_behind_and_return() -> list[set[str]]:
        engines = [FakeEngine("a"), FakeEngine("b")]
        pool = EnginePool(engines, retry_s=0.01)
        engines[0].failure = WeightSyncError("a refused v1")
        await pool.load_weights(Path("v1"), "v1")
        behind = {(await pool.generate([REQUEST]))[0].version_spans[0][0] for _ in range(4)}
        assert engines[0].num_calls == 0
        assert pool.quarantined == {"a": "a refused v1"}
        engines[0].failure = None
        await wait_until(lambda: pool.quarantined == {})
        both = [pool.generate([REQUEST]) for _ in range(4)]
        again = {completions[0].version_spans[0][0] for completions in await asyncio.gather(*both)}
        assert engines[0].num_calls > 0
        await pool.aclose()
        return [behind, again]

    assert asyncio.run(fall_behind_and_return()) == [{"v1"}, {"v1"}]


class ToldRouter:
    """Remembers which engines it is told to ask, and whether one of them was being given weights then."""

    name = "router"

    def __init__(self, watched: FakeEngine) -> None:
        self.watched = watched
        self.told: list[tuple[list[str], bool]] = []

    async def use(self, urls: Sequence[str]) -> None:
        await asyncio.sleep(0.01)  # it does so beside its answers
        self.told.append((list(urls), self.watched.loading != ""))


def test_a_router_has_let_go_of_an_engine_that_was_quarantined_before_that_is_given_weights() -> None:
    """It says that it has a version before it proved it, and what comes through a router counts by that alone."""

    async def lose_one() -> list[tuple[list[str], bool]]:
        engines = [FakeEngine("a"), FakeEngine("b")]
        router, pool = ToldRouter(engines[0]), EnginePool(engines, retry_s=0.01)
        routed = RoutedPool(cast(SGLangRouter, router), pool, cast(list[SGLangEngine], engines))
        await routed.load_weights(Path("v1"), "v1")
        engines[0].permits = asyncio.Semaphore(0)
        pool.quarantine(engines[0], "it fell silent")
        await wait_until(lambda: engines[0].loading)
        await pool.aclose()
        return router.told

    assert asyncio.run(lose_one()) == [(["b"], False)]


def test_an_engine_that_takes_too_long_is_left_behind_and_the_others_go_on() -> None:
    async def hang() -> dict[str, str]:
        engines = [FakeEngine("a"), FakeEngine("b")]
        engines[0].permits = asyncio.Semaphore(0)
        pool = EnginePool(engines, sync_timeout_s=0.05)
        await pool.load_weights(Path("v1"), "v1")
        await pool.generate([REQUEST])
        await pool.aclose()
        return pool.quarantined

    assert asyncio.run(hang()) == {"a": "it did not take v1 within 0.05 s"}


def test_a_new_version_is_never_followed_by_the_load_of_an_older_one() -> None:
    async def publish_twice() -> tuple[str, str]:
        engines = [FakeEngine("a"), FakeEngine("b")]
        pool = EnginePool(engines, retry_s=0.01)
        engines[0].failure = WeightSyncError("a refused v1")
        await pool.load_weights(Path("v1"), "v1")
        permits = asyncio.Semaphore(0)
        engines[0].failure, engines[0].permits = None, permits
        await wait_until(lambda: engines[0].loading == "v1")  # it is being brought there again
        await pool.load_weights(Path("v2"), "v2")
        permits.release()
        permits.release()
        await wait_until(lambda: pool.quarantined == {})
        await pool.aclose()
        return engines[0].version, engines[1].version

    assert asyncio.run(publish_twice()) == ("v2", "v2")


def test_a_publish_does_not_wait_for_an_engine_in_quarantine_which_comes_back_with_the_newest_version() -> None:
    async def publish_twice() -> str:
        engines = [FakeEngine("a"), FakeEngine("b")]
        engines[0].failure = lost("a")
        async with EnginePool(engines, retry_s=0.01) as pool:
            await pool.load_weights(Path("v1"), "v1")
            permits = asyncio.Semaphore(0)
            engines[0].failure, engines[0].permits = None, permits
            await wait_until(lambda: engines[0].loading == "v1")  # it is being brought there
            async with asyncio.timeout(60):
                await pool.load_weights(Path("v2"), "v2")
            assert engines[0].loading == "v1" and pool.quarantined.keys() == {"a"}
            permits.release()
            await wait_until(lambda: engines[0].loading == "v2")
            assert engines[0].version == "v1" and pool.quarantined.keys() == {"a"}, "it had v1 when v2 was published"
            permits.release()
            await wait_until(lambda: pool.quarantined == {})
        return engines[0].version

    assert asyncio.run(publish_twice()) == "v2"


def test_an_engine_that_hangs_in_quarantine_keeps_no_other_there() -> None:
    async def return_one() -> set[str]:
        engines = [FakeEngine(name) for name in "abc"]
        async with EnginePool(engines, retry_s=0.01) as pool:
            engines[0].failure = engines[1].failure = lost("both")
            await pool.load_weights(Path("v1"), "v1")
            engines[0].failure, engines[0].permits = None, asyncio.Semaphore(0)
            engines[1].failure = None
            await wait_until(lambda: pool.quarantined.keys() == {"a"})
            return set(pool.quarantined)

    assert asyncio.run(return_one()) == {"a"}


def test_where_nothing_was_published_an_engine_that_answers_again_is_asked_again() -> None:
    """As in an evaluation, whose engines serve what they were started with."""

    async def lose_and_return() -> tuple[dict[str, str], int]:
        engines = [FakeEngine("a"), FakeEngine("b")]
        async with EnginePool(engines, retry_s=0.01) as pool:
            engines[0].failure = lost("a")
            await pool.generate([REQUEST])
            await wait_until(lambda: engines[0].num_waits > 1)  # in vain
            quarantined = pool.quarantined
            engines[0].failure = None
            await wait_until(lambda: pool.quarantined == {})
            num_calls = engines[0].num_calls
            await pool.generate([REQUEST])
        return quarantined, engines[0].num_calls - num_calls

    assert asyncio.run(lose_and_return()) == ({"a": "a/generate: ReadError"}, 1)


def test_an_engine_that_answers_while_the_first_version_is_published_is_given_it_before_it_is_asked() -> None:
    async def answer_late() -> str:
        engines = [FakeEngine("a"), FakeEngine("b")]
        async with EnginePool(engines, retry_s=0.01) as pool:
            engines[0].may_be_ready.clear()
            pool.quarantine(engines[0], "it was away")
            await wait_until(lambda: engines[0].num_waits)
            await pool.load_weights(Path("v1"), "v1")
            engines[0].permits = asyncio.Semaphore(0)
            engines[0].may_be_ready.set()
            await wait_until(lambda: engines[0].loading == "v1")
            assert pool.quarantined.keys() == {"a"}
            engines[0].permits.release()
            await wait_until(lambda: pool.quarantined == {})
        return engines[0].version

    assert asyncio.run(answer_late()) == "v1"


def test_an_engine_that_comes_back_is_given_the_trainers_canary() -> None:
    async def score(samples: list[Sample]) -> list[list[float]]:
        return []

    async def lose_and_return(canary: Canary) -> list[Canary | None]:
        engines = [FakeEngine("a"), FakeEngine("b")]
        async with EnginePool(engines, retry_s=0.01) as pool:
            engines[0].failure = lost("a")
            await pool.load_weights(Path("v1"), "v1", canary)
            engines[0].failure = None
            await wait_until(lambda: pool.quarantined == {})
        return engines[0].canaries

    canary = Canary(temperature=1.0, score=score)
    assert set(asyncio.run(lose_and_return(canary))) == {canary}


def test_an_engine_that_cannot_be_given_weights_for_want_of_memory_holds_no_other_up_and_comes_back() -> None:
    """What torch raises is no error of an engine's, and no other engine is to blame for it either."""

    async def run_out_of_memory() -> tuple[dict[str, str], str]:
        engines = [FakeEngine("a"), FakeEngine("b")]
        engines[0].failure = RuntimeError("CUDA out of memory")
        async with EnginePool(engines, retry_s=0.01) as pool:
            await pool.load_weights(Path("v1"), "v1")
            behind = pool.quarantined
            while len(engines[0].canaries) < 2:  # it was tried again, with the same end
                await asyncio.sleep(0.01)
            engines[0].failure = None
            while pool.quarantined:
                await asyncio.sleep(0.01)
            return behind, engines[0].version

    outcome = asyncio.run(asyncio.wait_for(run_out_of_memory(), 20))
    assert outcome == ({"a": "RuntimeError: CUDA out of memory"}, "v1")


def test_a_broken_client_of_a_quarantined_engine_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """The task that brings it back would end with the error, and nobody ever look at either."""

    async def break_when_resumed() -> str:
        engines = [FakeEngine("a"), FakeEngine("b")]
        engines[0].failure, engines[0].resume_failure = lost("a"), RuntimeError("a bug")
        async with EnginePool(engines, retry_s=0.01) as pool:
            await InFlightEngine(pool, "continue").load_weights(Path("v1"), "v1")
            while engines[0].resume_failure:
                await asyncio.sleep(0.01)
            engines[0].failure = None
            while pool.quarantined:
                await asyncio.sleep(0.01)
            return engines[0].version

    assert asyncio.run(asyncio.wait_for(break_when_resumed(), 20)) == "v1"
    assert "engine a could not be brought to v1" in caplog.text


@pytest.mark.parametrize("failure", [CheckpointError("v1 is gone"), PermissionError("v1 is closed")])
def test_an_engine_whose_files_cannot_be_read_is_named_and_the_others_are_updated(failure: Exception) -> None:
    engines = [FakeEngine("a"), FakeEngine("b")]
    engines[0].failure = failure
    results = asyncio.run(sync_weights_to_engines(engines, Path("v1"), version="v1"))
    assert [(result.engine, result.error) for result in results] == [("a", str(failure)), ("b", "")]


def test_while_memory_is_the_trainers_no_engine_is_brought_back() -> None:
    async def hand_over() -> tuple[str, str, dict[str, str]]:
        engines = [FakeEngine("a"), FakeEngine("b"), FakeEngine("c")]
        async with EnginePool(engines, retry_s=0.01) as pool:
            await pool.load_weights(Path("v1"), "v1")
            engines[0].failure = lost("a")
            await pool.generate([REQUEST])  # a is tried first, and from now on brought back
            engines[1].failure = lost("b")
            await pool.release_memory()
            assert pool.quarantined.keys() == {"a", "b"}
            is_released = [engines[2].is_released]
            engines[0].failure = engines[1].failure = None
            engines[0].version = engines[1].version = "start"
            await asyncio.sleep(0.1)
            while_released = engines[0].version
            await pool.resume_memory()
            is_released.append(engines[2].is_released)
            assert is_released == [True, False]
            await pool.load_weights(Path("v2"), "v2")
            while pool.quarantined:
                await asyncio.sleep(0.01)
            return while_released, engines[0].version, pool.quarantined

    assert asyncio.run(asyncio.wait_for(hand_over(), 60)) == ("start", "v2", {})


def test_without_any_engine_left_every_reason_is_told() -> None:
    async def lose_all() -> None:
        engines = [FakeEngine("a"), FakeEngine("b")]
        for engine in engines:
            engine.failure = lost(engine.name)
        pool = EnginePool(engines)
        with pytest.raises(EngineUnavailableError, match=r"no engine is left: a: .*ReadError; b: .*ReadError"):
            await pool.generate([REQUEST])
        with pytest.raises(WeightSyncError, match=r"no engine took v1: a: .*; b: "):
            await pool.load_weights(Path("v1"), "v1")
        await pool.aclose()

    asyncio.run(lose_all())


def test_a_request_that_an_engine_refuses_is_not_tried_on_the_others() -> None:
    async def refuse() -> list[int]:
        engines = [FakeEngine("a"), FakeEngine("b")]
        engines[0].failure = EngineError("a/generate answered 400: too long")
        pool = EnginePool(engines)
        with pytest.raises(EngineError, match="too long"):
            await pool.generate([REQUEST])
        return [engine.num_calls for engine in engines]

    assert asyncio.run(refuse()) == [1, 0]


def test_real_engines_share_the_groups_and_one_that_is_gone_is_done_without(quickstart_dir: Path) -> None:
    model_dir = quickstart_dir / "base_model"

    async def generate(pool: EnginePool) -> set[str]:
        await pool.load_weights(model_dir, "v1")
        groups = await asyncio.gather(*(pool.generate([REQUEST] * 2) for _ in range(6)))
        assert pool.quarantined.keys() == {"http://127.0.0.1:9"}
        await pool.aclose()
        return {version for group in groups for completion in group for version, _, _ in completion.version_spans}

    gone = SGLangEngine("http://127.0.0.1:9", restart_timeout_s=0.2)
    with served_engine(model_dir) as (engine, _):
        assert asyncio.run(generate(EnginePool([engine, gone]))) == {"v1"}
