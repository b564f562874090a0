"""Check that memory savings change no gradient, and that the preflight's estimate is right.

Not here: steps of a plain model (correctness.py).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import torch
from loss_memory import chunked_loss, naive_loss, peak_bytes, start_of_peak
from side_by_side import REPOSITORY, worker_environment
from torch import Tensor, nn

from gpu_parts.checking import Check, Place, hold, hold_close
from gpu_parts.correctness import TOLERANCE, hold_small_difference
from gpu_parts.models import (
    OPTIM,
    add_gradients,
    create_backend,
    gradients_of,
    packed_rows,
    sft_step,
    take_step,
    write_sized_model,
    write_small_model,
)
from gpu_parts.record import Figures
from rollouts_core.backends.optim import create_adamw_optimizer
from rollouts_core.checks.activation_needs import Rows
from rollouts_core.checks.needed_part import sum_bytes
from rollouts_core.checks.resource_needs import training_parts
from rollouts_core.config import LoRAConfig, ModelConfig, PolicyConfig, SFTTrainingConfig
from rollouts_core.fingerprint import digest_model
from rollouts_core.job import InputDataset, InputModel, SFTJob
from rollouts_core.model.model_size import find_model_size
from rollouts_core.model.policy import find_kernel

LARGE_VOCABULARY = 152_000
LEAST_SHARE, MOST_SHARE = 0.9, 1.25
"""Accepted ratio of the preflight's estimate to the memory of a step. A lower estimate would start runs that run out of
memory."""
ADAMW_STEPS = 5


def compare_lora(place: Place) -> Figures:
    """Gradients of adapters on the device, against the CPU; the weights under them have none."""
    model = write_small_model(place)
    lora = LoRAConfig(rank=8)
    found, expected = create_backend(model, place.device, lora=lora), create_backend(model, "cpu", lora=lora)
    others = dict(expected.model.named_parameters())
    with torch.no_grad():
        for name, weight in found.model.named_parameters():
            if weight.requires_grad:  # B begins at 0, under which A would have no gradient
                others[name].copy_(torch.randn(others[name].shape) / 10)
                weight.copy_(others[name])
    step = sft_step(0)
    hold_close("the loss", add_gradients(found, step), add_gradients(expected, step), tolerance=TOLERANCE)
    gradients = gradients_of(found)
    hold(all("lora" in name for name in gradients), "weights under the adapters have a gradient")
    return hold_small_difference(gradients, gradients_of(expected))


def compare_recomputation(place: Place) -> Figures:
    """Gradients with activations that are computed again, against kept ones; and the peaks of both."""
    model = write_small_model(place)
    gradients, peaks = [], []
    for again in (True, False):
        backend = create_backend(model, place.device, activation_checkpointing=again)
        before = start_of_peak(torch.device(place.device))
        add_gradients(backend, sft_step(0, num_documents=place.choose(200, 12)))
        peaks.append(peak_bytes(torch.device(place.device)) - before)
        gradients.append(gradients_of(backend))
    figures = hold_small_difference(*gradients)
    if place.is_rehearsal:
        return figures
    hold(peaks[0] < peaks[1], f"recomputation takes {peaks[0]} bytes, keeping activations {peaks[1]}")
    return {**figures, "peak MiB": peaks[0] / 2**20, "peak MiB without": peaks[1] / 2**20}


def compare_large_vocabulary(place: Place) -> Figures:
    """The loss in pieces of the logits, against all logits at once, with a vocabulary of 152,000."""
    num_tokens, hidden_size = place.choose((4096, 1024), (24, 16))
    device = torch.device(place.device)
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, device=device)
    head = torch.randn(LARGE_VOCABULARY, hidden_size, device=device) / hidden_size**0.5
    targets = torch.randint(LARGE_VOCABULARY, (num_tokens,), device=device)
    losses, gradients, peaks = [], [], []
    for loss_of in (chunked_loss, naive_loss):
        inputs = {"hidden": hidden.clone().requires_grad_(), "head": head.clone().requires_grad_()}
        before = start_of_peak(device)
        loss = loss_of(inputs["hidden"], inputs["head"], targets)
        torch.autograd.backward(loss)
        losses.append(float(loss))
        peaks.append(peak_bytes(device) - before)
        gradients.append({name: _gradient(tensor) for name, tensor in inputs.items()})
    hold_close("the loss in pieces", *losses, tolerance=TOLERANCE)
    figures = hold_small_difference(*gradients)
    if place.is_rehearsal:
        return figures
    hold(
        peaks[0] < 0.7 * peaks[1], f"pieces take {peaks[0]} bytes, all logits {peaks[1]}: expected less than 0.7 of it"
    )
    return {**figures, "peak MiB": peaks[0] / 2**20, "peak MiB of all logits": peaks[1] / 2**20}


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None, "the loss was propagated back to it"
    return tensor.grad.double().cpu()


def compare_optimizer(place: Place) -> Figures:
    """Steps of fused AdamW, against its formula in float64."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 32).to(place.device)
    optimizer = create_adamw_optimizer(layer, OPTIM)
    weight = layer.weight.detach().double().cpu()
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    beta1, beta2 = OPTIM.betas
    for step in range(1, ADAMW_STEPS + 1):
        gradient = torch.randn(32, 64)
        layer.weight.grad, layer.bias.grad = gradient.to(place.device), torch.zeros(32, device=place.device)
        optimizer.step()
        mean = beta1 * mean + (1 - beta1) * gradient.double()
        square = beta2 * square + (1 - beta2) * gradient.double() ** 2
        scaled = (mean / (1 - beta1**step)) / ((square / (1 - beta2**step)).sqrt() + OPTIM.eps)
        weight = weight * (1 - OPTIM.lr * OPTIM.weight_decay) - OPTIM.lr * scaled
    return hold_small_difference({"weight": layer.weight.detach().double().cpu()}, {"weight": weight})


