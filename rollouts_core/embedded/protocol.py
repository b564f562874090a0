"""Translate between the JSON of SGLang 0.5.23's API and this engine's records.

Requests with unsupported fields are refused; no field is ignored silently. Not here: HTTP and routes (app.py).

    {"input_ids": [...], "sampling_params": {...}} -> GenerateCall(requests=(GenerationRequest, ...))
    Completion -> {"text": ..., "output_ids": [...], "meta_info": {...}}

JSON values have the type `Any` in this file, because the functions here check the values.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.receiving import BucketCall, GroupCall
from rollouts_core.embedded.running import Completion, FinishReason, GenerationRequest, Partial, WeightSpan, complete
from rollouts_core.embedded.sampling import MAX_SEED, MIN_SEED, SamplingParams
from rollouts_core.embedded.scheduler import MAX_WAITING_REQUESTS, Load, RequestError
from rollouts_core.embedded.scoring import NO_LOGPROBS, Alternatives, LogprobParams
from rollouts_core.embedded.segments import SegmentAddress

Json = Any

MAX_COMPLETIONS_PER_PROMPT = 1024
MAX_CHARS_PER_TOKEN = 32
"""Limit of a text's characters, relative to the context length in tokens. A longer text is refused without tokenizing
it, which would take minutes and gigabytes. Most texts have four characters per token."""
MAX_NAMED_TOKENS = 2**18
"""Limit of entries in `stop_token_ids` and in `logit_bias`. The engine searches these entries at every token."""
MAX_EXPRESSIONS = 32
"""Limit of different stop patterns, regular expressions and JSON schemas in a request. Compiling one may take half a
second."""
MAX_LOGPROBS = 2**21
"""Limit of log-probs in an answer besides the log-probs of the sampled tokens. So many log-probs make 100 MB of
JSON."""
MAX_GROUP_SIZE = 4096
"""Limit of the size of a process group. torch allocates memory for every rank before any rank has joined."""
MAX_ID_CHARS = 1024
"""Limit of characters in a request's id. Each completion of the request has a copy of the id."""
MAX_SHOWN_VALUES, MAX_SHOWN_CHARS, MAX_SHOWN_DEPTH = 20, 40, 3
"""Limits of a value quoted in an error message: elements, characters and nested levels."""

SAMPLING_FIELDS = (
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "json_schema", "regex"),
    *("ebnf", "structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"),
    *("no_stop_trim", "stream_interval", "logit_bias", "sampling_seed", "custom_params", "beam_width"),
    *("watermark", "choice"),
)
"""All sampling parameters of SGLang, in the order of SGLang's error text."""

EXPRESSION_FIELDS = ("stop_regex", "json_schema", "regex")
"""Sampling parameters that are compiled."""

NEUTRAL_VALUES: Mapping[str, tuple[Json, ...]] = {
    "choice": ([], {}, ""),
    "beam_width": (1,),
    **dict.fromkeys(("ebnf", "structural_tag"), ("",)),
    "spaces_between_special_tokens": (True, False),
    **dict.fromkeys(("stream_interval", "watermark"), ()),
}
"""SGLang's sampling parameters that this engine does not support. Each parameter has the values that a request
may give because they change nothing. null is always permitted."""


def _texts(value: Json) -> tuple[str, ...]:
    return tuple(text for text in ([value] if isinstance(value, str) else value) if text)


CONVERSIONS: Mapping[str, Callable[[Json], object]] = {
    "stop_token_ids": tuple,
    **dict.fromkeys(("stop", "stop_regex"), _texts),
    "logit_bias": lambda value: tuple((int(token), float(bias)) for token, bias in value.items()),
    "top_k": lambda value: -1 if value >= 2**30 else value,
}
"""Functions that convert checked JSON values to values of `SamplingParams`. Other values need no conversion."""

