"""Pins: OpenAI's own client talks to the embedded engine, and gets from /v1 what /generate gives.

Without it a trained model could be used by this project's client alone, or would answer otherwise than it was trained.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from rollouts_core.embedded import exchange
from rollouts_core.embedded.scheduler import Scheduler
from tests.rollouts_core.data.test_dialects import template_of
from tests.rollouts_core.embedded.scripted_model import (
    CALL,
    NAME,
    STORY,
    THOUGHTS,
    TIMEOUT_S,
    served,
    until_idle,
    write_scripted_model,
)
from tests.rollouts_core.embedded.tiny_models import expected_logits, make_model, save_model

pytestmark = pytest.mark.slow
USER = {"role": "user", "content": "Say it."}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=TIMEOUT_S, max_retries=0)


@pytest.fixture(scope="module")
def client(story: tuple[str, Scheduler]) -> openai.OpenAI:
    return client_of(story[0])


@pytest.fixture
def texted_dir(model_dir: Path, story_dir: Path, tmp_path: Path) -> Path:
    """The model's folder, with a tokenizer that knows its ids."""
    shutil.copytree(model_dir, tmp_path / "texted")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(story_dir / name, tmp_path / "texted" / name)
    return tmp_path / "texted"


def chat(client: openai.OpenAI, **asked: Any) -> Any:
    return client.chat.completions.create(**{"model": NAME, "messages": [USER], "temperature": 0, **asked})


def test_the_model_is_listed(client: openai.OpenAI, story_dir: Path) -> None:
    [card] = client.models.list().data
    assert (card.id, card.root, card.max_model_len) == (NAME, str(story_dir), 1024)  # type: ignore[attr-defined]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="is not served here: ask for 'my-model'"):
        client.models.retrieve("gpt-5")


def test_a_chat_is_answered_by_the_template(client: openai.OpenAI, story: tuple[str, Scheduler]) -> None:
    answer = chat(client)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "".join(STORY), "stop")
    assert choice.message.tool_calls is None and choice.logprobs is None
    asked = {"messages": [USER]}
    tokens = httpx.post(f"{story[0]}/tokenize", json=asked).json()
    assert answer.usage.prompt_tokens == tokens["count"] == len(tokens["tokens"])
    assert (answer.usage.completion_tokens, answer.metadata) == (8, {"weight_version": "default"})
    text = httpx.post(f"{story[0]}/detokenize", json={"tokens": tokens["tokens"], "skip_special_tokens": False}).json()
    assert text["text"] == "<|im_start|>user\nSay it.<|im_end|>\n<|im_start|>assistant\n"


def test_a_stream_has_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    texts = [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content]
    assert "".join(texts) == "".join(STORY) and len(texts) > 1
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 8)
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_string_is_left_out_also_of_a_stream(client: openai.OpenAI, is_stream: bool) -> None:
    """Its beginning comes in the tokens ahead of it."""
    answer = chat(client, stop=["me there", " time there w"], stream=is_stream)
    if is_stream:
        assert "".join(c.choices[0].delta.content or "" for c in answer) == "Once upon a ti"
    else:
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Once upon a ti", "stop")


def test_the_limit_of_tokens_ends_an_answer(client: openai.OpenAI) -> None:
    for limit in ({"max_tokens": 2}, {"max_completion_tokens": 2}):
        [choice] = chat(client, **limit).choices
        assert (choice.message.content, choice.finish_reason) == ("Once upon", "length")


def test_several_answers_have_a_seed_each(client: openai.OpenAI) -> None:
    asked = {"n": 3, "seed": 5, "temperature": 3, "max_tokens": 6, "extra_body": {"return_token_ids": True}}
    answers = [[choice.token_ids for choice in chat(client, **asked).choices] for _ in range(2)]
    assert answers[0] == answers[1] and len({tuple(ids) for ids in answers[0]}) == 3
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for chunk in chat(client, stream=True, **asked):
        for choice in chunk.choices:
            streamed[choice.index] += getattr(choice, "token_ids", None) or []
    assert list(streamed.values()) == answers[0]


