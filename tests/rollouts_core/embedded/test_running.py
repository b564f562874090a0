"""Pins: a completion is the same, to the last bit of its logprobs, whatever runs beside it, and ends where it should.

Without it rollouts would depend on timing, and a run could not be repeated or resumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.offline import generate_tokens
from rollouts_core.embedded.running import (
    Completion,
    FinishReason,
    GenerationRequest,
    Partial,
    RunningBatch,
    WeightSpan,
    weight_spans,
)
from rollouts_core.embedded.sampling import SamplingParams
from rollouts_core.errors import NoMemoryError
from tests.rollouts_core.embedded.tiny_models import (
    EOS,
    expected_logits,
    expected_logprobs,
    make_model,
    random_prompt,
    save_model,
)


@pytest.fixture
def restore_threads() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def complete_one(decoder: Decoder, prompt: list[int], **params: Any) -> Completion:
    return generate_tokens(decoder, [prompt], [SamplingParams(**params)])[0]


def mixed_requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 70 tokens and completions of 1 to 40, so that rows come and go all the time."""
    prompts = [random_prompt(1 + 7 * index % 70, seed=index) for index in range(count)]
    params = [
        SamplingParams(
            max_new_tokens=1 + 11 * index % 40, ignore_eos=True, sampling_seed=index, temperature=0.5 + index % 3 / 2
        )
        for index in range(count)
    ]
    return prompts, params


