"""Rewards that a service, a classifier or a judge computes, against real servers and a real model.

Without these tests an overloaded service could become a reward of 0, or every sample a request of its own.
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForSequenceClassification,
    Gemma3Config,
    Gemma3ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from rollouts_core.config import RewardConfig
from rollouts_core.errors import CheckpointError, ConfigError, EnvironmentUnavailableError, RewardError
from rollouts_core.reward_services import (
    BatchedReward,
    create_classifier_reward,
    create_http_reward,
    create_judge_reward,
    render_judge_prompt,
)
from rollouts_core.rewards import grade_group
from rollouts_core.system import backoff
from rollouts_core.types import Message, Sample
from tests.rollouts_core.scripted_service import Answer, Service
from tests.rollouts_core.served_engine import engine_url


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "FIRST_BACKOFF_S", 0.001)


def count_letters(body: dict[str, Any]) -> Answer:
    return 200, {"rewards": [len(sample["response"]) for sample in body["samples"]]}


def make_samples(*responses: str) -> list[Sample]:
    return [
        Sample(prompt="q", response=response, index=i, metadata={"answer": "a", "prompt_id": "p0"})
        for i, response in enumerate(responses)
    ]


def grade(samples: list[Sample], reward: Any) -> list[float | None]:
    return [sample.reward for sample in asyncio.run(grade_group(samples, reward))]


def http_reward(service: Service, **changes: Any) -> Any:
    return create_http_reward(RewardConfig(kind="http", url=service.url, **changes))


def test_samples_travel_in_batches_and_come_back_in_order(serve: Any) -> None:
    service = serve(count_letters)
    responses = ["x" * n for n in range(1, 11)]
    assert grade(make_samples(*responses), http_reward(service, batch_size=4)) == [float(n) for n in range(1, 11)]
    assert sorted(len(body["samples"]) for body in service.bodies) == [2, 4, 4]
    assert {
        "prompt": "q",
        "response": "x",
        "answer": "a",
        "metadata": {"answer": "a", "prompt_id": "p0"},
    } in [sample for body in service.bodies for sample in body["samples"]]


def test_equal_samples_are_scored_once_also_later(serve: Any) -> None:
    service = serve(count_letters)
    reward = http_reward(service)
    assert grade(make_samples("xx", "xx", "x"), reward) == [2.0, 2.0, 1.0]
    assert grade(make_samples("xx"), reward) == [2.0]
    assert sum(len(body["samples"]) for body in service.bodies) == 2
    assert (reward.num_calls, reward.num_cached) == (4, 2)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, b"[" * 100_000 + b"]" * 100_000), "nested too deeply"),
        ((200, gzip.compress(b" " * (65 << 20)), {"Content-Encoding": "gzip"}), "more than 67,108,864 bytes"),
        ((500, b"broken", {"Content-Type": "text/plain; charset=rot13"}), "answered 500: broken"),
    ],
    ids=["a bomb of brackets", "a bomb of gzip", "no encoding of text"],
)
def test_whatever_a_service_sends_is_no_more_than_an_answer_that_cannot_be_read(
    serve: Any, answer: Answer, said: str
) -> None:
    service = serve(lambda _: answer)
    with pytest.raises(EnvironmentUnavailableError, match=said):
        grade(make_samples("x"), http_reward(service, max_retries=0))


@pytest.mark.slow
def test_requests_that_wait_for_others_have_their_time_before_them(serve: Any) -> None:
    """A batch that a slow service answers one after another takes longer than one reward may."""

    def answer_slowly(body: dict[str, Any]) -> Answer:
        time.sleep(0.1)
        return count_letters(body)

    reward = http_reward(serve(answer_slowly), batch_size=1, max_concurrent=1)
    samples = make_samples(*("x" * n for n in range(1, 7)))
    graded = asyncio.run(grade_group(samples, reward, timeout_s=0.3))
    assert [sample.reward for sample in graded] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_a_score_without_a_limit_of_its_own_has_that_of_the_reward() -> None:
    async def score_for_ever(samples: Sequence[Sample]) -> list[float | None]:
        await asyncio.sleep(3600)
        return []

    reward = BatchedReward(score_for_ever, batch_size=1, has_limit=False)
    with pytest.raises(RewardError, match=r"did not return within 0\.1 s"):
        asyncio.run(asyncio.wait_for(grade_group(make_samples("x"), reward, timeout_s=0.1), 20))


def test_samples_that_differ_in_their_metadata_alone_are_scored_each(serve: Any) -> None:
    service = serve(lambda body: (200, {"rewards": [sample["metadata"]["rubric"] for sample in body["samples"]]}))
    samples = [replace(sample, metadata={"rubric": i}) for i, sample in enumerate(make_samples("x", "x"))]
    assert grade(samples, http_reward(service)) == [0.0, 1.0]


@pytest.mark.slow
def test_of_a_sample_that_was_scored_no_text_stays_in_memory() -> None:
    num_bytes = 1_000_000

    async def score(samples: Sequence[Sample]) -> list[float]:
        return [1.0 for _ in samples]

    async def grade_many(reward: BatchedReward) -> None:
        for place in range(20):
            [sample] = make_samples(f"{place}" + "x" * num_bytes)
            await reward(sample)

    reward = BatchedReward(score, batch_size=1)
    tracemalloc.start()
    asyncio.run(grade_many(reward))
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < num_bytes, "of 20 texts of this length"


def test_a_sample_that_is_cancelled_leaves_its_equals_their_reward(serve: Any) -> None:
    is_asked, may_answer = threading.Event(), threading.Event()

    def answer_late(body: dict[str, Any]) -> Answer:
        is_asked.set()
        may_answer.wait(10)
        return count_letters(body)

    reward = http_reward(serve(answer_late))

    async def cancel_the_first() -> float:
        first, second = (asyncio.create_task(reward(sample)) for sample in make_samples("xx", "xx"))
        await asyncio.to_thread(is_asked.wait, 10)
        first.cancel()
        await asyncio.sleep(0)
        may_answer.set()
        return await second

    assert asyncio.run(cancel_the_first()) == 2.0


@pytest.mark.parametrize(
    "failure",
    [
        (503, {}),
        (429, {}),
        (524, {}),
        (529, {}),
        (200, b"no json"),
        (200, {"scores": []}),
        (200, {"rewards": ["high"]}),
    ],
)
def test_a_service_that_fails_once_is_asked_again(serve: Any, failure: Answer) -> None:
    answers = [failure]
    service = serve(lambda body: answers.pop() if answers else count_letters(body))
    assert grade(make_samples("xx"), http_reward(service)) == [2.0]
    assert len(service.bodies) == 2


def test_a_service_that_stays_away_gives_no_reward_and_names_the_prompt(serve: Any) -> None:
    service = serve(lambda body: (503, {}))
    reward = http_reward(service, max_retries=2)
    with pytest.raises(EnvironmentUnavailableError, match=r"on prompt 'p0': .* no reward in 3 attempts: .*503"):
        grade(make_samples("x"), reward)
    assert len(service.bodies) == 3
    service.server.shutdown()
    service.server.server_close()
    with pytest.raises(EnvironmentUnavailableError, match="no reward in 3 attempts"):
        grade(make_samples("x"), reward)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ((400, {"error": "no such field"}), "answered 400: .*no such field"),
        ((501, {"error": "no POST"}), "answered 501: .*no POST"),
        ((200, {"rewards": [1.0, 2.0]}), "1 samples got 2 rewards"),
        ((200, b'{"rewards": [NaN]}'), "returned nan: return a finite number"),
    ],
)
def test_a_service_with_a_mistake_ends_the_run_and_names_the_prompt(serve: Any, answer: Answer, sentence: str) -> None:
    service = serve(lambda body: answer)
    with pytest.raises(RewardError, match=f"on prompt 'p0' .*{sentence}"):
        grade(make_samples("x"), http_reward(service))
    assert len(service.bodies) == 1


def test_a_service_that_hangs_is_left(serve: Any) -> None:
    is_over = threading.Event()
    service = serve(lambda body: (200, {"rewards": [is_over.wait(10)]}))
    with pytest.raises(EnvironmentUnavailableError, match="gave no reward"):
        grade(make_samples("x"), http_reward(service, timeout_s=0.05, max_retries=0))
    is_over.set()


def say(text: str) -> Answer:
    return 200, {"choices": [{"message": {"content": text}}]}


@pytest.mark.parametrize(
    "last",
    [
        "**Score: 7.5**",
        "**Score:** 7.5",
        "**Score**: 7.5",
        "__Score__: `7.5`/10",
        "Score: 7.5 out of 10",
        '{"score": 7.5, "why": "%"}',
        "{'score': '7.5/10'}",
    ],
)
def test_a_judge_reads_the_answer_and_its_last_score_counts(
    serve: Any, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    service = serve(lambda body: say(f"Score: 2 would be harsh.\n{last}"))
    config = RewardConfig(kind="judge", url=f"{service.url}/v1/", model="big", api_key_variable="JUDGE_KEY")
    assert grade(make_samples("blue"), create_judge_reward(config)) == [0.75]
    [body] = service.bodies
    assert (body["model"], body["temperature"], service.keys) == ("big", 0, ["Bearer s3cret"])
    assert "blue" in body["messages"][0]["content"]


@pytest.mark.parametrize("parameter", ["temperature", "max_tokens", None])
def test_a_judge_that_takes_no_temperature_is_asked_without_one_from_then_on(
    serve: Any, caplog: pytest.LogCaptureFixture, parameter: str | None
) -> None:
    """OpenAI's models that reason answer so."""
    refusal = {"error": {"message": "Unsupported value", "param": parameter, "code": "unsupported_value"}}
    service = serve(lambda body: (400, refusal) if "temperature" in body else say("Score: 5"))
    reward = create_judge_reward(RewardConfig(kind="judge", url=service.url, model="big"))
    if parameter != "temperature":
        with pytest.raises(RewardError, match=r"answered 400: .*Unsupported value"):
            grade(make_samples("x"), reward)
        return
    for responses in (["x"], ["y", "z"]):
        assert grade(make_samples(*responses), reward) == [0.5] * len(responses)
    assert ["temperature" in body for body in service.bodies] == [True, False, False, False]
    [line] = caplog.messages
    assert "refuses temperature 0" in line