def test_log_probs_of_a_chat_are_those_of_the_model(client: openai.OpenAI) -> None:
    [choice] = chat(client, logprobs=True, top_logprobs=3, max_tokens=3).choices
    expected = 8.0 - torch.logsumexp(torch.tensor([8.0] + [0.0] * 200), 0).item()
    assert [entry.token for entry in choice.logprobs.content] == STORY[:3]
    for entry in choice.logprobs.content:
        assert entry.logprob == pytest.approx(expected, abs=0.05)
        assert (len(entry.top_logprobs), entry.top_logprobs[0].token) == (3, entry.token)
        assert bytes(entry.bytes).decode() == entry.token
    streamed = chat(client, logprobs=True, max_tokens=3, stream=True)
    found = [entry.token for c in streamed for o in c.choices if o.logprobs for entry in o.logprobs.content]
    assert found == STORY[:3]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_call_is_read_in_the_dialect_of_the_model(says: Callable[..., Any], is_stream: bool) -> None:
    with says(CALL) as (url, _):
        answer = chat(client_of(url), tools=[ADD], stream=is_stream)
        if not is_stream:
            [choice] = answer.choices
            [call] = choice.message.tool_calls
            said, reason, function = choice.message.content, choice.finish_reason, call.function
        else:
            chunks = [choice for chunk in answer for choice in chunk.choices]
            [call] = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
            said = "".join(chunk.delta.content or "" for chunk in chunks)
            reason, function = chunks[-1].finish_reason, call.function
            assert call.index == 0
        assert (said, reason) == ("I add.", "tool_calls")
        assert (function.name, json.loads(function.arguments)) == ("add", {"a": 1, "b": 2})
        assert call.id.startswith("call_")
        # Without tools, or if none may be called, it is text.
        for asked in ({}, {"tools": [ADD], "tool_choice": "none"}):
            [choice] = chat(client_of(url), **asked).choices
            assert (choice.message.content, choice.message.tool_calls) == ("".join(CALL), None)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_call_that_cannot_be_read_is_text(says: Callable[..., Any], is_stream: bool) -> None:
    script = ["I add.", "\n<tool_call>\n", '{"name": ', "oh no", "\n</tool_call>", " Sorry."]
    with says(script) as (url, _):
        answer = chat(client_of(url), tools=[ADD], stream=is_stream)
        choices = [o for c in answer for o in c.choices] if is_stream else answer.choices
        parts = [choice.delta if is_stream else choice.message for choice in choices]
        assert "".join(part.content or "" for part in parts) == "".join(script)
        assert choices[-1].finish_reason == "stop"


def test_a_conversation_with_a_tool_goes_on(says: Callable[..., Any]) -> None:
    with says(["It is 3."]) as (url, _):
        call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
        messages = [
            {"role": "developer", "content": "Be brief."},
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "3"}]},
        ]
        assert chat(client_of(url), messages=messages, tools=[ADD]).choices[0].message.content == "It is 3."
        tokens = httpx.post(f"{url}/tokenize", json={"messages": messages}).json()["tokens"]
        body = {"tokens": tokens, "skip_special_tokens": False}
        text = httpx.post(f"{url}/detokenize", json=body).json()["text"]
        assert '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>' in text
        assert text.startswith("<|im_start|>system\nBe brief.") and "<|im_start|>tool\n3" in text


def test_thoughts_are_told_apart_where_the_template_knows_them(says: Callable[..., Any]) -> None:
    template = template_of("hermes", "{{ '<think>\\n\\n</think>\\n\\n' if x is defined else '' }}")
    with says(THOUGHTS, template) as (url, _):
        message = chat(client_of(url)).choices[0].message
        assert (message.content, message.reasoning_content) == ("Four", "hm, hm")
        whole = chat(client_of(url), extra_body={"separate_reasoning": False}).choices[0].message
        assert whole.content == "".join(THOUGHTS)
        chunks = [choice.delta for chunk in chat(client_of(url), stream=True) for choice in chunk.choices]
        assert "".join(chunk.content or "" for chunk in chunks) == "Four"
        assert "".join(getattr(chunk, "reasoning_content", None) or "" for chunk in chunks) == "hm, hm"