def test_logprobs_of_crowded_ragged_batches_equal_transformers(decoder: Decoder, model: PreTrainedModel) -> None:
    prompts, params = mixed_requests(30)
    completions = generate_tokens(decoder, prompts, params)
    for prompt, wanted, completion in zip(prompts, params, completions, strict=True):
        assert len(completion.output_ids) == wanted.max_new_tokens
        expected = expected_logprobs(model, prompt, completion.output_ids, temperature=wanted.temperature)
        torch.testing.assert_close(torch.tensor(completion.output_logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_completions_are_bit_for_bit_the_same_alone_and_in_company(
    decoder: Decoder, num_threads: int, restore_threads: None
) -> None:
    torch.set_num_threads(num_threads)
    prompts, params = mixed_requests(30)
    together = generate_tokens(decoder, prompts, params)
    for index in range(0, 30, 3):
        alone = generate_tokens(decoder, [prompts[index]], [params[index]])[0]
        assert alone.output_ids == together[index].output_ids
        assert alone.output_logprobs == together[index].output_logprobs


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_long_completions_too_are_the_same_in_company(num_kv_heads: int, tmp_path: Path) -> None:
    """Sums over more than 256 positions are split by their number, which others in the batch have a part in."""
    decoder = Decoder(save_model(make_model(num_key_value_heads=num_kv_heads), tmp_path), num_slots=8)
    prompts = [random_prompt(length, seed=length) for length in (3, 200, 270, 330, 420, 600, 800, 1000)]
    params = [SamplingParams(max_new_tokens=40, ignore_eos=True, sampling_seed=seed) for seed in range(len(prompts))]
    together = generate_tokens(decoder, prompts, params)
    for prompt, own, completion in zip(prompts, params, together, strict=True):
        [alone] = generate_tokens(decoder, [prompt], [own])
        assert (alone.output_ids, alone.output_logprobs) == (completion.output_ids, completion.output_logprobs)


def test_penalties_make_a_greedy_completion_vary_and_leave_its_neighbours_alone(decoder: Decoder) -> None:
    prompt = random_prompt(6, seed=0)
    plain = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
    varied = replace(plain, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=2.0)
    [alone] = generate_tokens(decoder, [prompt], [plain])
    beside, penalized = generate_tokens(decoder, [prompt, prompt], [plain, varied])
    assert beside.output_ids == alone.output_ids
    assert len(set(penalized.output_ids)) > len(set(alone.output_ids))
    assert penalized.output_ids[0] == alone.output_ids[0]  # the prompt is not penalized


def test_adjusted_logits_are_those_of_the_model_plus_the_bias_whatever_runs_beside(
    decoder: Decoder, model: PreTrainedModel
) -> None:
    prompts, params = mixed_requests(12)
    bias = ((5, 4.0), (7, -3.0))
    params = [replace(each, logit_bias=bias) if index % 2 else each for index, each in enumerate(params)]
    together = generate_tokens(decoder, prompts, params)
    for prompt, wanted, completion in zip(prompts, params, together, strict=True):
        assert generate_tokens(decoder, [prompt], [wanted])[0].output_logprobs == completion.output_logprobs
        logits = expected_logits(model, [*prompt, *completion.output_ids])[len(prompt) - 1 : -1]
        for token, value in wanted.logit_bias:
            logits[:, token] += value
        logprobs = torch.log_softmax(logits / wanted.temperature, -1)
        expected = logprobs.gather(-1, torch.tensor(completion.output_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.output_logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_completion_does_not_end_by_itself_before_it_is_long_enough(decoder: Decoder, ignore_eos: bool) -> None:
    """The ends are not chosen, not merely ignored: also where they are ignored, as in SGLang."""
    prompt = random_prompt(6, seed=0)
    plain = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    [free] = generate_tokens(decoder, [prompt], [plain])
    end = free.output_ids[0]
    longer = replace(plain, stop_token_ids=(end, 10**6), min_new_tokens=5, ignore_eos=ignore_eos)
    [completion] = generate_tokens(decoder, [prompt], [longer])
    assert len(completion.output_ids) >= 5
    assert end not in completion.output_ids[:5]


@pytest.mark.parametrize("width", [96, 256])
def test_wide_models_too_complete_bit_for_bit_the_same_in_company(width: int, tmp_path: Path) -> None:
    model_dir = save_model(make_model(hidden_size=width, intermediate_size=4 * width), tmp_path / "wide")
    decoder = Decoder(model_dir, num_slots=30)
    prompts, params = mixed_requests(30)
    together = generate_tokens(decoder, prompts, params)
    for index in range(0, 30, 6):
        alone = generate_tokens(decoder, [prompts[index]], [params[index]])[0]
        assert alone.output_logprobs == together[index].output_logprobs


def test_order_and_number_of_slots_change_nothing(decoder: Decoder, model_dir: Path) -> None:
    prompts, params = mixed_requests(20)
    forward = generate_tokens(decoder, prompts, params)
    backward = generate_tokens(Decoder(model_dir, num_slots=3), prompts[::-1], params[::-1])[::-1]
    assert [c.output_logprobs for c in forward] == [c.output_logprobs for c in backward]


def test_an_interrupted_completion_continues_as_if_it_had_not_been(decoder: Decoder) -> None:
    prompt = random_prompt(6, seed=0)
    whole = complete_one(decoder, prompt, max_new_tokens=30, sampling_seed=9, ignore_eos=True)
    begun = complete_one(decoder, prompt, max_new_tokens=12, sampling_seed=9, ignore_eos=True)
    rest = complete_one(decoder, [*prompt, *begun.output_ids], max_new_tokens=18, sampling_seed=9, ignore_eos=True)
    assert begun.output_ids + rest.output_ids == whole.output_ids


def test_requests_without_a_seed_differ(decoder: Decoder) -> None:
    params = SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=2.0)
    first, second = generate_tokens(decoder, [[3, 4], [3, 4]], [params, params])
    assert first.output_ids != second.output_ids


def test_temperature_zero_follows_the_most_probable_tokens(decoder: Decoder, model: PreTrainedModel) -> None:
    prompt = random_prompt(6, seed=2)
    completion = complete_one(decoder, prompt, temperature=0.0, max_new_tokens=10, ignore_eos=True)
    logits_TV = expected_logits(model, [*prompt, *completion.output_ids])
    assert logits_TV[len(prompt) - 1 : -1].argmax(-1).tolist() == list(completion.output_ids)


def test_a_completion_ends_with_its_stop_token(decoder: Decoder) -> None:
    free = complete_one(decoder, [3, 4], max_new_tokens=12, sampling_seed=1, ignore_eos=True)
    assert EOS not in free.output_ids, "choose another seed"
    stop_id = free.output_ids[5]
    absent = next(token for token in range(2, 61) if token not in free.output_ids)
    stopped = complete_one(decoder, [3, 4], max_new_tokens=12, sampling_seed=1, stop_token_ids=(absent, stop_id))
    assert stopped.output_ids == free.output_ids[: free.output_ids.index(stop_id) + 1]
    assert stopped.finish_reason == FinishReason("stop", token_id=stop_id)


def test_stop_tokens_that_the_model_lacks_take_no_memory(decoder: Decoder) -> None:
    batch = RunningBatch(decoder)
    params = SamplingParams(max_new_tokens=2, stop_token_ids=(-1, 5, *range(61, 200_000)))
    request = GenerationRequest(request_id="a", input_ids=(3, 4), params=params)
    batch.step([Partial(request=request, seed=1)])
    assert batch._stop_ids.shape[1] == 2  # 5, and the model's own


def test_more_slots_than_memory_are_refused_in_a_sentence(decoder: Decoder) -> None:
    decoder.num_slots = 10**13
    with pytest.raises(
        NoMemoryError, match=r"too little memory for 10000000000000 completions .*: lower deployment\.max_ru"
    ):
        RunningBatch(decoder)


def test_ignore_eos_ignores_every_stop_token(decoder: Decoder) -> None:
    every_token = tuple(range(61))
    completion = complete_one(decoder, [3, 4], max_new_tokens=9, ignore_eos=True, stop_token_ids=every_token)
    assert (len(completion.output_ids), completion.finish_reason) == (9, FinishReason("length"))
    assert complete_one(decoder, [3, 4], max_new_tokens=9, stop_token_ids=every_token).finish_reason.kind == "stop"


def test_the_models_own_end_of_turn_ends_a_completion(decoder: Decoder) -> None:
    params = [SamplingParams(max_new_tokens=200, sampling_seed=seed, temperature=3.0) for seed in range(8)]
    for completion in generate_tokens(decoder, [[3, 4]] * 8, params):
        ends_there = EOS in completion.output_ids
        assert completion.finish_reason == (FinishReason("stop", token_id=EOS) if ends_there else ("length", -1, ""))
        assert EOS not in completion.output_ids[:-1]


def test_without_a_limit_a_completion_fills_the_context(model_dir: Path) -> None:
    decoder = Decoder(model_dir, num_slots=2, context_length=40)
    completion = complete_one(decoder, random_prompt(8, seed=0), max_new_tokens=None, ignore_eos=True)
    assert (len(completion.output_ids), completion.finish_reason.kind) == (32, "length")


def test_zero_new_tokens_give_an_empty_completion(decoder: Decoder) -> None:
    completion = complete_one(decoder, [3, 4], max_new_tokens=0)
    assert (completion.output_ids, completion.finish_reason.kind) == ((), "length")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "cannot be empty"),
        ([3, 61], r"token id 61, valid range is \[0, 61\)"),
        ([-1], r"token id -1"),
        ([3] * 2048, r"\(2048 tokens\) is longer than the model's context length \(2048 tokens\)"),
        ([3] * 2000, "Requested token count exceeds .* total of 2128 tokens"),
    ],
)
def test_impossible_prompts_are_refused(prompt: list[int], words: str, decoder: Decoder) -> None:
    with pytest.raises(ValueError, match=words):
        complete_one(decoder, prompt)


@pytest.mark.parametrize(
    ("changes", "spans"),
    [
        ([], [("c", 0, 9)]),
        ([("a", 3)], [("a", 0, 3), ("c", 3, 9)]),
        ([("a", 3), ("b", 3)], [("a", 0, 3), ("c", 3, 9)]),
        ([("a", 3), ("b", 9)], [("a", 0, 3), ("b", 3, 9)]),
        ([("c", 3)], [("c", 0, 9)]),
    ],
)
def test_version_changes_become_spans_that_cover_every_token(
    changes: list[tuple[str, int]], spans: list[tuple[str, int, int]]
) -> None:
    assert weight_spans(changes, "c", 9) == tuple(WeightSpan(*span) for span in spans)
