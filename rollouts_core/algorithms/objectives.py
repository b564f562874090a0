"""The objectives of RL, a record for each: the function of a token's loss, and what the settings have to know of it.

A new objective is a function like those in `algorithms/loss.py` and a row here, or an `Objective` that an installed
package adds (plugins.py). Checks and warnings ask the row, and no other file knows an objective by its name. torch is
not imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollouts_core.plugins import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """How `training.rl.loss.objective` makes a loss of the advantage and the log-prob of a token."""

    loss: str
    """`package.module:function` of (logprobs_BT, log_ratio_BT, batch, config). It returns (B, T) each token's loss, and
    (B, T) whether the token's gradient was limited."""
    help: str
    """Its part of the setting's help text."""
    has_ratio: bool
    """It weighs a token by its probability now over that of `ratio_base`, so it corrects for older weights."""
    is_clipped: bool
    """It reads `clip_low` and `clip_high`."""
    is_capped: bool = False
    """It reads `dual_clip`."""
    needs_rollout_logprobs: bool = False
    """It reads the engine's log-probs also without a ratio to them."""
    needs_reference: bool = False
    """It reads the log-probs of the model that training starts from, also with `kl_coef` 0."""
    follows_advantage: bool = True
    """Its gradient is 0 at the advantage 0. Completions with that advantage are then left out of the forward pass."""


OBJECTIVES: dict[str, Objective] = {
    "ppo": Objective(
        loss="rollouts_core.algorithms.loss:ppo_objective",
        help="the clipped ratio times the advantage",
        has_ratio=True,
        is_clipped=True,
        is_capped=True,
    ),
    "gspo": Objective(
        loss="rollouts_core.algorithms.loss:gspo_objective",
        help="the same with the completion's geometric mean ratio",
        has_ratio=True,
        is_clipped=True,
        is_capped=True,
    ),
    "cispo": Objective(
        loss="rollouts_core.algorithms.loss:cispo_objective",
        help="the gradient of the log-prob, weighted by the clipped ratio",
        has_ratio=True,
        is_clipped=True,
    ),
    "dppo": Objective(
        loss="rollouts_core.algorithms.loss:dppo_objective",
        help="the free ratio, without tokens whose probability moved too far",
        has_ratio=True,
        is_clipped=True,
    ),
    "reinforce": Objective(
        loss="rollouts_core.algorithms.loss:reinforce_objective",
        help="the gradient of the log-prob",
        has_ratio=False,
        is_clipped=False,
    ),
}


def _find_fault(name: str, value: object) -> str:
    if not isinstance(value, Objective):
        return f"it is {value!r:.80}, and no Objective"
    return "" if ":" in value.loss else f"its loss is {value.loss!r}: give package.module:function"


ALL_OBJECTIVES = Registry[Objective]("rollouts.objectives", OBJECTIVES, _find_fault)
"""Also those of installed packages."""

OWN_LOSS = Objective(
    loss="",
    help="",
    has_ratio=True,
    is_clipped=True,
    is_capped=True,
    follows_advantage=False,
)
"""Stands for `training.rl.loss_fn`, which may read every setting. This record does not say whether the function reads
the engine's log-probs: `reads_rollout_logprobs` of `checks/loss_checks.py` calls it to find out."""


def describe_objectives() -> str:
    """The help text of the setting."""
    return " ".join(f"{name}: {each.help}." for name, each in OBJECTIVES.items())
