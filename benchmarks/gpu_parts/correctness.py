"""Does a GPU compute what the CPU computes? Steps, packed rows, attention kernels, repetition, kill and resume.

Not here: memory (memory.py), backends of several processes (backends.py).

The checks compare gradients, not weights after AdamW. AdamW divides by the size of a gradient, so the sign of a
gradient near 0 decides a whole step.
"""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal, get_args, get_origin

import torch
from side_by_side import worker_environment

from gpu_parts.checking import Check, NotHereError, Place, hold, hold_close
from gpu_parts.models import (
    RL,
    add_gradients,
    create_backend,
    create_rl_backend,
    gradients_of,
    grpo_step,
    largest_difference,
    sft_step,
    take_step,
    weights_of,
    with_settings,
    write_small_model,
)
from gpu_parts.record import Figures
from gpu_parts.resumed_training import train
from rollouts_core import PyTorchTrainingBackend, TrainBatch
from rollouts_core.config import ModelConfig, PolicyConfig
from rollouts_core.model.flex import FLEX
from rollouts_core.model.varlen import VARLEN, find_varlen_attn, why_not_varlen

TOLERANCE = 1e-4
"""Share by which float32 sums in another order may differ, through four layers and back."""
BFLOAT16_FACTOR = 2.0
"""How many times bfloat16's own error of `eager` another kernel in bfloat16 may have."""
NUM_STEPS = 3
KILLED_AT = 6
RESUMED_TOLERANCE = 1e-3
"""Share by which weights may differ after AdamW on a GPU, whose sums come in no fixed order."""
NO_KERNELS = {"auto", "eager"}
"""Values of `policy.attention` that name no kernel to be compared: a choice, and what is compared with."""
PACKAGES_OF_KERNELS = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def compare_sft(place: Place) -> Figures:
    """Losses and gradients of SFT steps in float32, against the CPU."""
    model = write_small_model(place)
    return _compare(create_backend(model, place.device), create_backend(model, "cpu"), sft_step(0), sft_step(1))


def compare_grpo(place: Place) -> Figures:
    """Losses and gradients of GRPO steps in float32, against the CPU."""
    model = write_small_model(place)
    return _compare(create_rl_backend(model, place.device), create_rl_backend(model, "cpu"), grpo_step(0), grpo_step(1))


def _compare(found: PyTorchTrainingBackend, expected: PyTorchTrainingBackend, *steps: list[TrainBatch]) -> Figures:
    worst = 0.0
    for step in steps:
        hold_close("the loss", add_gradients(found, step), add_gradients(expected, step), tolerance=TOLERANCE)
        share, name = largest_difference(gradients_of(found), gradients_of(expected))
        hold(share <= TOLERANCE, f"the gradient of {name} differs by {share:.2g} of its norm, at most {TOLERANCE:g}")
        worst = max(worst, share)
    mine, other = take_step(found, steps[0]), take_step(expected, steps[0])
    hold_close("the gradient norm", mine["grad_norm"], other["grad_norm"], tolerance=TOLERANCE)
    return {"largest difference": worst, "tolerance": TOLERANCE}


def compare_packed(place: Place) -> Figures:
    """The gradient of a step in packed rows, against one row per sample."""
    model = write_small_model(place)
    backend = create_backend(model, place.device)
    losses, gradients = [], []
    for packed in (True, False):
        losses.append(add_gradients(backend, sft_step(0, packed=packed)))
        gradients.append(gradients_of(backend))
    hold_close("the loss of packed rows", *losses, tolerance=TOLERANCE)
    return hold_small_difference(*gradients)


def compare_shared_prompts(place: Place) -> Figures:
    """The gradient of a GRPO step whose completions share their prompt in a row, against one row per completion."""
    model = write_small_model(place)
    backend = create_rl_backend(model, place.device)
    gradients = []
    for packing in (True, False):
        add_gradients(backend, grpo_step(0, with_settings(RL, packing=packing)))
        gradients.append(gradients_of(backend))
    return hold_small_difference(*gradients)


def hold_small_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> Figures:
    """Figures of the largest difference; raises BrokenError if it is more than TOLERANCE."""
    share, name = largest_difference(found, expected)
    hold(share <= TOLERANCE, f"the gradient of {name} differs by {share:.2g} of its norm, at most {TOLERANCE:g}")
    return {"largest difference": share, "tolerance": TOLERANCE}


def kernels() -> list[str]:
    """The attention kernels that the settings can name, but those of NO_KERNELS."""
    annotation = PolicyConfig.model_fields["attention"].annotation
    assert get_origin(annotation) is Literal, f"policy.attention is one of some names, found {annotation}"
    return [name for name in get_args(annotation) if name not in NO_KERNELS]