def test_values_for_the_template_reach_it(says: Callable[..., Any]) -> None:
    template = "{{ style }}" + template_of("hermes")
    with says(["Hi"], template) as (url, _):
        lengths = []
        for values in ({}, {"style": "formal"}, {"style": "{{ 1 }}"}):
            answer = chat(client_of(url), extra_body={"chat_template_kwargs": values})
            assert answer.choices[0].message.content == "Hi"
            lengths.append(answer.usage.prompt_tokens)
        assert lengths == [lengths[0], lengths[0] + len("formal"), lengths[0] + len("{{ 1 }}")]
        for name in ("messages", "a b", "x %}{{ 7 }}{% set y"):
            with pytest.raises(openai.BadRequestError, match="cannot be the name of a template's value"):
                chat(client_of(url), extra_body={"chat_template_kwargs": {name: 1}})


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"model": "gpt-5"}, openai.NotFoundError, "The model 'gpt-5' is not served here: ask for 'my-model'"),
        (
            {"messages": [{"role": "user", "content": [PICTURE]}]},
            openai.BadRequestError,
            "A part of the type 'image_url' is not supported. This model reads only text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            openai.BadRequestError,
            "'input_audio' is not supported",
        ),
        (
            {"messages": [{"role": "user", "content": "x" * 2000}]},
            openai.BadRequestError,
            r"longer than the model's context length \(1024 tokens\)",
        ),
        (
            {"messages": [{"role": "user", "content": "x" * 100_000}]},
            openai.BadRequestError,
            r"at most 32768 characters",
        ),
        ({"max_tokens": 5000}, openai.BadRequestError, "maximum context length of 1024 tokens"),
        ({"messages": []}, openai.BadRequestError, "messages: List should have at least 1 item"),
        ({"temperature": "hot"}, openai.BadRequestError, "temperature: Input should be a valid number"),
        ({"temperature": -1}, openai.BadRequestError, "temperature must be a non-negative finite number"),
        ({"n": 2000}, openai.BadRequestError, "n must be at least 1 and at most 1024"),
        ({"top_logprobs": 3}, openai.BadRequestError, "top_logprobs needs logprobs"),
        ({"extra_body": {"beams": 3}}, openai.BadRequestError, "beams: this server has no such field"),
        ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice: tools does not have the required function"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_cannot_be_answered_is_refused_before_anything_is_sent(
    client: openai.OpenAI, asked: dict[str, Any], error: type[Exception], words: str, is_stream: bool
) -> None:
    with pytest.raises(error, match=words) as refusal:
        chat(client, **asked, stream=is_stream)
    assert refusal.value.type == "invalid_request_error"  # type: ignore[attr-defined]


def test_a_key_is_asked_for(story_dir: Path) -> None:
    with served(story_dir, api_key="secret") as (url, _):
        assert chat(client_of(url, "secret"), model=str(story_dir)).choices[0].message.content == "".join(STORY)
        with pytest.raises(openai.AuthenticationError, match="Unauthorized") as refusal:
            client_of(url, "wrong").models.list()
        assert refusal.value.code == "invalid_api_key"


def test_greedy_completions_equal_those_of_generate(model_dir: Path) -> None:
    """Token for token, of one call and of a stream, alone and among others."""
    prompts = [[3, 4, 5], [9, 8], [7] * 40]
    with served(model_dir, name=NAME) as (url, _):
        sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
        whole = httpx.post(f"{url}/generate", json={"input_ids": prompts, "sampling_params": sampling}).json()
        asked: dict[str, Any] = {"temperature": 0, "max_tokens": 20}
        extra = {"ignore_eos": True, "return_token_ids": True}
        answer = client_of(url).completions.create(model=NAME, prompt=prompts, extra_body=extra, **asked)
        assert [choice.token_ids for choice in answer.choices] == [each["output_ids"] for each in whole]
        assert answer.usage is not None and answer.usage.prompt_tokens == 45


def test_completions_of_several_prompts_are_streamed_side_by_side(client: openai.OpenAI) -> None:
    prompts = ["assistant\n", "Once upon", " was"]
    asked: dict[str, Any] = {"model": NAME, "prompt": prompts, "temperature": 0, "max_tokens": 5}
    whole = [choice.text for choice in client.completions.create(**asked).choices]
    assert whole == ["".join(STORY[:5]), "".join(STORY[2:]), STORY[-1]]
    streamed = [""] * 3
    for chunk in client.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == whole


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_echo_has_log_probs_of_the_prompt(client: openai.OpenAI, is_stream: bool) -> None:
    asked: dict[str, Any] = {"model": NAME, "prompt": "Once upon", "temperature": 0, "echo": True, "logprobs": 2}
    answer: Any = client.completions.create(**asked, max_tokens=2, stream=is_stream)
    choices = [chunk.choices[0] for chunk in answer] if is_stream else [answer.choices[0]]
    found = [choice.logprobs for choice in choices if choice.logprobs]
    assert "".join(choice.text for choice in choices) == "Once upon a time"
    assert [token for each in found for token in each.tokens] == STORY[:4]
    logprobs = [value for each in found for value in each.token_logprobs]
    assert logprobs[0] is None and logprobs[1] == pytest.approx(logprobs[3], abs=1e-4)
    assert [offset for each in found for offset in each.text_offset] == [0, 4, 9, 11]
    top = [value for each in found for value in each.top_logprobs]
    assert top[0] is None
    assert all(max(own, key=own.__getitem__) == token for own, token in zip(top[1:], STORY[1:4], strict=True))