SENT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Permitted dtypes of weights that a trainer sends, by their names in requests."""

UNSUPPORTED_FIELDS = (
    *("input_embeds", "image_data", "video_data", "audio_data"),
    *("return_hidden_states", "return_routed_experts", "return_sampling_mask", "return_entropy", "session_params"),
    *("lora_path", "lora_id", "custom_logit_processor", "positional_embed_overrides", "max_thinking_tokens"),
    *("return_prompt_token_ids", "watermark"),
)
"""Fields of a generate request that this engine does not support. A request that sets one of these fields is
refused."""
UNSUPPORTED_LOGPROB_FIELDS = ("return_text_in_logprobs",)
"""Unsupported fields that this engine refuses only in requests with `return_logprob`."""


LOAD_SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")
"""Names of the sections in SGLang's load report. This engine reports only core, memory and queues."""


class ContractError(RequestError):
    """The form of a request is wrong. The answer has the form of SGLang's error for malformed requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """A parsed POST /generate: one request per completion, and the form of the answer."""

    requests: tuple[GenerationRequest, ...]
    """One request per completion, in the order of the answer."""
    is_batch: bool
    """True if the answer is a list of completions, False for a single completion."""
    wants_logprobs: bool
    """True if the answer has output_token_logprobs."""
    is_stream: bool
    """True if the answer is a stream of server-sent events."""


def parse_generate(
    body: Json, encode: Callable[[str], list[int]] | None, *, context_length: int | None = None
) -> GenerateCall:
    """Check the body of a POST /generate and convert it.

    Args:
        body: parsed JSON.
        encode: converts text to token ids; None if the model directory has no tokenizer.
        context_length: limit of the tokens of a prompt with its completion. Longer prompts are refused before their
            elements are checked. If None, the caller checks the length.

    Raises:
        ContractError: a field has a wrong type, or a sampling parameter is unknown.
        RequestError: the request is valid, but this engine cannot fulfil it.
    """
    if not isinstance(body, dict):
        raise ContractError(f"invalid type: {_show(body)}, expected struct GenerateRequest")
    for name in UNSUPPORTED_FIELDS:
        if body.get(name):
            raise _unsupported(name)
    prompts, is_batch = _prompts(body, encode, context_length)
    params_of_prompts = _spread(body, "sampling_params", len(prompts))
    _check_num_expressions(params_of_prompts)
    params = [sampling_params_from_json(value) for value in params_of_prompts]
    count = _completions_per_prompt(params_of_prompts)
    if (total := len(prompts) * count) > MAX_WAITING_REQUESTS:  # checked before a record per completion is created
        raise RequestError(f"A request may ask for at most {MAX_WAITING_REQUESTS} completions, found {total}.")
    for name in ("return_logprob", "logprob_start_len", "top_logprobs_num"):
        if count > 1 and isinstance(body.get(name), list):
            raise RequestError(f"Cannot use list {name} with parallel_sample_num > 1")
    wanted = [_boolean("return_logprob", value) for value in _spread(body, "return_logprob", len(prompts))]
    if unsupported := [name for name in UNSUPPORTED_LOGPROB_FIELDS if True in wanted and body.get(name)]:
        raise _unsupported(unsupported[0])
    if len(set(wanted)) > 1:
        raise RequestError("return_logprob must be the same for all prompts of a request.")
    logprobs = _logprob_params(body, prompts) if True in wanted else [NO_LOGPROBS] * len(prompts)
    request_ids = _request_ids(body.get("rid"), len(prompts), count, is_batch=is_batch or count > 1)
    asked = [
        (prompt, _of_sibling(prompt_params, sibling), own_logprobs)
        for prompt, prompt_params, own_logprobs in zip(prompts, params, logprobs, strict=True)
        for sibling in range(count)
    ]
    requests = tuple(
        GenerationRequest(request_id=request_id, input_ids=prompt, params=own_params, logprobs=own_logprobs)
        for request_id, (prompt, own_params, own_logprobs) in zip(request_ids, asked, strict=True)
    )
    _check_num_logprobs(requests, context_length)
    return GenerateCall(
        requests=requests,
        is_batch=is_batch or count > 1,
        wants_logprobs=True in wanted,
        is_stream=_boolean("stream", body.get("stream")),
    )


def needs_time(body: Json) -> bool:
    """True if `parse_generate` tokenizes text or compiles expressions, which would keep the event loop busy."""
    if not isinstance(body, dict):
        return False
    params = body.get("sampling_params")
    return body.get("text") is not None or bool(_expressions(params if isinstance(params, list) else [params]))


def sampling_params_from_json(value: Json) -> SamplingParams:
    """Convert the sampling parameters of a request. Null and missing fields get SGLang's defaults."""
    if value is None:
        return SamplingParams()
    if not isinstance(value, dict):
        raise ContractError(f"invalid type: {_show(value)}, expected struct SamplingParams")
    own: dict[str, Any] = {}
    for name, setting in value.items():
        if setting is not None:
            _check_sampling_field(name, setting)
            if name not in NEUTRAL_VALUES:
                own[name] = CONVERSIONS[name](setting) if name in CONVERSIONS else setting
    own.pop("n", None)  # `parse_generate` reads the field n
    own |= own.pop("custom_params", {})
    if value.get("max_new_tokens", 0) is None:
        own["max_new_tokens"] = None
    try:
        return SamplingParams(**own)
    except ValueError as error:
        raise RequestError(str(error)) from error


