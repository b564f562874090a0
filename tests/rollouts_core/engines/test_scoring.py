"""Pins that the clients return log-probs of exactly the given tokens, and name the engine if they cannot.

Without it a teacher would teach, and multiple choice would be graded, by log-probs of other tokens or positions.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from rollouts_core.embedded.scheduler import Scheduler
from rollouts_core.engines import (
    EnginePool,
    RoutedPool,
    ScoredTokens,
    ScoringRequest,
    SGLangEngine,
    SGLangRouter,
    VLLMEngine,
    recovery,
    vllm,
)
from rollouts_core.errors import EngineAnswerError, EngineError, EngineUnavailableError, NoNumbersError
from tests.rollouts_core.embedded.test_process import serving
from tests.rollouts_core.embedded.tiny_models import expected_logits, make_model, random_prompt, save_model
from tests.rollouts_core.served_engine import served_engine

TOLERANCE = 1e-4
REQUEST = ScoringRequest(tokens=[4, 8, 9], start=1, num_top=2, token_ids=(7, 8))
LOGPROBS = {4: -3.0, 7: -2.5, 8: -0.5, 9: -1.5}
"""Log-probs of the scripted servers, at every position."""
BOTH = pytest.mark.parametrize("client", [SGLangEngine, VLLMEngine])


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "RETRY_PAUSE_S", 0.01)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model()


@pytest.fixture(scope="module")
def model_dir(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(model, tmp_path_factory.mktemp("scoring") / "model")


def score(engine: SGLangEngine | VLLMEngine, *requests: ScoringRequest) -> list[ScoredTokens]:
    return asyncio.run(engine.score(requests))


def test_scores_are_those_of_the_model(model: PreTrainedModel, model_dir: Path) -> None:
    requests = [
        ScoringRequest(tokens=random_prompt(2, seed=0)),
        ScoringRequest(tokens=random_prompt(70, seed=1), start=60, num_top=3),
        ScoringRequest(tokens=random_prompt(9, seed=2), start=8, token_ids=(7, 60, 7)),
        ScoringRequest(tokens=random_prompt(20, seed=3), start=2, num_top=61, token_ids=(1, 0)),
    ]
    with served_engine(model_dir) as (engine, _):
        answers = score(engine, *requests)
    for request, scored in zip(requests, answers, strict=True):
        expected_TV = expected_logits(model, request.tokens).log_softmax(-1)[request.start - 1 : -1]
        own = expected_TV.gather(-1, torch.tensor(request.tokens[request.start :])[:, None])[:, 0]
        assert scored.logprobs == pytest.approx(own.tolist(), abs=TOLERANCE)
        assert scored.version == "default"
        for expected_V, top, named in zip(expected_TV, scored.top_logprobs, scored.token_ids_logprobs, strict=True):
            assert list(top) == expected_V.topk(request.num_top).indices.tolist()
            assert list(named) == list(dict.fromkeys(request.token_ids))
            found = {**top, **named}
            assert found == pytest.approx({token: float(expected_V[token]) for token in found}, abs=TOLERANCE)


def test_scores_are_of_the_weights_that_were_loaded_last(model_dir: Path, tmp_path: Path) -> None:
    other = make_model(seed=5)
    other_dir = save_model(other, tmp_path / "other")

    async def run(engine: SGLangEngine, scheduler: Scheduler) -> list[ScoredTokens]:
        await engine.load_weights(other_dir, "v-1")
        scheduler.update_weights(model_dir, weight_version="default").result(10)  # as by a restart
        return await engine.score([REQUEST])

    with served_engine(model_dir) as (engine, scheduler):
        [scored] = asyncio.run(run(engine, scheduler))
    expected_TV = expected_logits(other, REQUEST.tokens).log_softmax(-1)
    assert scored.version == "v-1"
    assert scored.logprobs == pytest.approx([float(expected_TV[0, 8]), float(expected_TV[1, 9])], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (ScoringRequest(tokens=[4, 61]), "has the token id 61, the served model has 61 tokens"),
        (ScoringRequest(tokens=[4, 5], token_ids=(-1,)), "has the token id -1"),
        (ScoringRequest(tokens=[4, 5], num_top=62), "num_top is 62, the served model has 61 tokens"),
        (ScoringRequest(tokens=[4] * 2048), r"The input \(2048 tokens\) is longer than the model's context length"),
    ],
)
def test_a_request_that_the_model_cannot_score_names_engine_and_reason(
    request_: ScoringRequest, problem: str, model_dir: Path
) -> None:
    async def run(engine: SGLangEngine) -> None:
        await engine.load_weights(model_dir, "v-1")  # since then the client knows the vocabulary
        await engine.score([request_])

    with served_engine(model_dir) as (engine, _), pytest.raises(EngineError, match=f"http://engine.*{problem}"):
        asyncio.run(run(engine))


@pytest.mark.parametrize(
    ("tokens", "start", "num_top", "problem"),
    [
        ([4, 8], 2, 0, "start is 2, expected 1 to 1 for 2 tokens"),
        ([4, 8], 0, 0, "start is 0"),
        ([4], 1, 0, "start is 1, expected 1 to 0"),
        ([4, 8], 1, -1, "num_top is -1"),
    ],
)
def test_a_request_without_tokens_to_score_is_refused(
    tokens: list[int], start: int, num_top: int, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        ScoringRequest(tokens=tokens, start=start, num_top=num_top)


def entries_of(token_ids: Sequence[int]) -> list[Any]:
    return [[LOGPROBS[token], token, None] for token in token_ids]


def sglang_answer(body: dict[str, Any], **changed: Any) -> Any:
    """SGLang's answer to a request for log-probs of `REQUEST`."""
    if "input_ids" not in body:
        return {}
    meta = {
        "finish_reason": {"type": "length"},
        "weight_version": "default",
        "input_token_logprobs": [[None, 4, None], *entries_of([8, 9])],
        "input_top_logprobs": [None, entries_of([8, 9]), entries_of([8, 9])],
        "input_token_ids_logprobs": [None, entries_of([7, 8]), entries_of([7, 8])],
    }
    return [{"output_ids": [], "meta_info": {**meta, **changed}}]


