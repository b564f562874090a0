"""Pins: the endpoints answer as SGLang's do, and notice clients that leave.

Without it the engine's client would wait for what never comes, or read what it was not meant to. How the process starts
and ends is in test_process.py.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from starlette.applications import Starlette
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel

from rollouts_core.embedded import exchange
from rollouts_core.embedded.app import build_app
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.gate import Gate, is_loopback
from rollouts_core.embedded.scheduler import Scheduler
from rollouts_core.embedded.server import serve
from rollouts_core.embedded.weights import tensor_sha256
from rollouts_core.errors import InputError, NoMemoryError
from tests.rollouts_core.embedded.test_protocol import check_schema, load_spec
from tests.rollouts_core.embedded.tiny_models import expected_logprobs, make_model, save_model

TIMEOUT_S = 20.0
LONG = {"max_new_tokens": 1500, "ignore_eos": True}


@pytest.fixture
def scheduler(decoder: Decoder, model_dir: Path) -> Iterator[Scheduler]:
    with Scheduler(decoder, model_dir=model_dir) as running:
        yield running


def talk(scheduler: Scheduler, conversation: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """Run a conversation with the app, in this process."""

    async def run() -> None:
        transport = httpx.ASGITransport(build_app(scheduler))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=TIMEOUT_S) as client:
            await asyncio.wait_for(conversation(client), TIMEOUT_S)

    asyncio.run(run())


def ask(scheduler: Scheduler, method: str, path: str, body: Any = None) -> httpx.Response:
    """One request to the app, in this process."""
    answers: list[httpx.Response] = []

    async def conversation(client: httpx.AsyncClient) -> None:
        answers.append(await client.request(method, path, json=body))

    talk(scheduler, conversation)
    return answers[0]


async def until_running(scheduler: Scheduler, count: int) -> None:
    while scheduler.num_running != count:
        await asyncio.sleep(0.002)


OWN_ENDPOINTS = ("/update_weights_from_segments", "/tokenize", "/detokenize")
"""SGLang has none of them; the last two are vLLM's."""


def test_every_endpoint_exists_in_sglang(scheduler: Scheduler) -> None:
    paths = load_spec()["paths"]
    for route in build_app(scheduler).routes:
        path = route.path.replace(":path", "")  # type: ignore[attr-defined]
        if path in OWN_ENDPOINTS:
            continue
        methods = {method.lower() for method in route.methods} - {"head"}  # type: ignore[attr-defined]
        assert methods <= set(paths[path]), path


