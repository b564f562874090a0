"""Pins: what is accepted and refused is what SGLang accepts and refuses, and nothing is ignored silently.

Without it one client could not drive both engines, or a penalty that SGLang applies would be dropped here unnoticed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rollouts_core.embedded.protocol import (
    UNSUPPORTED_FIELDS,
    ContractError,
    completion_to_json,
    parse_generate,
    sampling_params_from_json,
)
from rollouts_core.embedded.running import Completion, FinishReason, GenerationRequest, WeightSpan
from rollouts_core.embedded.sampling import MAX_SEED, MIN_SEED, SamplingParams
from rollouts_core.embedded.scheduler import RequestError
from tests.kit.excuses import ExcusedSkip

SPEC = Path(__file__).parents[3].parent / "shared" / "specs" / "sglang-0.5.23.openapi.json"


def load_spec() -> dict[str, Any]:
    if not SPEC.exists():
        raise ExcusedSkip(f"SGLang's OpenAPI description is not at {SPEC}")
    spec: dict[str, Any] = json.loads(SPEC.read_text())
    return spec


def check_schema(instance: Any, name: str) -> None:
    """Raise unless `instance` is valid under this schema of SGLang's OpenAPI description."""
    jsonschema.validate(instance, {**load_spec(), "$ref": f"#/components/schemas/{name}"})


FULL_REQUEST = {
    "input_ids": [[3, 4], [5]],
    "sampling_params": [{"max_new_tokens": 3, "top_k": -1, "stop_token_ids": [7]}, {"temperature": 0, "n": 1}],
    "return_logprob": True,
    "logprob_start_len": -1,
    "rid": ["a", "b"],
    "stream": False,
}


@pytest.mark.specs
def test_a_full_request_is_understood_and_valid_in_sglangs_schema() -> None:
    check_schema(FULL_REQUEST, "GenerateReqInput")
    call = parse_generate(FULL_REQUEST, None)
    assert [asked.request_id for asked in call.requests] == ["a", "b"]
    assert [asked.input_ids for asked in call.requests] == [(3, 4), (5,)]
    assert call.requests[0].params == SamplingParams(max_new_tokens=3, stop_token_ids=(7,))
    assert call.requests[1].params == SamplingParams(temperature=0)
    assert (call.is_batch, call.wants_logprobs, call.is_stream) == (True, True, False)


@pytest.mark.specs
def test_every_field_that_is_refused_exists_in_sglang() -> None:
    properties = load_spec()["components"]["schemas"]["GenerateReqInput"]["properties"]
    assert set(UNSUPPORTED_FIELDS) <= set(properties)


def test_nothing_given_means_sglangs_defaults() -> None:
    call = parse_generate({"input_ids": [3]}, None)
    assert call.requests[0].params == SamplingParams(max_new_tokens=128, temperature=1.0, top_p=1.0, top_k=-1)
    assert not (call.is_batch or call.wants_logprobs or call.is_stream)


def test_null_means_the_default_and_no_limit_for_max_new_tokens() -> None:
    params = sampling_params_from_json({"temperature": None, "top_k": None, "max_new_tokens": None})
    assert params == SamplingParams(max_new_tokens=None)


@pytest.mark.parametrize("stop", ["ab", ["ab"], ["ab", ""]])
def test_stop_strings_come_alone_or_in_a_list(stop: Any) -> None:
    assert sampling_params_from_json({"stop": stop}) == SamplingParams(stop=("ab",))


def test_sglangs_number_for_all_tokens_is_understood() -> None:
    assert sampling_params_from_json({"top_k": 1 << 30}).top_k == -1


def test_one_id_for_a_batch_names_its_members() -> None:
    call = parse_generate({"input_ids": [[3], [4]], "rid": "x"}, None)
    assert [asked.request_id for asked in call.requests] == ["x_0", "x_1"]


