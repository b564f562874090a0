"""A model learns to use a calculator: demonstrations first, then reinforcement learning in several turns.

A share of the demonstrations calls the calculator step by step and is right; the others answer at once, which a model
of 160 000 parameters cannot. After SFT it does both. Rewarded for right answers alone, it learns to call the tool.

    user         57+83-21=?
    assistant    <calc>57+83</calc>
    tool         140                      written by the environment: never trained on
    assistant    <calc>140-21</calc>
    tool         119
    assistant    :119

The environment is `rollouts_core/environments/calculator.py`. Everything runs in this process, on one thread.

    python examples/tool_use.py --seed 0            one seed, about a minute
    python examples/tool_use.py --seeds 3           seeds 0, 1 and 2, and a table of what each stage achieved
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from rollouts_core import (
    AsyncRolloutManager,
    DataBuffer,
    Message,
    Prompt,
    PyTorchTrainingBackend,
    RLTrainingConfig,
    RolloutConfig,
    SFTTrainingConfig,
    create_cross_entropy_loss,
    create_engine_generate_fn,
    create_policy_loss,
    create_pytorch_backend,
    load_prompts_from_jsonl,
    load_sft_dataset,
    run_rl_training,
    run_sft_training,
    serve_in_process,
)
from rollouts_core.config import ModelConfig, MultiTurnConfig, OptimConfig, RLOptimConfig, SamplingConfig
from rollouts_core.environments.calculator import calculate
from rollouts_core.evaluate import generate_samples
from rollouts_core.quickstart import QuickstartSize, build_character_tokenizer, build_untrained_model
from rollouts_core.rewards import grade_group
from rollouts_core.rollout.resolve import resolve_reward_fn

NUM_DEMONSTRATIONS, NUM_PROMPTS, NUM_HELDOUT = 12_000, 2_000, 200
CALLED_SHARE = 0.4
"""Demonstrations that call the calculator."""
HELDOUT_SHARE = 20
"""One problem in this many is kept out of training, by its checksum."""
ROLLOUT = RolloutConfig(
    environment="calculator",
    batch_size=16,
    n_samples_per_prompt=8,
    max_prompt_tokens=32,
    sampling=SamplingConfig(max_new_tokens=128),
    multi_turn=MultiTurnConfig(max_turns=6, max_tokens_per_turn=24),
)
SFT = SFTTrainingConfig(
    batch_size=8,
    max_length=128,
    optim=OptimConfig(lr=5e-3, betas=(0.9, 0.95), num_warmup_steps=30, weight_decay=0.01),
)
RL = RLTrainingConfig(optim=RLOptimConfig(lr=5e-4))


def draw_problem(rng: random.Random, *, is_heldout: bool) -> list[str]:
    """Two or three numbers of two digits and the signs between them: ["57", "+", "83", "-", "21"]."""
    while True:
        numbers = [str(rng.randrange(10, 100)) for _ in range(rng.randint(2, 3))]
        problem = numbers[:1] + [part for number in numbers[1:] for part in (rng.choice("+-"), number)]
        if (zlib.crc32("".join(problem).encode()) % HELDOUT_SHARE == 0) == is_heldout:
            return problem


def demonstrate(problem: list[str], rng: random.Random) -> dict[str, Any]:
    """A conversation that answers a problem, with the calculator or without."""
    messages = [Message(role="user", content="".join(problem) + "=?")]
    result = problem[0]
    for sign, number in zip(problem[1::2], problem[2::2], strict=True):
        expression = result + sign + number
        result = calculate(expression)
        messages.append(Message(role="assistant", content=f"<calc>{expression}</calc>"))
        messages.append(Message(role="tool", content=result))
    answer = Message(role="assistant", content=f":{result}")
    return {"messages": [*(messages if rng.random() < CALLED_SHARE else messages[:1]), answer]}


def ask(problem: list[str]) -> dict[str, str]:
    """A row of a prompt file."""
    question = "".join(problem)
    return {"prompt": question + "=?", "answer": calculate(question)}


def write_files(folder: Path, *, seed: int) -> None:
    """Demonstrations, prompts, held-out prompts and an untrained model whose tokenizer knows the calculator's marks."""
    rng = random.Random(seed)
    rows = {
        "sft": [demonstrate(draw_problem(rng, is_heldout=False), rng) for _ in range(NUM_DEMONSTRATIONS)],
        "prompts": [ask(draw_problem(rng, is_heldout=False)) for _ in range(NUM_PROMPTS)],
        "heldout": [ask(draw_problem(rng, is_heldout=True)) for _ in range(NUM_HELDOUT)],
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = build_character_tokenizer()
    tokenizer.add_tokens(["<|tool|>"], special_tokens=True)
    tokenizer.add_tokens(["<calc>", "</calc>"])  # not special: the environment must read them
    tokenizer.save_pretrained(folder / "model")
    build_untrained_model(tokenizer, QuickstartSize(), seed=seed).save_pretrained(folder / "model")


async def fine_tune(folder: Path, *, num_steps: int) -> None:
    """Imitate the demonstrations."""
    config = SFT.model_copy(update={"num_steps": num_steps})
    model = ModelConfig(path=str(folder / "model"))
    backend = create_pytorch_backend(
        model, config.optim, create_cross_entropy_loss(), num_steps=num_steps, device="cpu"
    )
    samples = load_sft_dataset(folder / "sft.jsonl", backend.tokenizer, max_length=config.max_length)
    await run_sft_training(backend, samples, config)
    save(backend, folder / "sft")


async def reinforce(folder: Path, *, num_steps: int) -> None:
    """Improve by the rewards of conversations, sampled by an engine that gets the new weights after every step."""
    config = RL.model_copy(update={"num_steps": num_steps})
    start = folder / "sft"
    backend = create_pytorch_backend(
        ModelConfig(path=str(start)),
        config.optim,
        create_policy_loss(config.loss),
        num_steps=num_steps,
        within_tokenizer=True,
        device="cpu",
    )
    prompts = DataBuffer(load_prompts_from_jsonl(folder / "prompts.jsonl"))
    async with serve_in_process(start, max_running_requests=128) as engine:
        generate = create_engine_generate_fn([engine], backend.tokenizer, ROLLOUT)
        async with AsyncRolloutManager(prompts, ROLLOUT, generate_fn=generate) as manager:
            history = await run_rl_training(backend, prompts, manager, [engine], config)
    for step, metrics in enumerate(history, start=1):
        if step == 1 or step % 5 == 0:
            print(f"step {step:3d}  reward {metrics['reward']:.3f}  turns {metrics['num_turns']:.2f}", flush=True)
    save(backend, folder / "rl")


def save(backend: PyTorchTrainingBackend, folder: Path) -> None:
    """The model and its tokenizer as a checkpoint."""
    backend.model.save_pretrained(folder)
    backend.tokenizer.save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class Score:
    """The results of a model on the held-out problems."""

    greedy: float
    """Share of right answers when it always takes the most likely token."""
    sampled: float
    """The same at temperature 1, as in training."""
    num_turns: float
    """Turns of a greedy answer."""


async def score(model: Path, prompts: list[Prompt]) -> Score:
    """The model's accuracy on held-out problems."""
    greedy, num_turns = await measure(model, prompts, temperature=0.0, num_samples=1)
    sampled, _ = await measure(model, prompts, temperature=1.0, num_samples=4)
    return Score(greedy, sampled, num_turns)


async def measure(model: Path, prompts: list[Prompt], *, temperature: float, num_samples: int) -> tuple[float, float]:
    """Mean reward and mean number of turns."""
    sampling = ROLLOUT.sampling.model_copy(update={"temperature": temperature})
    settings = ROLLOUT.model_copy(update={"n_samples_per_prompt": num_samples, "sampling": sampling})
    samples = await generate_samples(ModelConfig(path=str(model)), prompts, settings, num_slots=128)
    graded = await grade_group(samples, resolve_reward_fn(settings))
    num_turns = statistics.fmean(len(sample.metadata["outcomes"]) for sample in graded)
    return statistics.fmean(sample.reward or 0.0 for sample in graded), num_turns


async def main(seed: int, num_sft_steps: int, num_rl_steps: int, folder: Path) -> dict[str, Score]:
    """Make the data, train in two stages, and say what each achieved, the untrained model first."""
    write_files(folder, seed=seed)
    heldout = load_prompts_from_jsonl(folder / "heldout.jsonl")
    await fine_tune(folder, num_steps=num_sft_steps)
    await reinforce(folder, num_steps=num_rl_steps)
    scores = {stage: await score(folder / stage, heldout) for stage in ("model", "sft", "rl")}
    for stage, found in scores.items():
        print(
            f"{stage:5s}  held-out accuracy {found.greedy:.3f}  sampled {found.sampled:.3f}  "
            f"turns {found.num_turns:.2f}",
            flush=True,
        )
    return scores


def render_table(scores_by_seed: dict[int, dict[str, Score]]) -> str:
    """Held-out accuracy, greedy / sampled, before and after each stage, in Markdown."""
    lines = ["| seed | untrained | after SFT | after RL | turns after RL |", "|---|---|---|---|---|"]
    for seed, scores in scores_by_seed.items():
        cells = [f"{scores[stage].greedy:.3f} / {scores[stage].sampled:.3f}" for stage in ("model", "sft", "rl")]
        lines.append(f"| {seed} | {' | '.join(cells)} | {scores['rl'].num_turns:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Tool use: SFT, then RL in several turns.")
    parser.add_argument("--seed", type=int, default=0, help="of the data and the start weights")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from --seed on")
    parser.add_argument("--sft-steps", type=int, default=1000)
    parser.add_argument("--rl-steps", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    scores_by_seed = {}
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        with tempfile.TemporaryDirectory() as folder:
            scores_by_seed[seed] = asyncio.run(main(seed, arguments.sft_steps, arguments.rl_steps, Path(folder)))
    if arguments.seeds > 1:
        print(render_table(scores_by_seed))
