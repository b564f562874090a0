"""Peak memory of the loss over a vocabulary of 150,000: straight from hidden states, against full logits.

    python benchmarks/loss_memory.py [--tokens 2048] [--out loss-memory.json]

Each way runs forward and backward in a process of its own. What counts is the rise of the largest resident set (on a
GPU of the allocator's peak) above what the inputs take; gradients of hidden states and head are part of it for both.
Loss and gradients must agree.

    ours     rollouts_core.model.logprobs.linear_logprobs and the cross-entropy of log-probs
    naive    logits = hidden @ head.T, F.cross_entropy in float32: the way of a model's own forward pass
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from side_by_side import describe_machine, render_machine, render_table, worker_environment, write_results
from torch import Tensor

from rollouts_core.model.logprobs import linear_logprobs

NAMES = ("ours", "naive")
TOLERANCE = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="file for the figures")
    parser.add_argument("--worker", choices=NAMES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(run_once(options)))
        return
    machine = describe_machine(options.threads)
    figures = {name: run_in_process(name) for name in NAMES}
    for quantity in ("loss", "hidden_gradient", "head_gradient"):
        ours, naive = figures["ours"][quantity], figures["naive"][quantity]
        assert abs(ours - naive) <= TOLERANCE * abs(naive), f"{quantity}: ours {ours}, naive {naive}"
    share = figures["ours"]["peak_bytes"] / figures["naive"]["peak_bytes"]
    write_results(options.out, {"script": "loss_memory", "machine": machine, "figures": figures, "peak_share": share})
    rows = [[n, f"{f['peak_bytes'] / 2**20:,.0f}", f"{f['seconds']:.2f}"] for n, f in figures.items()]
    print(render_machine(machine) + "\n")
    print(render_table(["loss", "peak, MiB", "seconds"], rows))
    print(f"\nours / naive: {share:.3f} of the memory ({options.tokens} tokens, vocabulary {options.vocabulary})")


def run_in_process(name: str) -> dict[str, float]:
    """The figures of one way, from a process of its own with the same options."""
    command = [sys.executable, *sys.argv, "--worker", name]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, env=worker_environment(2))
    figures: dict[str, float] = json.loads(answer.stdout)
    return figures


def run_once(options: argparse.Namespace) -> dict[str, float]:
    """Forward and backward; peak bytes above the inputs, and what must agree."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = torch.device(options.device)
    hidden = torch.randn(options.tokens, options.hidden, device=device, requires_grad=True)
    head = (0.05 * torch.randn(options.vocabulary, options.hidden, device=device)).requires_grad_()
    targets = torch.randint(options.vocabulary, (options.tokens,), device=device)
    loss_of = {"ours": chunked_loss, "naive": naive_loss}[options.worker]
    loss_of(hidden[:8], head[:100], targets[:8] % 100).backward()  # what libraries allocate once
    for inputs in (hidden, head):
        inputs.grad = None
    before = start_of_peak(device)
    began = time.perf_counter()
    loss = loss_of(hidden, head, targets)
    loss.backward()
    value = loss.item()
    seconds = time.perf_counter() - began
    peak = peak_bytes(device) - before
    assert hidden.grad is not None and head.grad is not None
    norms = {"hidden_gradient": float(hidden.grad.norm()), "head_gradient": float(head.grad.norm())}
    return {"loss": value, **norms, "peak_bytes": peak, "seconds": seconds}


def chunked_loss(hidden_NH: Tensor, head_VH: Tensor, targets_N: Tensor) -> Tensor:
    """Mean negative log-likelihood, never holding all logits."""
    return -linear_logprobs(hidden_NH, head_VH, targets_N)[0].mean()


def naive_loss(hidden_NH: Tensor, head_VH: Tensor, targets_N: Tensor) -> Tensor:
    """Mean negative log-likelihood from all logits."""
    return F.cross_entropy((hidden_NH @ head_VH.T).float(), targets_N)


def start_of_peak(device: torch.device) -> int:
    """Forget earlier peaks; returns the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's reset of VmHWM
    return _status_bytes("VmRSS")


def peak_bytes(device: torch.device) -> int:
    """The most bytes in use since `start_of_peak`."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
