"""Pins that ids which the tokenizer does not have are neither sampled nor part of any probability of RL.

Models pad their vocabulary. Without these tests a policy samples ids that stand for nothing, and is trained on them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from rollouts_core.algorithms.credit import RolloutScores, assign_credit
from rollouts_core.algorithms.loss import create_policy_loss
from rollouts_core.backends.create import create_backend
from rollouts_core.batch import build_batch
from rollouts_core.config import (
    LossConfig,
    ModelConfig,
    OptimConfig,
    PolicyConfig,
    RLTrainingConfig,
    RolloutConfig,
    SamplingConfig,
)
from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.embedded.app import build_app
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.offline import generate_tokens
from rollouts_core.embedded.sampling import SamplingParams
from rollouts_core.embedded.scheduler import Scheduler
from rollouts_core.engines.completion import GenerationRequest
from rollouts_core.engines.sglang import SGLangEngine
from rollouts_core.engines.transfer.canary import checkpoint_canary, prove
from rollouts_core.engines.vllm import _render_request
from rollouts_core.errors import DataError, WeightSyncError
from rollouts_core.evaluate import generate_samples
from rollouts_core.model.loading import count_token_ids, load_hf_model, load_tokenizer
from rollouts_core.rl import describe_rollouts
from rollouts_core.rollout.generate import build_pending_group, create_engine_generate_fn
from rollouts_core.rollout.manager import AsyncRolloutManager
from rollouts_core.types import Prompt, RolloutBatch, Sample, Status
from tests.rollouts_core.make import NUM_PADDED, make_sample, write_padded_model
from tests.rollouts_core.scripted import ScriptedEngine
from tests.rollouts_core.served_engine import engine_url


@pytest.fixture
def padded_model(base_model: ModelConfig, tmp_path: Path) -> ModelConfig:
    """A random model with three times the ids that its tokenizer has."""
    return write_padded_model(base_model, tmp_path / "model")


@pytest.mark.parametrize("backend", ["pytorch", "jax"])
@pytest.mark.parametrize("is_reference", [False, True])
def test_the_trainer_normalises_over_what_the_engine_samples_from(
    backend: str, is_reference: bool, padded_model: ModelConfig
) -> None:
    num_tokens = count_token_ids(load_tokenizer(padded_model))
    assert num_tokens < NUM_PADDED
    decoder = Decoder(Path(padded_model.path), num_slots=4, context_length=64)
    params = [
        SamplingParams(max_new_tokens=40, sampling_seed=i, num_tokens=num_tokens, temperature=0.7) for i in range(4)
    ]
    completions = generate_tokens(decoder, [[2, 3, 4]] * 4, params)
    assert max(token for each in completions for token in each.output_ids) < num_tokens
    trainer = create_backend(
        padded_model,
        OptimConfig(lr=1e-2),
        create_policy_loss(LossConfig()),
        num_steps=2,
        policy=PolicyConfig(backend=backend),
        temperature=0.7,
        with_reference=True,
        within_tokenizer=True,
    )
    samples = [
        make_sample([2, 3, 4, *each.output_ids], [0.0] * 3 + [1.0] * len(each.output_ids)) for each in completions
    ]
    scored = asyncio.run(
        trainer.score(build_batch([[each] for each in samples], pad_id=0), reference=is_reference).result()
    )
    for row, each in enumerate(completions):
        found = scored.logprobs_BT[row, 2 : 2 + len(each.output_ids)].tolist()
        assert found == pytest.approx(list(each.output_logprobs), abs=1e-4)


def test_weights_of_other_ids_get_no_gradient(padded_model: ModelConfig) -> None:
    num_tokens = count_token_ids(load_tokenizer(padded_model))
    trainer = create_backend(
        padded_model, OptimConfig(), create_policy_loss(LossConfig()), num_steps=2, within_tokenizer=True
    )
    batch = build_batch([[make_sample([2, 3, 4], [0, 1, 1], [0, -1, -1])]], pad_id=0, advantages=[[1.0]])
    asyncio.run(trainer.forward_backward(batch).result())
    grad_VH = trainer.model.get_output_embeddings().weight.grad  # type: ignore[attr-defined]
    assert grad_VH[:num_tokens].any()
    assert not grad_VH[num_tokens:].any()
    foreign = build_batch([[make_sample([2, 3, num_tokens], [0, 1, 1], [0, -1, -1])]], pad_id=0, advantages=[[1.0]])
    with pytest.raises(DataError, match=f"token id {num_tokens}"):
        asyncio.run(trainer.forward_backward(foreign).result())


def test_an_engine_by_url_is_asked_to_leave_out_the_other_ids(padded_model: ModelConfig) -> None:
    """The embedded engine behind its API, and a canary that compares log-probs with those of the trainer."""
    num_tokens = count_token_ids(load_tokenizer(padded_model))
    with engine_url(Path(padded_model.path)) as url:

        async def ask() -> list[int]:
            async with SGLangEngine(url, model_dir=Path(padded_model.path)) as engine:
                request = GenerationRequest(
                    prompt_tokens=[2, 3],
                    sampling=SamplingConfig(max_new_tokens=40),
                    stop_token_ids=(),
                    seed=1,
                    num_tokens=num_tokens,
                )
                [completion] = await engine.generate([request])
                canary = checkpoint_canary(Path(padded_model.path), num_tokens=num_tokens)
                assert await prove(url, engine.complete, canary) < 1e-4
                return completion.tokens

        assert max(asyncio.run(ask())) < num_tokens


def test_sglang_and_vllm_get_a_bias_against_the_other_ids(padded_model: ModelConfig) -> None:
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/generate":
            return httpx.Response(200, json={"weight_version": "default", "model_path": padded_model.path})
        bodies.append(json.loads(request.content))
        meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-1.0, 2, None]], "weight_version": "d"}
        return httpx.Response(200, json=[{"output_ids": [2], "meta_info": meta}])

    request = GenerationRequest(
        prompt_tokens=[2],
        sampling=SamplingConfig(max_new_tokens=1),
        stop_token_ids=(),
        seed=1,
        num_tokens=NUM_PADDED - 2,
    )

    async def ask() -> None:
        transport = httpx.MockTransport(answer)
        async with SGLangEngine("http://a", model_dir=Path(padded_model.path), transport=transport) as engine:
            await engine.generate([request])

    asyncio.run(ask())
    bias = {str(NUM_PADDED - 2): -100.0, str(NUM_PADDED - 1): -100.0}
    assert bodies[0]["sampling_params"][0]["logit_bias"] == bias
    assert _render_request(request, NUM_PADDED)["logit_bias"] == bias
    assert "logit_bias" not in _render_request(request, NUM_PADDED - 2)
    assert "logit_bias" not in _render_request(request, 10_000), "newer versions of vLLM take 1,024"


def test_samples_of_an_engine_that_leaves_nothing_out_are_invalid(base_model: ModelConfig) -> None:
    tokenizer = load_tokenizer(base_model)
    engine = ScriptedEngine([[count_token_ids(tokenizer)], "7"], tokenizer)
    generate = create_engine_generate_fn(
        [engine], tokenizer, RolloutConfig(environment="arithmetic", sampling=SamplingConfig(max_new_tokens=8))
    )
    prompt = Prompt(id="p", messages=({"role": "user", "content": "1"},), answer="7")
    samples = asyncio.run(generate(build_pending_group(prompt, group_index=0, size=2)))
    assert [sample.status for sample in samples] == [Status.INVALID, Status.COMPLETED]
    assert samples[0].finish_reason == "foreign_tokens"


def test_an_evaluation_samples_no_other_ids(padded_model: ModelConfig) -> None:
    prompt = Prompt(id="p", messages=({"role": "user", "content": "1"},), answer="7")
    config = RolloutConfig(environment="arithmetic", n_samples_per_prompt=4, sampling=SamplingConfig(max_new_tokens=40))
    samples = asyncio.run(generate_samples(padded_model, [prompt], config, num_slots=4))
    assert max(token for sample in samples for token in sample.tokens) < count_token_ids(load_tokenizer(padded_model))


class _Server:
    """The embedded engine as a server of others that knows no limit of ids: it drops that part of each request."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.app = build_app(scheduler)
        self.transport = httpx.ASGITransport(app=self.app)

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/generate":
            return await self.transport.handle_async_request(request)
        body = json.loads(request.content)
        for params in body["sampling_params"]:
            assert params.pop("custom_params") or params.pop("logit_bias")
        headers = {name: value for name, value in request.headers.items() if name != "content-length"}
        plain = httpx.Request("POST", request.url, headers=headers, json=body)
        answer = await self.transport.handle_async_request(plain)
        return httpx.Response(answer.status_code, headers=answer.headers, content=await answer.aread())


