"""Pins: Anthropic's own client talks to the embedded engine: messages, streams, tools, thoughts and errors.

Without it agents that are written for that API could not use a trained model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest

from rollouts_core.embedded.scheduler import Scheduler
from tests.rollouts_core.data.test_dialects import template_of
from tests.rollouts_core.embedded.scripted_model import CALL, NAME, STORY, THOUGHTS, TIMEOUT_S, served, until_idle

pytestmark = pytest.mark.slow
ADD: Any = {
    "name": "add",
    "description": "Add.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


def client_of(url: str, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=key, timeout=TIMEOUT_S, max_retries=0)


@pytest.fixture(scope="module")
def client(story: tuple[str, Scheduler]) -> anthropic.Anthropic:
    return client_of(story[0])


def asked(**changes: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "Say it."}
    return {"model": NAME, "max_tokens": 50, "messages": [message], "extra_body": {"temperature": 0}, **changes}


def test_a_message_is_answered(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**asked(system="Be brief."))
    [block] = answer.content
    assert (answer.role, block.type, answer.stop_reason) == ("assistant", "text", "end_turn")
    assert block.type == "text" and block.text == "".join(STORY)
    counted = client.messages.count_tokens(model=NAME, system="Be brief.", messages=asked()["messages"])
    assert answer.usage.input_tokens == counted.input_tokens
    assert answer.usage.output_tokens == len(STORY) + 1


def test_a_stream_becomes_the_same_message(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**asked()) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == "".join(STORY) and len(texts) > 1
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", len(STORY) + 1)
    whole = client.messages.create(**asked())
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]


@pytest.mark.parametrize(
    ("changes", "reason", "text"),
    [({"max_tokens": 2}, "max_tokens", "Once upon"), ({"stop_sequences": [" time"]}, "stop_sequence", "Once upon a")],
)
def test_the_reason_of_an_end(client: anthropic.Anthropic, changes: Any, reason: str, text: str) -> None:
    answer = client.messages.create(**asked(**changes))
    assert (answer.stop_reason, answer.content[0].text) == (reason, text)
    assert answer.stop_sequence == (" time" if reason == "stop_sequence" else None)


@pytest.mark.parametrize("is_stream", [False, True])
def test_tools_are_called_and_answered(says: Callable[..., Any], is_stream: bool) -> None:
    with says(CALL) as (url, _):
        client = client_of(url)
        if is_stream:
            with client.messages.stream(**asked(tools=[ADD])) as stream:
                answer: Any = stream.get_final_message()
        else:
            answer = client.messages.create(**asked(tools=[ADD]))
        text, call = answer.content
        assert (answer.stop_reason, text.text, call.type) == ("tool_use", "I add.", "tool_use")
        assert (call.name, call.input) == ("add", {"a": 1, "b": 2})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]}
        turns = [
            *asked()["messages"],
            {"role": "assistant", "content": [block.to_dict() for block in answer.content]},
            {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
        ]
        longer = client.messages.create(**asked(tools=[ADD], messages=turns))
        assert longer.usage.input_tokens > answer.usage.input_tokens + len("Go on.")


@pytest.mark.parametrize("is_stream", [False, True])
def test_thoughts_are_a_block_of_their_own(says: Callable[..., Any], is_stream: bool) -> None:
    template = template_of("hermes", "{{ '<think>\\n\\n</think>\\n\\n' if x is defined else '' }}")
    with says(THOUGHTS, template) as (url, _):
        if is_stream:
            with client_of(url).messages.stream(**asked()) as stream:
                answer: Any = stream.get_final_message()
        else:
            answer = client_of(url).messages.create(**asked())
        thoughts, text = answer.content
        assert (thoughts.type, thoughts.thinking, text.text) == ("thinking", "hm, hm", "Four")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": "claude"}, anthropic.NotFoundError, "'claude' is not served here"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            anthropic.BadRequestError,
            "'image' is not supported. This model reads only text",
        ),
        ({"max_tokens": 5000}, anthropic.BadRequestError, "maximum context length of 1024 tokens"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens: Input should be greater than or equal to 1"),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, anthropic.BadRequestError, "the type tool needs a name"),
    ],
    ids=["model", "image", "limit", "none", "choice"],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_errors_have_anthropics_form(
    client: anthropic.Anthropic, changes: Any, error: type[anthropic.APIStatusError], words: str, is_stream: bool
) -> None:
    with pytest.raises(error, match=words) as refusal:
        client.messages.create(**asked(**changes), stream=is_stream)
    body: Any = refusal.value.body
    assert (body["type"], body["error"]["type"] in ("invalid_request_error", "not_found_error")) == ("error", True)


def test_the_key_comes_in_anthropics_header(story_dir: Path) -> None:
    with served(story_dir, name=NAME, api_key="secret") as (url, _):
        assert client_of(url, "secret").messages.create(**asked()).stop_reason == "end_turn"
        with pytest.raises(anthropic.AuthenticationError, match="Unauthorized"):
            client_of(url, "wrong").messages.create(**asked())


def test_a_stream_that_is_cut_frees_its_slot(says: Callable[..., Any]) -> None:
    """Each of these tokens is said once: the client leaves amid them."""
    with says([f"word {number}, " for number in range(400)]) as (url, scheduler):
        with client_of(url).messages.stream(**asked(max_tokens=500)) as stream:
            next(iter(stream.text_stream))
        until_idle(scheduler)