def compare_kernel(kernel: str, place: Place) -> Figures:
    """Loss and gradient of packed rows by one kernel, against `eager` in float32; with `flex` samples share prompts.

    A kernel that computes in float32 must agree to TOLERANCE; another one within BFLOAT16_FACTOR times the error that
    `eager` has in bfloat16.
    """
    model = write_small_model(place)
    # A loss of demonstrations serves for both: what is compared is what a token reads.
    step = grpo_step(0) if kernel == FLEX else sft_step(0)
    if kernel == VARLEN:
        expect_varlen(model, device_type=place.device)
    loss, exact = _loss_and_gradient(model, place, step, attention="eager")
    if kernel == "sdpa":
        own_loss, own = _loss_and_gradient(model, place, step, attention=kernel)
        hold_close("the loss", own_loss, loss, tolerance=TOLERANCE)
        return hold_small_difference(own, exact)
    _, rounded = _loss_and_gradient(model, place, step, attention="eager", precision="bfloat16")
    own_loss, own = _loss_and_gradient(model, place, step, attention=kernel, precision="bfloat16")
    allowed = BFLOAT16_FACTOR * _error(rounded, exact)
    found = _error(own, exact)
    hold(found <= allowed, f"the gradient differs by {found:.3g} of its norm, at most {allowed:.3g}")
    hold_close("the loss", own_loss, loss, tolerance=0.01)
    return {"difference": found, "allowed": allowed}


def expect_varlen(model: ModelConfig, *, device_type: str) -> None:
    """Return if torch's kernel for packed rows can train the model.

    Raises:
        NotHereError: this torch has no such kernel.
        BrokenError: it has the kernel, and the kernel refuses the model.
    """
    reason = why_not_varlen(model, device_type=device_type)
    if find_varlen_attn() is None:
        raise NotHereError(reason)
    hold(not reason, f"{VARLEN} refuses the model: {reason}")


def _loss_and_gradient(
    model: object, place: Place, step: list[TrainBatch], **policy: str
) -> tuple[float, dict[str, torch.Tensor]]:
    backend = create_backend(model, place.device, **policy)  # type: ignore[arg-type]  # what write_small_model gave
    return add_gradients(backend, step), gradients_of(backend)


def _error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of all gradients, as a share of their norm."""
    differences = [float((found[name] - value).norm()) for name, value in exact.items()]
    return math.hypot(*differences) / math.hypot(*(float(value.norm()) for value in exact.values()))


def kernel_checks(names: Sequence[str]) -> list[Check]:
    """A check for each of some kernels."""
    return [
        Check(
            name=f"attention kernel {kernel} equals eager",
            run=partial(compare_kernel, kernel),
            needs_gpu=kernel != "sdpa",
            needs=(PACKAGES_OF_KERNELS[kernel],) if kernel in PACKAGES_OF_KERNELS else (),
        )
        for kernel in names
    ]


def repeat_training(place: Place) -> Figures:
    """Weights after the same steps twice: the same bits on a CPU, on a GPU the spread is measured."""
    model = write_small_model(place)
    weights = []
    for _ in range(2):
        backend = create_backend(model, place.device)
        for seed in range(NUM_STEPS):
            take_step(backend, sft_step(seed))
        weights.append(weights_of(backend))
    share, _ = largest_difference(*weights)
    hold(share == 0.0 or not place.is_rehearsal, f"two trainings on a CPU differ by {share:.2g}")
    hold(share <= RESUMED_TOLERANCE, f"two trainings differ by {share:.2g} of a weight's norm")
    return {"largest difference of weights": share, "same bits": "yes" if share == 0.0 else "no"}


def resume_killed_training(place: Place) -> Figures:
    """A training that was killed and resumed ends with the weights of an uninterrupted training."""
    model = write_small_model(place)
    folder = place.folder / "killed"
    command = [sys.executable, "-m", "gpu_parts.resumed_training", model.path, str(folder), place.device]
    done = subprocess.run(
        [*command, str(KILLED_AT)],
        cwd=Path(__file__).parents[1],
        env=worker_environment(1),
        capture_output=True,
        text=True,
        check=False,
    )
    hold(done.returncode == -signal.SIGKILL, f"it ended with {done.returncode} before its kill: {done.stderr[-500:]}")
    hold(any(folder.iterdir()), "the killed training left no checkpoint")
    resumed = weights_of(train(model, folder, place.device))
    straight = weights_of(train(model, place.folder / "straight", place.device))
    share, name = largest_difference(resumed, straight)
    limit = 0.0 if place.is_rehearsal else RESUMED_TOLERANCE
    hold(share <= limit, f"{name} differs by {share:.2g} of its norm after the resume, at most {limit:g}")
    return {"largest difference of weights": share, "tolerance": limit}


CHECKS = [
    Check(name="SFT steps equal the CPU's in float32", run=compare_sft),
    Check(name="GRPO steps equal the CPU's in float32", run=compare_grpo),
    Check(name="packed rows equal a row per sample", run=compare_packed),
    Check(name="completions that share a prompt equal a row each", run=compare_shared_prompts),
    *kernel_checks([name for name in kernels() if name != FLEX]),
    Check(name="the same training twice", run=repeat_training),
    Check(name="a killed training resumes", run=resume_killed_training),
    *kernel_checks([FLEX]),  # the last, because it compiles for up to a minute
]