def test_generated_logprobs_are_those_of_the_model(scheduler: Scheduler, model: PreTrainedModel) -> None:
    params = {"temperature": 0.7, "max_new_tokens": 12, "ignore_eos": True}
    body = {"input_ids": [3, 4, 5], "sampling_params": params, "return_logprob": True}
    answer = ask(scheduler, "POST", "/generate", body).json()
    entries = answer["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in entries] == answer["output_ids"]
    expected = expected_logprobs(model, [3, 4, 5], answer["output_ids"], temperature=0.7)
    torch.testing.assert_close(torch.tensor([entry[0] for entry in entries]), expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_list_of_prompts_gives_a_list_in_order(scheduler: Scheduler) -> None:
    sampling_params = [{"max_new_tokens": count, "ignore_eos": True} for count in (5, 2)]
    body = {"input_ids": [[3], [4, 5]], "sampling_params": sampling_params}
    answers = ask(scheduler, "POST", "/generate", body).json()
    assert [len(answer["output_ids"]) for answer in answers] == [5, 2]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [1, 2]
    assert "output_token_logprobs" not in answers[0]["meta_info"]


def test_the_two_forms_of_errors(scheduler: Scheduler) -> None:
    unknown = ask(scheduler, "POST", "/generate", {"input_ids": [3], "sampling_params": {"max_tokens": 3}})
    assert (unknown.status_code, unknown.json()["error"][:46]) == (
        400,
        "unknown field `max_tokens`, expected one of `m",
    )
    too_long = ask(scheduler, "POST", "/generate", {"input_ids": [3] * 3000})
    assert (too_long.status_code, list(too_long.json()["error"])) == (400, ["message"])
    outside = ask(scheduler, "POST", "/generate", {"input_ids": [[3], [61]]})
    assert (outside.status_code, "token id 61" in outside.json()["error"]["message"]) == (400, True)
    assert ask(scheduler, "GET", "/nothing").status_code == 404


def test_a_refused_member_of_a_batch_leaves_none_running(scheduler: Scheduler) -> None:
    body = {"input_ids": [[3], [61]], "sampling_params": LONG}
    assert ask(scheduler, "POST", "/generate", body).status_code == 400
    scheduler.weight_digests().result(TIMEOUT_S)  # queued behind the abort
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


def test_a_stream_sends_what_exists_then_the_answer_then_done(scheduler: Scheduler) -> None:
    params = {"max_new_tokens": 6, "ignore_eos": True, "sampling_seed": 4}
    body = {"input_ids": [3, 4], "sampling_params": params, "return_logprob": True}
    whole = ask(scheduler, "POST", "/generate", body).json()
    stream = ask(scheduler, "POST", "/generate", {**body, "stream": True})
    events = stream.text.removesuffix("\n\n").split("\n\n")
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "data: [DONE]"
    answers = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert [answer["meta_info"]["finish_reason"] for answer in answers[:-1]] == [None] * (len(answers) - 1)
    assert all(answer["output_ids"] == whole["output_ids"][: len(answer["output_ids"])] for answer in answers)
    assert answers[-1]["output_ids"] == whole["output_ids"]


def test_a_stream_shows_no_half_of_a_character(model: PreTrainedModel, tmp_path: Path) -> None:
    """Whoever prints what is new in an event would have it for ever; tokens are bytes here."""
    directory = save_model(model, tmp_path)
    halves = (*range(0xA1, 0xAD), *range(0xAE, 0xC0), *range(0xC2, 0xE1))  # 30 second bytes, then 31 first ones
    tokenizer = Tokenizer(models.WordLevel({chr(byte): i for i, byte in enumerate(halves)}, unk_token=chr(halves[0])))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    body = {"input_ids": [3], "stream": True, "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
    with Scheduler(Decoder(directory, num_slots=1), model_dir=directory) as scheduler:
        events = ask(scheduler, "POST", "/generate", body).text.split("\n\n")[:-2]
    *parts, whole = [json.loads(event.removeprefix("data: "))["text"] for event in events]
    assert parts and all(whole.startswith(part) for part in parts)


@pytest.mark.slow
def test_a_stream_that_is_read_slowly_is_kept_no_events_for(scheduler: Scheduler) -> None:
    """Each has everything so far: those of 16,000 tokens would be 7 GB."""
    body = json.dumps({"input_ids": [3], "stream": True, "sampling_params": LONG}).encode()
    request = {"type": "http.request", "body": body, "more_body": False}
    sent: list[bytes] = []

    async def read_slowly() -> None:
        requests = [request]
        never: asyncio.Future[dict[str, Any]] = asyncio.Future()

        async def receive() -> dict[str, Any]:
            return requests.pop() if requests else await never

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message.get("body", b""))
            if len(sent) == 3:  # behind the header and the first event
                await until_running(scheduler, 0)

        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [], "query_string": b""}
        await asyncio.wait_for(build_app(scheduler)(scope, receive, send), TIMEOUT_S)

    asyncio.run(read_slowly())
    whole, done = [part for part in b"".join(sent).split(b"\n\n") if part][-2:]
    assert done == b"data: [DONE]"
    assert json.loads(whole.removeprefix(b"data: "))["meta_info"]["completion_tokens"] == LONG["max_new_tokens"]
    assert len(sent) < 20


@pytest.fixture
def texts(model: PreTrainedModel, tmp_path: Path) -> Iterator[Scheduler]:
    """A scheduler of a model with a tokenizer: token i is the character 33 + i, and text has spaces in between."""
    directory = add_tokenizer(save_model(model, tmp_path))
    with Scheduler(Decoder(directory, num_slots=2), model_dir=directory) as scheduler:
        yield scheduler


def add_tokenizer(directory: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel({chr(33 + index): index for index in range(61)}, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("keeps_stop", [False, True])
def test_a_stop_string_ends_a_completion_and_is_cut_off_the_text(texts: Scheduler, keeps_stop: bool) -> None:
    params: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 3}
    whole = ask(texts, "POST", "/generate", {"text": "%", "sampling_params": params}).json()
    words = whole["text"].split(" ")
    stop = " ".join(words[4:7])
    params |= {"stop": ["nowhere", stop], "no_stop_trim": keeps_stop}
    stopped = ask(texts, "POST", "/generate", {"text": "%", "sampling_params": params}).json()
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["output_ids"] == whole["output_ids"][:7]
    assert stopped["text"].strip() == " ".join(words[: 7 if keeps_stop else 4])


def test_a_pattern_ends_a_completion_and_stays_in_its_text(texts: Scheduler) -> None:
    params = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 3}
    whole = ask(texts, "POST", "/generate", {"text": "%", "sampling_params": params}).json()
    words = whole["text"].split(" ")
    pattern = rf"{re.escape(words[3])}.*{re.escape(words[6])}$"
    stopped = ask(
        texts, "POST", "/generate", {"text": "%", "sampling_params": {**params, "stop_regex": pattern}}
    ).json()
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": pattern}
    assert stopped["output_ids"] == whole["output_ids"][:7]
    assert stopped["text"].split(" ") == words[:7]


TRAP = {"stop_regex": r"^(A ?|A ?)*$!", "logit_bias": {str(ord("A") - 33): 100.0}, "max_new_tokens": 200}
"""A completion of nothing but A, and a pattern that has two ways to read each of them: 2**200 steps at its end."""


@pytest.mark.slow
def test_a_pattern_without_end_ends_its_own_request_alone(texts: Scheduler) -> None:
    async def converse(client: httpx.AsyncClient) -> None:
        async def complete(**params: Any) -> httpx.Response:
            body = {"text": "%", "sampling_params": {"max_new_tokens": 100, "ignore_eos": True, **params}}
            return await client.post("/generate", json=body)

        trapped, *others = await asyncio.gather(
            complete(**TRAP), *(complete(stop_regex="[0-9]{101}") for _ in range(3))
        )
        assert trapped.status_code == 400
        assert "The search for stop_regex in the completion took too long" in trapped.json()["error"]["message"]
        assert [other.status_code for other in others] == [200] * 3
        assert [other.json()["meta_info"]["completion_tokens"] for other in others] == [100] * 3

    talk(texts, converse)
    assert texts.is_healthy and texts.num_running == 0


@pytest.mark.slow
def test_a_stream_whose_pattern_has_no_end_says_so(texts: Scheduler) -> None:
    body = {"text": "%", "stream": True, "sampling_params": {"ignore_eos": True, **TRAP}}
    events = ask(texts, "POST", "/generate", body).text.split("\n\n")
    assert "took too long" in events[-3] and events[-2] == "data: [DONE]"


def test_several_completions_of_a_prompt_are_those_of_the_seeds_that_follow(scheduler: Scheduler) -> None:
    params = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 3}
    body = {"input_ids": [3, 4], "return_logprob": True}
    several = ask(scheduler, "POST", "/generate", {**body, "sampling_params": {**params, "n": 3}}).json()
    alone = [
        ask(scheduler, "POST", "/generate", {**body, "sampling_params": {**params, "sampling_seed": seed}}).json()
        for seed in (3, 4, 5)
    ]
    of_tokens = [each["meta_info"]["output_token_logprobs"] for each in several]
    assert of_tokens == [each["meta_info"]["output_token_logprobs"] for each in alone]
    assert len({json.dumps(tokens) for tokens in of_tokens}) == 3