def compare_estimate(place: Place) -> Figures:
    """Compare the preflight's estimate for a step at 0.5B with the allocator's peak."""
    figures: Figures = {}
    for name, settings in (
        ("all weights", PolicyConfig(precision="bfloat16")),
        ("a mask", PolicyConfig(precision="bfloat16", attention="sdpa")),
        ("recomputation", PolicyConfig(precision="bfloat16", activation_checkpointing=True)),
        ("adapters", PolicyConfig(precision="bfloat16", lora=LoRAConfig(rank=16))),
    ):
        model = write_sized_model(place, "0.5B")
        policy = settings.model_copy(update={"attention": find_kernel(model, settings, place.device)})
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        backend = create_backend(model, place.device, **dict(policy))
        for _ in range(2):  # the optimizer's moments come with the first step
            take_step(backend, packed_rows(num_rows=2, row_length=2048))
        measured = torch.cuda.max_memory_allocated()
        share = estimate(model, policy, num_rows=2, row_length=2048) / measured
        hold(
            LEAST_SHARE <= share <= MOST_SHARE,
            f"with {name} the preflight says {share:.2f} of the {measured / 2**30:.2f} GiB that a step takes, expected "
            f"{LEAST_SHARE} to {MOST_SHARE}",
        )
        figures |= {f"{name}, GiB": measured / 2**30, f"{name}, estimate / measured": share}
        del backend
    return figures


def estimate(model: ModelConfig, policy: PolicyConfig, *, num_rows: int, row_length: int) -> int:
    """Bytes that the preflight says for a step of packed rows by the kernel that `policy` names."""
    size = find_model_size(model)
    rows = Rows(num_rows * row_length, row_length, policy.takes_dense_masks, "the rows of this check")
    return sum_bytes(training_parts(size, policy, rows))


WITHOUT_MEMORY = """
import sys, torch
torch.cuda.set_per_process_memory_fraction(float(sys.argv[1]))
from rollouts_core.__main__ import main
sys.exit(main(["sft", sys.argv[2]]))
"""


def run_out_of_memory(place: Place) -> Figures:
    """A job with too little memory of the GPU ends with code 2 and a sentence that names what to change."""
    model = write_small_model(place)
    rows = place.folder / "rows.jsonl"
    rows.write_text('{"prompt": "w2 w3", "completion": "w4 w5"}\n' * 8)
    job = SFTJob(
        model=InputModel(name="base", model=model, digest=digest_model(model)),
        data=(InputDataset(path=str(rows), digest=hashlib.sha256(rows.read_bytes()).hexdigest()),),
        training=SFTTrainingConfig(num_steps=2, batch_size=4, max_length=64),
    )
    folder = place.folder / "job"
    folder.mkdir()
    (folder / "job.json").write_text(job.model_dump_json())
    limit = 8 * 2**20 / torch.cuda.get_device_properties(0).total_memory  # less than the model
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEMORY, str(limit), str(folder / "job.json")],
        env=worker_environment(os.cpu_count() or 1),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    last_line = done.stderr.strip().rpartition("\n")[2]
    hold(done.returncode == 2, f"it ended with code {done.returncode}, expected 2: {last_line}")
    hold("a GPU has too little memory" in last_line, f"its last line does not say so: {last_line}")
    return {"its last line": last_line[:200]}


CHECKS = [
    Check(name="adapters have the CPU's gradients", run=compare_lora, needs=("peft",)),
    Check(name="recomputed activations change no gradient", run=compare_recomputation),
    Check(name="the loss in pieces equals that of all 152,000 logits", run=compare_large_vocabulary),
    Check(name="fused AdamW equals its formula", run=compare_optimizer),
    Check(name="out of memory ends in a sentence", run=run_out_of_memory, needs_gpu=True),
    Check(name="the preflight's estimate is about what a step takes", run=compare_estimate, needs_gpu=True),
]
