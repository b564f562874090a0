"""Pins that what adapters learned reaches float32 engines whole, and that what bfloat16 engines round away is known.

Without it RL samples from a policy that lacks most of the training, without a warning.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollouts_core.algorithms.loss import create_cross_entropy_loss
from rollouts_core.backends.pytorch import PyTorchTrainingBackend, create_pytorch_backend
from rollouts_core.config import (
    LoRAConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    PolicyConfig,
    RLTrainingConfig,
)
from rollouts_core.embedded.adapters import merge_published
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.engines import PublishTarget, SGLangEngine, publish_weights
from rollouts_core.engines.protocol import SegmentAccess
from rollouts_core.engines.transfer.rounding import (
    RoundingWatch,
    common_dtype,
    describe_last_rounding,
)
from rollouts_core.jobs.rl_job import describe_formats
from rollouts_core.model import weight_sample
from rollouts_core.model.lora import base_weights
from rollouts_core.model.weight_sample import ARRIVED, CHANGED, NUM_SAMPLED, measure_arrival, sample_weights
from rollouts_core.quickstart import build_character_tokenizer, build_untrained_model
from tests.rollouts_core.make import TINY_SIZE
from tests.rollouts_core.model.test_policy import take_steps
from tests.rollouts_core.served_engine import served_engine

README = PolicyConfig(precision="bfloat16", lora=LoRAConfig(rank=16, alpha=32))


class FileReader(SGLangEngine):
    """Reads weights from files alone, as SGLang does."""

    async def segment_access(self) -> SegmentAccess:
        """None."""
        return SegmentAccess.NONE


def backend_after(num_steps: int, model: ModelConfig, policy: PolicyConfig, *, lr: float) -> PyTorchTrainingBackend:
    """A backend that has taken some steps."""
    optim = OptimConfig(lr=lr)
    loss_fn = create_cross_entropy_loss()
    backend = create_pytorch_backend(model, optim, loss_fn, num_steps=10, policy=policy, device="cpu")
    take_steps(backend, range(num_steps))
    return backend


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """A random model of a width at which each number of an update is about as small as in a real one."""
    folder = tmp_path_factory.mktemp("wide")
    tokenizer = build_character_tokenizer()
    tokenizer.save_pretrained(folder)
    build_untrained_model(tokenizer, replace(TINY_SIZE, hidden_size=256, num_layers=1), seed=0).save_pretrained(folder)
    return ModelConfig(path=str(folder))


def weights_of(decoder: Decoder) -> dict[str, Tensor]:
    served = {**decoder._weights.by_name, **decoder._adapters}
    return {name: tensor.float() for name, tensor in merge_published(served).items()}


def share_of(change: dict[str, Tensor], intended: dict[str, Tensor]) -> float:
    """The part of a change along the intended one, over all numbers of all tensors."""
    along = sum(float((change[name] * each).sum()) for name, each in intended.items())
    return along / sum(float(each.square().sum()) for each in intended.values())


def test_a_float32_engine_gets_all_of_the_update_of_the_readme_and_a_bfloat16_engine_says_how_much(
    wide_model: ModelConfig, tmp_path: Path
) -> None:
    backend = backend_after(4, wide_model, README, lr=2e-5)
    config = Path(wide_model.path) / "config.json"
    target = PublishTarget(weights_dir=tmp_path, model_config=config, prefix="run")
    merged = asyncio.run(backend.get_weights().result())
    start = {name: tensor.float() for name, tensor in base_weights(backend.model).items()}
    intended = {name: merged[name].double() - start[name].double() for name in start}
    arrived = {}
    for dtype, client in ((torch.float32, SGLangEngine), (torch.bfloat16, FileReader)):
        with served_engine(Path(wide_model.path), dtype=dtype, client=client) as (engine, scheduler):
            asyncio.run(publish_weights(backend, [engine], target))
            served = weights_of(scheduler.decoder)
            arrived[dtype] = share_of({name: served[name] - start[name] for name in start}, intended)
        if dtype == torch.float32:
            assert target.rounding.take_metrics() == {}
    assert arrived[torch.float32] == pytest.approx(1, abs=1e-4)
    metrics = target.rounding.take_metrics()
    assert metrics[ARRIVED] == pytest.approx(arrived[torch.bfloat16], abs=0.02)  # a sample
    assert metrics[ARRIVED] < 0.5 and metrics[CHANGED] < 0.3


def test_all_weights_that_are_trained_in_float32_are_measured_too(base_model: ModelConfig) -> None:
    backend = backend_after(2, base_model, PolicyConfig(), lr=1e-3)
    start = sample_weights(asyncio.run(backend.get_weights().result()))
    assert measure_arrival(start, asyncio.run(backend.get_weights().result()), torch.bfloat16) is None
    weights = asyncio.run(backend.get_weights().result())
    watch, given = RoundingWatch(), dict(weights)
    watch.round_for(given, backend.start_sample, torch.bfloat16)
    assert all(given[name] is weights[name] for name in weights)  # an engine rounds them by itself
    assert 0.9 < watch.take_metrics()[ARRIVED] < 1.1


def test_another_number_format_than_the_trainers_is_said_with_its_correction() -> None:
    plain = RLTrainingConfig(policy=PolicyConfig(precision="bfloat16"))
    assert describe_formats(plain, torch.bfloat16) == describe_formats(plain, None) == ""
    assert "bfloat16, the engines in float32" in describe_formats(plain, torch.float32)
    assert describe_formats(plain, torch.float32).endswith("corrects for that by importance weights")
    uncorrected = plain.model_copy(update={"loss": LossConfig(ratio_base="old")})
    assert "nothing in training.rl.loss corrects" in describe_formats(uncorrected, torch.float32)


def test_the_share_is_the_part_along_the_update_of_what_changes_in_engines() -> None:
    start = {"kept": torch.ones(3), "moved": torch.tensor([1.0, 1.0, 1.0, 1.0])}
    step = 2**-7  # of bfloat16 above 1
    weights = {"kept": torch.ones(3), "moved": torch.tensor([1 + step, 1 + step / 4, 1.0, 1 + 0.75 * step])}
    found = measure_arrival(start, weights, torch.bfloat16)
    assert found is not None
    # Delivered are 1, 0, 0 and 1 steps; intended 1, 1/4, 0 and 3/4.
    assert found.arrived == pytest.approx((1 + 0.75) / (1 + 1 / 16 + 9 / 16))
    assert found.changed == 0.5
    exact = measure_arrival(start, weights, torch.float32)
    assert exact is not None and exact.arrived == 1
    assert measure_arrival({}, weights, torch.bfloat16) is None


def test_a_sample_says_about_what_all_numbers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    start = {name: torch.randn(600, 700, generator=generator).bfloat16() for name in "abcd"}
    weights = {name: t.float() + 0.002 * torch.randn(t.shape, generator=generator) for name, t in start.items()}
    sampled = measure_arrival(sample_weights(start), weights, torch.bfloat16)
    assert {len(tensor) for tensor in sample_weights(start).values()} == {NUM_SAMPLED}
    monkeypatch.setattr(weight_sample, "NUM_SAMPLED", 600 * 700)
    whole = measure_arrival(sample_weights(start), weights, torch.bfloat16)
    assert sampled is not None and whole is not None
    assert sampled.arrived == pytest.approx(whole.arrived, abs=0.05)
    assert sampled.changed == pytest.approx(whole.changed, abs=0.02)


def test_the_shares_do_not_depend_on_the_names_of_the_tensors() -> None:
    """Names decide the order of a set, in each process another one, and the order how a sum is rounded."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(99, generator=generator).bfloat16() for _ in range(40)]
    weights = [tensor.float() + 0.01 * torch.randn(99, generator=generator) for tensor in start]

    def named(tensors: list[Tensor], prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}.{number}": tensor for number, tensor in enumerate(tensors)}

    found = [measure_arrival(named(start, prefix), named(weights, prefix), torch.bfloat16) for prefix in "abcdefgh"]
    assert found == found[:1] * len(found)


def test_engines_of_which_one_does_not_say_its_number_format_are_given_float32(base_model: ModelConfig) -> None:
    class Silent:
        """An engine of somebody's."""

    with served_engine(Path(base_model.path), dtype=torch.bfloat16) as (engine, _):
        assert asyncio.run(common_dtype([engine, engine])) == torch.bfloat16
        assert asyncio.run(common_dtype([engine, Silent()])) is None
    assert asyncio.run(common_dtype([])) is None


def test_a_record_warns_of_what_the_last_publication_lost() -> None:
    lost = {"step": 1.0, ARRIVED: 0.36, CHANGED: 0.15}
    assert "36% of RL's change" in describe_last_rounding([lost, {"step": 2.0}])
    assert "85% of the trained weights" in describe_last_rounding([lost])
    assert describe_last_rounding([lost, lost | {ARRIVED: 0.95}]) == describe_last_rounding([]) == ""
