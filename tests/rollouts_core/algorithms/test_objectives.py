"""Pins that the record of an objective is all that the library knows of it, and that the record tells the truth.

Without it a new objective could train while the warning of stale completions, or the one of a setting without effect,
is silently wrong for it.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rollouts_core
from rollouts_core.algorithms.loss import policy_loss, policy_objective, ratio_of
from rollouts_core.algorithms.objectives import OBJECTIVES, OWN_LOSS, Objective, describe_objectives
from rollouts_core.batch import TrainBatch
from rollouts_core.checks.no_effect import find_settings_without_effect
from rollouts_core.checks.validate import warn_of_uncorrected_age
from rollouts_core.config import Config, LossConfig
from rollouts_core.rl_batch import has_gradient
from tests.rollouts_core.algorithms.batches import draw_logprobs, make_one_token_batch, make_random_batch, score
from tests.rollouts_core.make import make_sample

PACKAGES = [Path(rollouts_core.__file__).parents[1] / name for name in ("rollouts_core", "tasks", "flows", "infra")]
ROWS = ("algorithms/objectives.py", "algorithms/presets.py")
"""The record of each objective, and the settings of named algorithms."""


def find_gradient(name: str, batch: TrainBatch, **settings: Any) -> Tensor:
    """The gradient of the objective, where most tokens have become likelier."""
    logprobs_BT = (draw_logprobs(batch) + 0.5).detach().requires_grad_()
    config = LossConfig(objective=name, **settings)
    objective_BT, _ = policy_objective(logprobs_BT, logprobs_BT - batch.rollout_logprobs_BT, batch, config)
    objective_BT.sum().backward()
    assert logprobs_BT.grad is not None
    return logprobs_BT.grad


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_record_of_an_objective_says_what_its_function_does(name: str) -> None:
    record, batch = OBJECTIVES[name], make_random_batch()
    usual = find_gradient(name, batch)

    def changes(other: TrainBatch, **settings: Any) -> bool:
        return not torch.equal(find_gradient(name, other, **settings), usual)

    older = replace(batch, rollout_logprobs_BT=batch.rollout_logprobs_BT - 0.1)
    logprobs_BT, config = draw_logprobs(batch).detach(), LossConfig(objective=name)
    one, _ = policy_objective(logprobs_BT, logprobs_BT - batch.rollout_logprobs_BT, batch, config)
    another, _ = policy_objective(logprobs_BT, logprobs_BT - older.rollout_logprobs_BT, batch, config)
    assert (not torch.equal(one, another)) is record.has_ratio
    assert changes(batch, clip_low=0.9, clip_high=9.0) is record.is_clipped
    assert changes(batch, dual_clip=1.01) is record.is_capped
    unrewarded = replace(batch, advantages_BT=torch.zeros_like(batch.advantages_BT))
    assert bool((find_gradient(name, unrewarded) == 0).all()) is record.follows_advantage


def toy_objective(
    logprobs_BT: Tensor, log_ratio_BT: Tensor, batch: TrainBatch, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Pulls every token towards the reference, and reads neither ratio nor clip."""
    assert batch.ref_logprobs_BT is not None
    return (logprobs_BT - batch.ref_logprobs_BT).square() - batch.advantages_BT, torch.zeros_like(logprobs_BT)


TOY = Objective(
    loss=f"{__name__}:toy_objective",
    help="a toy",
    has_ratio=False,
    is_clipped=False,
    needs_reference=True,
    follows_advantage=False,
)


def config_of(**loss: Any) -> Config:
    sections: dict[str, Any] = {
        "mode": "rl",
        "model": {"path": "m"},
        "data": {"prompts": "p", "selection": "s", "heldout": "h"},
        "training": {"rl": {"loss": loss}},
        "rollout": {"environment": "arithmetic", "max_staleness": 2},
    }
    return Config.model_validate(sections)


def test_an_objective_is_one_function_and_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="Input should be " + ", ".join(map(repr, [*OBJECTIVES][:-1]))):
        LossConfig(objective="toy")
    monkeypatch.setitem(OBJECTIVES, "toy", TOY)
    batch = replace(make_one_token_batch(1.0), ref_logprobs_BT=torch.tensor([[-1.0]]))
    loss, _ = policy_loss(score([[-3.0]]), batch, LossConfig(objective="toy"))
    assert float(loss) == 3.0  # (-3 + 1)^2 - 1
    assert "toy" in LossConfig.model_json_schema()["properties"]["objective"]["enum"]
    assert describe_objectives().endswith("toy: a toy.")


def test_every_check_and_warning_asks_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBJECTIVES, "toy", TOY)
    config = config_of(objective="toy", clip_low=0.1, dual_clip=3.0)
    rl = config.training.rl
    assert rl.with_reference and not rl.needs_rollout_logprobs and not rl.corrects_for_age
    assert has_gradient(make_sample([1, 2]), 0.0, rl), "a completion without an advantage is trained on"
    [stale] = warn_of_uncorrected_age(config)
    assert stale.startswith("rollout.max_staleness 2 trains on completions that were sampled with other weights")
    assert [sentence.split()[0].rpartition(".")[2] for sentence in find_settings_without_effect(config)] == [
        "clip_low",
        "dual_clip",
    ]
    assert LossConfig.model_validate({"objective": "toy", "mismatch": {"weight": "token"}})
    assert not has_gradient(make_sample([1, 2]), 0.0, config_of().training.rl)
    assert warn_of_uncorrected_age(config_of()) == []
    monkeypatch.setitem(OBJECTIVES, "toy", replace(TOY, has_ratio=True, needs_rollout_logprobs=True))
    assert warn_of_uncorrected_age(config) == [] and config.training.rl.needs_rollout_logprobs
    with pytest.raises(ValueError, match="would correct twice"):
        LossConfig.model_validate({"objective": "toy", "mismatch": {"weight": "token"}})


def test_a_loss_of_the_users_counts_as_one_that_trains_on_everything() -> None:
    rl = config_of().training.rl.model_copy(update={"loss_fn": "own:loss"})
    assert rl.objective_spec is OWN_LOSS and not rl.with_reference
    assert has_gradient(make_sample([1, 2]), 0.0, rl)


def test_no_other_file_compares_with_the_name_of_an_objective() -> None:
    found = [
        f"{path}: {ast.dump(node)}"
        for package in PACKAGES
        for path in sorted(package.rglob("*.py"))
        if not path.as_posix().endswith(ROWS)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare | ast.match_case | ast.Dict)
        and any(isinstance(each, ast.Constant) and each.value in OBJECTIVES for each in _compared(node))
    ]
    assert found == []


def _compared(node: ast.AST) -> list[ast.AST]:
    """What a comparison, a case or a dict looks at, also within tuples; not the body of a case."""
    if isinstance(node, ast.Dict):
        return [key for key in node.keys if key is not None]
    return list(ast.walk(node.pattern if isinstance(node, ast.match_case) else node))


def test_a_ratio_is_limited_before_it_can_be_infinite() -> None:
    assert torch.isfinite(ratio_of(torch.tensor([[1e4, -1e4]]))).all()
