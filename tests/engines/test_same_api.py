"""Pins that the embedded engine answers as SGLang does, so that one client, and one habit, serves both.

Without it a client that works here fails against the server that it is for.
"""

from __future__ import annotations

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
from tests.engines.conftest import SavedModel
from tests.engines.servers import Server, make_server, started_by_hand
from tests.engines.test_contract import LOGPROB_TOLERANCE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

GREEDY = {"max_new_tokens": 4, "temperature": 0.0}
CALLS: list[tuple[str, str, dict[str, Any] | None]] = [  # Any: JSON
    ("POST", "/generate", {"input_ids": [4, 8, 9], "sampling_params": GREEDY, "return_logprob": True, "rid": "one"}),
    ("POST", "/generate", {"input_ids": [[4, 8], [9]], "sampling_params": [GREEDY, GREEDY], "return_logprob": True}),
    *(
        ("POST", "/generate", {"input_ids": [4, 8, 9], "sampling_params": {**GREEDY, "max_new_tokens": 24, **penalty}})
        for penalty in ({"presence_penalty": 1.5}, {"frequency_penalty": 0.7}, {"repetition_penalty": 1.8})
    ),
    *(
        ("POST", "/generate", {"input_ids": [4, 8, 9], "sampling_params": {**GREEDY, **more}, "return_logprob": True})
        for more in ({"logit_bias": {"3": 2.5, "7": -4}}, {"n": 2}, {"logit_bias": {"29": 1.0}})
    ),
    ("POST", "/generate", {"input_ids": [[4, 8], [9]], "sampling_params": {**GREEDY, "n": 3}}),
    ("POST", "/generate", {"input_ids": [[4], [9]], "sampling_params": [{**GREEDY, "n": 3}, {**GREEDY, "n": 2}]}),
    ("GET", "/model_info", None),
    ("POST", "/weights_checker", {"action": "checksum"}),
    ("POST", "/update_weight_version", {"new_version": "v7"}),
    ("POST", "/pause_generation", {"mode": "retract"}),
    ("POST", "/continue_generation", {}),
    ("POST", "/update_weights_from_disk", {"model_path": "/nowhere", "weight_version": "v8"}),
]
NOT_COMPARED = ("checksums", "parallelism_info", "text")
"""Tables whose keys are names of tensors or of ranks; and text, which SGLang without a tokenizer leaves out."""


def misfits(ours: Any, theirs: Any, path: str = "") -> list[str]:  # Any: JSON
    """Where an answer of ours has a field that theirs lacks, or another type."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        names = ours.keys() - set(NOT_COMPARED)
        found = [f"{path}.{key} is not SGLang's" for key in names - theirs.keys()]
        shared = names & theirs.keys()
        return found + [each for key in shared for each in misfits(ours[key], theirs[key], f"{path}.{key}")]
    if isinstance(ours, list) and isinstance(theirs, list) and ours and theirs:
        return misfits(ours[0], theirs[0], f"{path}[0]")
    is_alike = type(ours) is type(theirs) or None in (ours, theirs)
    return [] if is_alike else [f"{path} is {type(ours).__name__}, SGLang's is {type(theirs).__name__}"]


@pytest.mark.parametrize("server", ["sglang"], indirect=True)
def test_the_embedded_engine_answers_in_sglangs_form_with_the_same_tokens(server: Server, start: SavedModel) -> None:
    with Scheduler(Decoder(start.directory, num_slots=4), model_dir=start.directory) as scheduler:
        embedded = TestClient(build_app(scheduler))
        with httpx.Client(base_url=server.url, timeout=60.0) as sglang:
            sglang.post("/update_weights_from_disk", json={"model_path": str(start.directory)})
            for method, path, body in CALLS:
                ours, theirs = (client.request(method, path, json=body) for client in (embedded, sglang))
                assert ours.status_code == theirs.status_code, (path, ours.text, theirs.text)
                assert misfits(ours.json(), theirs.json(), path) == []
                if path == "/generate" and ours.status_code == 200:
                    assert tokens_of(ours.json()) == tokens_of(theirs.json())
                    assert logprobs_of(ours.json()) == pytest.approx(logprobs_of(theirs.json()), abs=LOGPROB_TOLERANCE)


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


def test_a_field_that_sglang_lacks_and_another_type_are_misfits() -> None:
    assert misfits({"a": 1, "b": [{"c": 2.0}]}, {"b": [{"c": "2"}], "d": 0}, "/x") == [
        "/x.a is not SGLang's",
        "/x.b[0].c is float, SGLang's is str",
    ]