def vllm_answer(body: dict[str, Any], **changed: Any) -> Any:
    """vLLM's answer to a request for log-probs of `REQUEST`, of its prompt or of named tokens."""
    if "prompt_logprobs" in body:
        row = {"4": {"logprob": -3.0, "rank": 4}, "9": {"logprob": -1.5, "rank": 2}, "8": {"logprob": -0.5, "rank": 1}}
        choice = {"index": 0, "finish_reason": "length", "prompt_logprobs": [None, row, row], **changed}
        return {"choices": [choice]}
    likely = sorted(LOGPROBS, key=lambda token: -LOGPROBS[token])[: body["logprobs"]]
    named = {f"token_id:{token}": LOGPROBS[token] for token in (4, *body.get("logprob_token_ids", likely))}
    prompts = [
        {"index": index, "finish_reason": "length", "logprobs": {"top_logprobs": [named]}}
        for index in range(len(body["prompt"]))
    ]
    return {"choices": prompts[::-1]}


def scripted(
    client: type[SGLangEngine] | type[VLLMEngine], *, lora_config: dict[str, Any] | None = None, **changed: Any
) -> tuple[Any, list[dict[str, Any]]]:
    """A client of a server that answers `REQUEST`, and the bodies that it sends."""
    bodies: list[dict[str, Any]] = []
    answer: Callable[..., Any] = sglang_answer if client is SGLangEngine else vllm_answer

    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path in ("/generate", "/v1/completions"):
            bodies.append(json.loads(request.content))
            return httpx.Response(200, json=answer(bodies[-1], **changed))
        config = {"vllm_config": {"model_config": {"max_logprobs": 30}, "lora_config": lora_config}}
        return httpx.Response(200, json={"weight_version": "default", **config})

    return client("http://engine", transport=httpx.MockTransport(respond), restart_timeout_s=0.5), bodies