def test_a_judge_behind_sglangs_own_endpoint_is_asked_in_tokens(
    serve: Any, byte_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    byte_tokenizer.chat_template = "<|im_start|>{{ messages[0]['content'] }}<|im_end|><|im_start|>"
    byte_tokenizer.save_pretrained(tmp_path)
    said = byte_tokenizer("Fine. Score: 8<|im_end|>")["input_ids"]
    service = serve(lambda body: (200, {"output_ids": said, "meta_info": {}}))
    config = RewardConfig(kind="judge", url=f"{service.url}/generate", model=str(tmp_path), judge_prompt="{response}?")
    assert grade(make_samples("blue"), create_judge_reward(config)) == [0.8]
    [body] = service.bodies
    assert byte_tokenizer.decode(body["input_ids"]) == "<|im_start|>blue?<|im_end|><|im_start|>"
    assert body["sampling_params"]["stop_token_ids"] == [byte_tokenizer.eos_token_id]


def test_the_embedded_engine_answers_as_a_judge(quickstart_dir: Path, tmp_path: Path) -> None:
    """What an untrained model writes is no score, and is read as text all the same."""
    model = quickstart_dir / "base_model"
    with engine_url(model) as url:
        config = RewardConfig(
            kind="judge", url=f"{url}/generate", model=str(model), judge_prompt="{response}", max_retries=0
        )
        with pytest.raises(EnvironmentUnavailableError, match=r"no score from 0 to 10 in '[0-9+=?:,]*'"):
            grade(make_samples("1+1=?"), create_judge_reward(config))


def test_a_judge_is_asked_a_bounded_number_of_times_at_once_and_equal_answers_once(serve: Any) -> None:
    def judge_slowly(body: dict[str, Any]) -> Answer:
        time.sleep(0.02)
        return say("Score: 5")

    service = serve(judge_slowly)
    config = RewardConfig(kind="judge", url=service.url, model="big", max_concurrent=4)
    responses = [f"answer {n % 12}" for n in range(24)]
    assert grade(make_samples(*responses), create_judge_reward(config)) == [0.5] * 24
    assert (len(service.bodies), service.max_under_way, len(service.clients)) == (12, 4, 4)


@pytest.mark.parametrize(
    "text", ["I cannot say.", "Score: 11", "Score: high", "Score: 4/5", "Score: 2. Score: **10** / 100", "Score: 10 %"]
)
def test_a_judge_that_gives_no_score_gives_no_reward(serve: Any, text: str) -> None:
    service = serve(lambda body: say(text))
    config = RewardConfig(kind="judge", url=service.url, model="big", max_retries=1)
    with pytest.raises(EnvironmentUnavailableError, match=r"no reward in 2 attempts.*no score from 0 to 10"):
        grade(make_samples("x"), create_judge_reward(config))


def test_what_a_policy_writes_fills_no_other_place_of_the_judges_prompt() -> None:
    sample = Sample(prompt="q", response="{answer} {prompt}", metadata={"answer": "secret"})
    assert render_judge_prompt("{prompt}|{response}|{answer}|{other}", sample) == "q|{answer} {prompt}|secret|{other}"


@pytest.fixture
def classifier(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Callable[..., Path]:
    def save(num_labels: int = 1) -> Path:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_labels=num_labels, max_position_embeddings=64,
        )  # fmt: skip
        LlamaForSequenceClassification(config).save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        return tmp_path

    return save


def test_a_classifier_scores_the_conversation_whatever_shares_its_batch(
    classifier: Callable[..., Path], tokenizer: PreTrainedTokenizerBase
) -> None:
    folder = classifier()
    reward = create_classifier_reward(RewardConfig(kind="classifier", model=str(folder), batch_size=4))
    samples = [Sample(prompt="1+1=?", response="2" * n, index=n) for n in range(1, 6)]
    rewards = grade(samples, reward)
    model = LlamaForSequenceClassification.from_pretrained(folder).eval()
    for sample, found in zip(samples, rewards, strict=True):
        messages = [*sample.messages, Message(role="assistant", content=sample.response)]
        ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)["input_ids"]
        assert found == pytest.approx(model(ids).logits.item(), abs=1e-5)
    assert len(set(rewards)) == 5