def test_a_bias_on_a_token_that_the_model_lacks_is_refused(scheduler: Scheduler) -> None:
    body = {"input_ids": [3], "sampling_params": {"logit_bias": {"61": 1.0}}}
    refused = ask(scheduler, "POST", "/generate", body)
    assert refused.status_code == 400
    assert "logit_bias must has keys in [0, 60], got 61" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {"3": 1e38}, "temperature": 0.1},
        {"logit_bias": dict.fromkeys(map(str, range(61)), -1e39)},
        {"repetition_penalty": 1e-40, "temperature": 0.0},
    ],
)
def test_parameters_that_leave_no_numbers_to_choose_by_end_their_own_request_alone(
    scheduler: Scheduler, params: dict[str, Any]
) -> None:
    async def converse(client: httpx.AsyncClient) -> None:
        async def complete(**own: Any) -> httpx.Response:
            body = {"input_ids": [3], "sampling_params": {"max_new_tokens": 9, "ignore_eos": True, **own}}
            return await client.post("/generate", json=body)

        refused, other = await asyncio.gather(complete(**params), complete())
        assert refused.status_code == 400
        assert "The log-probs of the next token are no finite numbers" in refused.json()["error"]["message"]
        assert other.json()["meta_info"]["completion_tokens"] == 9

    talk(scheduler, converse)
    assert scheduler.is_healthy and scheduler.num_running == 0