@BOTH
def test_both_clients_give_answers_one_shape(client: type[SGLangEngine] | type[VLLMEngine]) -> None:
    engine, _ = scripted(client)
    assert score(engine, REQUEST) == [
        ScoredTokens(
            logprobs=[-0.5, -1.5],
            top_logprobs=[{8: -0.5, 9: -1.5}] * 2,
            token_ids_logprobs=[{7: -2.5, 8: -0.5}] * 2,
            version="default",
        )
    ]
    [scored] = score(engine, REQUEST)
    assert list(scored.top_logprobs[0]) == [8, 9]


def test_vllm_gets_a_prompt_for_each_position_of_named_tokens() -> None:
    engine, bodies = scripted(VLLMEngine)
    score(engine, REQUEST)
    by_kind = {"prompt_logprobs" in body: body for body in bodies}
    assert (by_kind[True]["prompt"], by_kind[True]["prompt_logprobs"]) == ([4, 8, 9], 2)
    assert (by_kind[False]["prompt"], by_kind[False]["logprob_token_ids"]) == ([[4], [4, 8]], [7, 8])
    assert (by_kind[False]["temperature"], by_kind[False]["top_p"]) == (1.0, 1.0)


def test_vllm_that_was_started_to_return_fewer_likely_tokens_is_told_how_to_start() -> None:
    engine, bodies = scripted(VLLMEngine)
    with pytest.raises(
        EngineError, match=r"http://engine .* at most 30 .*, not 31: lower num_top, .*--max-logprobs 31"
    ):
        score(engine, ScoringRequest(tokens=[4, 8], num_top=31))
    assert bodies == []


def test_vllm_with_adapters_is_asked_at_sampled_positions() -> None:
    """A real one ends at a request for log-probs of a prompt: tests/engines/test_adapters.py."""
    engine, bodies = scripted(VLLMEngine, lora_config={"max_lora_rank": 16})
    plain, _ = scripted(VLLMEngine)
    engine._adapters.current = "run-4"
    assert score(engine, REQUEST) == score(plain, REQUEST)
    assert [body["model"] for body in bodies] == ["run-4"] * 2
    assert {tuple(map(tuple, body["prompt"])) for body in bodies} == {((4,), (4, 8))}
    assert sorted((body["logprobs"], body.get("logprob_token_ids")) for body in bodies) == [(0, [7, 8, 9]), (2, None)]


def test_vllm_with_adapters_gets_no_more_tokens_and_prompts_than_it_takes() -> None:
    few = ScoringRequest(tokens=[1] * 2051, start=3)
    assert [len(call.positions) for call in vllm._scoring_calls(few, is_sampled=True)] == [1024, 1024]
    many = ScoringRequest(tokens=list(range(301)), token_ids=(0, 5))
    calls = vllm._scoring_calls(many, is_sampled=True)
    assert [len(call.body["logprob_token_ids"]) for call in calls] == [128, 128, 49]
    assert [position for call in calls for position in call.positions] == list(range(1, 301))


@pytest.mark.parametrize(
    ("client", "changed", "error", "problem"),
    [
        (SGLangEngine, {"input_token_logprobs": [[None, 4, None]]}, EngineAnswerError, "it answered 0 of 2 tokens"),
        (SGLangEngine, {"input_token_logprobs": None}, EngineAnswerError, "answered log-probs without"),
        (SGLangEngine, {"input_top_logprobs": [None, [], []]}, EngineAnswerError, "0 of 2 most likely tokens"),
        (
            SGLangEngine,
            {"input_token_ids_logprobs": [None, [], []]},
            EngineAnswerError,
            "left out log-probs of tokens: 7",
        ),
        (SGLangEngine, {"input_token_logprobs": [0, [None, 8, 0], [-1, 9, 0]]}, NoNumbersError, "not finite"),
        (SGLangEngine, {"finish_reason": {"type": "abort"}}, EngineUnavailableError, "3 attempts.*aborted a request"),
        (VLLMEngine, {"prompt_logprobs": None}, EngineAnswerError, "answered log-probs without"),
        (VLLMEngine, {"prompt_logprobs": [None, {"5": {"logprob": 0}}]}, EngineAnswerError, "log-probs without 8"),
        (VLLMEngine, {"finish_reason": "abort"}, EngineUnavailableError, "3 attempts.*aborted a request"),
    ],
)
def test_an_unusable_answer_is_an_error_that_names_the_engine(
    client: type[SGLangEngine] | type[VLLMEngine], changed: dict[str, Any], error: type[EngineError], problem: str
) -> None:
    engine, _ = scripted(client, **changed)
    with pytest.raises(error, match=f"http://engine.*{problem}"):
        score(engine, REQUEST)


