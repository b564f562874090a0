"""Pins which learning rates are told as too large, and that those which people train with are not.

Without it a slip of the comma trains for a day and leaves noise.
"""

from pathlib import Path
from typing import Any

import pytest

from rollouts_core.checks.learning_rates import check_learning_rates, largest_usual_lr
from rollouts_core.config import Config
from rollouts_core.findings import Caution
from tests.kit.small_pipeline import small_settings

LORA = {"lora": {"rank": 8}}


def find(path: str, mode: str = "sft+rl", **training: Any) -> list[str]:  # Any: settings of every type
    data = {"sft": "a", "prompts": "b", "selection": "c", "heldout": "d"}
    settings = {"mode": mode, "model": {"path": path}, "data": data, "training": training}
    return check_learning_rates(Config.model_validate(settings))


@pytest.mark.parametrize("kind", ["sft", "rl"])
@pytest.mark.parametrize("policy", [{}, LORA])
@pytest.mark.parametrize("lr", [1.0, 10.0, 1e3])
def test_what_no_model_survives_is_warned_of_also_where_its_size_is_not_known(
    tmp_path: Path, kind: str, policy: dict[str, Any], lr: float
) -> None:
    [said] = find(str(tmp_path), kind, **{kind: {"optim": {"lr": lr}, "policy": policy}})
    assert isinstance(said, Caution)
    assert said.startswith(f"training.{kind}.optim.lr {lr:g} is so large that training most probably ruins the model")
    assert ("adapters" if policy else "all weights") in said


def test_the_bound_goes_by_the_size_of_the_model(quickstart_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small model of tests learns at 1e-2; one of half a billion weights is lost at that."""
    model = str(quickstart_dir / "base_model")
    assert find(model, sft={"optim": {"lr": 1e-2}}) == []
    assert largest_usual_lr(5e8, "sft", has_adapters=False) < 1e-3
    [said] = find(model, sft={"optim": {"lr": 0.5}})
    assert " weights rarely learns" in said


@pytest.mark.parametrize(
    ("num_weights", "kind", "has_adapters", "lr"),
    [
        (125e6, "sft", False, 6e-4),  # GPT-3 small, from scratch
        (1.3e9, "sft", False, 2e-4),  # GPT-3 XL, from scratch
        (7e9, "sft", False, 2e-5),
        (70e9, "sft", False, 1e-5),
        (8e9, "sft", True, 5e-4),
        (7e9, "rl", False, 5e-6),
        (8e9, "rl", True, 1e-4),
        (156e3, "sft", False, 5e-3),  # the quickstart
        (156e3, "rl", False, 3e-4),
    ],
)
def test_what_people_train_with_is_not_warned_of(num_weights: float, kind: str, has_adapters: bool, lr: float) -> None:
    assert lr <= largest_usual_lr(num_weights, kind, has_adapters=has_adapters)


def test_the_defaults_are_not_warned_of_whatever_the_model() -> None:
    assert find("no/such-model") == []


@pytest.mark.parametrize(("kind", "lr", "is_said"), [("sft", 1e-5, True), ("sft", 1e-4, False), ("rl", 1e-6, True)])
def test_adapters_with_what_all_weights_take_are_a_remark_and_no_warning(kind: str, lr: float, is_said: bool) -> None:
    said = find("no/such-model", kind, **{kind: {"optim": {"lr": lr}, "policy": LORA}})
    assert [isinstance(each, Caution) for each in said] == [False] * is_said
    assert all("adapters usually need a larger one" in each for each in said)


def test_a_stage_that_does_not_run_is_not_looked_at() -> None:
    assert find("no/such-model", "rl", sft={"optim": {"lr": 10.0}}) == []


def test_the_small_pipeline_is_not_warned_of(quickstart_dir: Path) -> None:
    training = small_settings()["training"]
    optims: dict[str, Any] = {kind: {"optim": training[kind]["optim"]} for kind in training}
    assert find(str(quickstart_dir / "base_model"), **optims) == []