def test_a_harness_scores_a_continuation_without_a_token(tmp_path: Path) -> None:
    """As lm-evaluation-harness asks: token ids, an echo, and no new token."""
    directory = write_scripted_model(tmp_path / "tokens", STORY)
    other = make_model(seed=3, vocab_size=104 + len(STORY))
    model = save_model(other, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((directory / name).read_bytes())
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    with served(model, name=NAME) as (url, _):
        answer = client_of(url).completions.create(
            model=NAME, prompt=prompts, echo=True, logprobs=1, max_tokens=0, temperature=0
        )
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        expected = expected_logits(other, prompt)[:-1].log_softmax(-1)
        expected_T = expected.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        torch.testing.assert_close(torch.tensor(choice.logprobs.token_logprobs[1:]), expected_T, atol=1e-4, rtol=0)


def test_a_stream_that_is_cut_frees_its_slot(texted_dir: Path) -> None:
    with served(texted_dir, name=NAME) as (url, scheduler):
        asked: dict[str, Any] = {
            "model": NAME,
            "prompt": [3, 4],
            "max_tokens": 2000,
            "extra_body": {"ignore_eos": True},
        }
        with client_of(url).completions.create(**asked, stream=True) as stream:
            next(iter(stream))
            assert scheduler.num_running == 1
        until_idle(scheduler)


def test_weights_change_amid_a_stream(texted_dir: Path, other_dir: Path) -> None:
    """The answer ends under the new weights, and says so."""
    with served(texted_dir, name=NAME) as (url, _):
        asked: dict[str, Any] = {"model": NAME, "prompt": [3, 4], "max_tokens": 1500, "stream": True, "logprobs": 0}
        options: dict[str, Any] = {"stream_options": {"include_usage": True}, "extra_body": {"ignore_eos": True}}
        with client_of(url).completions.create(**asked, **options) as stream:
            chunks = iter(stream)
            next(chunks)
            httpx.post(f"{url}/pause_generation", json={"mode": "retract"}, timeout=TIMEOUT_S)
            body = {"model_path": str(other_dir), "weight_version": "second"}
            assert httpx.post(f"{url}/update_weights_from_disk", json=body, timeout=TIMEOUT_S).json()["success"]
            httpx.post(f"{url}/continue_generation", timeout=TIMEOUT_S)
            *_, last = chunks
        assert last.usage is not None and last.usage.completion_tokens == 1500
        assert last.metadata == {"weight_version": "second"}


def test_a_client_that_reads_slowly_keeps_no_other_waiting(texted_dir: Path) -> None:
    with served(texted_dir, name=NAME) as (url, scheduler):
        body = {"model": NAME, "prompt": [3], "max_tokens": 1500, "stream": True, "ignore_eos": True, "logprobs": 5}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT_S) as slow:
            lines = slow.iter_lines()
            next(lines)
            answer = client_of(url).completions.create(model=NAME, prompt=[4], max_tokens=3)
            assert answer.usage is not None and answer.usage.completion_tokens <= 3
            until_idle(scheduler)  # the engine has not waited for the reader
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"]
)
def test_a_body_of_more_than_is_taken_is_refused(
    story: tuple[str, Scheduler], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MAX_BODY_BYTES", 1000)
    answer = httpx.post(f"{story[0]}{path}", json={"model": NAME, "prompt": "x" * 2000}, timeout=TIMEOUT_S)
    assert (answer.status_code, "more than the permitted 1000 bytes" in answer.text) == (400, True)
    assert "message" in answer.json()["error"]