@pytest.mark.parametrize("is_routed", [False, True])
def test_several_engines_share_what_is_scored(is_routed: bool, model: PreTrainedModel, model_dir: Path) -> None:
    requests = [ScoringRequest(tokens=random_prompt(5 + number, seed=number)) for number in range(7)]

    async def run(first: SGLangEngine, second: SGLangEngine) -> list[ScoredTokens]:
        pool: EnginePool | RoutedPool = EnginePool([first, second])
        if is_routed:
            pool = RoutedPool(SGLangRouter("http://nowhere"), cast("EnginePool", pool), [first, second])
        async with pool:
            await pool.load_weights(model_dir, "v-1")
            assert await pool.score([]) == []
            return await pool.score(requests)

    with served_engine(model_dir) as (first, one), served_engine(model_dir) as (second, other):
        counts = [count_submitted(scheduler) for scheduler in (one, other)]
        answers = asyncio.run(run(first, second))
    assert [len(count) for count in counts] == [4, 3]
    for request, scored in zip(requests, answers, strict=True):
        check_logprobs(model, request, scored)
        assert scored.version == "v-1"


def count_submitted(scheduler: Scheduler) -> list[str]:
    """The ids of the requests that ask a scheduler for log-probs of a prompt."""
    ids: list[str] = []
    submit = scheduler.submit

    def count(request: Any, **options: Any) -> Any:
        if request.params.max_new_tokens == 0:
            ids.append(request.request_id)
        return submit(request, **options)

    scheduler.submit = count  # type: ignore[method-assign]
    return ids


def check_logprobs(model: PreTrainedModel, request: ScoringRequest, scored: ScoredTokens) -> None:
    expected_TV = expected_logits(model, request.tokens).log_softmax(-1)[request.start - 1 : -1]
    expected_T = expected_TV.gather(-1, torch.tensor(request.tokens[request.start :])[:, None])[:, 0]
    assert scored.logprobs == pytest.approx(expected_T.tolist(), abs=TOLERANCE)


@pytest.mark.slow
def test_an_engine_that_is_killed_amid_scoring_is_replaced_by_another(model: PreTrainedModel, model_dir: Path) -> None:
    """Its process is stopped first, so that it has its share when it is killed."""
    requests = [ScoringRequest(tokens=random_prompt(5 + number, seed=number)) for number in range(8)]

    async def run(urls: list[str], killed: subprocess.Popen[str]) -> list[ScoredTokens]:
        async with EnginePool([SGLangEngine(url, restart_timeout_s=0.5) for url in urls], retry_s=60.0) as pool:
            await pool.load_weights(model_dir, "v-1")
            killed.send_signal(signal.SIGSTOP)
            scoring = asyncio.create_task(pool.score(requests))
            await asyncio.sleep(1.0)
            assert not scoring.done()
            killed.kill()
            answers = await asyncio.wait_for(scoring, 60.0)
            assert list(pool.quarantined) == [urls[0]]
            return answers

    with serving(model_dir) as (first, one), serving(model_dir) as (_, other):
        answers = asyncio.run(run([one, other], first))
    assert len(answers) == len(requests)
    for request, scored in zip(requests, answers, strict=True):
        check_logprobs(model, request, scored)


def test_an_engine_that_cannot_score_is_named() -> None:
    class Other:
        name = "http://other"

        async def aclose(self) -> None:
            return None

    async def run() -> None:
        async with EnginePool([cast("Any", Other())]) as pool:
            await pool.score([REQUEST])

    with pytest.raises(EngineError, match="http://other cannot score given tokens: Other has no `score`"):
        asyncio.run(run())
