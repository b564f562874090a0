"""Pins that the embedded engine answers as SGLang does, so that one client, and one habit, serves both.

Without it a client that works here fails against the server that it is for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from rollouts_core.embedded.app import build_app
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.scheduler import Scheduler
from rollouts_core.engines.launch import render_launch
from tests.engines.asking import LOGPROB_TOLERANCE
from tests.engines.models import SavedModel
from tests.engines.servers import Server, make_server, started_by_hand
from tests.rollouts_core.served_engine import engine_url

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

GREEDY = {"max_new_tokens": 4, "temperature": 0.0}
NO_BUCKET = {"names": [], "dtypes": [], "shapes": [], "load_format": "flattened_bucket", "group_name": "of nobody"}
CALLS: list[tuple[str, str, dict[str, Any] | None]] = [  # Any: JSON
    ("POST", "/generate", {"input_ids": [4, 8, 9], "sampling_params": GREEDY, "return_logprob": True, "rid": "one"}),
    ("POST", "/generate", {"input_ids": [[4, 8], [9]], "sampling_params": [GREEDY, GREEDY], "return_logprob": True}),
    *(
        ("POST", "/generate", {"input_ids": [4, 8, 9], "sampling_params": GREEDY | {"max_new_tokens": 24} | penalty})
        for penalty in ({"presence_penalty": 1.5}, {"frequency_penalty": 0.7}, {"repetition_penalty": 1.8})
    ),
    *(
        ("POST", "/generate", {"input_ids": [4, 8, 9], "sampling_params": {**GREEDY, **more}, "return_logprob": True})
        for more in ({"logit_bias": {"3": 2.5, "7": -4}}, {"n": 2}, {"logit_bias": {"29": 1.0}})
    ),
    ("POST", "/generate", {"input_ids": [[4, 8], [9]], "sampling_params": {**GREEDY, "n": 3}}),
    ("POST", "/generate", {"input_ids": [[4], [9]], "sampling_params": [{**GREEDY, "n": 3}, {**GREEDY, "n": 2}]}),
    *(
        ("POST", "/generate", {**prompts, "sampling_params": GREEDY, "return_logprob": True, "stream": True})
        for prompts in ({"input_ids": [4, 8, 9]}, {"input_ids": [[4, 8], [9]]})
    ),
    ("POST", "/generate", {"input_ids": [4], "sampling_params": {"nothing": 1}, "stream": True}),
    ("GET", "/model_info", None),
    ("GET", "/server_info", None),
    ("GET", "/health", None),
    ("GET", "/health_generate", None),
    ("POST", "/weights_checker", {"action": "checksum"}),
    ("POST", "/update_weight_version", {"new_version": "v7"}),
    ("POST", "/pause_generation", {"mode": "retract"}),
    ("POST", "/continue_generation", {}),
    ("POST", "/abort_request", {"rid": "of nobody"}),
    ("POST", "/abort_request", {"abort_all": True}),
    ("POST", "/flush_cache", None),
    ("POST", "/release_memory_occupation", {"tags": ["kv_cache", "weights", "cuda_graph"]}),
    ("POST", "/resume_memory_occupation", {"tags": ["kv_cache", "weights", "cuda_graph"]}),
    *(("GET", f"/v1/loads{asked}", None) for asked in ("", "?include=core", "?include=core,queues")),
    ("POST", "/begin_weight_update", {}),
    ("POST", "/begin_weight_update", {}),
    ("POST", "/end_weight_update", {}),
    ("POST", "/end_weight_update", {}),
    ("POST", "/update_weights_from_distributed", NO_BUCKET),
    ("POST", "/destroy_weights_update_group", {"group_name": "of nobody"}),
    ("POST", "/destroy_weights_update_group", {}),
    *(("POST", "/abort_request", nobody) for nobody in ({}, {"rid": ""}, {"rid": None}, {"nothing": 1})),
    ("POST", "/update_weights_from_disk", {"model_path": "/nowhere", "weight_version": "v8"}),
]
NOT_COMPARED = {
    *("checksums", "parallelism_info"),  # tables whose keys are names of tensors or of ranks
    "text",  # SGLang without a tokenizer leaves it out
    "cached_tokens_details",  # SGLang's, where it had part of the prompt in its cache; null where it had not
}
OURS = {
    *("memory_scope", "num_threads"),  # which segments the engine can open, and its threads
    "takes_adapters",  # SGLang says by `enable_lora` whether it takes adapters
    *("num_running_reqs", "num_waiting_reqs", "is_paused"),  # SGLang has them at /v1/loads
}
NOT_OURS = {
    "num_retractions",  # how often a completion was computed anew is not counted
    "response_sent_to_client_ts",  # SGLang's own measurement, in the first event of a stream or its answer
    # Neither how long steps take nor how much of prompts was computed is counted.
    *("total_prefill_uncached_tokens", "total_prefill_busy_us", "decode_moments"),
    "disaggregation",  # prompts that others compute
    "embedding",  # how a model makes embeddings, which the engine does not
}
OF_LAST_EVENT = {"e2e_latency", "weight_versions"}
"""The first event of a stream has them where it is the last one, too: where all was generated before it was read."""
SETTINGS = "/server_info"
"""SGLang answers the hundreds of settings that it was started with: here what we lack is not looked for."""


def misfits(ours: Any, theirs: Any, path: str = "") -> list[str]:  # Any: JSON
    """Where two answers differ in their fields, in the lengths of lists, or in the types of values."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found = [f"{path}.{name} is not SGLang's" for name in sorted(ours.keys() - theirs.keys() - OURS - NOT_COMPARED)]
        if not path.startswith(SETTINGS):
            lacking = theirs.keys() - ours.keys() - NOT_OURS - NOT_COMPARED
            found += [f"{path}.{name} is SGLang's, and missing" for name in sorted(lacking)]
        shared = sorted(ours.keys() & theirs.keys() - NOT_COMPARED)
        return found + [each for name in shared for each in misfits(ours[name], theirs[name], f"{path}.{name}")]
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return [f"{path} has {len(ours)} elements, SGLang's has {len(theirs)}"]
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [each for place, pair in pairs for each in misfits(*pair, f"{path}[{place}]")]
    is_alike = type(ours) is type(theirs)
    return [] if is_alike else [f"{path} is {type(ours).__name__}, SGLang's is {type(theirs).__name__}"]