def _check_sampling_field(name: str, setting: Json) -> None:
    if name not in SAMPLING_FIELDS:
        listed = ", ".join(f"`{field}`" for field in SAMPLING_FIELDS)
        raise ContractError(f"unknown field `{name}`, expected one of {listed}")
    if name in NEUTRAL_VALUES:
        if setting not in NEUTRAL_VALUES[name]:
            raise _unsupported(name)
        return
    if isinstance(setting, list | dict) and len(setting) > MAX_NAMED_TOKENS:
        raise RequestError(f"{name} may have at most {MAX_NAMED_TOKENS} entries, got {len(setting)}.")
    _check_sampling_type(name, setting)


def completion_to_json(
    completion: Completion, asked: GenerationRequest, *, wants_logprobs: bool, text: str, index: int | None = None
) -> dict[str, Json]:
    """SGLang's JSON for one completion."""
    meta_info = {
        "id": completion.request_id,
        "finish_reason": finish_reason_to_json(completion.finish_reason, len(completion.output_ids)),
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": len(completion.output_ids),
        "cached_tokens": 0,
        "cached_tokens_details": None,  # this engine has no prefix cache
        "reasoning_tokens": 0,
        "dp_rank": None,
        "weight_version": completion.weight_version,
        "weight_versions": [WeightSpan._asdict(span) for span in completion.weight_versions],
        "e2e_latency": completion.latency_s,
    }
    if wants_logprobs:
        meta_info["input_token_logprobs"] = _prompt_logprobs_to_json(completion, asked)
        meta_info["output_token_logprobs"] = logprobs_to_json(completion.output_ids, completion.output_logprobs)
        meta_info["output_token_logprobs_length"] = len(completion.output_ids)
        if asked.logprobs.num_alternatives:
            meta_info |= _alternatives_to_json(completion, asked.logprobs)
    answer = {"text": text, "output_ids": list(completion.output_ids), "meta_info": meta_info}
    return answer if index is None else {**answer, "index": index}


def progress_to_json(
    partial: Partial, *, weight_version: str, wants_logprobs: bool, text: str, index: int | None = None
) -> dict[str, Json]:
    """SGLang's stream event for an unfinished completion, with all tokens so far and without a finish reason."""
    so_far = complete(partial, FinishReason("length"), weight_version=weight_version)
    answer = completion_to_json(so_far, partial.request, wants_logprobs=wants_logprobs, text=text, index=index)
    meta_info = answer["meta_info"]
    meta_info["finish_reason"] = None
    del meta_info["weight_versions"], meta_info["e2e_latency"]
    return answer


def checksums_to_json(digests: Mapping[str, str]) -> dict[str, Json]:
    """SGLang's JSON for checksums of the weights, for a server with one rank."""
    overall = hashlib.sha256()
    for name in sorted(digests):
        overall.update(name.encode() + digests[name].encode())
    rank = {"checksums": dict(digests), "per_gpu_checksum": overall.hexdigest(), "parallelism_info": []}
    return {
        "success": True,
        "message": "Success.",
        "ranks": [rank],
        "per_engine_checksum": hashlib.sha256(overall.hexdigest().encode()).hexdigest(),
    }