@pytest.mark.specs
@pytest.mark.parametrize(
    ("rid", "expected"),
    [("x", ["x_0", "x_1", "x_2", "x_3"]), (["x", "y"], ["x_0", "x_1", "y_0", "y_1"])],
)
def test_several_completions_of_a_prompt_are_requests_side_by_side(rid: Any, expected: list[str]) -> None:
    body = {"input_ids": [[3], [4]], "rid": rid, "sampling_params": {"n": 2, "sampling_seed": 7}}
    check_schema(body, "GenerateReqInput")
    call = parse_generate(body, None)
    assert [asked.request_id for asked in call.requests] == expected
    assert [asked.input_ids for asked in call.requests] == [(3,), (3,), (4,), (4,)]
    assert [asked.params.sampling_seed for asked in call.requests] == [7, 8, 7, 8]


def test_several_completions_of_one_prompt_are_answered_as_a_list() -> None:
    assert parse_generate({"input_ids": [3], "sampling_params": {"n": 2}}, None).is_batch
    [first, last] = parse_generate(
        {"input_ids": [3], "sampling_params": {"n": 2, "sampling_seed": MAX_SEED}}, None
    ).requests
    assert (first.params.sampling_seed, last.params.sampling_seed) == (MAX_SEED, MIN_SEED)


def test_text_goes_through_the_tokenizer() -> None:
    call = parse_generate({"text": ["ab", "c"]}, lambda text: [ord(letter) for letter in text])
    assert [asked.input_ids for asked in call.requests] == [(97, 98), (99,)]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "expected struct GenerateRequest"),
        ({"input_ids": "abc"}, "expected a list of token ids"),
        ({"input_ids": [1, "2"]}, "invalid type in input_ids"),
        ({"input_ids": [True]}, "invalid type in input_ids"),
        ({"input_ids": [[1], 2]}, "invalid type in input_ids"),
        ({"input_ids": [1], "stream": 1}, "stream"),
        (
            {"input_ids": [1], "sampling_params": {"max_tokens": 3}},
            "^unknown field `max_tokens`, expected one of `max_",
        ),
        ({"input_ids": [1], "sampling_params": {"temperature": "hot"}}, "str `hot` for `temperature`, expected f64"),
        ({"input_ids": [1], "sampling_params": {"temperature": 10**400}}, "for `temperature`, expected f64"),
        (
            {"input_ids": [1], "sampling_params": {"logit_bias": {"3": 10**400}}},
            "expected an object from token ids to numbers",
        ),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 1.5}}, "expected i64"),
        ({"input_ids": [1], "sampling_params": {"stop_token_ids": 3}}, "expected a list of i64"),
        ({"input_ids": [1], "sampling_params": {"stop_token_ids": [2**63]}}, "expected a list of i64"),
        ({"input_ids": [1], "sampling_params": {"stop": [3]}}, "for `stop`, expected a string or a list of strings"),
        ({"input_ids": [1], "sampling_params": {"stop_regex": 3}}, "for `stop_regex`, expected a string or a list"),
        (
            {"input_ids": [1], "sampling_params": {"logit_bias": {"x": 1}}},
            "expected an object from token ids to numbers",
        ),
        (
            {"input_ids": [1], "sampling_params": {"logit_bias": {"3": "1"}}},
            "expected an object from token ids to numbers",
        ),
        (
            {"input_ids": [1], "sampling_params": {"logit_bias": {"3" * 5000: 1}}},
            "expected an object from token ids to numbers",
        ),
        ({"input_ids": [1], "sampling_params": {"n": 1.5}}, "for `n`, expected i64"),
        ({"input_ids": [1], "rid": 3}, "expected a string"),
    ],
)
def test_requests_of_the_wrong_form_break_the_contract(body: Any, words: str) -> None:
    with pytest.raises(ContractError, match=words):
        parse_generate(body, None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_ids": []}, "cannot be empty"),
        ({"input_ids": None}, "Either text or input_ids"),
        ({"text": "a"}, "Either text or input_ids"),
        ({"text": "a", "input_ids": None}, "has no tokenizer.json"),
        ({"sampling_params": [{}, {}]}, r"sampling_params has 2 values"),
        ({"sampling_params": {"temperature": -1}}, "temperature must be"),
        ({"sampling_params": {"ebnf": "x"}}, "`ebnf` is not supported"),
        (
            {"sampling_params": {"min_new_tokens": 129}},
            r"in \[0, max_new_tokens\(128\)\], got 129",
        ),
        ({"sampling_params": {"stop_regex": ["x"] * 33}}, "at most 32 stop_regex patterns"),
        ({"sampling_params": {"stop_regex": "x" * 257}}, "stop_regex is 257 bytes, over the 256-byte limit"),
        ({"sampling_params": {"stop_regex": "a("}}, "invalid stop_regex 'a\\('"),
        ({"sampling_params": {"frequency_penalty": 2.5}}, r"frequency_penalty must be in \[-2, 2\]"),
        ({"sampling_params": {"repetition_penalty": 0}}, r"repetition_penalty must be in \(0, 2\]"),
        ({"sampling_params": {"stop": ["x"] * 33}}, "at most 32 stop strings"),
        ({"sampling_params": {"n": 0}}, "n must be at least 1"),
        ({"input_ids": [[1]] * 65, "sampling_params": {"n": 1024}}, "at most 65536 completions, found 66560"),
        ({"input_ids": [[1], [2]], "sampling_params": [{"n": 2}, {"n": 3}]}, "should be the same for all samples"),
        ({"return_logprob": [True], "sampling_params": {"n": 2}}, "Cannot use list return_logprob"),
        ({"sampling_params": {"logit_bias": {"3": 1e999}}}, "logit_bias must have finite numbers"),
        ({"return_logprob": True, "return_text_in_logprobs": True}, "`return_text_in_logprobs` is not supported"),
        ({"lora_path": "x"}, "`lora_path` is not supported"),
        (
            {"return_logprob": True, "top_logprobs_num": 2**20},
            "at most 2097152 log-probs, and this request asks for up to",
        ),
        ({"rid": ["a", "a"]}, "different ids"),
    ],
)
def test_what_this_engine_cannot_do_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words) as refusal:
        parse_generate({"input_ids": [1], **change}, None)
    assert not isinstance(refusal.value, ContractError)


