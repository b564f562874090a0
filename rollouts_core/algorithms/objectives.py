"""The objectives of RL: for each, its loss function and the properties that settings and checks need.

To add an objective, write a function like those in `algorithms/loss.py` and add an entry here, or provide an
`Objective` in an installed package (`plugins.py`). No other file may test for an objective by its name. This file does
not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollouts_core.plugins import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A value of `training.rl.loss.objective`: how a token's loss follows from its advantage and log-prob."""

    loss: str
    """Name `package.module:function` of the loss function, called with (logprobs_BT, log_ratio_BT, batch, config).

    The function returns two (B, T) tensors: each token's loss, and whether the token's gradient was limited."""
    help: str
    """Description of the objective in the setting's help text."""
    has_ratio: bool
    """True if the objective multiplies by the ratio of a token's current probability to its probability under
    `ratio_base`.

    The ratio corrects for tokens that were sampled by older weights."""
    is_clipped: bool
    """True if the objective reads `clip_low` and `clip_high`."""
    is_capped: bool = False
    """True if the objective reads `dual_clip`."""
    needs_rollout_logprobs: bool = False
    """True if the objective reads the engine's log-probs for every value of `ratio_base`."""
    needs_reference: bool = False
    """True if the objective reads the log-probs of the start model, even if `kl_coef` is 0."""
    follows_advantage: bool = True
    """True if the gradient is 0 for advantage 0. Completions with advantage 0 then need no forward pass."""


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
        help="ppo with the completion's geometric mean ratio",
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
        help="the unclipped ratio, without tokens whose probability moved too far",
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
        return f"expected an Objective, found {value!r:.80}"
    return "" if ":" in value.loss else f"its loss is {value.loss!r}: give package.module:function"


ALL_OBJECTIVES = Registry[Objective]("rollouts.objectives", OBJECTIVES, _find_fault)
"""The built-in objectives, and those of installed packages."""

OWN_LOSS = Objective(
    loss="",
    help="",
    has_ratio=True,
    is_clipped=True,
    is_capped=True,
    follows_advantage=False,
)
"""Properties assumed for a user's `training.rl.loss_fn`, which may read every setting.

`reads_rollout_logprobs` in `checks/loss_checks.py` calls the function to find out whether the function reads the
engine's log-probs."""


def describe_objectives() -> str:
    """Help text of the setting `objective`: a sentence for each built-in objective."""
    return " ".join(f"{name}: {each.help}." for name, each in OBJECTIVES.items())