def segments_from_json(value: Json) -> tuple[SegmentAddress, ...]:
    """Parse the addresses of published weights. SGLang's API has no such field.

    Raises:
        ContractError: the value is not a list of {"id": ..., "path": ..., "names": [...]}.
    """
    try:
        segments = tuple(
            SegmentAddress(id=entry["id"], path=entry["path"], names=tuple(entry["names"])) for entry in value
        )
    except (TypeError, KeyError) as error:
        raise ContractError(
            f"segments must be a list of objects with id, path and names, found {_show(value)}"
        ) from error
    if not segments or not all(
        isinstance(text, str) for each in segments for text in (each.id, each.path, *each.names)
    ):
        raise ContractError(f"segments must not be empty, and id, path and names must be strings, found {_show(value)}")
    return segments


def group_from_json(body: Mapping[str, Json]) -> GroupCall:
    """Parse a request to join a process group with a trainer.

    Raises:
        ContractError: a field is missing or has another type.
        RequestError: this engine does not support the backend.
    """
    if (backend := body.get("backend", "nccl")) != "gloo":
        raise RequestError(
            f"backend {_show(backend)} is not supported by the embedded engine, which has no GPU: open the group with "
            "gloo in the trainer, too (the source of slime names nccl), or save the weights and call "
            "/update_weights_from_disk."
        )
    address: Json = body.get("master_address")
    port: Json = _port(body.get("master_port"))
    rank: Json = body.get("rank_offset")
    size: Json = body.get("world_size")
    if not isinstance(address, str) or not address.isprintable():
        raise ContractError(f"invalid value: {_show(address)} for `master_address`, expected an address")
    if not _is_integer(port) or not 0 < port < 2**16:
        raise ContractError(f"invalid value: {_show(port)} for `master_port`, expected a number from 1 to 65535")
    if not (_is_integer(rank) and _is_integer(size) and 0 < rank < size <= MAX_GROUP_SIZE):
        raise ContractError(
            f"invalid value: {_show(rank)} of {_show(size)}, expected a `rank_offset` of at least 1 and below "
            f"`world_size`, and a `world_size` of at most {MAX_GROUP_SIZE}"
        )
    return GroupCall(
        name=group_name_from_json(body),
        address=address.strip("[]"),  # trainers write IPv6 addresses as in a URL
        port=port,
        rank=rank,
        size=size,
    )


def bucket_from_json(body: Mapping[str, Json]) -> BucketCall:
    """Parse the announcement of the tensors that the trainer sends next.

    Raises:
        ContractError: names, dtypes and shapes are not lists of the same length, or have other types.
        RequestError: this engine does not support the `load_format` or a dtype.
    """
    if (load_format := body.get("load_format")) not in (None, "flattened_bucket"):
        raise RequestError(
            f"load_format {_show(load_format)} is not supported by the embedded engine: use flattened_bucket, or null "
            "for one broadcast per tensor."
        )
    names, dtypes, shapes = (body.get(field) for field in ("names", "dtypes", "shapes"))
    lists = [each for each in (names, dtypes, shapes) if isinstance(each, list)]
    if len({len(each) for each in lists}) != 1 or len(lists) != 3:
        raise ContractError("names, dtypes and shapes must be lists of the same length")
    assert names is not None and dtypes is not None and shapes is not None, "they are lists"
    if not all(isinstance(name, str) for name in names) or not all(_is_shape(shape) for shape in shapes):
        raise ContractError("names must be strings, and shapes must be lists of non-negative integers")
    if unknown := [dtype for dtype in dtypes if not isinstance(dtype, str) or dtype not in SENT_DTYPES]:
        raise RequestError(f"dtype {_show(unknown[0])} is not supported, expected one of {', '.join(SENT_DTYPES)}.")
    return BucketCall(
        group=group_name_from_json(body),
        dtypes={name: SENT_DTYPES[dtype] for name, dtype in zip(names, dtypes, strict=True)},
        shapes={name: tuple(shape) for name, shape in zip(names, shapes, strict=True)},
        is_flat=load_format == "flattened_bucket",
    )


