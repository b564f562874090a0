"""Every fault of an engine, a reward and an environment that a run must survive or end by: what comes of it, and where.

Asked through the whole path: manager, generate function, client, socket, and a server that really does it. A message
names the engine by its address and the request by its prompt. Without a row of this table a fault could hang a run,
become a sample, or end it with a sentence that says neither.

    fault                          outcome                                          test, here unless named
    ─────────────────────────────  ───────────────────────────────────────────────  ───────────────────────────────────
    engine not up                  waits restart_timeout_s, then ends the run       ..._nobody_listens
    engine up but hung             the same                                         ..._ends_the_run[hangs]
    engine goes away and returns   brought up to date, asked again                  engines/test_sglang.py, test_pool.py
    one engine of several          the others sample its groups                     engines/test_pool.py
    wrong model                    refused before the first sample                  ..._another_model[hidden_size]
    wrong vocabulary size          refused before the first sample                  ..._another_model[vocab_size]
    status 429, 500, 502-504       asked again, 429 more often; then ends the run   ..._ends_the_run, ..._is_forgiven
    connection reset mid-answer    asked again; then ends the run                   ..._ends_the_run, ..._is_forgiven
    truncated JSON                 ends the run                                     ..._ends_the_run
    logprobs missing               ends the run                                     ..._ends_the_run
    logprobs NaN, or too few       ends the run                                     ..._ends_the_run
    token id out of range          ends the run                                     ..._ends_the_run
    over-long prompt               refused by its row before the run                flows/test_bad_data.py
      ... refused by the engine    ends the run                                     ..._ends_the_run
    reward raises                  ends the run with function and prompt            ..._reward...; test_rewards.py
    reward hangs                   ends the run with the line that it hangs in      ..._reward...; test_time_limits.py
    reward returns NaN             ends the run with function and prompt            ..._reward...; test_rewards.py
    environment always answers     cut off at a budget, a truncated sample          test_conversation.py
    environment never answers      begun again, dropped, counted, ends the run      ..._never_answers
    environment never waits        interrupted, ends the run with the line          test_conversation.py
    weights not taken              quarantined, never sampled from                  engines/test_pool.py, tests/engines
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rollouts_core.config import MultiTurnConfig, RolloutConfig, SamplingConfig
from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.engines import SGLangEngine, VLLMEngine, recovery
from rollouts_core.environments import Conversation, Reply
from rollouts_core.errors import (
    EngineAnswerError,
    EngineError,
    EngineUnavailableError,
    EnvironmentOutageError,
    NoNumbersError,
    RewardError,
    WeightSyncError,
)
from rollouts_core.rollout import generate
from rollouts_core.rollout.generate import create_engine_generate_fn
from rollouts_core.rollout.manager import AsyncRolloutManager
from rollouts_core.types import Message, Prompt, RolloutBatch, Sample
from tests.rollouts_core.rollout.misbehaving import Api, Connection, Fault, behave, misbehaving

BOTH = pytest.mark.parametrize("api", ["sglang", "vllm"])
CLIENTS: dict[Api, type[SGLangEngine] | type[VLLMEngine]] = {"sglang": SGLangEngine, "vllm": VLLMEngine}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(generate, "FIRST_BACKOFF_S", 0.001)


def hang(connection: Connection) -> None:
    connection.server.is_over.wait(30)


def reset_midway(connection: Connection) -> None:
    whole = json.dumps(connection.complete()).encode()
    connection.send_bytes(200, whole[:20], missing=len(whole) - 20)
    connection.reset()


def truncate(connection: Connection) -> None:
    connection.send_bytes(200, json.dumps(connection.complete()).encode()[:-5])


def answer_status(status: int) -> Fault:
    return lambda connection: connection.send_json(status, {"error": {"message": "The input is too long"}})


def complete_with(**changes: Any) -> Fault:
    return lambda connection: connection.send_json(200, connection.complete(**changes))


def grade_by_length(sample: Sample) -> float:
    return float(len(sample.tokens))


def sample_batch(
    api: Api,
    url: str,
    tokenizer: PreTrainedTokenizerBase,
    model_dir: Path,
    *,
    timeout_s: float = 5.0,
    **changes: Any,
) -> RolloutBatch:
    """A batch of two groups of two, from an engine at this address that must serve this model."""
    settings = {"batch_size": 2, "n_samples_per_prompt": 2, "reward_fn": grade_by_length, **changes}
    config = RolloutConfig(sampling=SamplingConfig(max_new_tokens=2), **settings)

    async def sample() -> RolloutBatch:
        engine = CLIENTS[api](url, request_timeout_s=timeout_s, restart_timeout_s=timeout_s, model_dir=model_dir)
        prompts = [Prompt(id=f"sum-{n}", messages=(Message(role="user", content=f"{n}+1=?"),)) for n in range(4)]
        generate = create_engine_generate_fn([engine], tokenizer, config)
        try:
            async with AsyncRolloutManager(DataBuffer(prompts), config, generate_fn=generate) as manager:
                return await manager.generate_batch()
        finally:
            await engine.aclose()

    return asyncio.run(sample())


@pytest.fixture
def model_dir(quickstart_dir: Path) -> Path:
    return quickstart_dir / "base_model"


@BOTH
def test_a_server_without_a_fault_gives_a_batch(api: Api, tokenizer: PreTrainedTokenizerBase, model_dir: Path) -> None:
    with misbehaving(api, behave) as server:
        batch = sample_batch(api, server.url, tokenizer, model_dir)
    assert [sample.tokens[-2:] for sample in batch.samples] == [[5, 6]] * 4


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (hang, EngineUnavailableError, "Timeout"),
        (answer_status(429), EngineUnavailableError, "answered 429"),
        (answer_status(500), EngineUnavailableError, "answered 500"),
        (answer_status(502), EngineUnavailableError, "answered 502"),
        (answer_status(503), EngineUnavailableError, "answered 503"),
        (answer_status(504), EngineUnavailableError, "answered 504"),
        (answer_status(400), EngineError, "answered 400: .*The input is too long"),
        (reset_midway, EngineUnavailableError, "reset by peer|not completed"),
        (truncate, EngineAnswerError, "answered no JSON"),
        (complete_with(logprobs=None), EngineAnswerError, "without|cannot be read"),
        (complete_with(logprobs=[-1.0]), EngineAnswerError, "2 tokens with 1 logprobs"),
        (complete_with(logprobs=[-1.0, float("nan")]), NoNumbersError, "not finite numbers"),
        (complete_with(token_ids=[5, 4096]), EngineAnswerError, "token id 4096, the served model has 29 tokens"),
        (complete_with(token_ids=[5, -1]), EngineAnswerError, "token id -1, the served model has 29 tokens"),
        (complete_with(token_ids=[5], logprobs=[-1.0]), EngineError, "after 1 of 2 tokens: its context is too short"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_that_stays_ends_the_run_with_the_engine_and_the_prompt(
    api: Api, tokenizer: PreTrainedTokenizerBase, model_dir: Path, fault: Fault, kind: type[EngineError], words: str
) -> None:
    began = time.monotonic()
    with misbehaving(api, fault) as server, pytest.raises(kind, match=words) as caught:
        sample_batch(api, server.url, tokenizer, model_dir, timeout_s=0.5 if fault is hang else 5.0)
    assert server.url in str(caught.value)
    assert "prompt 'sum-" in str(caught.value)
    assert type(caught.value) is kind
    assert time.monotonic() - began < 5.0


@BOTH
@pytest.mark.parametrize("fault", [hang, answer_status(429), answer_status(503), reset_midway])
def test_a_fault_that_passes_is_forgiven(
    api: Api, tokenizer: PreTrainedTokenizerBase, model_dir: Path, fault: Fault
) -> None:
    with misbehaving(api, fault, behave) as server:
        batch = sample_batch(api, server.url, tokenizer, model_dir, timeout_s=0.5 if fault is hang else 5.0)
    assert len(batch.samples) == 4
    assert server.num_asked > {"sglang": 2, "vllm": 4}[api]


@BOTH
def test_an_engine_where_nobody_listens_ends_the_run(
    api: Api, tokenizer: PreTrainedTokenizerBase, model_dir: Path
) -> None:
    url = "http://127.0.0.1:9"
    with pytest.raises(EngineUnavailableError, match=rf"prompt 'sum-\d'.*{url} did not answer within 0\.3 s"):
        sample_batch(api, url, tokenizer, model_dir, timeout_s=0.3)


@BOTH
@pytest.mark.parametrize(("key", "value"), [("hidden_size", 64), ("vocab_size", 4096)])
def test_a_server_of_another_model_is_refused_before_the_first_sample(
    api: Api, model_dir: Path, tmp_path: Path, key: str, value: int
) -> None:
    other = Path(shutil.copytree(model_dir, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, key: value}))

    async def get_ready(url: str) -> None:
        engine = CLIENTS[api](url, model_dir=model_dir)
        try:
            await engine.wait_until_ready(5.0)
        finally:
            await engine.aclose()

    with misbehaving(api, behave, model=other) as server, pytest.raises(WeightSyncError) as caught:
        asyncio.run(get_ready(server.url))
    assert f"{server.url} serves a model with {key} {value}, but the published model" in str(caught.value)
    assert server.num_asked == 0


def raise_an_error(sample: Sample) -> float:
    raise KeyError("rubric")


def never_return(sample: Sample) -> float:
    while True:
        pass


def return_nan(sample: Sample) -> float:
    return float("nan")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward_fn", "words"),
    [
        (raise_an_error, "raised KeyError: 'rubric'"),
        (never_return, "did not return within 0.2 s; it was in never_return, test_fault_matrix.py line"),
        (return_nan, "returned nan: return a finite number"),
    ],
)
def test_a_reward_with_a_fault_ends_the_run_with_the_function_and_the_prompt(
    tokenizer: PreTrainedTokenizerBase, model_dir: Path, reward_fn: Callable[[Sample], float], words: str
) -> None:
    name = rf"reward function .*:{reward_fn.__name__} on prompt 'sum-\d'"
    with misbehaving("sglang", behave) as server, pytest.raises(RewardError, match=f"{name}.*{words}"):
        sample_batch("sglang", server.url, tokenizer, model_dir, reward_fn=reward_fn, reward_timeout_s=0.2)


class SilentEnvironment:
    """Never answers the policy."""

    async def respond(self, conversation: Conversation) -> Reply:
        await asyncio.sleep(3600)
        return Reply()

    def grade(self, sample: Sample) -> float:
        return 0.0


def end_turn(connection: Connection) -> None:
    """A turn that the policy ends, so that the environment has to answer."""
    content = connection.complete()
    for completion in content:
        completion["meta_info"]["finish_reason"] = {"type": "stop", "matched": 6}
    connection.send_json(200, content)


def test_an_environment_that_never_answers_ends_the_run_and_is_never_a_reward(
    tokenizer: PreTrainedTokenizerBase, model_dir: Path
) -> None:
    environment = f"{__name__}:SilentEnvironment"
    words = r"2 of the last \d groups .* SilentEnvironment on prompt 'sum-\d' did not answer within 0.05 s"
    with misbehaving("sglang", end_turn) as server, pytest.raises(EnvironmentOutageError, match=words):
        sample_batch(
            "sglang",
            server.url,
            tokenizer,
            model_dir,
            environment=environment,
            reward_fn="",
            multi_turn=MultiTurnConfig(reply_timeout_s=0.05),
            max_environment_retries=1,
            max_environment_failure_share=0.02,
            max_outage_minutes=0,
        )
    assert server.num_asked >= 2 * 2 * 2  # both samples of two groups, each begun twice