class TextLine(str):
    """The first line of an answer that is no JSON."""


def content_of(response: httpx.Response) -> Any:  # Any: JSON
    """What was answered: JSON, or the beginning and the last event of each prompt of a stream, or a line of text.

    How many events come in between, and with how many tokens the first, is up to how fast they are read.
    """
    kind = response.headers.get("content-type", "")
    if kind == "application/json":
        return response.json()
    if not kind.startswith("text/event-stream"):
        return TextLine(response.text.partition("\n")[0])
    *events, end = response.text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    by_prompt: dict[int, list[Any]] = {}  # Any: JSON
    for event in events:
        answer = json.loads(event.removeprefix("data: "))
        by_prompt.setdefault(answer.get("index", 0), []).append(answer)
    return [each for _, answers in sorted(by_prompt.items()) for each in (first_token_of(answers[0]), answers[-1])]


def first_token_of(event: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
    """The first event of a stream, as if it had come when one token was there."""
    if "meta_info" not in event:  # it says what went wrong
        return event
    details = {name: value for name, value in event["meta_info"].items() if name not in OF_LAST_EVENT}
    return {
        **event,
        "output_ids": event["output_ids"][:1],
        "meta_info": {**details, "output_token_logprobs": details["output_token_logprobs"][:1], "finish_reason": None},
    }


@pytest.mark.parametrize("server", ["sglang"], indirect=True)
def test_the_embedded_engine_answers_in_sglangs_form_with_the_same_tokens(server: Server, start: SavedModel) -> None:
    with engine_url(start.directory, num_slots=4) as url:
        clients = [httpx.Client(base_url=each, timeout=60.0) for each in (url, server.url)]
        clients[1].post("/update_weights_from_disk", json={"model_path": str(start.directory)})
        for method, path, body in CALLS:
            answers = [client.request(method, path, json=body) for client in clients]
            ours, theirs = map(content_of, answers)
            assert answers[0].status_code == answers[1].status_code, (path, ours, theirs)
            assert misfits(ours, theirs, path) == []
            if isinstance(ours, TextLine):
                assert ours == theirs
            if path == "/generate" and answers[0].status_code == 200:
                assert tokens_of(ours) == tokens_of(theirs)
                assert logprobs_of(ours) == pytest.approx(logprobs_of(theirs), abs=LOGPROB_TOLERANCE)
            if path == "/resume_memory_occupation":  # what is in the memory means nothing
                clients[1].post("/update_weights_from_disk", json={"model_path": str(start.directory)})


@pytest.mark.parametrize("server", ["sglang"], indirect=True)
def test_a_completion_that_is_aborted_is_answered_as_by_sglang(server: Server, start: SavedModel) -> None:
    with engine_url(start.directory, num_slots=4) as url:
        ours, theirs = (abort_amid(each) for each in (url, server.url))
    assert ours["meta_info"]["finish_reason"] == theirs["meta_info"]["finish_reason"]
    for answer in (ours, theirs):
        del answer["output_ids"]  # each has as many as it had until then
    assert misfits(ours, theirs) == []


def abort_amid(url: str) -> Any:  # Any: JSON
    """The last event of a stream that is aborted after its first."""
    params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": None}
    body = {"input_ids": [4, 8, 9], "rid": "long", "sampling_params": params, "stream": True}
    with httpx.Client(base_url=url, timeout=60.0) as client, client.stream("POST", "/generate", json=body) as stream:
        last = ""
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                if not last:
                    assert httpx.post(f"{url}/abort_request", json={"rid": "long"}, timeout=60.0).status_code == 200
                last = line
    return json.loads(last.removeprefix("data: "))


@pytest.fixture
def with_text(start: SavedModel, tmp_path: Path) -> Iterator[str]:
    """The address of an SGLang with a tokenizer, which the pipeline's have not: it finds stops in text."""
    server = make_server("sglang", start.directory, tmp_path / "run")
    command = render_launch(server.job, start.directory, on_gpu=False)
    argv = tuple(argument for argument in command.argv if argument != "--skip-tokenizer-init")
    with started_by_hand(replace(command, argv=argv), tmp_path):
        server.wait_until_ready(log=tmp_path / "log.txt")
        yield server.url


STOPS: list[dict[str, Any]] = [  # Any: JSON
    {"min_new_tokens": 20},
    {"min_new_tokens": 20, "ignore_eos": True},
    {"min_new_tokens": 25},
    {"stop_regex": r"[0-9].*[0-9]"},
    {"stop_regex": ["nowhere", r"\d"]},
    {"stop_regex": r".{3,}$", "no_stop_trim": True},
    {"stop_regex": "x" * 257},
]


@pytest.mark.matrix
def test_stops_in_text_and_shortest_lengths_are_those_of_sglang(with_text: str, start: SavedModel) -> None:
    model = Decoder(start.directory, num_slots=4)
    with Scheduler(model, model_dir=start.directory) as scheduler:
        embedded = TestClient(build_app(scheduler))
        with httpx.Client(base_url=with_text, timeout=60.0) as sglang:
            prompt = [4, 8, 9, 12]
            free = {**GREEDY, "max_new_tokens": 24}
            [first, *_] = tokens_of(
                embedded.post("/generate", json={"input_ids": prompt, "sampling_params": free}).json()
            )
            for more in STOPS:
                params = {**free, "stop_token_ids": [first] if "min_new_tokens" in more else [], **more}
                body = {"input_ids": prompt, "sampling_params": params}
                ours, theirs = (client.post("/generate", json=body) for client in (embedded, sglang))
                assert ours.status_code == theirs.status_code, (more, ours.text, theirs.text)
                if ours.status_code == 200:
                    assert tokens_of(ours.json()) == tokens_of(theirs.json()), more
                    reasons = [answer.json()["meta_info"]["finish_reason"] for answer in (ours, theirs)]
                    assert reasons[0] == reasons[1], more
                    assert ours.json()["text"].split() == theirs.json()["text"].split(), more


def tokens_of(answer: Any) -> Any:  # Any: JSON
    """The completion tokens of an answer, or of each in a list."""
    return [tokens_of(each) for each in answer] if isinstance(answer, list) else answer["output_ids"]


def logprobs_of(answer: Any) -> list[float]:  # Any: JSON
    """The log-probs of all completions of an answer, where they were asked for."""
    if isinstance(answer, list):
        return [logprob for each in answer for logprob in logprobs_of(each)]
    return [entry[0] for entry in answer["meta_info"].get("output_token_logprobs", ())]


def test_every_difference_in_form_is_a_misfit() -> None:
    ours = {"a": 1, "b": [{"c": None}, {"c": 2.0}], "e": [1], "is_paused": True}
    theirs = {"b": [{"c": "2"}, {"c": "2"}], "d": 0, "e": [], "embedding": {}}
    assert misfits(ours, theirs, "/x") == [
        "/x.a is not SGLang's",
        "/x.d is SGLang's, and missing",
        "/x.b[0].c is NoneType, SGLang's is str",
        "/x.b[1].c is float, SGLang's is str",
        "/x.e has 1 elements, SGLang's has 0",
    ]
