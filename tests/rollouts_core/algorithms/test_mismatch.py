"""Pins how the difference between engine and trainer is weighted, masked and measured, by hand.

Without it a limit on the wrong side, or a mean over the wrong tokens, would train on what it should leave out.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rollouts_core.algorithms.mismatch import describe_mismatch, mean_per_sample, mismatch_weights, sum_per_sample
from rollouts_core.batch import TrainBatch, build_batch
from rollouts_core.config import LossConfig, MismatchConfig
from tests.rollouts_core.make import make_random_samples, make_sample

W = [[0.25, 1.0, 4.0], [1.2, 0.9, 0.0]]
"""w of three tokens of one completion, and of two of another."""


def make_batch() -> TrainBatch:
    return build_batch([[make_sample([1, 2, 3, 4])], [make_sample([1, 2, 3])]], pad_id=0)


def log_weights() -> Tensor:
    return torch.tensor([[math.log(w) if w else 0.0 for w in row] for row in W])


def weights(**settings: object) -> list[list[float]]:
    found_BT = mismatch_weights(log_weights(), make_batch(), MismatchConfig.model_validate(settings))
    return [[round(w, 5) for w in row[:length]] for row, length in zip(found_BT.tolist(), (3, 2), strict=True)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [[1, 1, 1], [1, 1]]),
        ({"weight": "token"}, [[0.25, 1, 2], [1.2, 0.9]]),
        ({"weight": "token", "weight_low": 0.5, "weight_high": 5}, [[0.5, 1, 4], [1.2, 0.9]]),
        ({"weight": "token", "weight_low": 0.5, "weight_high": 2, "outside": "zero"}, [[0, 1, 0], [1.2, 0.9]]),
        ({"weight": "token", "weight_high": 0}, [[0.25, 1, 4], [1.2, 0.9]]),
        # products 0.25 * 1 * 4 = 1 and 1.2 * 0.9 = 1.08
        ({"weight": "sequence"}, [[1, 1, 1], [1.08, 1.08]]),
        ({"weight": "sequence", "weight_high": 1.05, "outside": "zero"}, [[1, 1, 1], [0, 0]]),
        # geometric means 1 and 1.08 ** 0.5 = 1.03923
        ({"weight": "geometric", "weight_high": 0}, [[1, 1, 1], [1.03923, 1.03923]]),
        ({"weight": "geometric", "weight_high": 1.02}, [[1, 1, 1], [1.02, 1.02]]),
        ({"mask": "token", "mask_low": 0.5, "mask_high": 2}, [[0, 1, 0], [1, 1]]),
        ({"mask": "token", "mask_low": 0.5}, [[0, 1, 1], [1, 1]]),
        ({"mask": "product", "mask_high": 1.05}, [[1, 1, 1], [0, 0]]),
        # geometric means 1 and 1.08 ** 0.5 = 1.039
        ({"mask": "geometric", "mask_low": 0.99, "mask_high": 1.01}, [[1, 1, 1], [0, 0]]),
        ({"mask": "geometric", "mask_low": 0.99, "mask_high": 1.05}, [[1, 1, 1], [1, 1]]),
        # kept completions keep the raw weights of their tokens
        (
            {"weight": "token", "weight_high": 0, "mask": "geometric", "mask_low": 0.99, "mask_high": 1.01},
            [[0.25, 1, 4], [0, 0]],
        ),
    ],
)
def test_weights_by_hand(settings: dict[str, object], expected: list[list[float]]) -> None:
    assert weights(**settings) == expected


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_an_engine_that_agrees_gives_weights_of_one(level: str) -> None:
    batch = make_batch()
    found_BT = mismatch_weights(torch.zeros(2, 3), batch, MismatchConfig(weight=level, mask="geometric", mask_low=0.9))
    assert found_BT.tolist() == [[1.0] * 3] * 2


def test_packing_does_not_change_the_weights() -> None:
    samples = make_random_samples(4)
    packed = build_batch([samples], pad_id=0)
    log_weight_BT = torch.randn(packed.loss_mask_BT.shape, generator=torch.Generator().manual_seed(0))
    config = MismatchConfig(weight="sequence", mask="geometric", mask_low=0.5, mask_high=2.0)
    together = mismatch_weights(log_weight_BT, packed, config)[0]
    start = 0
    for sample in samples:
        end = start + len(sample.tokens) - 1
        alone = mismatch_weights(log_weight_BT[:, start:end], build_batch([[sample]], pad_id=0), config)
        assert torch.allclose(alone[0], together[start:end])
        start = end


def test_means_and_sums_belong_to_the_sample_and_to_its_trained_tokens() -> None:
    first, second = make_sample([1, 2, 3], [0, 1, 0]), make_sample([4, 5, 6])
    batch = build_batch([[first, second]], pad_id=0)
    values_BT = torch.tensor([[1.0, 5.0, 2.0, 4.0]])
    assert sum_per_sample(values_BT, batch).tolist() == [[6.0, 6.0, 6.0, 6.0]]
    assert mean_per_sample(values_BT, batch).tolist() == [[1.0, 1.0, 3.0, 3.0]]


def test_an_impossible_token_gives_a_finite_weight() -> None:
    log_weight_BT = torch.tensor([[900.0, 0.0, 0.0], [-900.0, 0.0, 0.0]])
    found_BT = mismatch_weights(log_weight_BT, make_batch(), MismatchConfig(weight="sequence", weight_high=0.0))
    assert bool(torch.isfinite(found_BT).all())


def test_the_mismatch_is_measured_by_hand() -> None:
    batch = make_batch()
    config = MismatchConfig(weight="token", weight_low=0.5, weight_high=2.0, mask="token", mask_low=0.3)
    log_weight_BT = log_weights()
    described = describe_mismatch(log_weight_BT, mismatch_weights(log_weight_BT, batch, config), batch, config)
    assert float(described["mismatch_ratio_max"]) == pytest.approx(4.0)
    # k3 of engine against trainer: w - 1 - ln w
    expected = [[w - 1 - math.log(w) if w else 0.0 for w in row] for row in W]
    assert described["mismatch_kl"].tolist() == [pytest.approx(row, abs=1e-6) for row in expected]
    gaps = [[abs(math.log(w)) if w else 0.0 for w in row] for row in W]
    assert described["mismatch_mean"].tolist() == [pytest.approx(row, abs=1e-6) for row in gaps]
    assert float(described["mismatch_p99_max"]) == pytest.approx(math.log(4.0))  # of so few, the largest
    assert described["mismatch_beyond_share"].tolist() == [[float(gap > 0.1) for gap in row] for row in gaps]
    # 0.25 is masked, 4 was moved to 2
    assert described["mismatch_masked_share"].tolist()[0] == [1.0, 0.0, 0.0]
    assert described["mismatch_clamped_share"].tolist()[0] == [0.0, 0.0, 1.0]


def test_the_high_quantile_is_of_trained_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    gaps_BT = torch.randperm(1000, generator=generator).reshape(10, 100) / 1000
    mask_BT = (gaps_BT < 0.5).float()  # the larger ones are not trained
    batch = replace(make_batch(), loss_mask_BT=mask_BT)
    described = describe_mismatch(-gaps_BT, torch.ones_like(gaps_BT), batch, MismatchConfig())
    assert float(described["mismatch_p99_max"]) == pytest.approx(0.494)  # 5 of 500 are larger


@pytest.mark.parametrize("objective", ["ppo", "gspo", "cispo", "dppo"])
def test_a_correction_of_what_the_ratio_holds_already_is_refused(objective: str) -> None:
    with pytest.raises(ValueError, match="would correct twice"):
        LossConfig(objective=objective, mismatch=MismatchConfig(weight="token"))


def test_limits_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mask_low 2 must be below mask_high 0\.5"):
        MismatchConfig(mask="token", mask_low=2.0, mask_high=0.5)
    with pytest.raises(ValueError, match='mask "geometric" needs limits: set mask_low'):
        MismatchConfig(mask="geometric")
