"""RL with generation ahead of the trainer against RL in turns: the same work, its wall-clock, and what it learns.

    python benchmarks/async_rl.py [--rounds 3] [--steps 40] [--grade-s 0] [--out async_rl.json]

The quickstart's task (three-digit additions, 0.16M parameters): SFT once, then from its checkpoint GRPO with 16 prompts
of 8 completions per step, once per contender and round; a round has a seed of its own. Engine and trainer are two
processes with half of the threads each, so in turns one half always waits.

    in turns      rollout.max_staleness 0
    ahead S       rollout.max_staleness S, publications wait for what is under way
    ahead S abort, ahead S continue      they do not (rollout.in_flight)

With `--grade-s` each completion is graded so many seconds after it was sampled, without the use of a processor: a
stand-in for what a judge, a sandbox or an engine on another machine takes.

All see the same prompts in the same order. The score is the mean reward of two completions of each held-out prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from side_by_side import describe_machine, range_of, render_machine, render_table, write_results
from transformers.utils.logging import disable_progress_bar

from rollouts_core import (
    AsyncRolloutManager,
    DataBuffer,
    Prompt,
    Sample,
    create_engine_generate_fn,
    create_pytorch_backend,
    load_prompts_from_jsonl,
    load_sft_dataset,
    load_tokenizer,
    run_rl_training,
    run_sft_training,
)
from rollouts_core.algorithms.loss import create_cross_entropy_loss, create_policy_loss
from rollouts_core.checkpoint import step_directory
from rollouts_core.config import (
    EvaluationConfig,
    ModelConfig,
    OptimConfig,
    RLOptimConfig,
    RLTrainingConfig,
    RolloutConfig,
    SamplingConfig,
    SFTTrainingConfig,
)
from rollouts_core.embedded.server import serve
from rollouts_core.engines import InFlightEngine, PublishTarget, SGLangEngine
from rollouts_core.evaluate import evaluation_rollouts, generate_samples, scores_by_prompt
from rollouts_core.model.loading import pad_token_id
from rollouts_core.quickstart import QuickstartSize, write_quickstart_files
from rollouts_core.rewards import grade_group, grade_sample
from rollouts_core.rollout.resolve import resolve_reward_fn

REFERENCE = "in turns"
CONTENDERS: dict[str, dict[str, Any]] = {  # Any: settings of several types
    REFERENCE: {},
    "ahead 1": {"max_staleness": 1},
    "ahead 2": {"max_staleness": 2},
    "ahead 2 abort": {"max_staleness": 2, "in_flight": "abort"},
    "ahead 2 continue": {"max_staleness": 2, "in_flight": "continue"},
}
MAX_PROMPT_TOKENS, MAX_NEW_TOKENS, NUM_SLOTS = 24, 40, 128
ROLLOUT = RolloutConfig(
    environment="arithmetic",
    batch_size=16,
    n_samples_per_prompt=8,
    sampling=SamplingConfig(temperature=1.0, max_new_tokens=MAX_NEW_TOKENS),
)
SFT_STEPS = 800
MICRO_BATCH_TOKENS = 2048
"""Padded tokens of a forward pass: on a CPU larger ones fall out of the caches."""
WARMUP_STEPS = 3
"""Not timed: the first batch of a run has nothing to overlap with."""
PARTS = ("generate_s", "train_s", "publish_s", "idle_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one training came to."""

    s_per_step: float
    """After the warm-up."""
    parts_s: dict[str, float]
    """Means per step of what the loop measured."""
    staleness: float
    """Mean over the steps."""
    score: float
    """Mean held-out reward after the last step."""


def main() -> None:
    options = read_options()
    torch.set_num_threads(max(1, options.threads // 2))
    disable_progress_bar()
    machine = describe_machine(options.threads)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in options.contenders.split(",")}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as engines:
        files = Path(folder) / "quickstart"
        write_quickstart_files(files, size=QuickstartSize())
        start = asyncio.run(imitate(files, Path(folder) / "sft"))
        url = engines.enter_context(serving(start, num_threads=torch.get_num_threads()))
        start_score = asyncio.run(score_model(start, files))
        print(f"after SFT: {start_score:.3f}", file=sys.stderr, flush=True)
        for number in range(options.rounds):
            for name in list(outcomes) if number % 2 == 0 else reversed(outcomes):
                directory = Path(folder) / f"{name.replace(' ', '_')}-{number}"
                training = reinforce(name, start, files, directory, url=url, seed=number, options=options)
                outcomes[name].append(asyncio.run(training))
                last = outcomes[name][-1]
                print(
                    f"round {number + 1}: {name} {last.s_per_step:.3f} s, {last.score:.3f}", file=sys.stderr, flush=True
                )
    results = {
        "script": "async_rl",
        "machine": machine,
        "steps": options.steps,
        "grade_s": options.grade_s,
        "start_score": start_score,
        "outcomes": {name: [asdict(outcome) for outcome in each] for name, each in outcomes.items()},
    }
    write_results(options.out, results)
    print(render_machine(machine) + "\n\n" + render(outcomes, start_score))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="trainings of every contender (default: 3)")
    parser.add_argument("--steps", type=int, default=40, help="steps of a training (default: 40)")
    parser.add_argument("--grade-s", type=float, default=0.0, help="what grading a completion takes (default: 0)")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="comma-separated")
    parser.add_argument("--threads", type=int, default=2, help="half for the engine, half for the trainer (default: 2)")
    parser.add_argument("--out", type=Path, help="file for the figures")
    return parser.parse_args()