def group_name_from_json(body: Mapping[str, Json]) -> str:
    """The name of a process group; SGLang's default name if the request has none.

    Raises:
        ContractError: the name is not a string.
    """
    name = body.get("group_name", "weight_update_group")
    if not isinstance(name, str):
        raise ContractError(f"invalid type: {_show(name)} for `group_name`, expected a string")
    return name


def _port(value: Json) -> Json:
    """Convert a port given as text to an integer. AReaL and SGLang's own clients send the port as text."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 6 else value


def _is_shape(value: Json) -> bool:
    return isinstance(value, list) and all(_is_integer(length) and length >= 0 for length in value)


def abort_from_json(body: Mapping[str, Json]) -> tuple[str, bool]:
    """Parse an abort: the id of the request to abort ("" if missing), and True if all requests shall be aborted.

    Raises:
        ContractError: a field has another type.
    """
    rid = "" if body.get("rid") is None else body["rid"]
    if not isinstance(rid, str):
        raise ContractError(f"invalid type: {_show(rid)} for `rid`, expected a string")
    return rid, _boolean("abort_all", body.get("abort_all"))


def load_to_json(load: Load, decoder: Decoder, include: Collection[str]) -> dict[str, Json]:
    """SGLang's load report for one rank, with the requested sections.

    Throughput and utilization are always 0, as in SGLang when its metrics are disabled.

    Raises:
        RequestError: a requested section is unknown.
    """
    if unknown := sorted({*include} - {*LOAD_SECTIONS}):
        raise RequestError(f"Invalid include sections: {unknown[0]}. Valid options: {', '.join(LOAD_SECTIONS)}")
    capacity = decoder.num_slots * decoder.context_length
    num_total = load.num_used_tokens + load.num_waiting_tokens
    sections: dict[str, Json] = {
        "memory": {
            "weight_gb": round(decoder.num_weight_bytes / 2**30, 3),
            "kv_cache_gb": round(decoder.num_cache_bytes / 2**30, 3),
            "graph_gb": 0.0,
            "token_capacity": capacity,
        },
        "queues": {
            "waiting": load.num_waiting,
            "grammar": 0,
            "paused": 0,
            "retracted": 0,
            "prealloc_ready": 0,
        },
    }
    is_whole = not include or "all" in include
    return {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": load.num_running,
        "num_waiting_reqs": load.num_waiting,
        "num_waiting_uncached_tokens": load.num_waiting_tokens,
        "num_used_tokens": load.num_used_tokens,
        "num_total_tokens": num_total,
        "num_active_tokens": num_total,
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": capacity,
        "max_running_requests": decoder.num_slots,
        "token_usage": load.num_used_tokens / capacity,
        "gen_throughput": 0.0,
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
        **{name: section for name, section in sections.items() if is_whole or name in include},
    }


def logprobs_to_json(token_ids: tuple[int, ...], logprobs: tuple[float, ...]) -> list[tuple[float, int, None]]:
    """SGLang's [log-prob, token id, text] entries. The text is always None."""
    return [(logprob, token_id, None) for logprob, token_id in zip(logprobs, token_ids, strict=True)]


def _prompt_logprobs_to_json(completion: Completion, asked: GenerationRequest) -> list[tuple[float | None, int, None]]:
    """SGLang's [log-prob, token id, text] entries for the prompt. The first token has no log-prob."""
    if completion.prompt_scores is None:
        return []
    logprobs = [None, *completion.prompt_scores.logprobs_T.tolist()]
    token_ids = asked.input_ids[-len(logprobs) :]
    return [(logprob, token_id, None) for logprob, token_id in zip(logprobs, token_ids, strict=True)]


def _alternatives_to_json(completion: Completion, wanted: LogprobParams) -> dict[str, Json]:
    """SGLang's fields with log-probs of alternative tokens: a list per position, and None for the first position of a
    prompt."""
    scores, found = completion.prompt_scores, completion.alternatives
    prompt = None if scores is None else scores.alternatives
    answer: dict[str, Json] = {}
    for place, each in (("input", prompt), ("output", found)):
        first = [None] if each is not None and place == "input" else []
        if wanted.num_top:
            answer[f"{place}_top_logprobs"] = first + ([] if each is None else top_entries(each))
        if wanted.token_ids:
            answer[f"{place}_token_ids_logprobs"] = first + ([] if each is None else given_entries(each, wanted))
    return answer


