"""Pins: the loops written out by hand run as their docstrings say, and compute what the library's own loops compute.

Without it the first code that a reader tries would be the code that nobody runs.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollouts_core.algorithms.loss import create_cross_entropy_loss
from rollouts_core.backends.pytorch import create_pytorch_backend
from rollouts_core.config import ModelConfig, OptimConfig, SFTTrainingConfig
from rollouts_core.data.dataset import load_sft_dataset
from rollouts_core.quickstart import QuickstartSize, write_quickstart_files
from rollouts_core.sft import run_sft_training

ROOT = Path(__file__).resolve().parents[1]
NUM_SFT_STEPS, NUM_RL_STEPS, BATCH_SIZE = 20, 2, 4
TIMEOUT_S = 120
STEP_LINE = re.compile(r"^step +(\d+)  (?:loss|reward) +([\d.]+)", re.MULTILINE)


def start_example(name: str, *arguments: str | Path, timeout_s: float = TIMEOUT_S) -> str:
    """What the example printed."""
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def run_example(name: str, *arguments: str | Path) -> dict[int, float]:
    """The loss or reward per step that the example printed."""
    return {int(step): float(value) for step, value in STEP_LINE.findall(start_example(name, *arguments))}


@pytest.fixture(scope="module")
def sft_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """The model that sft_by_hand.py leaves after a few steps, and the losses that it printed."""
    folder = tmp_path_factory.mktemp("examples") / "sft_model"
    losses = run_example(
        "sft_by_hand.py", "--steps", str(NUM_SFT_STEPS), "--batch-size", str(BATCH_SIZE), "--out", folder
    )
    return folder, losses


@pytest.mark.slow
def test_sft_by_hand_learns(sft_model: tuple[Path, dict[int, float]]) -> None:
    _, losses = sft_model
    assert losses[NUM_SFT_STEPS] < losses[1] - 0.5, losses


@pytest.mark.slow
def test_sft_by_hand_computes_what_run_sft_training_computes(
    sft_model: tuple[Path, dict[int, float]], tmp_path: Path
) -> None:
    _, losses = sft_model
    torch.set_num_threads(1)
    files = tmp_path / "quickstart"
    write_quickstart_files(files, size=QuickstartSize())
    optim = OptimConfig(lr=5e-3, num_warmup_steps=NUM_SFT_STEPS // 20, weight_decay=0.01)
    config = SFTTrainingConfig(
        num_steps=NUM_SFT_STEPS, batch_size=BATCH_SIZE, max_length=128, packing=False, optim=optim
    )
    backend = create_pytorch_backend(
        ModelConfig(path=str(files / "base_model")),
        optim,
        create_cross_entropy_loss(),
        num_steps=NUM_SFT_STEPS,
        device="cpu",
    )
    samples = load_sft_dataset(files / "sft.jsonl", backend.tokenizer, max_length=128)
    history = asyncio.run(run_sft_training(backend, samples, config))
    # The printed losses have four digits.
    assert losses == pytest.approx({step: history[step - 1]["loss"] for step in losses}, abs=1e-4)


@pytest.mark.slow
def test_rl_by_hand_runs_on_the_model_of_sft_by_hand(sft_model: tuple[Path, dict[int, float]]) -> None:
    folder, _ = sft_model
    rewards = run_example("rl_by_hand.py", folder, "--steps", str(NUM_RL_STEPS), "--batch-size", "2")
    assert list(rewards) == [1, 2]
    assert all(0 <= reward <= 1 for reward in rewards.values())


HELDOUT_LINE = re.compile(
    r"^(model|sft|rl) +held-out accuracy ([\d.]+)  sampled ([\d.]+)  turns ([\d.]+)", re.MULTILINE
)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tool_use_learns_to_call_the_calculator_in_several_turns() -> None:
    """Half of the RL steps of docs/environments.md, where three seeds end at 0.91 to 0.96 sampled."""
    ended = start_example("tool_use.py", "--seed", "0", "--rl-steps", "20", timeout_s=800)
    sampled = {stage: float(accuracy) for stage, _, accuracy, _ in HELDOUT_LINE.findall(ended)}
    turns = {stage: float(number) for stage, _, _, number in HELDOUT_LINE.findall(ended)}
    assert sampled["model"] < 0.05 < 0.2 < sampled["sft"] < 0.5
    assert sampled["rl"] > sampled["sft"] + 0.2
    assert turns["sft"] < 1.5 < 2.0 < turns["rl"], "two or three numbers take two or three turns"
