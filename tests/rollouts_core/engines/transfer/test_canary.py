"""Pins who answers a canary: the trainer while it has the published weights and does nothing else, else the files.

Without it the model is asked by the event loop while a thread trains it, and an engine with the right weights is
refused because the trainer has others by now, or one with wrong weights is taken.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rollouts_core.algorithms.loss import Metrics, TokenScores, create_policy_loss
from rollouts_core.backends.protocol import TrainFuture, TrainingState
from rollouts_core.backends.pytorch import PyTorchTrainingBackend, create_pytorch_backend
from rollouts_core.backends.threaded import ThreadedBackend
from rollouts_core.batch import TrainBatch
from rollouts_core.config import ModelConfig, RLOptimConfig, RLTrainingConfig, RolloutConfig, SamplingConfig
from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.data.dataset import load_prompts_from_jsonl
from rollouts_core.engines import InFlightEngine, PublishTarget, SGLangEngine
from rollouts_core.engines.protocol import SegmentAccess
from rollouts_core.engines.transfer.canary import Canary, backend_canary, checkpoint_canary
from rollouts_core.rl import run_rl_training
from rollouts_core.rollout.generate import create_engine_generate_fn
from rollouts_core.rollout.manager import AsyncRolloutManager
from rollouts_core.types import Sample, Status
from tests.rollouts_core.served_engine import served_engine

if TYPE_CHECKING:
    from rollouts_core.engines.protocol import Weights

MAX_WAIT_S = 60.0


class WatchedBackend:
    """A backend that notes which thread calls it, and whether one call begins amid another."""

    def __init__(self, backend: PyTorchTrainingBackend) -> None:
        self.backend = backend
        self.threads: dict[str, set[str]] = {}
        self.overlaps: list[str] = []
        self.in_forward_backward: Callable[[], None] = lambda: None
        self._under_way: list[str] = []

    num_ranks = 1

    @property
    def weight_version(self) -> int:
        return self.backend.weight_version

    def forward_backward(self, batch: TrainBatch) -> TrainFuture[Metrics]:
        def work() -> TrainFuture[Metrics]:
            self.in_forward_backward()
            return self.backend.forward_backward(batch)

        return self._note("forward_backward", work)

    def score(self, batch: TrainBatch, *, reference: bool = False) -> TrainFuture[TokenScores]:
        return self._note("score", lambda: self.backend.score(batch, reference=reference))

    def optim_step(self) -> TrainFuture[Metrics]:
        return self._note("optim_step", self.backend.optim_step)

    def get_weights(self) -> TrainFuture[dict[str, Tensor]]:
        return self._note("get_weights", self.backend.get_weights)

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        return self._note("load_weights", lambda: self.backend.load_weights(weights))

    def release_cache(self) -> TrainFuture[None]:
        return self._note("release_cache", self.backend.release_cache)

    def save_checkpoint(self, path: Path, state: TrainingState) -> TrainFuture[None]:
        return self._note("save_checkpoint", lambda: self.backend.save_checkpoint(path, state))

    def load_checkpoint(self, path: Path) -> TrainFuture[TrainingState]:
        return self._note("load_checkpoint", lambda: self.backend.load_checkpoint(path))

    def _note(self, call: str, work: Callable[[], Any]) -> Any:  # Any: the future of that call
        self.overlaps += [f"{call} amid {other}" for other in self._under_way]
        self.threads.setdefault(call, set()).add(threading.current_thread().name)
        self._under_way.append(call)
        try:
            return work()
        finally:
            self._under_way.remove(call)


@dataclasses.dataclass
class RecoveringEngine:
    """An engine that has to prove its weights again while the trainer computes; otherwise the real one."""

    client: SGLangEngine
    training: threading.Event
    answered: threading.Event
    answers: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    recoveries: list[asyncio.Task[None]] = dataclasses.field(default_factory=list)

    def __getattr__(self, name: str) -> Any:  # Any: whatever the client has
        return getattr(self.client, name)

    async def segment_access(self) -> SegmentAccess:
        return SegmentAccess.NONE

    async def load_weights(self, weights: Weights, version: str, canary: Canary | None = None) -> None:
        await self.client.load_weights(weights, version, canary)
        assert canary is not None
        self.recoveries.append(asyncio.create_task(self.recover(version, canary)))

    async def recover(self, version: str, canary: Canary) -> None:
        """What a recovery asks the trainer, once it is amid a step of training."""
        await asyncio.to_thread(self.training.wait, MAX_WAIT_S)
        self.training.clear()
        self.answers[version] = await canary.score([canary_sample()])
        self.answered.set()


def canary_sample() -> Sample:
    return Sample(
        prompt="",
        tokens=list(range(2, 9)),
        loss_mask=[0.0] * 3 + [1.0] * 4,
        rollout_log_probs=[0.0] * 7,
        status=Status.COMPLETED,
    )


def answer_of(canary: Canary) -> list[float]:
    async def ask() -> list[list[float]]:
        return await canary.score([canary_sample()])

    [answer] = asyncio.run(ask())
    return answer


def create_backend(base_model: ModelConfig, *, temperature: float = 1.0) -> PyTorchTrainingBackend:
    optim = RLOptimConfig(lr=1e-2, schedule="constant")
    loss_fn = create_policy_loss(RLTrainingConfig().loss)
    return create_pytorch_backend(base_model, optim, loss_fn, num_steps=2, temperature=temperature)


def even_digits(sample: Sample) -> float:
    return sum(character in "02468" for character in sample.response)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_recovery_amid_training_does_not_touch_the_model_that_is_trained(
    base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rollout = RolloutConfig(
        batch_size=2,
        n_samples_per_prompt=4,
        max_staleness=1,
        sampling=SamplingConfig(max_new_tokens=8),
        reward_fn=even_digits,
    )
    backend = WatchedBackend(create_backend(base_model))
    training, answered = threading.Event(), threading.Event()

    def let_it_recover() -> None:
        answered.clear()
        training.set()
        answered.wait(MAX_WAIT_S)

    async def train(client: SGLangEngine) -> RecoveringEngine:
        engine = RecoveringEngine(client, training, answered)
        behind = InFlightEngine(engine)
        prompts = load_prompts_from_jsonl(Path(base_model.path).parent / "prompts.jsonl")
        generate_fn = create_engine_generate_fn([behind], tokenizer, rollout)
        target = PublishTarget(
            weights_dir=tmp_path / "weights", model_config=Path(base_model.path) / "config.json", prefix="test"
        )
        async with AsyncRolloutManager(DataBuffer(prompts), rollout, generate_fn=generate_fn) as manager:
            backend.in_forward_backward = let_it_recover
            config = RLTrainingConfig(num_steps=1, optim=RLOptimConfig(lr=1e-2, schedule="constant"))
            await run_rl_training(
                backend, manager.data_buffer, manager, [behind], config, target=target, checkpoint_dir=tmp_path / "c"
            )
        training.set()
        await asyncio.gather(*engine.recoveries)  # the second when the trainer has ended
        return engine

    with served_engine(Path(base_model.path)) as (client, _):
        engine = asyncio.run(train(client))
    assert backend.overlaps == []
    threads = set().union(*backend.threads.values())
    assert len(threads) == 1, f"the backend is called by {threads}"
    assert threading.main_thread().name not in threads
    assert {"forward_backward", "optim_step", "get_weights", "save_checkpoint"} <= backend.threads.keys()
    expected = answer_of(checkpoint_canary(Path(base_model.path)))
    assert engine.answers["test-0"][0] == pytest.approx(expected, abs=1e-4)
    expected = answer_of(checkpoint_canary(tmp_path / "weights" / "test-1"))
    assert engine.answers["test-1"][0] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_answer_is_that_of_the_published_weights_after_the_trainer_trained_on(
    base_model: ModelConfig, temperature: float
) -> None:
    backend = WatchedBackend(create_backend(base_model, temperature=temperature))
    canary = backend_canary(backend, Path(base_model.path), temperature=temperature)
    before = answer_of(canary)
    assert backend.threads.pop("score")
    weights = asyncio.run(backend.get_weights().result())
    other = {name: value + 0.1 * torch.randn_like(value) for name, value in weights.items()}
    asyncio.run(backend.load_weights(other).result())
    backend.backend._steps.num_done += 1
    after = answer_of(canary)
    assert "score" not in backend.threads
    assert after == pytest.approx(before, abs=1e-4)


def test_the_thread_does_calls_in_their_order_and_its_errors_arrive_at_the_result(
    base_model: ModelConfig, tmp_path: Path
) -> None:
    async def use() -> list[str]:
        done: list[str] = []
        threaded = ThreadedBackend(create_backend(base_model))

        async def note(_: object, name: str) -> None:
            await asyncio.sleep(0.01)
            done.append(name)

        first = asyncio.ensure_future(threaded.run(partial(note, name="first")))
        await asyncio.sleep(0)
        assert threaded.is_busy
        weights = threaded.get_weights()
        assert not weights.done()
        await threaded.run(partial(note, name="second"))
        await first
        assert weights.done()
        saved = threaded.save_checkpoint(tmp_path / "step_000001", {"step": 1})
        await saved.result()
        assert (await threaded.load_checkpoint(tmp_path / "step_000001").result())["step"] == 1
        with pytest.raises(Exception, match="step_000002"):
            await threaded.load_checkpoint(tmp_path / "step_000002").result()
        await threaded.aclose()
        return done

    assert asyncio.run(use()) == ["first", "second"]
