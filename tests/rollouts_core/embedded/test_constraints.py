"""Pins: a completion follows its JSON schema or its expression, whatever the model would say.

Without it a program that reads answers would meet one that it cannot read.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.protocol import parse_generate
from rollouts_core.embedded.scheduler import Scheduler
from tests.rollouts_core.embedded.test_server import TIMEOUT_S, ask
from tests.rollouts_core.embedded.tiny_models import make_model, save_model

END = 256
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["yes", "no"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scheduler]:
    """A model whose tokens are bytes, and that says nonsense."""
    directory = tmp_path_factory.mktemp("bytes")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    model = make_model(seed=0, vocab_size=END + 8, eos_token_id=END)  # more embeddings than tokens, as many models have
    save_model(model, directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    with Scheduler(Decoder(directory, num_slots=4), model_dir=directory) as running:
        yield running


def complete(scheduler: Scheduler, *sampling: dict[str, Any]) -> list[dict[str, Any]]:
    each = [{"max_new_tokens": 200, "sampling_seed": number, **asked} for number, asked in enumerate(sampling)]
    body = {
        "input_ids": [[40 + number] for number in range(len(each))],
        "sampling_params": each,
        "return_logprob": True,
    }
    answer = ask(scheduler, "POST", "/generate", body)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()
    return found


def test_each_completion_follows_what_it_was_asked_for(scheduler: Scheduler) -> None:
    """Several at once, more than there are slots: rows leave and move."""
    free: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    asked: list[dict[str, Any]] = [
        {"json_schema": json.dumps(SCHEMA)},
        free,
        {"regex": "[a-c]{3,9}z"},
        {"regex": "x|yy"},
    ] * 3
    answers = complete(scheduler, *asked)
    assert complete(scheduler, *asked)[0]["output_ids"] == answers[0]["output_ids"]
    for one, answer in zip(asked, answers, strict=True):
        if "json_schema" in one:
            found = json.loads(answer["text"])
            assert found.keys() == {"a", "b"} and 0 <= found["a"] <= 99 and found["b"] in ("yes", "no")
        elif "regex" in one:
            assert re.fullmatch(one["regex"], answer["text"])
        if one is not free:
            assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": END}
    assert answers[1]["output_ids"] == complete(scheduler, *([free] * 2))[1]["output_ids"]


def test_log_probs_are_of_what_may_follow(scheduler: Scheduler) -> None:
    [answer] = complete(scheduler, {"regex": "ab"})
    logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert answer["text"] == "ab" and logprobs == pytest.approx([0.0, 0.0, 0.0])


def test_a_constraint_survives_a_retraction(scheduler: Scheduler) -> None:
    sampling = {"regex": "[a-c]{300}", "max_new_tokens": 400, "sampling_seed": 1}
    call = parse_generate({"input_ids": [5], "sampling_params": sampling}, None)
    done = scheduler.submit(call.requests[0])
    while not scheduler.num_running:
        pass
    scheduler.pause("retract").result(TIMEOUT_S)
    scheduler.resume().result(TIMEOUT_S)
    completion = done.result(TIMEOUT_S)
    assert scheduler.tokenizer is not None
    assert re.fullmatch("[a-c]{300}", scheduler.tokenizer.decode(list(completion.output_ids)))


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"regex": "a("}, "regex is not supported"),
        ({"json_schema": "{"}, "json_schema is not supported"),
        ({"json_schema": '{"type": "wonder"}'}, "json_schema is not supported"),
        ({"json_schema": {}}, "for `json_schema`, expected a string"),
        ({"regex": "a", "json_schema": "{}"}, "Only one of json_schema, regex and"),
        ({"regex": "a" * 70_000}, "at most 65536 characters"),
    ],
)
def test_what_cannot_be_followed_is_refused(scheduler: Scheduler, sampling: dict[str, Any], words: str) -> None:
    answer = ask(scheduler, "POST", "/generate", {"input_ids": [5], "sampling_params": sampling})
    assert (answer.status_code, words in answer.text) == (400, True), answer.text


def test_an_expression_of_nested_repetitions_is_given_up_within_a_second(scheduler: Scheduler) -> None:
    """Its automaton has a billion states. With llguidance's default limit, each completion takes five seconds."""
    began = time.process_time()
    answers = complete(scheduler, *[{"regex": "((a{1000}){1000}){1000}"}] * 4)
    assert time.process_time() - began < 4
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["stop"] * 4


def test_a_schema_is_checked_once_for_all_completions_of_a_request(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One check of a large schema takes a tenth of a second, and a request may have 1024 completions."""
    from llguidance import LLMatcher

    checked: list[str] = []

    class CountingMatcher:
        """LLMatcher, which cannot be subclassed, with another check."""

        grammar_from_regex = staticmethod(LLMatcher.grammar_from_regex)

        def __new__(cls, *arguments: Any, **named: Any) -> Any:
            return LLMatcher(*arguments, **named)

        @staticmethod
        def validate_grammar(grammar: str, *arguments: Any, **named: Any) -> str:
            checked.append(threading.current_thread().name)
            return LLMatcher.validate_grammar(grammar, *arguments, **named)

    monkeypatch.setattr("llguidance.LLMatcher", CountingMatcher)
    body = {"input_ids": [40], "sampling_params": {"regex": "b{2}", "n": 5}}
    assert ask(scheduler, "POST", "/generate", body).status_code == 200
    assert len(checked) == 1 and "AnyIO worker" in checked[0], "the event loop must not wait for it"


@pytest.mark.parametrize("name", ["json_schema", "regex"])
def test_the_largest_usual_grammar_is_followed(scheduler: Scheduler, name: str) -> None:
    each = {f"p{i}": {"enum": [f"{'x' * 9}{k}{i}" for k in range(10)]} for i in range(300)}
    schema = json.dumps({"type": "object", "properties": each, "required": [*each]})
    expression = "|".join(f"{number}{'word' * 4}" for number in range(3000))
    asked = {"json_schema": schema, "regex": expression}[name]
    [answer] = complete(scheduler, {name: asked, "max_new_tokens": 40, "sampling_seed": 1})
    assert len(asked) > 55_000 and len(answer["text"]) >= 16


def test_without_the_extra_the_refusal_names_it(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    answer = ask(scheduler, "POST", "/generate", {"input_ids": [5], "sampling_params": {"regex": "a"}})
    assert answer.status_code == 400 and 'pip install \\"rollouts[constraints]\\"' in answer.text


def test_a_response_format_of_openai_is_followed(scheduler: Scheduler) -> None:
    body = {"model": str(scheduler.model_dir), "prompt": [5], "max_tokens": 200}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
    answer = ask(scheduler, "POST", "/v1/completions", {**body, "response_format": schema})
    assert json.loads(answer.json()["choices"][0]["text"]).keys() == {"a", "b"}
    refused = ask(scheduler, "POST", "/v1/completions", {**body, "response_format": {"type": "json_schema"}})
    assert refused.status_code == 400 and "needs json_schema.schema" in refused.text
