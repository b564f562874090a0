"""tinker-cookbook: group advantages and the KL penalty that it adds to them (its losses run in a service)."""

import asyncio
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.rollouts_core.algorithms.peers.recording import (
    INPUTS,
    Case,
    advantages_per_token,
    bare_package,
    padded,
    prepare_imports,
    rows,
)

STAND_INS = ("tinker", "chz", "wandb", "tinker_cookbook.rl.types", "tinker_cookbook.supervised")
PACKAGES = ("tinker_cookbook", "tinker_cookbook.rl")


def _advantage_cases() -> list[Case]:
    from tinker_cookbook.rl.data_processing import compute_advantages

    cases = []
    for source in ("rewards_groups", "rewards_singleton_groups", "rewards_ragged_groups"):
        groups = [SimpleNamespace(get_total_rewards=lambda rewards=rewards: rewards) for rewards in INPUTS[source]]
        suffix = source.removeprefix("rewards").removesuffix("groups").strip("_")
        cases.append(
            Case(
                name="_".join(filter(None, ["advantage", "default", suffix])),
                function="compute_advantages",
                file="tinker_cookbook/rl/data_processing.py",
                settings={},
                inputs=[source],
                outputs={"advantages_groups": compute_advantages(groups)},
                note="computed in float32",
            )
        )
    return cases


def _held(values: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(to_torch=lambda: values, data=values.tolist())


def _kl_case(discount: float) -> Case:
    from tinker_cookbook.rl.metrics import incorporate_kl_penalty

    importlib.import_module("tinker").TensorData.from_torch = _held
    reference = [[0.0, *row.tolist()] for row in rows("ref_logprobs_BT")]
    data = []
    for row, (logprobs, mask) in enumerate(zip(rows("rollout_logprobs_BT"), rows("loss_mask_BT"), strict=True)):
        inputs: dict[str, Any] = {
            "target_tokens": _held(torch.ones(len(mask))),
            "logprobs": _held(logprobs),
            "mask": _held(mask),
            "advantages": _held(advantages_per_token()[row, : len(mask)]),
        }
        model_input = SimpleNamespace(append_int=lambda _token, row=row: row)
        data.append(SimpleNamespace(model_input=model_input, loss_fn_inputs=inputs))

    async def logprobs_of(row: int) -> list[float]:
        return reference[row]

    settings = {"kl_penalty_coef": 0.1, "kl_discount_factor": discount}
    asyncio.run(incorporate_kl_penalty(data, SimpleNamespace(compute_logprobs_async=logprobs_of), **settings))
    return Case(
        name="kl_in_advantage" + ("_discounted" if discount else ""),
        function="incorporate_kl_penalty",
        file="tinker_cookbook/rl/metrics.py",
        settings=settings,
        inputs=["advantages_B", "rollout_logprobs_BT", "ref_logprobs_BT", "loss_mask_BT"],
        outputs={"advantages_BT": padded(datum.loss_fn_inputs["advantages"].to_torch() for datum in data)},
        note="kl is engine minus reference, k1",
    )


def record(checkout: Path) -> list[Case]:
    """Every case of tinker-cookbook."""
    prepare_imports(checkout, stand_ins=STAND_INS)
    for package in PACKAGES:
        bare_package(package, checkout / package.replace(".", "/"))
    return [*_advantage_cases(), _kl_case(0.0), _kl_case(0.9)]