@pytest.mark.parametrize(
    "neutral",
    [
        *({"frequency_penalty": 0.0}, {"n": 1}, {"stop": []}, {"stop": None}, {"repetition_penalty": 1.0}),
        *({"regex": None}, {"stop_regex": ""}, {"logit_bias": {}}, {"min_new_tokens": 0}, {"n": None}),
    ],
)
def test_parameters_that_change_nothing_are_accepted(neutral: dict[str, Any]) -> None:
    assert sampling_params_from_json(neutral) == SamplingParams()


@pytest.mark.specs
@pytest.mark.parametrize(
    ("reason", "rendered"),
    [
        (FinishReason("stop", token_id=9), {"type": "stop", "matched": 9}),
        (FinishReason("stop", string="ab"), {"type": "stop", "matched": "ab"}),
        (FinishReason("length"), {"type": "length", "length": 2}),
        (
            FinishReason("abort", message="Aborted"),
            {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
        ),
    ],
)
def test_an_answer_has_sglangs_fields(reason: FinishReason, rendered: dict[str, Any]) -> None:
    completion = Completion(
        request_id="r",
        output_ids=(5, 9),
        output_logprobs=(-0.5, -1.5),
        finish_reason=reason,
        prompt_tokens=4,
        weight_versions=(WeightSpan("1", 0, 1), WeightSpan("2", 1, 2)),
        latency_s=0.25,
    )
    asked = GenerationRequest(request_id="r", input_ids=(1, 2, 3, 4), params=SamplingParams())
    answer = json.loads(json.dumps(completion_to_json(completion, asked, wants_logprobs=True, text="t")))
    assert answer == {
        "text": "t",
        "output_ids": [5, 9],
        "meta_info": {
            "id": "r",
            "finish_reason": rendered,
            "prompt_tokens": 4,
            "completion_tokens": 2,
            "cached_tokens": 0,
            "cached_tokens_details": None,
            "reasoning_tokens": 0,
            "dp_rank": None,
            "weight_version": "2",
            "weight_versions": [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}],
            "e2e_latency": 0.25,
            "input_token_logprobs": [],
            "output_token_logprobs": [[-0.5, 5, None], [-1.5, 9, None]],
            "output_token_logprobs_length": 2,
        },
    }
    for span in answer["meta_info"]["weight_versions"]:
        check_schema(span, "WeightVersionSpan")