@contextmanager
def deaf_engine(model: ModelConfig) -> Iterator[SGLangEngine]:
    path = Path(model.path)
    with Scheduler(Decoder(path, num_slots=16), model_dir=path) as scheduler:
        yield SGLangEngine("http://a", model_dir=path, transport=httpx.MockTransport(_Server(scheduler)))


def make_rare(model: ModelConfig, *, scale: float) -> None:
    """Give the ids that the tokenizer does not have less probability."""
    hf_model = load_hf_model(model)
    head_VH = hf_model.get_output_embeddings().weight
    with torch.no_grad():
        head_VH[: count_token_ids(load_tokenizer(model))] *= scale
        head_VH[count_token_ids(load_tokenizer(model)) :] = 0.0
    hf_model.save_pretrained(model.path)


def generate_by(engine: SGLangEngine, model: ModelConfig, *, batch_size: int) -> RolloutBatch:
    tokenizer = load_tokenizer(model)
    config = RolloutConfig(
        batch_size=batch_size, n_samples_per_prompt=4, sampling=SamplingConfig(max_new_tokens=4), reward_fn=grade_all
    )
    prompts = [
        Prompt(id=f"{number}", messages=({"role": "user", "content": f"{number}"},)) for number in range(batch_size)
    ]
    num_tokens = count_token_ids(tokenizer)

    async def run() -> RolloutBatch:
        async with engine:
            canary = checkpoint_canary(Path(model.path), num_tokens=num_tokens)
            await prove("the engine", engine.complete, canary)
            manager = AsyncRolloutManager(
                DataBuffer(prompts, seed=0),
                config,
                generate_fn=create_engine_generate_fn([engine], tokenizer, config),
                num_tokens=num_tokens,
            )
            async with manager:
                return await manager.generate_batch()

    return asyncio.run(run())


