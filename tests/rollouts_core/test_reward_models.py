"""Rewards by a reward model that SGLang or vLLM serves, against servers that answer as the real ones did.

Without these tests a server could be sent other tokens than a classifier here would read, or one of several scores
could be taken for the reward. tests/engines/test_reward_models.py has the real servers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rollouts_core.config import RewardConfig
from rollouts_core.errors import CheckpointError, ConfigError, EnvironmentUnavailableError, RewardError
from rollouts_core.reward_services import create_reward_model_reward
from rollouts_core.rewards import grade_group
from rollouts_core.system import backoff
from rollouts_core.types import Message, Sample
from tests.rollouts_core.scripted_service import Answer, Service

MAX_TOKENS = 40


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "FIRST_BACKOFF_S", 0.001)


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def name_labels(folder: Path, *labels: str) -> None:
    (folder / "config.json").write_text(json.dumps({"id2label": {str(i): name for i, name in enumerate(labels)}}))


def models_of(kind: str, max_tokens: int = 512) -> dict[str, Any]:
    return {"/v1/models": {"object": "list", "data": [{"id": "m", "owned_by": kind, "max_model_len": max_tokens}]}}


def as_sglang(scores: list[Any]) -> Answer:
    return 200, [{"embedding": each, "meta_info": {"id": "1"}} for each in scores]


def as_vllm(scores: list[Any]) -> Answer:
    return 200, {"data": [{"index": i, "object": "pooling", "data": each} for i, each in enumerate(scores)]}


def count_tokens(body: dict[str, Any]) -> Answer:
    """The score is the number of tokens."""
    if "input_ids" in body:
        return as_sglang([[len(ids)] for ids in body["input_ids"]])
    return as_vllm([[len(ids)] for ids in body["input"]])


def grade(service: Service, folder: Path, *responses: str, **changes: Any) -> list[float | None]:
    config = RewardConfig(kind="reward_model", url=f"{service.url}/", model=str(folder), **changes)
    samples = [Sample(prompt="1+1=?", response=response, metadata={"prompt_id": "p0"}) for response in responses]
    return [sample.reward for sample in asyncio.run(grade_group(samples, create_reward_model_reward(config)))]


def conversation_ids(tokenizer: PreTrainedTokenizerBase, response: str) -> list[int]:
    messages = [Message(role="user", content="1+1=?"), Message(role="assistant", content=response)]
    ids: list[int] = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    return ids


@pytest.mark.parametrize(
    ("kind", "path", "field", "others"),
    [("sglang", "/classify", "input_ids", {}), ("vllm", "/pooling", "input", {"use_activation": False})],
)
def test_each_kind_of_server_is_sent_the_conversations_tokens_in_batches(
    serve: Any,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    kind: str,
    path: str,
    field: str,
    others: dict[str, Any],
) -> None:
    service = serve(count_tokens, models_of(kind))
    responses = ["2" * n for n in range(1, 6)]
    expected = [conversation_ids(tokenizer, response) for response in responses]
    assert grade(service, folder, *responses, batch_size=3) == [float(len(ids)) for ids in expected]
    assert sorted(ids for body in service.bodies for ids in body[field]) == sorted(expected)
    assert {len(body[field]) for body in service.bodies} == {3, 2}
    assert all({name: body[name] for name in others} == others for body in service.bodies)
    assert set(service.paths) == {"/v1/models", path}


def test_a_server_is_asked_once_what_it_is_and_for_equal_conversations_once(serve: Any, folder: Path) -> None:
    service = serve(count_tokens, models_of("sglang"))
    reward = create_reward_model_reward(RewardConfig(kind="reward_model", url=service.url, model=str(folder)))
    for response in ("1", "2", "1"):
        asyncio.run(grade_group([Sample(prompt="q", response=response)], reward))
    assert service.paths == ["/v1/models", "/classify", "/classify"]


@pytest.mark.parametrize(("kind", "num_usable"), [("sglang", MAX_TOKENS - 1), ("vllm", MAX_TOKENS)])
def test_of_a_conversation_that_the_server_cannot_hold_the_end_is_graded(
    serve: Any, folder: Path, tokenizer: PreTrainedTokenizerBase, kind: str, num_usable: int
) -> None:
    service = serve(count_tokens, models_of(kind, MAX_TOKENS))
    response = "0123456789" * 6
    assert grade(service, folder, response) == [float(num_usable)]
    [body] = service.bodies
    sent = body["input_ids" if kind == "sglang" else "input"]
    assert sent == [conversation_ids(tokenizer, response)[-num_usable:]]


def test_of_scores_at_each_token_the_last_is_the_reward(serve: Any, folder: Path) -> None:
    """As vLLM gives them for Qwen2ForRewardModel."""
    service = serve(lambda body: as_vllm([[[0.5], [0.25], [-3.0]]]), models_of("vllm"))
    assert grade(service, folder, "2") == [-3.0]


@pytest.mark.parametrize(
    ("labels", "label", "expected"),
    [(("bad", "good"), "good", 2.0), (("bad", "good"), "0", 1.0), (("1", "0"), "0", 2.0), ((), "1", 2.0)],
)
def test_of_several_scores_that_of_the_label_is_the_reward(
    serve: Any, folder: Path, labels: tuple[str, ...], label: str, expected: float
) -> None:
    name_labels(folder, *labels)
    service = serve(lambda body: as_sglang([[1.0, 2.0]]), models_of("sglang"))
    assert grade(service, folder, "2", label=label) == [expected]


@pytest.mark.parametrize(
    ("labels", "label", "sentence"),
    [
        (("bad", "good"), "", "set label to the label whose score is the reward: .* has the labels bad, good$"),
        (("bad", "good"), "fine", "there is no label 'fine': .* has the labels bad, good$"),
        (("bad", "good"), "2", "there is no label '2'"),
        ((), "good", "has no label names .*: set label to its number, from 0"),
    ],
)
def test_a_label_that_is_missing_or_unknown_is_refused_without_the_server(
    folder: Path, labels: tuple[str, ...], label: str, sentence: str
) -> None:
    name_labels(folder, *labels)
    config = RewardConfig(kind="reward_model", url="http://127.0.0.1:9", model=str(folder), label=label)
    with pytest.raises(ConfigError, match=sentence):
        create_reward_model_reward(config)


@pytest.mark.parametrize(
    ("scores", "label", "sentence"),
    [
        ([[1.0, 2.0]], "", "gives 2 scores, expected one: set label to the number"),
        ([[1.0, 2.0]], "5", "gives 2 scores, but label is number 5"),
        ([[1.0], [2.0]], "", "1 samples got 2 rewards"),
    ],
)
def test_other_scores_than_the_settings_say_end_the_run(
    serve: Any, folder: Path, scores: list[Any], label: str, sentence: str
) -> None:
    service = serve(lambda body: as_sglang(scores), models_of("sglang"))
    with pytest.raises(RewardError, match=f"on prompt 'p0' .*{sentence}"):
        grade(service, folder, "2", label=label)
    assert len(service.bodies) == 1


@pytest.mark.parametrize(
    "failure", [(503, {}), (200, b"no json"), (200, [{"embedding": ["high"]}]), (200, {"data": []})]
)
def test_a_server_that_fails_once_is_asked_again(serve: Any, folder: Path, failure: Answer) -> None:
    answers = [failure]
    service = serve(lambda body: answers.pop() if answers else as_sglang([[1.5]]), models_of("sglang"))
    assert grade(service, folder, "2") == [1.5]
    assert len(service.bodies) == 2


def test_a_server_that_stays_away_gives_no_reward(serve: Any, folder: Path) -> None:
    service = serve(count_tokens, models_of("sglang"))
    service.server.shutdown()
    service.server.server_close()
    with pytest.raises(EnvironmentUnavailableError, match=r"/v1/models gave no reward in 2 attempts"):
        grade(service, folder, "2", max_retries=1)


def test_a_server_that_refuses_is_quoted_beside_what_was_expected(serve: Any, folder: Path) -> None:
    service = serve(lambda body: (404, {"detail": "Not Found"}), models_of("vllm"))
    with pytest.raises(RewardError, match=r"/pooling answered 404: .*Not Found.*--is-embedding or by vLLM with --run"):
        grade(service, folder, "2")


@pytest.mark.parametrize(
    ("pages", "sentence"),
    [
        (models_of("someone"), "names 'someone' as the server: expected one of sglang, vllm"),
        ({}, "/v1/models answered 404"),
    ],
)
def test_another_kind_of_server_is_refused(
    serve: Callable[..., Service], folder: Path, pages: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RewardError, match=sentence):
        grade(serve(count_tokens, pages), folder, "2")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    settings = {"kind": "reward_model", "url": "http://127.0.0.1:9"}
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        create_reward_model_reward(RewardConfig(**settings, model=str(tmp_path)))
    with pytest.raises(ConfigError, match="is not a folder"):
        create_reward_model_reward(RewardConfig(**settings, model=str(tmp_path / "missing")))
