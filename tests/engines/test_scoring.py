"""Pins that log-probs of given tokens are those of the model, from every server that a user can ask.

Without it a teacher would teach, and multiple choice would be graded, by log-probs of other tokens or positions.
"""

from __future__ import annotations

import asyncio

import pytest
import torch

from rollouts_core.config import SamplingConfig
from rollouts_core.engines import Completion, GenerationRequest, ScoredTokens, ScoringRequest
from rollouts_core.errors import EngineError
from rollouts_core.quickstart import build_character_tokenizer
from tests.engines.models import SavedModel
from tests.engines.servers import Server
from tests.rollouts_core.embedded.tiny_models import expected_logits

pytestmark = pytest.mark.timeout(400)

VOCAB_SIZE = len(build_character_tokenizer())
TOLERANCE = 1e-4
"""Nats. All three engines compute in float32 here, as transformers does, but add in other orders."""


def tokens_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist()


REQUESTS = [
    ScoringRequest(tokens=tokens_of(2, 0)),
    ScoringRequest(tokens=tokens_of(40, 1), start=39, token_ids=(7, 3, 20)),
    ScoringRequest(tokens=tokens_of(300, 2), num_top=20),
    ScoringRequest(tokens=tokens_of(300, 2), start=250, num_top=3, token_ids=(5,)),
    ScoringRequest(tokens=tokens_of(17, 3), start=4, num_top=1, token_ids=(9, 9, 2)),
]


def check_scores(saved: SavedModel, request: ScoringRequest, scored: ScoredTokens) -> None:
    """Compare everything in an answer with a forward pass of transformers."""
    expected_TV = expected_logits(saved.model, request.tokens).log_softmax(-1)[request.start - 1 : -1]
    picked = expected_TV.gather(-1, torch.tensor(request.tokens[request.start :])[:, None])[:, 0]
    assert scored.logprobs == pytest.approx(picked.tolist(), abs=TOLERANCE)
    for expected_V, top, named in zip(expected_TV, scored.top_logprobs, scored.token_ids_logprobs, strict=True):
        assert list(top.values()) == pytest.approx(expected_V.topk(request.num_top).values.tolist(), abs=TOLERANCE)
        assert {**top, **named} == pytest.approx(
            {token: float(expected_V[token]) for token in (*top, *request.token_ids)}, abs=TOLERANCE
        )
        assert list(named) == list(dict.fromkeys(request.token_ids))


def test_scores_of_given_tokens_are_those_of_transformers(server: Server, start: SavedModel) -> None:
    """Also the second time, when the engine has the tokens in its cache."""

    async def score_twice() -> list[list[ScoredTokens]]:
        async with server.client() as engine:
            await engine.load_weights(start.directory, "start-0")
            return [await engine.score(REQUESTS) for _ in range(2)]

    for answers in asyncio.run(score_twice()):
        for request, scored in zip(REQUESTS, answers, strict=True):
            check_scores(start, request, scored)
            assert scored.version == "start-0"


def test_a_sampled_completion_has_the_scores_that_it_was_sampled_with(server: Server, start: SavedModel) -> None:
    prompt = tokens_of(30, 4)
    request = GenerationRequest(
        prompt_tokens=prompt, sampling=SamplingConfig(max_new_tokens=20), stop_token_ids=(), seed=3
    )

    async def sample_and_score() -> tuple[Completion, ScoredTokens]:
        async with server.client() as engine:
            await engine.load_weights(start.directory, "start-0")
            [completion] = await engine.generate([request])
            [scored] = await engine.score([ScoringRequest(tokens=prompt + completion.tokens, start=len(prompt))])
            return completion, scored

    completion, scored = asyncio.run(sample_and_score())
    assert scored.logprobs == pytest.approx(completion.logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("server", [pytest.param("vllm", marks=pytest.mark.engine)], indirect=True)
def test_more_most_likely_tokens_than_vllm_returns_are_an_error_with_the_needed_argument(server: Server) -> None:
    async def score() -> None:
        async with server.client() as engine:
            await engine.score([ScoringRequest(tokens=[4, 8], num_top=21)])

    with pytest.raises(EngineError, match=r"at most 20 of the most likely tokens, not 21.*--max-logprobs 21"):
        asyncio.run(score())
