"""Pins what training relies on, against every server that it can use: this project's own, SGLang, and vLLM.

Without it RL trains on log-probs of another distribution or of other weights than it believes, and nothing shows it
but a reward that does not rise.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import torch

from rollouts.flows.preflight import served_model
from rollouts.infra.engines import has_generated, resume_generation
from rollouts_core.engines import Completion
from rollouts_core.errors import EngineError, WeightSyncError
from rollouts_core.rollout.generate import continue_request, sampling_seed
from rollouts_core.types import Status
from tests.engines.asking import (
    LOGPROB_TOLERANCE,
    PROMPT,
    Engine,
    ask,
    num_running,
    versions_of,
    with_client,
    worst_gap,
)
from tests.engines.models import SavedModel, make, save
from tests.engines.servers import CONTEXT_LENGTH, Server
from tests.rollouts_core.embedded.tiny_models import expected_logits

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_of_the_distribution_that_was_sampled_from(
    server: Server, start: SavedModel, temperature: float
) -> None:
    requests = [ask(PROMPT[: 2 + place], temperature=temperature, seed=place) for place in range(4)]

    async def load_and_generate(engine: Engine) -> list[Completion]:
        await engine.load_weights(start.directory, "start-0")
        return await engine.generate(requests)

    completions = with_client(server, load_and_generate)
    for request, completion in zip(requests, completions, strict=True):
        assert len(completion.tokens) == len(completion.logprobs) > 0
        assert completion.status in (Status.TRUNCATED, Status.COMPLETED)
        assert worst_gap(start, request, completion) < LOGPROB_TOLERANCE


def test_each_completion_has_its_own_temperature(server: Server, start: SavedModel) -> None:
    requests = [ask(temperature=temperature, num_tokens=8) for temperature in (0.0, 2.0, 0.5)]

    async def load_and_generate(engine: Engine) -> list[Completion]:
        await engine.load_weights(start.directory, "start-0")
        return await engine.generate(requests)

    completions = with_client(server, load_and_generate)
    for request, completion in zip(requests, completions, strict=True):
        assert worst_gap(start, request, completion) < LOGPROB_TOLERANCE
    greedy = completions[0].tokens
    assert greedy == expected_logits(start.model, [*PROMPT, *greedy])[len(PROMPT) - 1 : -1].argmax(-1).tolist()


def test_ids_that_the_tokenizer_does_not_have_are_left_out_of_the_distribution(
    server: Server, start: SavedModel
) -> None:
    """As for a model whose vocabulary is padded: here the model's last ids count as padding."""
    num_known = 20
    requests = [replace(ask(num_tokens=40, temperature=0.7, seed=seed), num_tokens=num_known) for seed in range(4)]

    async def load_and_generate(engine: Engine) -> list[Completion]:
        await engine.load_weights(start.directory, "start-0")
        return await engine.generate(requests)

    for request, completion in zip(requests, with_client(server, load_and_generate), strict=True):
        assert max(completion.tokens) < num_known
        logits = expected_logits(start.model, [*request.prompt_tokens, *completion.tokens])
        logprobs = (logits[len(request.prompt_tokens) - 1 : -1, :num_known] / 0.7).log_softmax(-1)
        expected = logprobs.gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
        assert float((expected - torch.tensor(completion.logprobs)).abs().max()) < LOGPROB_TOLERANCE


def test_the_rest_of_a_completion_is_not_drawn_by_the_numbers_of_its_beginning(server: Server, tmp_path: Path) -> None:
    """Every token is as probable as any: by the same numbers, the same ones would follow."""
    undecided = save(make(2, initializer_range=1e-3), tmp_path / "undecided")
    wholes = [ask(num_tokens=2, seed=seed) for seed in range(16)]

    async def break_off(engine: Engine) -> tuple[list[Completion], list[Completion]]:
        await engine.load_weights(undecided.directory, "undecided-1")
        begun = await engine.generate([ask(num_tokens=1, seed=seed) for seed in range(16)])
        rests = [continue_request(whole, first.tokens) for whole, first in zip(wholes, begun, strict=True)]
        return begun, await engine.generate(rests)

    pairs = zip(*with_client(server, break_off), strict=True)
    assert sum(first.tokens == rest.tokens for first, rest in pairs) < 8


