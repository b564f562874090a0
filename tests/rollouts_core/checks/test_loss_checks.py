"""Pins that a loss of the user's own is tried before a run, and what is said of one that breaks the contract.

Without it such a loss is found to be wrong after SFT, on a rented machine, or not at all: means of micro-batches train,
and give other weights for another number of GPUs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollouts_core.algorithms.loss import TokenScores, policy_loss
from rollouts_core.algorithms.presets import ALGORITHMS
from rollouts_core.batch import TrainBatch
from rollouts_core.checks.loss_checks import check_loss_fn, reads_rollout_logprobs
from rollouts_core.checks.no_effect import find_settings_without_effect
from rollouts_core.checks.validate import validate_config, warn_of_uncorrected_age
from rollouts_core.config import Config, LossConfig, RLTrainingConfig
from rollouts_core.errors import ConfigError, InputError
from tests.rollouts_core.algorithms.batches import make_one_token_batch

ROOT = Path(__file__).resolve().parents[3]
Returned = tuple[Tensor, dict[str, Any]]


def with_loss(function: str, **settings: Any) -> RLTrainingConfig:
    name = function if ":" in function else f"{__name__}:{function}"
    return RLTrainingConfig.model_validate({"loss_fn": name, **settings})


def calls_ours(scores: TokenScores, batch: TrainBatch, config: LossConfig) -> Any:
    return policy_loss(scores, batch, config)


@pytest.mark.parametrize("algorithm", ["", *ALGORITHMS])
def test_a_function_that_computes_the_policy_loss_passes_whatever_the_settings(algorithm: str) -> None:
    training = with_loss("calls_ours", algorithm=algorithm, num_minibatches=1)
    assert check_loss_fn(training) == []


def test_the_batch_has_what_the_settings_ask_for() -> None:
    loss = {"value_coef": 0.5, "kl_coef": 0.1, "entropy_coef": 0.1, "aggregation": "prompt_mean"}
    assert check_loss_fn(with_loss("calls_ours", advantage={"estimator": "gae"}, loss=loss, num_epochs=2)) == []


def reinforces(scores: TokenScores, batch: TrainBatch) -> Returned:
    loss = -(scores.logprobs_BT * batch.advantages_BT * batch.loss_mask_BT).sum() / batch.num_loss_tokens
    return loss, {"loss": loss}


def takes_means(scores: TokenScores, batch: TrainBatch) -> Returned:
    loss = -(scores.logprobs_BT * batch.loss_mask_BT).sum() / batch.loss_mask_BT.sum()
    return loss, {"loss": loss}


def raises(scores: TokenScores, batch: TrainBatch) -> Returned:
    raise KeyError("margin")


def exits(scores: TokenScores, batch: TrainBatch) -> Returned:
    raise SystemExit(3)


def takes_places(scores: TokenScores, batch: TrainBatch, config: LossConfig, /) -> Returned:
    raise AssertionError


def takes_one(scores: TokenScores) -> Returned:
    raise AssertionError


def returns_a_number(scores: TokenScores, batch: TrainBatch) -> float:
    return 1.0


def has_no_gradient(scores: TokenScores, batch: TrainBatch) -> Returned:
    loss = scores.logprobs_BT.detach().sum()
    return loss, {"loss": loss}


def is_infinite(scores: TokenScores, batch: TrainBatch) -> Returned:
    loss = (scores.logprobs_BT * batch.loss_mask_BT).sum() / 0.0
    return loss, {"loss": loss}


def names_rows(scores: TokenScores, batch: TrainBatch) -> Returned:
    loss, metrics = reinforces(scores, batch)
    return loss, {**metrics, f"width_{batch.inputs_BT.shape[1]}": 1.0}


def breaks_backward(scores: TokenScores, batch: TrainBatch) -> Returned:
    logprobs_BT = scores.logprobs_BT * 1.0
    loss = logprobs_BT.square().sum()
    logprobs_BT.mul_(2.0)  # backward needs its old value
    return loss, {"loss": loss}


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("raises", r"raises raised KeyError: 'margin' \(test_loss_checks\.py, line \d+\)$"),
        ("exits", r"exits raised SystemExit: 3 \(test_loss_checks\.py, line \d+\)$"),
        ("torch:add", "the loss function torch:add raised TypeError: "),
        ("takes_places", "takes_places raised TypeError: .*missing 1 required positional argument: 'config'"),
        ("takes_one", r"takes_one raised TypeError: .*positional argument"),
        ("returns_a_number", "returns_a_number returned float: expected a tensor of one element and a dict"),
        ("has_no_gradient", "has_no_gradient returned a loss without a gradient: compute the loss from scores$"),
        ("is_infinite", "is_infinite returned -inf, with a gradient that may not be finite: "),
        ("names_rows", "returned these metrics for some micro-batches only: width_"),
        ("breaks_backward", "the gradient of the loss function .*breaks_backward raised RuntimeError: "),
        ("no_such_package:loss", "'no_such_package' cannot be imported"),
        (f"{__name__}:absent", "has no 'absent'"),
    ],
)
def test_what_is_wrong_with_a_loss_is_one_sentence(function: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        check_loss_fn(with_loss(function))
    assert len(str(raised.value).splitlines()) == 1


def test_a_loss_whose_micro_batches_do_not_add_up_is_warned_of() -> None:
    [told] = check_loss_fn(with_loss("takes_means"))
    assert "would change the result: divide sums over tokens by batch.num_loss_tokens" in told
    assert check_loss_fn(with_loss("reinforces")) == []


def takes_means_of_rows(scores: TokenScores, batch: TrainBatch) -> Returned:
    counts_B = batch.loss_mask_BT.sum(-1)
    means_B = (scores.logprobs_BT * batch.advantages_BT * batch.loss_mask_BT).sum(-1) / counts_B.clamp(min=1.0)
    loss = -means_B.sum() / batch.num_samples
    return loss, {"loss": loss}


def test_a_loss_of_rows_adds_up_if_completions_are_not_packed() -> None:
    [told] = check_loss_fn(with_loss("takes_means_of_rows", packing=True))
    assert "would change the result" in told
    assert check_loss_fn(with_loss("takes_means_of_rows", packing=False)) == []


def test_settings_that_a_loss_does_not_read_are_warned_of() -> None:
    [told] = check_loss_fn(with_loss("reinforces", loss={"clip_low": 0.1, "kl_coef": 0.1, "ratio_penalty": 0.1}))
    assert told.startswith("training.rl.loss.clip_low, training.rl.loss.ratio_penalty has no effect: ")
    assert told.endswith("reinforces has no parameter `config`, by which it would get these settings")
    config = Config.model_validate(
        {
            "mode": "rl",
            "model": {"path": "m"},
            "data": {"prompts": "p", "selection": "s", "heldout": "h"},
            "rollout": {"environment": "arithmetic"},
            "training": {"rl": {"loss_fn": "a:b", "loss": {"objective": "gspo"}}},
        }
    )
    assert find_settings_without_effect(config) == [
        'training.rl.loss.objective "gspo" does nothing with training.rl.loss_fn, which takes its place'
    ]


def takes_old_ratio(scores: TokenScores, batch: TrainBatch) -> Returned:
    assert batch.old_logprobs_BT is not None
    loss = -((scores.logprobs_BT - batch.old_logprobs_BT).exp() * batch.advantages_BT).sum() / batch.num_loss_tokens
    return loss, {"loss": loss}


@pytest.mark.parametrize("loss", [{"ratio_base": "old"}, {"mismatch": {"mask": "token", "mask_low": 0.5}}])
def test_settings_that_fill_the_batch_are_not_warned_of(loss: dict[str, Any]) -> None:
    assert check_loss_fn(with_loss("takes_old_ratio", num_minibatches=2, loss=loss)) == []
    assert check_loss_fn(with_loss("reinforces", loss={"kl_coef": 0.1})) == []  # the batch has the reference then


@pytest.mark.parametrize(("function", "reads"), [("calls_ours", True), ("reinforces", False)])
def test_a_loss_that_does_not_correct_for_older_weights_is_warned_of(function: str, reads: bool) -> None:
    training = with_loss(function)
    assert reads_rollout_logprobs(training) is reads
    config = Config.model_validate(
        {
            "mode": "rl",
            "model": {"path": "m"},
            "data": {"prompts": "p", "selection": "s", "heldout": "h"},
            "rollout": {"environment": "arithmetic", "max_staleness": 1},
            "training": {"rl": training},
        }
    )
    told = warn_of_uncorrected_age(config)
    assert bool(told) is not reads
    assert reads or f"{__name__}:reinforces does not correct for that" in told[0]


def test_the_example_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    training = with_loss("own_loss:sapo_loss")
    assert check_loss_fn(training) == [] and reads_rollout_logprobs(training)
    sapo_loss = sys.modules["own_loss"].sapo_loss
    logprobs_BT = torch.tensor([[-1.0]], requires_grad=True)
    loss, metrics = sapo_loss(TokenScores(logprobs_BT=logprobs_BT), make_one_token_batch(2.0))
    ratio = torch.exp(torch.tensor(-1.0))
    assert loss.item() == pytest.approx(float(-4 / (1 + torch.exp(-(ratio - 1))) * 2))
    assert float(metrics["far_share"]) == 1.0


def test_validate_says_it_at_the_setting() -> None:
    config = Config.model_validate(
        {
            "mode": "rl",
            "model": {"path": "m"},
            "data": {"prompts": "p", "selection": "s", "heldout": "h"},
            "rollout": {"environment": "arithmetic"},
            "training": {"rl": with_loss("raises")},
        }
    )
    with pytest.raises(InputError, match=r"training\.rl\.loss_fn: the loss function .* raised KeyError"):
        validate_config(config)