def top_entries(found: Alternatives) -> list[list[tuple[float, int, None]]]:
    """SGLang's [log-prob, token id, text] entries of the most probable tokens, a list per position."""
    rows = zip(found.top_logprobs_TK.tolist(), found.top_ids_TK.tolist(), strict=True)
    return [[(logprob, token, None) for logprob, token in zip(*row, strict=True)] for row in rows]


def given_entries(found: Alternatives, wanted: LogprobParams) -> list[list[tuple[float, int, None]]]:
    """SGLang's [log-prob, token id, text] entries of the tokens that the request names, a list per position."""
    rows = found.given_logprobs_TG.tolist()
    return [[(logprob, token, None) for logprob, token in zip(row, wanted.token_ids, strict=True)] for row in rows]


def finish_reason_to_json(reason: FinishReason, num_tokens: int) -> dict[str, Json]:
    match reason.kind:
        case "stop":
            return {"type": "stop", "matched": reason.string or reason.token_id}
        case "length":
            return {"type": "length", "length": num_tokens}
        case "abort":
            return {"type": "abort", "message": reason.message, "status_code": None, "err_type": None}
        case "error":
            raise AssertionError(f"a failed request has no finish reason: {reason.message}")


def _prompts(
    body: Mapping[str, Json], encode: Callable[[str], list[int]] | None, context_length: int | None
) -> tuple[list[tuple[int, ...]], bool]:
    """Return the token ids of every prompt, and True if the request has a list of prompts."""
    text, input_ids = body.get("text"), body.get("input_ids")
    if (text is None) == (input_ids is None):
        raise RequestError("Either text or input_ids should be provided, and not both.")
    if text is not None:
        if encode is None:
            raise RequestError("text needs a tokenizer, but the model directory has no tokenizer.json: send input_ids.")
        texts = text if isinstance(text, list) else [text]
        if not all(isinstance(entry, str) for entry in texts):
            raise ContractError(f"invalid type: {_show(text)}, expected a string or a list of strings")
        if not texts:
            raise RequestError("text cannot be empty.")
        _check_num_prompts(texts)
        return [_encode_within(entry, encode, context_length) for entry in texts], isinstance(text, list)
    if not isinstance(input_ids, list):
        raise ContractError(f"invalid type: {_show(input_ids)}, expected a list of token ids, or a list of lists")
    if not input_ids:
        raise RequestError("input_ids cannot be empty.")
    is_batch = isinstance(input_ids[0], list)
    prompts = input_ids if is_batch else [input_ids]
    _check_num_prompts(prompts)
    if context_length is not None:
        for prompt in prompts:
            _check_length(prompt, context_length)
    if not all(isinstance(prompt, list) and set(map(type, prompt)) <= {int} for prompt in prompts):
        raise ContractError("invalid type in input_ids, expected integers only, in a list or in a list of lists")
    return [tuple(prompt) for prompt in prompts], is_batch


def _check_num_prompts(prompts: Sequence[Json]) -> None:
    if len(prompts) > MAX_WAITING_REQUESTS:
        raise RequestError(
            f"A request may ask for at most {MAX_WAITING_REQUESTS} completions, found {len(prompts)} prompts."
        )


def _encode_within(text: str, encode: Callable[[str], list[int]], context_length: int | None) -> tuple[int, ...]:
    """The token ids of a text. A text that is too long for the context is refused, if possible without tokenizing."""
    if context_length is not None and len(text) > (most := context_length * MAX_CHARS_PER_TOKEN):
        raise RequestError(
            f"The input ({len(text)} characters) is longer than the model's context length ({context_length} tokens): "
            f"at most {most} characters are permitted."
        )
    token_ids = encode(text)
    if context_length is not None:
        _check_length(token_ids, context_length)
    return tuple(token_ids)


def _check_length(prompt: Json, context_length: int) -> None:
    if isinstance(prompt, list) and len(prompt) >= context_length:
        raise RequestError(
            f"The input ({len(prompt)} tokens) is longer than the model's context length ({context_length} tokens)."
        )