def test_tokens_are_drawn_as_often_as_the_model_says(server: Server, tmp_path: Path) -> None:
    """Of many completions with seeds as a training gives them: the first token, and the second one after each first."""
    pointed = save(make(3, initializer_range=0.3), tmp_path / "pointed")
    requests = [ask(num_tokens=2, seed=sampling_seed(0, group, index)) for group in range(100) for index in range(8)]

    async def load_and_generate(engine: Engine) -> list[Completion]:
        await engine.load_weights(pointed.directory, "pointed-3")
        return [each for k in range(0, 800, 80) for each in await engine.generate(requests[k : k + 80])]

    drawn = [completion.tokens for completion in with_client(server, load_and_generate)]
    first = expected_logits(pointed.model, PROMPT)[-1].softmax(-1)
    after = [expected_logits(pointed.model, [*PROMPT, token])[-1].softmax(-1) for token in range(len(first))]
    went_on = [tokens for tokens in drawn if len(tokens) == 2]  # others drew the model's own end
    assert fit_of_draws([tokens[0] for tokens in drawn], first * len(drawn)) > 1e-4
    given_firsts = torch.stack([after[first] for first, _ in went_on]).sum(0)
    assert fit_of_draws([second for _, second in went_on], given_firsts) > 1e-4


def fit_of_draws(drawn: list[int], expected: torch.Tensor) -> float:
    """Pearson's p-value of draws against the count that is expected of each token [V]; rare ones are taken together."""
    counts = torch.tensor(drawn).bincount(minlength=len(expected))
    rare = expected < 5
    counts, expected = (torch.cat([each[~rare], each[rare].sum()[None]]) for each in (counts, expected))
    statistic = ((counts - expected) ** 2 / expected.clamp(min=1e-9)).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2), statistic / 2))


def test_a_stop_token_ends_a_completion_and_is_part_of_it(server: Server, start: SavedModel) -> None:
    async def generate_twice(engine: Engine) -> tuple[Completion, Completion]:
        await engine.load_weights(start.directory, "start-0")
        [free] = await engine.generate([ask(temperature=0.0)])
        [stopped] = await engine.generate([ask(temperature=0.0, stop=(free.tokens[3],))])
        return free, stopped

    free, stopped = with_client(server, generate_twice)
    assert stopped.tokens == free.tokens[: free.tokens.index(free.tokens[3]) + 1]
    assert (free.status, stopped.status) == (Status.TRUNCATED, Status.COMPLETED)


def test_loaded_weights_are_served_from_then_on_under_their_version(
    server: Server, start: SavedModel, trained: SavedModel
) -> None:
    """Also for prompts that the server has keys and values of, computed by the old weights."""

    async def load_both(engine: Engine) -> tuple[list[Completion], list[Completion]]:
        await engine.load_weights(start.directory, "start-1")
        before = await engine.generate([ask(PROMPT * 8)])
        await engine.load_weights(trained.directory, "trained-1")
        return before, await engine.generate([ask(PROMPT * 8)])

    before, after = with_client(server, load_both)
    assert (versions_of(before), versions_of(after)) == ({"start-1"}, {"trained-1"})
    assert worst_gap(start, ask(PROMPT * 8), before[0]) < LOGPROB_TOLERANCE
    assert worst_gap(trained, ask(PROMPT * 8), after[0]) < LOGPROB_TOLERANCE
    assert worst_gap(start, ask(PROMPT * 8), after[0]) > 0.5


def test_an_update_amid_completions_mixes_no_weights_and_each_completion_says_its_version(
    server: Server, start: SavedModel, trained: SavedModel
) -> None:
    requests = [ask([*PROMPT, place], temperature=0.0, num_tokens=400) for place in range(2, 10)]

    async def update_meanwhile(engine: Engine) -> list[Completion]:
        await engine.load_weights(start.directory, "start-2")
        under_way = asyncio.ensure_future(engine.generate(requests))
        await asyncio.sleep(0.05)
        await engine.load_weights(trained.directory, "trained-2")
        return [*await under_way, *await engine.generate(requests)]

    completions = with_client(server, update_meanwhile)
    served = {"start-2": start, "trained-2": trained}
    for request, completion in zip(requests * 2, completions, strict=True):
        [version] = versions_of([completion])
        assert worst_gap(served[version], request, completion) < LOGPROB_TOLERANCE
    assert versions_of(completions[len(requests) :]) == {"trained-2"}


def test_requests_that_nobody_waits_for_any_more_are_ended(server: Server) -> None:
    requests = [ask([*PROMPT, place], temperature=0.0, num_tokens=550) for place in range(2, 10)] * 12

    async def cancel_amid(engine: Engine) -> int:
        under_way = asyncio.ensure_future(engine.generate(requests))
        with anyio.fail_after(30):
            while (most := await asyncio.to_thread(num_running, server)) == 0:
                assert not under_way.done()
        under_way.cancel()
        with anyio.fail_after(30):
            while await asyncio.to_thread(num_running, server):
                await asyncio.sleep(0.05)
        return most

    assert with_client(server, cancel_amid) > 0