@pytest.mark.parametrize("stop", [{"stop": "x"}, {"stop_regex": "x"}])
def test_a_stop_string_without_a_tokenizer_is_refused(scheduler: Scheduler, stop: dict[str, str]) -> None:
    refused = ask(scheduler, "POST", "/generate", {"input_ids": [3], "sampling_params": stop})
    assert refused.status_code == 400
    assert "need a tokenizer.json in the model directory" in refused.json()["error"]["message"]


def test_no_text_at_all_is_refused(texts: Scheduler) -> None:
    refused = ask(texts, "POST", "/generate", {"text": []})
    assert (refused.status_code, refused.json()) == (400, {"error": {"message": "text cannot be empty."}})


def test_text_is_understood_and_answered_where_a_tokenizer_is_found(texts: Scheduler) -> None:
    body = {"text": "%", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    answer = ask(texts, "POST", "/generate", body).json()
    assert answer["meta_info"]["prompt_tokens"] == 1
    assert answer["text"].replace(" ", "") == "".join(chr(33 + token) for token in answer["output_ids"])


def test_a_prompt_is_taken_whole_whatever_a_tokenizer_was_last_used_for(model: PreTrainedModel, tmp_path: Path) -> None:
    directory = add_tokenizer(save_model(model, tmp_path))
    for length in (2, 9):
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.enable_truncation(length)
        tokenizer.enable_padding(length=length)
        tokenizer.save(str(directory / "tokenizer.json"))
        with Scheduler(Decoder(directory, num_slots=2), model_dir=directory) as scheduler:
            answer = ask(scheduler, "POST", "/generate", {"text": "%&(", "sampling_params": {"max_new_tokens": 1}})
        assert answer.json()["meta_info"]["prompt_tokens"] == 3


def test_a_client_that_leaves_frees_its_row(scheduler: Scheduler) -> None:
    app = build_app(scheduler)
    body = json.dumps({"input_ids": [3], "sampling_params": LONG}).encode()

    async def leave_while_generating() -> None:
        events = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            if (event := next(events, None)) is not None:
                return event
            await until_running(scheduler, 1)
            return {"type": "http.disconnect"}

        await asyncio.wait_for(call_app(app, "/generate", receive), TIMEOUT_S)

    asyncio.run(leave_while_generating())
    assert scheduler.num_running == 0


@pytest.mark.parametrize("path", ["/generate", "/abort_request"])
def test_a_client_that_leaves_before_its_request_is_whole_is_no_failure(scheduler: Scheduler, path: str) -> None:
    """Every trainer that is killed amid one would write its traceback into the engine's log."""
    part: dict[str, Any] = {"type": "http.request", "body": b"{", "more_body": True}
    events = iter([part, {"type": "http.disconnect"}])

    async def receive() -> dict[str, Any]:
        return next(events)

    asyncio.run(call_app(build_app(scheduler), path, receive))


async def call_app(app: Starlette, path: str, receive: Callable[[], Awaitable[Any]]) -> None:
    async def send(_: Any) -> None:
        """The client is gone."""

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "app": app}
    await app(scope, receive, send)


def test_an_update_takes_over_the_published_weights_and_says_so(scheduler: Scheduler, other_dir: Path) -> None:
    body = {"model_path": str(other_dir), "weight_version": "7", "flush_cache": True}
    check_schema(body, "UpdateWeightFromDiskReqInput")
    answer = ask(scheduler, "POST", "/update_weights_from_disk", body).json()
    assert (answer["success"], answer["num_paused_requests"]) == (True, 0)
    info = ask(scheduler, "GET", "/model_info").json()
    assert (info["weight_version"], info["model_path"]) == ("7", str(other_dir))
    published = load_file(other_dir / "model.safetensors")
    checksums = ask(scheduler, "POST", "/weights_checker", {"action": "checksum"}).json()["ranks"][0]["checksums"]
    assert checksums == {name: tensor_sha256(tensor) for name, tensor in published.items()}


def test_an_update_that_fails_says_why_and_keeps_the_version(scheduler: Scheduler, tmp_path: Path) -> None:
    wider = save_model(make_model(hidden_size=64), tmp_path)
    answer = ask(scheduler, "POST", "/update_weights_from_disk", {"model_path": str(wider), "weight_version": "7"})
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert "model.embed_tokens.weight has shape (61, 64)" in answer.json()["message"]
    assert ask(scheduler, "GET", "/model_info").json()["weight_version"] == "default"


