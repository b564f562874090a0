"""Whole GRPO steps (generate, grade, train, publish): this library against TRL's GRPOTrainer.

    python benchmarks/grpo_speed.py --size 1M [--rounds 5] [--out grpo-1M.json]
    python benchmarks/grpo_speed.py --size 0.5B --given 512 --device cuda --dtype bf16      the training part, on a GPU

Both take 16 prompts of 8 to 24 tokens per step, sample 8 completions of at most 40 tokens for each at temperature 1,
reward the share of even token ids, and make one AdamW update with group-normalised advantages and a token mean. The
learning rate is so small that completions keep their lengths; the report shows the sampled tokens per step of both.

    ours    run_rl_training; the embedded engine is a process of its own, reached over HTTP, and proves its weights
            after each step. Trainer and engine work in turns, so both may use all threads: never more run at a time
    trl     GRPOTrainer, generation by transformers in the trainer's process, no reference model

With `--given N` nothing is sampled: every step trains on the same random completions of N / 2 to N tokens, and only the
training part is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from inputs import PAD_ID, SIZES, write_model
from side_by_side import (
    Gate,
    Turn,
    describe_machine,
    measure,
    parse_contender,
    render_machine,
    render_table,
    speed_ratios,
    speeds,
    worker_command,
    write_results,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollouts_core import (
    AsyncRolloutManager,
    DataBuffer,
    Prompt,
    PyTorchTrainingBackend,
    Sample,
    create_pytorch_backend,
    prepare_grpo_batch,
    run_rl_training,
)
from rollouts_core.algorithms.loss import create_policy_loss
from rollouts_core.config import (
    ModelConfig,
    PolicyConfig,
    RLOptimConfig,
    RLTrainingConfig,
    RolloutConfig,
    SamplingConfig,
)
from rollouts_core.embedded.server import serve
from rollouts_core.engines import PublishTarget, SGLangEngine
from rollouts_core.optimizer_step import update_policy
from rollouts_core.rollout.generate import create_engine_generate_fn
from rollouts_core.rollout.rollout_batch import convert_to_batch

PROMPTS_PER_STEP, GROUP_SIZE, MAX_NEW_TOKENS = 16, 8, 40
SHORTEST_PROMPT, LONGEST_PROMPT, NUM_PROMPTS = 8, 24, 2_000
LEARNING_RATE, MAX_GRAD_NORM = 1e-7, 1.0
ENDLESS = 1_000_000
WARMUP_STEPS = 2
MICRO_BATCH_TOKENS = 2048
"""Padded tokens of a forward pass: on a CPU larger ones fall out of the caches."""
LENGTH_TOLERANCE = 0.05
"""Largest accepted relative difference of the sampled tokens per step."""
GIVEN_MICRO_BATCH_TOKENS = 16_384
PARTS = ("generate_s", "grade_s", "train_s", "publish_s")
NAMES = ("ours", "trl")


def main(words: Sequence[str] | None = None) -> dict[str, Any]:  # Any: JSON
    """Measure as the words of a command line say, or those of this process; returns the figures."""
    options = read_options(words)
    if options.worker:
        run_worker(options)
        return {}
    names = options.contenders.split(",")
    machine = describe_machine(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_model(Path(folder) / "model", SIZES[options.size], device=options.device)
        shared = ["--size", options.size, "--dtype", options.dtype, "--model-dir", str(model_dir)]
        shared += ["--threads", str(options.threads), "--device", options.device]
        shared += ["--given", str(options.given)]
        turns, _ = measure(
            {name: worker_command(__file__, "--worker", name, *shared) for name in names},
            num_threads=options.threads,
            log_dir=options.log_dir or Path(folder) / "logs",
            num_rounds=options.rounds,
            turn_s=options.turn_s,
            warmup_steps=WARMUP_STEPS,
        )
    train_ratio = None
    if options.given and set(NAMES) <= turns.keys():
        pairs = zip(turns["ours"], turns["trl"], strict=True)
        train_ratio = statistics.median(mean_parts([b])["train_s"] / mean_parts([a])["train_s"] for a, b in pairs)
    results: dict[str, Any] = {
        "script": "grpo_speed",
        "trl_train_s / ours": train_ratio,
        "size": options.size,
        "dtype": options.dtype,
        "machine": machine,
        "rounds": options.rounds,
        "s_per_step": {name: [turn.seconds / turn.num_steps for turn in taken] for name, taken in turns.items()},
        "parts_s": {name: mean_parts(taken) for name, taken in turns.items()},
        "sampled_tokens": {name: mean_parts(taken)["sampled_tokens"] for name, taken in turns.items()},
    }
    check_work(results["sampled_tokens"])
    write_results(options.out, results)
    print(render_machine(machine) + "\n\n" + render(results, turns))
    return results


def read_options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1M", help="model (default: 1M)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every contender (default: 5)")
    parser.add_argument("--turn-s", type=float, default=3.0, help="least seconds of a turn (default: 3)")
    parser.add_argument("--threads", type=int, default=2, help="threads that work at a time (default: 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the trainers; cuda needs --given")
    parser.add_argument("--given", type=int, default=0, help="train on given completions of at most so many tokens")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: float32 weights, autocast")
    parser.add_argument(
        "--contenders", default=",".join(NAMES), help="comma-separated; 'trl|setting=value' with another setting"
    )
    parser.add_argument("--out", type=Path, help="file for the figures")
    parser.add_argument("--log-dir", type=Path, help="folder for what the workers print")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--model-dir", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def mean_parts(turns: Sequence[Turn]) -> dict[str, float]:
    """Means per step of what the worker measured, over all turns."""
    num_steps = sum(turn.num_steps for turn in turns)
    return {name: sum(turn.parts[name] for turn in turns) / num_steps for name in turns[0].parts}


def check_work(sampled_tokens: Mapping[str, float]) -> None:
    """Assert that all contenders sample about as many tokens per step."""
    low, high = min(sampled_tokens.values()), max(sampled_tokens.values())
    assert high / low - 1 <= LENGTH_TOLERANCE, f"sampled tokens per step differ too much: {sampled_tokens}"


def render(results: Mapping[str, Any], turns: Mapping[str, Sequence[Turn]]) -> str:
    """The table: time of a step and of its parts, and how many times faster ours is."""
    rows = []
    for name, taken in turns.items():
        ratio = "" if name == "ours" or "ours" not in turns else speed_ratios(turns, "ours", name).render()
        parts = [f"{results['parts_s'][name].get(part, 0.0):.3f}" for part in PARTS]
        seconds = statistics.median(results["s_per_step"][name])
        tokens = f"{results['sampled_tokens'][name]:,.0f}"
        rows.append([name, speeds(taken).render(2), f"{seconds:.3f}", *parts, tokens, ratio])
    header = ["contender", "steps/s", "s per step", "generate", "grade", "train", "publish", "sampled tokens"]
    return render_table([*header, "ours is faster by"], rows)


def run_worker(options: argparse.Namespace) -> None:
    """Train as one contender until the parent has had enough."""
    torch.set_num_threads(options.threads)
    name, options.changes = parse_contender(options.worker)
    if name == "ours" and options.given:
        train_given(Gate(), options)
    elif name == "ours":
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(train_ours(Gate(), options, Path(folder)))
    else:
        train_with_trl(Gate(), options)


def make_prompts(vocab_size: int) -> list[str]:
    """Prompts of random words."""
    numbers = random.Random(0)
    lengths = [numbers.randint(SHORTEST_PROMPT, LONGEST_PROMPT) for _ in range(NUM_PROMPTS)]
    return [" ".join(f"w{numbers.randrange(2, vocab_size)}" for _ in range(length)) for length in lengths]


def share_of_even(token_ids: Sequence[int]) -> float:
    """A reward that differs within nearly every group."""
    return sum(token % 2 == 0 for token in token_ids) / max(1, len(token_ids))


def give_completions(options: argparse.Namespace) -> list[list[int]]:
    """Random completions for the prompts of a step, the same in every process; none ends early."""
    numbers, vocab_size = random.Random(1), SIZES[options.size].vocab_size
    lengths = [numbers.randint(options.given // 2, options.given) for _ in range(PROMPTS_PER_STEP * GROUP_SIZE)]
    return [[numbers.randrange(2, vocab_size) for _ in range(length)] for length in lengths]


# --- ours


def reward_even_tokens(sample: Sample) -> float:
    """`share_of_even` of the completion."""
    return share_of_even([token for token, weight in zip(sample.tokens, sample.loss_mask, strict=True) if weight])


class GateLogger:
    """A `MetricsLogger` that hands each step to the gate."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Count the step, and wait while it is another's turn."""
        parts = {name: metrics[name] for name in PARTS if name in metrics}
        sampled = metrics["response_tokens"] * PROMPTS_PER_STEP * GROUP_SIZE
        self._gate.step_done(units=1, loss=metrics.get("loss", 0.0), sampled_tokens=sampled, **parts)


