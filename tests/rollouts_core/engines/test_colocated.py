"""Pins the order in which engines and trainer have the memory of GPUs that they share.

Without it a trainer begins while an engine holds the memory, or an engine generates from weights that are not there:
SGLang ends at that, and what vLLM gives means nothing. The servers here are the embedded engine behind a gate that
holds it to what SGLang wants, and a script of vLLM's answers; tests/engines asks the real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from rollouts_core.algorithms.loss import Metrics, create_policy_loss
from rollouts_core.backends.protocol import TrainFuture
from rollouts_core.backends.pytorch import PyTorchTrainingBackend, create_pytorch_backend
from rollouts_core.batch import TrainBatch
from rollouts_core.config import (
    Config,
    DeploymentConfig,
    InFlight,
    ModelConfig,
    RLOptimConfig,
    RLTrainingConfig,
    RolloutConfig,
    SamplingConfig,
)
from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.data.dataset import load_prompts_from_jsonl
from rollouts_core.embedded.app import build_app
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.scheduler import Scheduler
from rollouts_core.engines import (
    EnginePool,
    GenerationRequest,
    InFlightEngine,
    PublishTarget,
    SGLangEngine,
    VLLMEngine,
    memory_handed_over,
)
from rollouts_core.errors import EngineError
from rollouts_core.rl import run_rl_training
from rollouts_core.rollout.generate import complete_request, create_engine_generate_fn
from rollouts_core.rollout.manager import AsyncRolloutManager
from rollouts_core.types import Sample

PHASES = {
    "/generate": "generate",
    "/release_memory_occupation": "release",
    "/resume_memory_occupation": "resume",
    "/update_weights_from_segments": "publish",
    "/update_weights_from_disk": "publish",
}
STEP = ["generate", "release", "train", "cache", "resume", "publish"]
REQUEST = GenerationRequest(prompt_tokens=[4, 8], sampling=SamplingConfig(max_new_tokens=4), stop_token_ids=(), seed=0)


@dataclass
class Gate(httpx.AsyncBaseTransport):
    """The way to an embedded engine that wants to be called as an SGLang with --enable-memory-saver does."""

    scheduler: Scheduler
    phases: list[str]
    broken: list[str] = field(default_factory=list)
    is_released: bool = False
    has_weights: bool = True

    def __post_init__(self) -> None:
        self.app = httpx.ASGITransport(app=build_app(self.scheduler))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        phase = PHASES.get(path, "")
        if phase:
            self.phases.append(phase)
        self._check(phase)
        if path == "/flush_cache":
            assert request.url.params["timeout"] == "60"
        if phase in ("release", "resume"):
            self.is_released = phase == "release"
            self.has_weights = False
        response = await self.app.handle_async_request(request)
        if phase == "publish":
            self.has_weights = True
        return response

    def _check(self, phase: str) -> None:
        wrong = {
            "generate": self.is_released or not self.has_weights,
            "publish": self.is_released,
            "resume": not self.is_released,  # SGLang ends at that
            "release": self.is_released or self.scheduler.num_running > 0,  # and at that
        }
        if wrong.get(phase):
            self.broken.append(f"{phase} after {self.phases[:-1][-3:]}")


class NotedBackend(PyTorchTrainingBackend):
    """A backend that says when it trains and gives memory back."""

    phases: list[str]

    def forward_backward(self, batch: TrainBatch) -> TrainFuture[Metrics]:
        self.phases.append("train")
        return super().forward_backward(batch)

    def release_cache(self) -> TrainFuture[None]:
        self.phases.append("cache")
        return super().release_cache()


def even_digits(sample: Sample) -> float:
    return sum(character in "02468" for character in sample.response)


def nothing(_: Sample) -> float:
    return 0.0


def train(
    base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, folder: Path, rollout: RolloutConfig, num_engines: int
) -> tuple[list[str], list[Gate]]:
    """Two steps with colocated engines; what happened in which order, and the gates of the engines."""
    phases: list[str] = []
    config = RLTrainingConfig(num_steps=2, optim=RLOptimConfig(lr=1e-3, schedule="constant"))
    loss_fn = create_policy_loss(config.loss)
    backend = create_pytorch_backend(base_model, config.optim, loss_fn, num_steps=2)
    backend.__class__ = NotedBackend
    backend.phases = phases  # type: ignore[attr-defined]

    async def run(gates: Sequence[Gate]) -> None:
        clients = [SGLangEngine(f"http://engine-{place}", transport=gate) for place, gate in enumerate(gates)]
        engine = InFlightEngine(EnginePool(clients) if len(clients) > 1 else clients[0], rollout.in_flight)
        prompts = load_prompts_from_jsonl(Path(base_model.path).parent / "prompts.jsonl")
        generate_fn = create_engine_generate_fn([engine], tokenizer, rollout)
        target = PublishTarget(
            weights_dir=folder / "weights", model_config=Path(base_model.path) / "config.json", prefix="test"
        )
        async with AsyncRolloutManager(DataBuffer(prompts), rollout, generate_fn=generate_fn) as manager:
            await run_rl_training(
                backend, manager.data_buffer, manager, [engine], config, target=target, is_colocated=True
            )
        await engine.aclose()

    schedulers = [
        Scheduler(Decoder(Path(base_model.path), num_slots=16), model_dir=Path(base_model.path))
        for _ in range(num_engines)
    ]
    gates = [Gate(scheduler, phases) for scheduler in schedulers]
    try:
        asyncio.run(run(gates))
    finally:
        for scheduler in schedulers:
            scheduler.close()
    return [phase for phase, _ in groupby(phases)], gates


ROLLOUT = RolloutConfig(
    batch_size=2, n_samples_per_prompt=4, sampling=SamplingConfig(max_new_tokens=8), reward_fn=even_digits
)


@pytest.mark.parametrize("num_engines", [1, 2])
def test_engines_rest_while_the_trainer_trains_and_have_new_weights_before_they_generate(
    base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, num_engines: int
) -> None:
    phases, gates = train(base_model, tokenizer, tmp_path, ROLLOUT, num_engines)
    assert [gate.broken for gate in gates] == [[]] * num_engines
    assert phases == ["release", "cache", "resume", "publish", *STEP, *STEP]


def test_after_a_step_that_trained_nothing_the_engines_are_given_their_weights_again(
    base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rollout = ROLLOUT.model_copy(update={"reward_fn": nothing})
    phases, [gate] = train(base_model, tokenizer, tmp_path, rollout, 1)
    assert gate.broken == []
    idle_step = [phase for phase in STEP if phase != "train"]
    assert phases == ["release", "cache", "resume", "publish", *idle_step, *idle_step]


@pytest.mark.parametrize("in_flight", ["finish", "abort", "continue"])
def test_requests_under_way_end_before_memory_is_handed_over_and_new_ones_wait_for_weights(
    base_model: ModelConfig, in_flight: InFlight
) -> None:
    model_dir = Path(base_model.path)

    async def use(gate: Gate) -> list[str]:
        async with SGLangEngine("http://engine", transport=gate) as client:
            engine = InFlightEngine(client, in_flight)
            await engine.load_weights(model_dir, "v1")
            under_way = asyncio.ensure_future(complete_request(engine, REQUEST))
            while not gate.scheduler.num_running and not under_way.done():
                await asyncio.sleep(0)
            await engine.release_memory()
            waiting = asyncio.ensure_future(engine.generate([REQUEST]))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await engine.resume_memory()
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await engine.load_weights(model_dir, "v2")
            [completion] = await asyncio.wait_for(waiting, 60)
            assert len((await asyncio.wait_for(under_way, 60)).tokens) > 0
            return [version for version, _, _ in completion.version_spans]

    with Scheduler(Decoder(model_dir, num_slots=4), model_dir=model_dir) as scheduler:
        gate = Gate(scheduler, [])
        assert asyncio.run(use(gate)) == ["v2"]
    assert gate.broken == []


def test_an_engine_that_was_started_anew_meanwhile_is_not_told_to_take_back_what_it_has(
    base_model: ModelConfig,
) -> None:
    model_dir = Path(base_model.path)

    async def use(gate: Gate) -> None:
        async with SGLangEngine("http://engine", transport=gate) as client:
            await client.load_weights(model_dir, "v1")
            await client.release_memory()
            gate.is_released = False
            gate.scheduler.update_weights(model_dir, weight_version="default").result(10)  # it came back
            await client.resume_memory()
            await client.load_weights(model_dir, "v2")
            await client.generate([REQUEST])

    with Scheduler(Decoder(model_dir, num_slots=4), model_dir=model_dir) as scheduler:
        gate = Gate(scheduler, [])
        asyncio.run(use(gate))
    assert gate.broken == []
    assert "resume" not in gate.phases


def test_a_step_that_fails_leaves_the_engines_with_their_memory(base_model: ModelConfig) -> None:
    model_dir = Path(base_model.path)
    optim = RLOptimConfig(schedule="constant")
    backend = create_pytorch_backend(base_model, optim, create_policy_loss(RLTrainingConfig().loss), num_steps=1)

    async def fail(gate: Gate) -> None:
        async with SGLangEngine("http://engine", transport=gate) as client:
            with pytest.raises(ArithmeticError):
                async with memory_handed_over(backend, [client], is_colocated=True):
                    raise ArithmeticError

    with Scheduler(Decoder(model_dir, num_slots=4), model_dir=model_dir) as scheduler:
        gate = Gate(scheduler, [])
        asyncio.run(fail(gate))
    assert gate.phases == ["release", "resume"]


def test_vllm_drops_its_weights_and_is_woken_with_all_that_it_had() -> None:
    seen: list[tuple[str, dict[str, list[str]]]] = []
    model_config: dict[str, Any] = {"enable_sleep_mode": True}  # Any: JSON
    answers: dict[str, Any] = {  # Any: JSON
        "/server_info": {"vllm_config": {"model_config": model_config}},
        "/weight_info": {"weight_version": "v1"},
    }

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            params = request.url.params
            seen.append((request.url.path, {name: params.get_list(name) for name in params}))
        return httpx.Response(200, json=answers.get(request.url.path, {}))

    async def use() -> None:
        async with VLLMEngine("http://engine", transport=httpx.MockTransport(answer)) as engine:
            await engine.release_memory()
            await engine.resume_memory()
            model_config["enable_sleep_mode"] = False
            with pytest.raises(EngineError, match="started without --enable-sleep-mode"):
                await engine.release_memory()

    asyncio.run(use())
    assert seen == [("/sleep", {"level": ["2"], "mode": ["wait"]}), ("/wake_up", {})]


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValidationError, match="have none: remove colocated, or name the same GPUs"):
        DeploymentConfig(colocated=True, trainer_gpu_ranks=(0,), engine_gpu_ranks=(1,))
    assert DeploymentConfig(colocated=True, trainer_gpu_ranks=(0, 1), engine_gpu_ranks=(0, 1)).colocated
    settings: dict[str, Any] = {  # Any: settings of several types
        "mode": "rl",
        "model": {"path": "m"},
        "data": {"prompts": "p", "selection": "s", "heldout": "h"},
        "deployment": {"colocated": True},
    }
    Config.model_validate(settings)
    with pytest.raises(ValidationError, match=r"rollout\.max_staleness 1 they would generate during training"):
        Config.model_validate({**settings, "rollout": {"max_staleness": 1}})
    with pytest.raises(ValidationError, match=r"training\.rl\.sync_every must be 1, found 2"):
        Config.model_validate({**settings, "training": {"rl": {"sync_every": 2}}})