def render(outcomes: Mapping[str, Sequence[Outcome]], start_score: float) -> str:
    """The table of times and scores, and how far apart scores of one contender are."""
    rows = []
    for name, each in outcomes.items():
        ratios = [ours.s_per_step for ours in outcomes[REFERENCE]]
        faster = range_of([turns / own.s_per_step for turns, own in zip(ratios, each, strict=True)]).render()
        parts = [f"{statistics.fmean(outcome.parts_s[part] for outcome in each):.3f}" for part in PARTS]
        seconds = f"{statistics.median(outcome.s_per_step for outcome in each):.3f}"
        staleness = f"{statistics.fmean(outcome.staleness for outcome in each):.2f}"
        scores = range_of([outcome.score for outcome in each]).render(3)
        rows.append([name, seconds, "" if name == REFERENCE else faster, *parts, staleness, scores])
    header = ["contender", "s per step", "faster than in turns by", "generate", "train", "publish", "idle", "staleness"]
    return render_table([*header, "held-out score"], rows) + f"\n\nbefore RL: {start_score:.3f}"


async def imitate(files: Path, directory: Path) -> ModelConfig:
    """The checkpoint of SFT on the quickstart's demonstrations."""
    base = ModelConfig(path=str(files / "base_model"))
    training = SFTTrainingConfig(
        num_steps=SFT_STEPS,
        max_length=128,
        checkpoint_every=SFT_STEPS,
        optim=OptimConfig(lr=5e-3, betas=(0.9, 0.99), num_warmup_steps=30, weight_decay=0.01),
    )
    tokenizer = load_tokenizer(base)
    samples = load_sft_dataset(str(files / "sft.jsonl"), tokenizer, max_length=training.max_length)
    backend = create_pytorch_backend(base, training.optim, create_cross_entropy_loss(), num_steps=SFT_STEPS)
    await run_sft_training(backend, samples, training, pad_id=pad_token_id(tokenizer), checkpoint_dir=directory)
    return ModelConfig(path=str(step_directory(directory, SFT_STEPS)))


async def reinforce(
    name: str, start: ModelConfig, files: Path, directory: Path, *, url: str, seed: int, options: argparse.Namespace
) -> Outcome:
    """Train as one contender from the checkpoint of SFT."""
    steps = options.steps
    rollout = ROLLOUT.model_copy(update={**CONTENDERS[name], "seed": seed})
    training = RLTrainingConfig(
        num_steps=steps,
        checkpoint_every=steps,
        max_micro_batch_tokens=MICRO_BATCH_TOKENS,
        optim=RLOptimConfig(lr=3e-4, schedule="constant"),
    )
    backend = create_pytorch_backend(start, training.optim, create_policy_loss(training.loss), num_steps=steps)
    engine = InFlightEngine(SGLangEngine(url), rollout.in_flight)
    generate_fn = create_engine_generate_fn([engine], backend.tokenizer, rollout)
    prompts = load_prompts_from_jsonl(str(files / "prompts.jsonl"))
    clock = StepClock()
    grade = resolve_reward_fn(rollout)

    async def grade_later(sample: Sample) -> float | None:
        await asyncio.sleep(options.grade_s)
        return (await grade_sample(sample, grade)).reward

    async with AsyncRolloutManager(
        DataBuffer(prompts, seed=seed), rollout, generate_fn=generate_fn, reward_fn=grade_later
    ) as manager:
        history = await run_rl_training(
            backend,
            manager.data_buffer,
            manager,
            [engine],
            training,
            clock,
            target=PublishTarget(
                weights_dir=directory / "weights", model_config=Path(start.path) / "config.json", prefix=f"{name}{seed}"
            ),
            pad_id=pad_token_id(backend.tokenizer),
            checkpoint_dir=directory / "checkpoints",
        )
    await engine.aclose()
    timed = history[WARMUP_STEPS:]
    return Outcome(
        s_per_step=(clock.ended[-1] - clock.ended[WARMUP_STEPS - 1]) / len(timed),
        parts_s={part: statistics.fmean(metrics[part] for metrics in timed) for part in PARTS},
        staleness=statistics.fmean(metrics["staleness_mean"] for metrics in timed),
        score=await score_model(ModelConfig(path=str(step_directory(directory / "checkpoints", steps))), files),
    )


class StepClock:
    """A `MetricsLogger` that notes when each step ended."""

    def __init__(self) -> None:
        self.ended: list[float] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Note the time."""
        self.ended.append(time.perf_counter())


async def score_model(model: ModelConfig, files: Path) -> float:
    """Mean reward of two completions of each held-out prompt."""
    heldout: list[Prompt] = load_prompts_from_jsonl(str(files / "heldout.jsonl"))
    rollout = evaluation_rollouts(EvaluationConfig(temperature=1.0, samples_per_prompt=2), ROLLOUT)
    samples = await generate_samples(model, heldout, rollout, num_slots=NUM_SLOTS)
    return statistics.fmean(scores_by_prompt(await grade_group(samples, resolve_reward_fn(rollout))))


@contextmanager
def serving(model: ModelConfig, *, num_threads: int) -> Iterator[str]:
    """The address of an engine in a process of its own."""
    receiver, sender = get_context("spawn").Pipe(duplex=False)
    process = get_context("spawn").Process(target=run_engine, args=(Path(model.path), num_threads, sender), daemon=True)
    process.start()
    try:
        yield receiver.recv()
    finally:
        process.terminate()
        process.join()


def run_engine(model_dir: Path, num_threads: int, sender: Connection) -> None:
    """Serve the model until told to stop."""
    serve(
        model_dir,
        port=0,
        num_threads=num_threads,
        max_running_requests=NUM_SLOTS,
        context_length=MAX_PROMPT_TOKENS + MAX_NEW_TOKENS + 1,
        on_ready=sender.send,
    )


if __name__ == "__main__":
    main()