def grade_all(sample: Sample) -> float:
    assert sample.status is not Status.INVALID
    return float(len(sample.tokens))


def test_what_an_engine_by_url_samples_without_leaving_out_is_counted_and_neither_graded_nor_trained(
    padded_model: ModelConfig,
) -> None:
    make_rare(padded_model, scale=60.0)
    num_tokens = count_token_ids(load_tokenizer(padded_model))
    with deaf_engine(padded_model) as engine:
        batch = generate_by(engine, padded_model, batch_size=32)
    foreign = [sample for sample in batch.samples if max(sample.tokens) >= num_tokens]
    invalid = [sample for sample in batch.samples if sample.status is Status.INVALID]
    assert invalid == foreign
    assert 0 < len(invalid) <= 6
    assert {sample.reward for sample in invalid} == {None}
    assert describe_rollouts(batch)["invalid/foreign_tokens"] == len(invalid)
    credit = assign_credit(batch.samples, batch.rewards, RLTrainingConfig(), RolloutScores())
    assert {credit.advantages[place] for place, sample in enumerate(batch.samples) if sample in invalid} == {0.0}


@pytest.mark.parametrize(
    ("scale", "error", "reason"),
    [
        (1.0, WeightSyncError, r"1\.\d+ nats per token away .* it samples token ids that the tokenizer lacks"),
        (40.0, DataError, r"are invalid, more than 5%; .* the policy sampled the token id \d+, but its tokenizer has"),
    ],
)
def test_an_engine_by_url_that_samples_many_other_ids_ends_the_run_with_the_reason(
    padded_model: ModelConfig, scale: float, error: type[Exception], reason: str
) -> None:
    make_rare(padded_model, scale=scale)
    with deaf_engine(padded_model) as engine, pytest.raises(error, match=reason):
        generate_by(engine, padded_model, batch_size=32)