def _spread(body: Mapping[str, Json], name: str, count: int) -> list[Json]:
    """The value of a field for each prompt. The field has one value for all prompts, or a list of values per prompt."""
    value = body.get(name)
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} values, but the request has {count} prompts.")
    return value


def _check_num_expressions(params_of_prompts: Sequence[Json]) -> None:
    if (count := len(_expressions(params_of_prompts))) > MAX_EXPRESSIONS:
        raise RequestError(
            f"A request may have at most {MAX_EXPRESSIONS} different expressions in {', '.join(EXPRESSION_FIELDS)}, "
            f"found {count}: send fewer prompts at once."
        )


def _expressions(params_of_prompts: Sequence[Json]) -> set[str]:
    """The different expressions in the sampling parameters. `sampling_params_from_json` checks their types."""
    found: set[str] = set()
    for params in params_of_prompts:
        for name in EXPRESSION_FIELDS if isinstance(params, dict) else ():
            value = params.get(name)
            found.update(each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str))
    return found


def _completions_per_prompt(params_of_prompts: Sequence[Json]) -> int:
    """The number `n` of completions per prompt. `n` must be equal for all prompts of a request."""
    counts = {1 if (count := (params or {}).get("n")) is None else count for params in params_of_prompts}
    if len(counts) > 1:
        raise RequestError("The parallel_sample_num should be the same for all samples in sample params.")
    if not 1 <= (count := counts.pop()) <= MAX_COMPLETIONS_PER_PROMPT:
        raise RequestError(f"n must be at least 1 and at most {MAX_COMPLETIONS_PER_PROMPT}, got {count}.")
    return count


def _of_sibling(params: SamplingParams, sibling: int) -> SamplingParams:
    """The parameters of completion number `sibling` of a prompt. The seed is the request's seed plus `sibling`."""
    if params.sampling_seed is None or sibling == 0:
        return params
    num_seeds = MAX_SEED - MIN_SEED + 1
    return replace(params, sampling_seed=(params.sampling_seed + sibling - MIN_SEED) % num_seeds + MIN_SEED)


def _request_ids(value: Json, num_prompts: int, per_prompt: int, *, is_batch: bool) -> list[str]:
    """The ids of all completions. If several completions share an id, they get `<id>_<n>`, as in SGLang."""
    if value is None:
        return [uuid.uuid4().hex for _ in range(num_prompts * per_prompt)]
    ids = value if isinstance(value, list) else [value]
    if any(isinstance(entry, str) and len(entry) > MAX_ID_CHARS for entry in ids):
        raise RequestError(f"rid may have at most {MAX_ID_CHARS} characters.")
    if isinstance(value, str):
        return [f"{value}_{index}" for index in range(num_prompts * per_prompt)] if is_batch else [value]
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise ContractError(f"invalid type: {_show(value)}, expected a string or a list of strings")
    if len(value) != num_prompts or len(set(value)) != num_prompts:
        raise RequestError(f"rid needs {num_prompts} different ids, one per prompt.")
    return [f"{own}_{sibling}" for own in value for sibling in range(per_prompt)] if per_prompt > 1 else value


def _logprob_params(body: Mapping[str, Json], prompts: Sequence[tuple[int, ...]]) -> list[LogprobParams]:
    """The log-probs that each prompt's answer must have besides those of the sampled tokens."""
    starts = _spread(body, "logprob_start_len", len(prompts))
    tops = _spread(body, "top_logprobs_num", len(prompts))
    named = body.get("token_ids_logprob")
    is_spread = isinstance(named, list) and any(not _is_integer(each) for each in named)
    ids = _spread(body, "token_ids_logprob", len(prompts)) if is_spread else [named] * len(prompts)
    for name, values in (("logprob_start_len", starts), ("top_logprobs_num", tops)):
        if wrong := [value for value in values if value is not None and not _is_i64(value)]:
            raise ContractError(f"invalid type: {_show(wrong[0])} for `{name}`, expected i64")
    if wrong := [each for each in ids if each is not None and not (isinstance(each, list) and all(map(_is_i64, each)))]:
        raise ContractError(f"invalid type: {_show(wrong[0])} for `token_ids_logprob`, expected a list of i64")
    return [
        LogprobParams(
            start=start if start is not None and 0 <= start < len(prompt) else None,
            num_top=max(top or 0, 0),
            token_ids=tuple(own_ids or ()),
        )
        for prompt, start, top, own_ids in zip(prompts, starts, tops, ids, strict=True)
    ]