def test_a_classifier_computes_one_batch_at_a_time(
    classifier: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several at once would share the same cores and take longer together."""
    under_way: list[int] = []
    forward = LlamaForSequenceClassification.forward

    def slow_forward(*arguments: Any, **options: Any) -> Any:
        under_way.append(1)
        time.sleep(0.02)
        assert len(under_way) == 1
        under_way.pop()
        return forward(*arguments, **options)

    monkeypatch.setattr(LlamaForSequenceClassification, "forward", slow_forward)
    reward = create_classifier_reward(RewardConfig(kind="classifier", model=str(classifier()), batch_size=1))
    assert len(grade([Sample(prompt="1+1=?", response="2" * n) for n in range(4)], reward)) == 4


@pytest.mark.parametrize("model_max_length", [None, 30])
def test_of_a_conversation_that_a_classifier_cannot_hold_the_end_is_graded(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, model_max_length: int | None
) -> None:
    config = RobertaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id, hidden_dropout_prob=0.0,
        initializer_range=1.0,
    )  # fmt: skip
    torch.manual_seed(0)
    RobertaForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    if model_max_length:
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": model_max_length}))
    reward = create_classifier_reward(RewardConfig(kind="classifier", model=str(tmp_path)))
    prompt = "1+" * 50
    responses = ("1" * 20, "2" * 20)
    found = grade([Sample(prompt=prompt, response=response) for response in responses], reward)
    model = RobertaForSequenceClassification.from_pretrained(tmp_path).eval()
    num_usable = model_max_length or 64 - int(tokenizer.pad_token_id) - 1
    for response, reward_of_it in zip(responses, found, strict=True):
        messages = [Message(role="user", content=prompt), Message(role="assistant", content=response)]
        ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)["input_ids"]
        assert ids.shape[1] > num_usable
        assert reward_of_it == pytest.approx(model(ids[:, -num_usable:]).logits.item(), abs=1e-4)
    assert found[0] != pytest.approx(found[1], abs=1e-3)


SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
UNUSUAL_CLASSIFIERS: dict[str, Callable[[int], PreTrainedModel]] = {
    "without_a_table_of_positions": lambda vocab_size: BloomForSequenceClassification(
        BloomConfig(vocab_size=vocab_size, hidden_size=16, n_layer=1, n_head=2, num_labels=1)
    ),
    "that_sees_pictures": lambda vocab_size: Gemma3ForSequenceClassification(
        Gemma3Config(
            text_config={**SIZE, "vocab_size": vocab_size, "num_key_value_heads": 1, "head_dim": 8},
            vision_config={**SIZE, "image_size": 28, "patch_size": 14},
            num_labels=1,
        )
    ),
}


@pytest.mark.parametrize("build", UNUSUAL_CLASSIFIERS.values(), ids=UNUSUAL_CLASSIFIERS.keys())
def test_a_classifier_scores_the_same_in_a_batch_and_alone(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, build: Callable[[int], PreTrainedModel]
) -> None:
    torch.manual_seed(0)
    build(len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    samples = [Sample(prompt="1+1=?", response="2" * n) for n in (1, 90)]
    together, alone = (
        grade(samples, create_classifier_reward(RewardConfig(kind="classifier", model=str(tmp_path), batch_size=size)))
        for size in (2, 1)
    )
    assert together == pytest.approx(alone, abs=1e-5)


def test_a_classifier_with_several_labels_or_none_is_refused(classifier: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 3 labels: use a model with one label"):
        create_classifier_reward(RewardConfig(kind="classifier", model=str(classifier(3))))
    with pytest.raises(ConfigError, match="is not a folder"):
        create_classifier_reward(RewardConfig(kind="classifier", model=str(tmp_path / "missing")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        create_classifier_reward(RewardConfig(kind="classifier", model=str(tmp_path / "empty")))