def test_pause_update_continue_gives_one_answer_of_two_versions(scheduler: Scheduler, other_dir: Path) -> None:
    async def conversation(client: httpx.AsyncClient) -> None:
        body = {"input_ids": [3], "sampling_params": {**LONG, "max_new_tokens": 400}}
        generation = asyncio.ensure_future(client.post("/generate", json=body))
        await until_running(scheduler, 1)
        await client.post("/pause_generation", json={"mode": "retract"})
        await client.post("/update_weights_from_disk", json={"model_path": str(other_dir), "weight_version": "v"})
        await client.post("/continue_generation", json={})
        meta_info = (await generation).json()["meta_info"]
        assert [span["version"] for span in meta_info["weight_versions"]] == ["default", "v"]
        assert meta_info["weight_version"] == "v"

    talk(scheduler, conversation)


@pytest.mark.parametrize("body", [{"rid": "me"}, {"abort_all": True}])
def test_abort_answers_at_once_and_the_request_ends_with_what_it_has(
    scheduler: Scheduler, body: dict[str, Any]
) -> None:
    check_schema(body, "AbortReq")

    async def conversation(client: httpx.AsyncClient) -> None:
        request = {"input_ids": [3], "rid": "me", "sampling_params": LONG}
        generation = asyncio.ensure_future(client.post("/generate", json=request))
        await until_running(scheduler, 1)
        assert (await client.post("/abort_request", json=body)).status_code == 200
        answer = await generation
        assert answer.status_code == 200
        reason = answer.json()["meta_info"]["finish_reason"]
        assert (reason["type"], reason["message"]) == ("abort", "Aborted")

    talk(scheduler, conversation)


@pytest.mark.parametrize("body", [{}, {"rid": ""}, {"rid": None}])
def test_an_abort_of_nobody_ends_nothing(scheduler: Scheduler, body: dict[str, Any]) -> None:
    async def conversation(client: httpx.AsyncClient) -> None:
        request = {"input_ids": [3], "rid": "_me", "sampling_params": LONG}
        generation = asyncio.ensure_future(client.post("/generate", json=request))
        await until_running(scheduler, 1)
        assert (await client.post("/abort_request", json=body)).status_code == 200
        assert (await client.get("/server_info")).json()["internal_states"][0]["num_running_reqs"] == 1
        await client.post("/abort_request", json={"abort_all": True})
        await generation

    talk(scheduler, conversation)


def test_the_load_tells_what_runs_and_what_waits(scheduler: Scheduler) -> None:
    """The last token of what runs is not in the cache; of what was put back nothing is."""

    async def conversation(client: httpx.AsyncClient) -> None:
        request = {"input_ids": [3] * 5, "sampling_params": LONG}
        generation = asyncio.ensure_future(client.post("/generate", json=request))
        await until_running(scheduler, 1)
        loads = []
        for mode in ("in_place", "retract"):
            await client.post("/pause_generation", json={"mode": mode})
            loads += (await client.get("/v1/loads?include=core")).json()["loads"]
        names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "num_waiting_uncached_tokens")
        running, waiting = (tuple(load[name] for name in names) for load in loads)
        num_cached = running[2]
        assert num_cached >= 5
        assert (running, waiting) == ((1, 0, num_cached, 0), (0, 1, 0, num_cached + 1))
        await client.post("/abort_request", json={"abort_all": True})
        await generation

    talk(scheduler, conversation)


@pytest.mark.parametrize(
    ("query", "words"), [("include=all,nothing", "sections: nothing"), ("format=prometheus", "format prometheus")]
)
def test_a_load_of_another_form_is_refused_by_name(scheduler: Scheduler, query: str, words: str) -> None:
    answer = ask(scheduler, "GET", f"/v1/loads?{query}")
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True)


def test_flushing_is_refused_while_requests_run(scheduler: Scheduler) -> None:
    async def conversation(client: httpx.AsyncClient) -> None:
        assert (await client.post("/flush_cache")).status_code == 200
        generation = asyncio.ensure_future(client.post("/generate", json={"input_ids": [3], "sampling_params": LONG}))
        await until_running(scheduler, 1)
        refusal = await client.post("/flush_cache")
        assert (refusal.status_code, "running or waiting" in refusal.text) == (400, True)
        await client.post("/abort_request", json={"abort_all": True})
        await generation

    talk(scheduler, conversation)