def train_given(gate: Gate, options: argparse.Namespace) -> None:
    """The updates of `run_rl_training`, again and again on the same completions."""
    training = RLTrainingConfig(
        max_micro_batch_tokens=GIVEN_MICRO_BATCH_TOKENS if options.device == "cuda" else MICRO_BATCH_TOKENS,
        optim=RLOptimConfig(lr=LEARNING_RATE, betas=(0.9, 0.999), max_grad_norm=MAX_GRAD_NORM),
    )
    backend = create_backend(options, training)
    completions = give_completions(options)
    prompts = [backend.tokenizer.encode(text) for text in make_prompts(SIZES[options.size].vocab_size)]
    samples = [
        Sample(
            tokens=prompts[number // GROUP_SIZE] + tokens,
            loss_mask=[0.0] * len(prompts[number // GROUP_SIZE]) + [1.0] * len(tokens),
            group_index=number // GROUP_SIZE,
            index=number % GROUP_SIZE,
            reward=share_of_even(tokens),
        )
        for number, tokens in enumerate(completions)
    ]
    batch = convert_to_batch(samples)
    gate.start()
    while True:
        began = time.perf_counter()
        micro_batches = prepare_grpo_batch(batch, batch.rewards, training, pad_id=PAD_ID)
        metrics = asyncio.run(update_policy(backend, micro_batches))
        train_s = time.perf_counter() - began
        gate.step_done(units=1, loss=metrics["loss"], train_s=train_s, sampled_tokens=sum(map(len, completions)))


def create_backend(options: argparse.Namespace, training: RLTrainingConfig) -> PyTorchTrainingBackend:
    """The backend that both ways to train ours take."""
    return create_pytorch_backend(
        ModelConfig(path=str(options.model_dir)),
        training.optim,
        create_policy_loss(training.loss),
        num_steps=ENDLESS,
        policy=PolicyConfig(precision="bfloat16" if options.dtype == "bf16" else "float32"),
        device=options.device,
    )


async def train_ours(gate: Gate, options: argparse.Namespace, folder: Path) -> None:
    """`run_rl_training` with an engine process, as `rollouts_core rl` sets it up."""
    rollout = RolloutConfig(
        batch_size=PROMPTS_PER_STEP,
        n_samples_per_prompt=GROUP_SIZE,
        sampling=SamplingConfig(temperature=1.0, max_new_tokens=MAX_NEW_TOKENS),
    )
    training = RLTrainingConfig(
        num_steps=ENDLESS,
        max_micro_batch_tokens=MICRO_BATCH_TOKENS,
        optim=RLOptimConfig(lr=LEARNING_RATE, betas=(0.9, 0.999), max_grad_norm=MAX_GRAD_NORM),
    )
    backend = create_backend(options, training)
    texts = make_prompts(SIZES[options.size].vocab_size)
    prompts = [Prompt(id=str(i), messages=({"role": "user", "content": text},)) for i, text in enumerate(texts)]
    buffer = DataBuffer(prompts)
    receiver, sender = get_context("spawn").Pipe(duplex=False)
    process = get_context("spawn").Process(
        target=run_engine, args=(options.model_dir, options.threads, sender), daemon=True
    )
    process.start()
    engine = SGLangEngine(receiver.recv())
    generate_fn = create_engine_generate_fn([engine], backend.tokenizer, rollout)
    manager = AsyncRolloutManager(buffer, rollout, generate_fn=generate_fn, reward_fn=reward_even_tokens)
    target = PublishTarget(weights_dir=folder, model_config=options.model_dir / "config.json", prefix="bench")
    gate.start()
    async with manager:
        await run_rl_training(
            backend, buffer, manager, [engine], training, GateLogger(gate), target=target, pad_id=PAD_ID
        )


def run_engine(model_dir: Path, num_threads: int, sender: Connection) -> None:
    """Serve the model until the trainer's process ends."""
    serve(
        model_dir,
        port=0,
        num_threads=num_threads,
        max_running_requests=PROMPTS_PER_STEP * GROUP_SIZE,
        context_length=LONGEST_PROMPT + MAX_NEW_TOKENS,
        on_ready=sender.send,
    )


# --- TRL


def train_with_trl(gate: Gate, options: argparse.Namespace) -> None:
    """GRPOTrainer with its best settings; docs/benchmarks.md says which alternatives were tried."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    clock: dict[str, float] = {}
    given = (give_completions(options), None) if options.given else None
    """Token ids and, as without vLLM, no log-probs."""

    class TimedTrainer(GRPOTrainer):
        def _generate_single_turn(self, *positional: Any, **named: Any) -> Any:
            generate = (lambda *_, **__: given) if given else super()._generate_single_turn
            return timed_call(clock, "generate_s", generate, *positional, **named)

        def _calculate_rewards(self, *positional: Any, **named: Any) -> Any:
            return timed_call(clock, "grade_s", super()._calculate_rewards, *positional, **named)

    class StepGate(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = time.perf_counter()
            clock["train_s"] = now - clock.pop("began") - clock["generate_s"] - clock["grade_s"]
            gate.step_done(units=1, **clock)
            clock.clear()
            clock["began"] = time.perf_counter()

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        clock["sampled_tokens"] = sum(map(len, completion_ids))
        return [share_of_even(token_ids) for token_ids in completion_ids]

    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model_dir, dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(**trl_settings(options)),
        train_dataset=Dataset.from_dict({"prompt": make_prompts(SIZES[options.size].vocab_size)}),
        processing_class=AutoTokenizer.from_pretrained(options.model_dir, padding_side="left"),
        callbacks=[StepGate()],
    )
    gate.start()
    clock["began"] = time.perf_counter()
    trainer.train()


def trl_settings(options: argparse.Namespace) -> dict[str, Any]:
    """What TRL trains with."""
    return {
        "output_dir": str(options.model_dir.parent / "out"),
        "max_steps": ENDLESS,
        # A quarter of the step at a time, as ours; all 128 samples at once are slower.
        "per_device_train_batch_size": PROMPTS_PER_STEP * GROUP_SIZE // 4,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 4,
        "num_generations": GROUP_SIZE,
        "max_completion_length": options.given or MAX_NEW_TOKENS,
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "dapo",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": MAX_GRAD_NORM,
        "optim": "adamw_torch_fused",
        "use_cpu": options.device == "cpu",
        "bf16": options.dtype == "bf16",
        "gradient_checkpointing": False,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    } | options.changes


def timed_call(clock: dict[str, float], name: str, function: Any, *positional: Any, **named: Any) -> Any:
    """What the function returns; its seconds are added to `clock[name]`."""
    began = time.perf_counter()
    outcome = function(*positional, **named)
    clock[name] = clock.get(name, 0.0) + time.perf_counter() - began
    return outcome


if __name__ == "__main__":
    main()
