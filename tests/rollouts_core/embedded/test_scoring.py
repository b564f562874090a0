"""Pins: log-probs of prompts, of the most probable tokens and of named tokens are those of the model.

Without it a harness would score answers, and a teacher would teach, by numbers of other tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollouts_core.embedded import decoder as decoder_module
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.protocol import parse_generate
from rollouts_core.embedded.scheduler import Scheduler
from tests.rollouts_core.embedded.test_server import TIMEOUT_S, ask
from tests.rollouts_core.embedded.tiny_models import expected_logits, make_model, random_prompt, save_model

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
NOTHING = {"max_new_tokens": 0}


@pytest.fixture
def scheduler(decoder: Decoder, model_dir: Path) -> Iterator[Scheduler]:
    with Scheduler(decoder, model_dir=model_dir) as running:
        yield running


def score(scheduler: Scheduler, prompts: list[list[int]], **asked: Any) -> list[dict[str, Any]]:
    """The meta_info of each prompt."""
    body = {"input_ids": prompts, "sampling_params": NOTHING, "return_logprob": True, **asked}
    answer = ask(scheduler, "POST", "/generate", body)
    assert answer.status_code == 200, answer.text
    return [each["meta_info"] for each in answer.json()]


def check_entries(found: list[Any], expected_TV: torch.Tensor, token_ids: list[int]) -> None:
    """Compare SGLang's entries with a row of log-probs for each of them."""
    assert [entry[1] for entry in found] == token_ids
    expected = expected_TV.gather(-1, torch.tensor(token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([entry[0] for entry in found]), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("logits_bytes", [1, 2**20], ids=["some rows at a time", "all at once"])
def test_log_probs_of_prompts_are_those_of_the_model(
    scheduler: Scheduler, model: PreTrainedModel, logits_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_module, "MAX_LOGITS_BYTES", logits_bytes)
    prompts = [random_prompt(length, seed=length) for length in (1, 2, 75, 40, 75)]
    answers = score(scheduler, prompts, logprob_start_len=[0, 0, 0, 33, 10], top_logprobs_num=[0, 2, 3, 0, 1])
    for prompt, start, answer in zip(prompts, (0, 0, 0, 33, 10), answers, strict=True):
        first, *entries = answer["input_token_logprobs"]
        assert first == [None, prompt[start], None]
        expected_TV = expected_logits(model, prompt).log_softmax(-1)[start:-1]
        if entries:
            check_entries(entries, expected_TV, prompt[start + 1 :])
    top = answers[2]["input_top_logprobs"]
    assert top[0] is None and "input_top_logprobs" not in answers[3]
    expected_TV = expected_logits(model, prompts[2]).log_softmax(-1)
    for found, expected_V in zip(top[1:], expected_TV[:-1], strict=True):
        assert [entry[1] for entry in found] == expected_V.topk(3).indices.tolist()
        check_entries(found, expected_V.expand(3, -1), [entry[1] for entry in found])


def test_named_tokens_have_log_probs_in_prompt_and_completion(scheduler: Scheduler, model: PreTrainedModel) -> None:
    prompt, named = random_prompt(9, seed=3), [7, 60, 2]
    [answer] = score(
        scheduler, [prompt], logprob_start_len=4, sampling_params=GREEDY, token_ids_logprob=named, top_logprobs_num=1
    )
    completion = [entry[1] for entry in answer["output_token_logprobs"]]
    expected_TV = expected_logits(model, [*prompt, *completion]).log_softmax(-1)
    assert answer["input_token_ids_logprobs"][0] is None
    found = [*answer["input_token_ids_logprobs"][1:], *answer["output_token_ids_logprobs"]]
    for entries, expected_V in zip(found, expected_TV[4:-1], strict=True):
        check_entries(entries, expected_V.expand(3, -1), named)
    assert [[entry[1] for entry in each] for each in answer["output_top_logprobs"]] == [[token] for token in completion]


def test_alternatives_are_of_the_distribution_that_was_sampled_from(
    scheduler: Scheduler, model: PreTrainedModel
) -> None:
    prompt = random_prompt(5, seed=1)
    sampling = {
        "temperature": 0.5,
        "max_new_tokens": 5,
        "ignore_eos": True,
        "logit_bias": {"9": 3.0},
        "sampling_seed": 3,
    }
    [answer] = score(scheduler, [prompt], sampling_params=sampling, top_logprobs_num=61)
    assert answer["input_token_logprobs"] == []
    for entry, found in zip(answer["output_token_logprobs"], answer["output_top_logprobs"], strict=True):
        assert entry in found and len(found) == 61
    completion = [entry[1] for entry in answer["output_token_logprobs"]]
    logits_TV = expected_logits(model, [*prompt, *completion])[len(prompt) - 1 : -1]
    logits_TV[:, 9] += 3.0
    for found, expected_V in zip(answer["output_top_logprobs"], (logits_TV / 0.5).log_softmax(-1), strict=True):
        check_entries(found, expected_V.expand(61, -1), [entry[1] for entry in found])


def test_what_else_is_asked_for_changes_no_token(scheduler: Scheduler) -> None:
    """Rows move and leave meanwhile: what belongs to one stays with it."""
    prompts = [random_prompt(4 + number, seed=number) for number in range(12)]
    sampling = [{**GREEDY, "max_new_tokens": 3 + 5 * number % 11} for number in range(12)]
    plain = score(scheduler, prompts, sampling_params=sampling)
    asked = score(
        scheduler, prompts, sampling_params=sampling, logprob_start_len=0, top_logprobs_num=[n % 3 for n in range(12)]
    )
    for number, (one, other) in enumerate(zip(plain, asked, strict=True)):
        assert one["output_token_logprobs"] == other["output_token_logprobs"]
        if num_top := number % 3:
            top = [found[0][1] for found in other["output_top_logprobs"]]
            assert top == [entry[1] for entry in one["output_token_logprobs"]]
            assert {len(found) for found in other["output_top_logprobs"]} == {num_top}


def test_scores_survive_a_retraction(scheduler: Scheduler) -> None:
    prompt = random_prompt(6, seed=2)
    [whole] = score(scheduler, [prompt], sampling_params=GREEDY, logprob_start_len=0, top_logprobs_num=2)
    scheduler.pause("in_place").result(TIMEOUT_S)
    body = {"input_ids": prompt, "sampling_params": {**GREEDY, "max_new_tokens": 1500}, "return_logprob": True}
    call = parse_generate({**body, "logprob_start_len": 0, "top_logprobs_num": 2}, None)
    done = scheduler.submit(call.requests[0])
    scheduler.resume().result(TIMEOUT_S)
    while not scheduler.num_running:
        pass
    scheduler.pause("retract").result(TIMEOUT_S)
    scheduler.resume().result(TIMEOUT_S)
    scheduler.abort_all().result(TIMEOUT_S)
    completion = done.result(TIMEOUT_S)
    assert completion.prompt_scores is not None and completion.alternatives is not None
    assert len(completion.alternatives.top_ids_TK) == len(completion.output_ids)
    found = [entry[0] for entry in whole["input_token_logprobs"][1:]]
    assert completion.prompt_scores.logprobs_T.tolist() == pytest.approx(found)


def test_token_ids_that_do_not_exist_have_no_probability(scheduler: Scheduler, model: PreTrainedModel) -> None:
    prompt = [3, 4, 5, 6]
    sampling = {"max_new_tokens": 0, "custom_params": {"num_tokens": 20}}
    [answer] = score(scheduler, [prompt], logprob_start_len=0, sampling_params=sampling)
    expected_TV = expected_logits(model, prompt)[:-1, :20].log_softmax(-1)
    check_entries(answer["input_token_logprobs"][1:], expected_TV, prompt[1:])


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"top_logprobs_num": 62}, "top_logprobs_num may be at most 61, got 62"),
        ({"token_ids_logprob": [61]}, r"token_ids_logprob must have ids in \[0, 61\), got 61"),
        ({"token_ids_logprob": ["a"]}, "expected a list of i64"),
        ({"top_logprobs_num": "a"}, "for `top_logprobs_num`, expected i64"),
        ({"logprob_start_len": 1.5}, "for `logprob_start_len`, expected i64"),
        ({"token_ids_logprob": [3] * 2000, "logprob_start_len": 0}, "at most 2097152 log-probs"),
    ],
)
def test_what_cannot_be_answered_is_refused(scheduler: Scheduler, asked: dict[str, Any], words: str) -> None:
    body = {"input_ids": [3] * 1500, "sampling_params": NOTHING, "return_logprob": True, **asked}
    answer = ask(scheduler, "POST", "/generate", body)
    assert answer.status_code == 400
    assert re.search(words, answer.text), answer.text


def test_a_diverged_model_has_no_log_probs(tmp_path: Path) -> None:
    model = make_model(seed=0)
    with torch.no_grad():
        model.model.norm.weight.fill_(1e38)  # finite, as nothing else is served
    directory = save_model(model, tmp_path)
    with Scheduler(Decoder(directory, num_slots=2), model_dir=directory) as running:
        body = {"input_ids": [3, 4], "sampling_params": NOTHING, "return_logprob": True, "logprob_start_len": 0}
        answer = ask(running, "POST", "/generate", body)
    assert (answer.status_code, "no finite numbers" in answer.text) == (400, True)