def test_the_version_can_be_renamed(scheduler: Scheduler) -> None:
    answer = ask(scheduler, "POST", "/update_weight_version", {"new_version": "x"}).json()
    assert (answer["success"], answer["new_version"]) == (True, "x")
    assert ask(scheduler, "GET", "/model_info").json()["weight_version"] == "x"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/pause_generation", {"mode": "later"}, "mode must be one of abort, retract, in_place"),
        ("/update_weights_from_disk", {}, "model_path must be a string"),
        ("/abort_request", {"rid": 3}, "int `3` for `rid`, expected a string"),
        ("/abort_request", {"abort_all": "x"}, "str `x` for `abort_all`, expected a boolean"),
        ("/update_weight_version", {"new_version": 3}, "new_version must be a string"),
        ("/pause_generation", [], "expected a JSON object"),
    ],
)
def test_control_requests_of_the_wrong_form_are_refused(scheduler: Scheduler, path: str, body: Any, words: str) -> None:
    answer = ask(scheduler, "POST", path, body)
    assert (answer.status_code, words in answer.json()["error"]) == (400, True)


@pytest.mark.parametrize("path", ["/generate", "/pause_generation", "/abort_request"])
def test_no_more_is_read_of_a_request_than_is_taken(
    scheduler: Scheduler, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who sends in chunks does not say how much it will be: without a limit the server's memory is it."""
    monkeypatch.setattr(exchange, "MAX_BODY_BYTES", 1000)
    num_read = 0

    async def conversation(client: httpx.AsyncClient) -> None:
        async def parts() -> AsyncIterator[bytes]:
            nonlocal num_read
            for _ in range(100):
                num_read += 1
                yield b" " * 100

        answer = await client.post(path, content=parts())
        assert (answer.status_code, "more than the permitted 1000 bytes" in answer.text) == (400, True)

    talk(scheduler, conversation)
    assert num_read == 11


def test_a_stream_says_what_ended_the_engine(scheduler: Scheduler) -> None:
    def step_without_memory(*_: object, **__: object) -> torch.Tensor:
        raise NoMemoryError("lower deployment.max_running_requests")

    scheduler.decoder.step = step_without_memory  # type: ignore[method-assign]
    events = ask(scheduler, "POST", "/generate", {"input_ids": [3], "stream": True}).text.split("\n\n")
    assert json.loads(events[0].removeprefix("data: ")) == {
        "error": {"message": "lower deployment.max_running_requests", "code": 400}
    }
    assert events[1] == "data: [DONE]"


def test_health_follows_the_generation_thread(scheduler: Scheduler) -> None:
    assert ask(scheduler, "GET", "/health").status_code == 200
    assert ask(scheduler, "GET", "/health_generate").status_code == 200

    def broken_step(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("out of luck")

    scheduler.decoder.step = broken_step  # type: ignore[method-assign]
    failed = ask(scheduler, "POST", "/generate", {"input_ids": [3]})
    assert (failed.status_code, "out of luck" in failed.json()["error"]["message"]) == (503, True)
    assert ask(scheduler, "GET", "/health").status_code == 503
    assert ask(scheduler, "GET", "/health_generate").status_code == 503


def test_server_info_names_the_limits(scheduler: Scheduler) -> None:
    info = ask(scheduler, "GET", "/server_info").json()
    assert (info["context_length"], info["max_running_requests"], info["dtype"]) == (2048, 8, "float32")
    assert info["internal_states"][0]["num_running_reqs"] == 0


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback_addresses_are_told_from_others(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_an_address_beyond_this_machine_needs_a_key(model_dir: Path) -> None:
    with pytest.raises(InputError, match="needs an API key: set ROLLOUTS_API_KEY, or listen on"):
        serve(model_dir, port=0, host="0.0.0.0")


def test_a_key_that_no_request_can_carry_is_refused(model_dir: Path) -> None:
    with pytest.raises(InputError, match="which an HTTP header cannot carry"):
        serve(model_dir, port=0, api_key="schlüssel")


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer sesam", "Bearer sesame2", "sesame", "bearer sesame"])
def test_a_request_without_the_key_gets_nothing(scheduler: Scheduler, given: str) -> None:
    transport = httpx.ASGITransport(Gate(build_app(scheduler), "sesame"))

    async def ask_with(authorization: str) -> int:
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return (await client.get("/model_info", headers={"Authorization": authorization})).status_code

    assert asyncio.run(ask_with(given)) == 401
    assert asyncio.run(ask_with("Bearer sesame")) == 200