def _check_num_logprobs(requests: Sequence[GenerationRequest], context_length: int | None) -> None:
    """Raise RequestError if the answer could exceed `MAX_LOGPROBS`: log-probs besides those of the sampled tokens."""
    total = 0
    for asked in requests:
        num_prompt, limit = len(asked.input_ids), asked.params.max_new_tokens
        room = (limit or 0) if context_length is None else context_length - num_prompt
        total += asked.logprobs.count_entries(num_prompt, room if limit is None else min(limit, room))
    if total > MAX_LOGPROBS:
        raise RequestError(
            f"The answer may have at most {MAX_LOGPROBS} log-probs, and this request asks for up to {total}: lower "
            "top_logprobs_num or max_new_tokens, name fewer token ids, or send fewer prompts at once."
        )


def _check_sampling_type(name: str, value: Json) -> None:
    match name:
        case "stop_token_ids":
            is_fine, expected = isinstance(value, list) and all(map(_is_i64, value)), "a list of i64"
        case "stop" | "stop_regex":
            strings = value if isinstance(value, list) else [value]
            is_fine, expected = all(isinstance(each, str) for each in strings), "a string or a list of strings"
        case "json_schema" | "regex":
            is_fine, expected = isinstance(value, str), "a string"
        case "logit_bias":
            is_fine = isinstance(value, dict) and all(_is_bias(token, bias) for token, bias in value.items())
            expected = "an object from token ids to numbers"
        case "custom_params":
            is_fine = isinstance(value, dict) and value.keys() <= {"num_tokens"} and all(map(_is_i64, value.values()))
            expected = "an object with only num_tokens, an i64"
        case "ignore_eos" | "skip_special_tokens" | "no_stop_trim":
            is_fine, expected = isinstance(value, bool), "a boolean"
        case "temperature" | "top_p" | "min_p" | "frequency_penalty" | "presence_penalty" | "repetition_penalty":
            is_fine, expected = _is_f64(value), "f64"
        case _:
            is_fine, expected = _is_integer(value), "i64"
    if not is_fine:
        raise ContractError(f"invalid type: {_show(value)} for `{name}`, expected {expected}")


def _boolean(name: str, value: Json) -> bool:
    if not isinstance(value, bool | None):
        raise ContractError(f"invalid type: {_show(value)} for `{name}`, expected a boolean")
    return bool(value)


def _is_integer(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_i64(value: Json) -> bool:
    return _is_integer(value) and -(2**63) <= value < 2**63


def _is_f64(value: Json) -> bool:
    return isinstance(value, float) or (_is_integer(value) and value.bit_length() < 1024)  # larger ints overflow


def _is_bias(token: str, value: Json) -> bool:
    # Without a limit of the length, int() would raise for more than 4,300 digits.
    return token.isdecimal() and len(token) < 20 and _is_f64(value)


def _unsupported(name: str) -> RequestError:
    return RequestError(f"`{name}` is not supported by the embedded engine: omit it, or use the engine SGLang.")


def _show(value: Json) -> str:
    return f"{type(value).__name__} `{str(_shortened(value))[:MAX_SHOWN_CHARS]}`"


def _shortened(value: Json, depth: int = MAX_SHOWN_DEPTH) -> Json:
    """A shortened copy of a JSON value for an error message. The value may have millions of elements."""
    if isinstance(value, str):
        return value[:MAX_SHOWN_CHARS]
    if isinstance(value, list):
        return [_shortened(each, depth - 1) for each in value[:MAX_SHOWN_VALUES]] if depth else []
    if isinstance(value, dict):
        shown = islice(value.items(), MAX_SHOWN_VALUES)
        return {name[:MAX_SHOWN_CHARS]: _shortened(each, depth - 1) for name, each in shown} if depth else {}
    return value