def test_a_prompt_that_does_not_fit_is_refused_by_the_engines_name_and_the_engine_goes_on(
    server: Server,
) -> None:
    async def ask_too_much(engine: Engine) -> list[Completion]:
        for num_prompt, num_tokens in ((CONTEXT_LENGTH + 100, 2), (CONTEXT_LENGTH - 4, 64)):
            with pytest.raises(EngineError, match=server.url):
                await engine.generate([ask([4] * num_prompt, num_tokens=num_tokens)])
        return await engine.generate([ask()])

    assert with_client(server, ask_too_much)[0].tokens


def test_a_token_that_the_model_does_not_have_is_refused_before_it_ends_the_engine(
    server: Server, start: SavedModel
) -> None:
    async def ask_for_a_foreign_token(engine: Engine) -> list[Completion]:
        await engine.load_weights(start.directory, "start-3")
        with pytest.raises(EngineError, match=rf"{server.url}: a prompt has the token id 29, the served model has 29"):
            await engine.generate([ask([4, 29])])
        return await engine.generate([ask()])

    assert with_client(server, ask_for_a_foreign_token)[0].tokens


@pytest.mark.parametrize(("shape", "found"), [({"vocab_size": 40}, "vocab_size 29"), ({"hidden_size": 64}, "hidden")])
def test_a_model_of_other_shapes_is_refused_and_the_engine_goes_on(
    server: Server, start: SavedModel, tmp_path: Path, shape: dict[str, int], found: str
) -> None:
    other = save(make(2, **shape), tmp_path / "other")

    async def load_the_other(engine: Engine) -> list[Completion]:
        await engine.load_weights(start.directory, "start-4")
        with pytest.raises(WeightSyncError, match=f"{server.url} serves a model with {found}"):
            await engine.load_weights(other.directory, "other-4")
        return await engine.generate([ask()])

    completions = with_client(server, load_the_other)
    assert versions_of(completions) == {"start-4"}
    assert worst_gap(start, ask(), completions[0]) < LOGPROB_TOLERANCE


def test_the_checks_before_a_run_recognise_the_engine_by_the_model_it_serves(server: Server) -> None:
    served = served_model(server.url)
    assert served is not None and (served / "config.json").is_file()


PAUSES: dict[str, tuple[str, dict[str, Any]]] = {  # Any: arguments of `httpx.post`
    "embedded": ("/pause_generation", {"json": {"mode": "in_place"}}),
    "sglang": ("/pause_generation", {"json": {"mode": "in_place"}}),
    "vllm": ("/pause", {"params": {"mode": "keep"}}),
}


def test_a_server_that_a_killed_trainer_left_paused_generates_again_when_it_is_resumed(server: Server) -> None:
    engine = server.job.engine.spec
    path, arguments = PAUSES[server.job.engine.kind]
    with httpx.Client(timeout=30.0) as client:
        resume_generation(client, engine.resume_paths, server.url)  # harmless where nothing is paused
        assert has_generated(client, engine.probe, server.url, timeout_s=30.0)
        assert client.post(f"{server.url}{path}", **arguments).status_code == 200
        assert not has_generated(client, engine.probe, server.url, timeout_s=1.0)
        resume_generation(client, engine.resume_paths, server.url)
        assert has_generated(client, engine.probe, server.url, timeout_s=30.0)


@pytest.mark.parametrize(
    "server",
    [
        pytest.param("embedded", marks=pytest.mark.slow),
        pytest.param("sglang", marks=[pytest.mark.engine, pytest.mark.matrix]),
        pytest.param("vllm", marks=pytest.mark.engine),
    ],
    indirect=True,
)
def test_a_server_that_was_killed_and_came_back_is_brought_up_to_date(server: Server, trained: SavedModel) -> None:
    """The last test of a server, so that the others do not pay for its start."""

    async def generate_around_a_kill(engine: Engine) -> list[Completion]:
        await engine.load_weights(trained.directory, "trained-5")
        under_way = asyncio.ensure_future(engine.generate([ask(temperature=0.0, num_tokens=500)]))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        return [*await under_way, *await engine.generate([ask()])]

    completions = with_client(server, generate_around_a_kill)
    assert versions_of(completions) == {"trained-5"}
    assert worst_gap(trained, ask(), completions[1]) < LOGPROB_TOLERANCE
