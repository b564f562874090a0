"""SFT in trained tokens per second: this library, a bare PyTorch loop, TRL's SFTTrainer and the Transformers Trainer.

    python benchmarks/sft_speed.py --size 1M [--rounds 5] [--out sft-1M.json]
    python benchmarks/sft_speed.py --size 0.5B --device cuda --dtype bf16 --row-length 2048 --rows 4       on a GPU

All train the same model on the same 6,000 documents (inputs.py) with AdamW and a clipped gradient. Only targets of real
documents that enter the loss count: no padding. The losses of the first steps show that contenders with equal batches
do equal work. On a GPU the table also has the peak of the allocator, and the model FLOPs utilisation: 6 FLOP per token
and weight of a matrix, the head included, and 6 per layer, token and channel of what causal attention over a mean
document takes, as a share of the GPU's dense bfloat16 peak.

    ours            run_sft_training: rows of --row-length, best-fit packing, documents do not see each other
    bare packed     the same rows, as tensors prepared beforehand, in the shortest loop that separates documents
    bare padded     one document per row
    trl             SFTTrainer, one document per row (its default)
    trl grouped     the same, documents of like lengths together
    trl bfd         SFTTrainer, packing="bfd": documents end to end in one row of all rows' tokens
    trl bfd by row  the same, a row at a time and all of a step accumulated
    trl wrapped     SFTTrainer, packing="wrapped": the stream of documents cut at each row's end
    hf              transformers.Trainer with padding
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
import statistics
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from inputs import MEAN_LENGTH, PAD_ID, SIZES, as_samples, make_documents, write_model
from side_by_side import (
    Gate,
    Turn,
    check_equal_losses,
    cpu_ratios,
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
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rollouts_core import build_batch, create_pytorch_backend, run_sft_training
from rollouts_core.algorithms.loss import create_cross_entropy_loss
from rollouts_core.batch import TrainBatch
from rollouts_core.config import ModelConfig, OptimConfig, PolicyConfig, SFTTrainingConfig
from rollouts_core.data.steps import iterate_sft_steps

LEARNING_RATE, MAX_GRAD_NORM = 1e-4, 1.0
CONTENDERS_HELP = "comma-separated; 'NAME bf16' in mixed precision, 'NAME|setting=value' with another setting of a peer"
ENDLESS = 1_000_000
WARMUP_STEPS = 3
LOSS_TOLERANCE = 2e-4
"""Float32 sums in another order."""
NAMES = ("ours", "bare packed", "bare padded", "trl", "trl grouped", "trl bfd", "trl bfd by row", "trl wrapped", "hf")
PEAK_BF16_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "A40": 150e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "5090": 210e12,
    "4090": 165e12,
    "3090": 71e12,
}
"""Dense bfloat16 FLOP per second by words of the GPU's name, from the vendor's data sheets; the first that fits."""


def main(words: Sequence[str] | None = None) -> dict[str, Any]:  # Any: JSON
    """Measure as the words of a command line say, or those of this process; returns the figures."""
    options = read_options(words)
    if options.worker:
        run_worker(options)
        return {}
    names = [name for name in options.contenders.split(",") if name]
    machine = describe_machine(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_model(Path(folder) / "model", SIZES[options.size], device=options.device)
        shared = ["--size", options.size, "--device", options.device, "--dtype", options.dtype]
        shared += ["--model-dir", str(model_dir), "--threads", str(options.threads)]
        shared += ["--row-length", str(options.row_length), "--rows", str(options.rows)]
        turns, warmups = measure(
            {name: worker_command(__file__, "--worker", name, *shared) for name in names},
            num_threads=options.threads,
            log_dir=options.log_dir or Path(folder) / "logs",
            num_rounds=options.rounds,
            turn_s=options.turn_s,
            warmup_steps=WARMUP_STEPS,
        )
    differences = check_work(warmups, tolerance=LOSS_TOLERANCE if options.dtype == "fp32" else 0.05)
    results: dict[str, Any] = {
        "script": "sft_speed",
        "size": options.size,
        "device": options.device,
        "dtype": options.dtype,
        "machine": machine,
        "rounds": options.rounds,
        "loss_differences": differences,
        "cpu_us_per_token": {
            name: [1e6 * turn.cpu_seconds / turn.units for turn in taken] for name, taken in turns.items()
        },
        "tokens_per_s": {name: [turn.speed for turn in taken] for name, taken in turns.items()},
    }
    if options.device == "cuda":
        results["peak_gib"] = {name: peak_gib(taken) for name, taken in turns.items()}
        results["mfu"] = {name: utilisation(options.size, taken) for name, taken in turns.items()}
    write_results(options.out, results)
    print(render_machine(machine) + "\n\n" + render(results, turns))
    return results


def read_options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1M", help="model (default: 1M)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every contender (default: 5)")
    parser.add_argument("--row-length", type=int, default=256, help="tokens of a packed row (default: 256)")
    parser.add_argument("--rows", type=int, default=8, help="packed rows per step (default: 8)")
    parser.add_argument("--turn-s", type=float, default=3.0, help="least seconds of a turn (default: 3)")
    parser.add_argument("--threads", type=int, default=2, help="threads of every contender (default: 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: float32 weights, autocast")
    parser.add_argument("--contenders", default=",".join(NAMES), help=CONTENDERS_HELP)
    parser.add_argument("--out", type=Path, help="file for the figures")
    parser.add_argument("--log-dir", type=Path, help="folder for what the workers print")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--model-dir", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def check_work(warmups: Mapping[str, Turn], *, tolerance: float) -> dict[str, float]:
    """The largest difference of the first losses within each set of contenders that see equal batches."""
    differences = {}
    for names in (("bare packed", "ours"), ("bare padded", "trl", "hf")):
        present = [name for name in names if name in warmups]
        if len(present) > 1:
            differences[" = ".join(present)] = check_equal_losses(warmups, present, tolerance=tolerance)
    return differences


def render(results: Mapping[str, Any], turns: Mapping[str, Sequence[Turn]]) -> str:
    """The table: speed of each, and how many times faster ours is."""
    rows = []
    for name, taken in turns.items():
        row = [name, speeds(taken).render(0)]
        has_ratio = name != "ours" and "ours" in turns
        row += [ratio(turns, "ours", name).render() if has_ratio else "" for ratio in (speed_ratios, cpu_ratios)]
        if "mfu" in results:
            row += [f"{results['mfu'][name]:.1%}", f"{results['peak_gib'][name]:.1f}"]
        rows.append(row)
    header = ["contender", "trained tokens/s", "ours is faster by", "by CPU time"]
    return render_table([*header, "MFU", "peak, GiB"] if "mfu" in results else header, rows)


def utilisation(size_name: str, turns: Sequence[Turn]) -> float:
    """Share of the GPU's dense bfloat16 peak that the model's own arithmetic uses; NaN on a GPU not listed."""
    peak = peak_flops(torch.cuda.get_device_name())
    return statistics.median(turn.speed for turn in turns) * flops_per_token(size_name) / peak


def peak_flops(gpu_name: str) -> float:
    """The dense bfloat16 peak of a GPU by its name; NaN if PEAK_BF16_FLOPS has none of its words."""
    fitting = (flops for words, flops in PEAK_BF16_FLOPS.items() if re.search(rf"\b{words}\b", gpu_name))
    return next(fitting, float("nan"))


def peak_gib(turns: Sequence[Turn]) -> float:
    """The most memory that the allocator held at a time, in GiB."""
    return max(turn.parts["peak_bytes"] / turn.num_steps for turn in turns) / 2**30


def measure_peak(options: argparse.Namespace) -> dict[str, float]:
    """The allocator's peak so far, for a step's report; nothing on a CPU."""
    return {"peak_bytes": float(torch.cuda.max_memory_allocated())} if options.device == "cuda" else {}


def documents_per_step(options: argparse.Namespace) -> int:
    """As many documents as fit into the packed rows of a step."""
    return options.rows * options.row_length // MEAN_LENGTH + 1


def flops_per_token(size_name: str) -> float:
    """FLOP of forward and backward per token: 6 per matrix parameter, and the causal attention of a mean document."""
    size = SIZES[size_name]
    head_dim = size.hidden_size // size.num_heads
    attention = size.hidden_size * head_dim * 2 * (size.num_heads + size.num_kv_heads)
    matrices = size.num_layers * (attention + 3 * size.hidden_size * size.intermediate_size)
    head = size.vocab_size * size.hidden_size
    return 6.0 * (matrices + head) + 6.0 * size.num_layers * size.hidden_size * MEAN_LENGTH


def run_worker(options: argparse.Namespace) -> None:
    """Train as one contender until the parent has had enough."""
    torch.set_num_threads(options.threads)
    full_name, options.changes = parse_contender(options.worker)
    name = full_name.removesuffix(" bf16")
    options.bf16 = name != full_name or options.dtype == "bf16"
    documents = make_documents(SIZES[options.size].vocab_size)
    if name == "ours":
        train_ours(Gate(), documents, options)
    elif name.startswith("bare"):
        train_bare(Gate(), documents, options, packed=name.endswith("packed"))
    elif name.startswith("trl"):
        train_with_trl(Gate(), documents, options, variant=name.removeprefix("trl").strip())
    else:
        train_with_transformers(Gate(), documents, options)


# --- ours and the bare loop


class GateLogger:
    """A `MetricsLogger` that hands each step to the gate."""

    def __init__(self, gate: Gate, rows: Iterator[list[list[Any]]], options: argparse.Namespace) -> None:
        self._gate = gate
        self._rows = rows
        self._options = options

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Count the step's trained targets, and wait while it is another's turn."""
        num_targets = sum(len(sample.tokens) - 1 for row in next(self._rows) for sample in row)
        self._gate.step_done(units=num_targets, loss=metrics["loss"], **measure_peak(self._options))


def sft_config(options: argparse.Namespace) -> SFTTrainingConfig:
    """The packed rows of a step, in one micro-batch."""
    return SFTTrainingConfig(
        num_steps=ENDLESS,
        batch_size=options.rows,
        micro_batch_size=options.rows,
        max_length=options.row_length,
        packing=True,
        log_every=1,
    )


def train_ours(gate: Gate, documents: list[list[int]], options: argparse.Namespace) -> None:
    """`run_sft_training` as a user calls it."""
    samples = as_samples(documents)
    backend = create_pytorch_backend(
        ModelConfig(path=str(options.model_dir)),
        OptimConfig(lr=LEARNING_RATE, schedule="constant", betas=(0.9, 0.999), max_grad_norm=MAX_GRAD_NORM),
        create_cross_entropy_loss(),
        num_steps=ENDLESS,
        policy=PolicyConfig(precision="bfloat16" if options.bf16 else "float32"),
        device=options.device,
    )
    logger = GateLogger(gate, iterate_sft_steps(samples, sft_config(options)), options)
    gate.start()
    asyncio.run(run_sft_training(backend, samples, sft_config(options), logger, pad_id=PAD_ID))


def train_bare(gate: Gate, documents: list[list[int]], options: argparse.Namespace, *, packed: bool) -> None:
    """The shortest loop: tensors prepared beforehand, model, cross entropy, clip, fused AdamW."""
    model = load_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    batches = packed_batches(documents, options) if packed else padded_batches(documents, options)
    gate.start()
    for batch in itertools.cycle(batches):
        on_device = batch.to(model.device)
        inputs = {"input_ids": on_device.inputs_BT}
        if packed:
            segments = on_device.segment_ids_BT
            same = (segments[:, :, None] == segments[:, None, :]).tril()
            inputs |= {"attention_mask": same[:, None], "position_ids": on_device.position_ids_BT}
        with torch.autocast(options.device, dtype=torch.bfloat16, enabled=options.bf16):
            logits = model(**inputs, use_cache=False).logits
        targets = on_device.targets_BT.masked_fill(on_device.loss_mask_BT == 0, -100)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        gate.step_done(units=batch.num_loss_tokens, loss=float(loss), **measure_peak(options))


def load_model(options: argparse.Namespace) -> PreTrainedModel:
    """The model in float32."""
    return AutoModelForCausalLM.from_pretrained(options.model_dir, dtype=torch.float32).to(options.device).train()


def packed_batches(documents: list[list[int]], options: argparse.Namespace) -> list[TrainBatch]:
    """The steps of `run_sft_training`'s first two epochs, as tensors."""
    num_steps = 2 * sum(map(len, documents)) // (options.row_length * options.rows)
    steps = itertools.islice(iterate_sft_steps(as_samples(documents), sft_config(options)), num_steps)
    return [build_batch(rows, pad_id=PAD_ID) for rows in steps]


def padded_batches(documents: list[list[int]], options: argparse.Namespace) -> list[TrainBatch]:
    """Documents in order, one per row."""
    samples, size = as_samples(documents), documents_per_step(options)
    return [
        build_batch([[sample] for sample in samples[start : start + size]], pad_id=PAD_ID)
        for start in range(0, len(samples) - size + 1, size)
    ]


# --- the peers


def train_with_trl(gate: Gate, documents: list[list[int]], options: argparse.Namespace, *, variant: str) -> None:
    """SFTTrainer with its best settings."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    packs = variant in ("bfd", "bfd by row", "wrapped")
    settings = trainer_settings(options, grouped=variant == "grouped")
    settings["per_device_train_batch_size"] = options.rows if packs else documents_per_step(options)
    if variant == "bfd by row":
        settings |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": options.rows}
    trainer = SFTTrainer(
        model=load_model(options),
        args=SFTConfig(
            **settings | options.changes,
            max_length=options.row_length,
            packing=packs,
            packing_strategy="wrapped" if variant == "wrapped" else "bfd",
            dataset_num_proc=1,
        ),
        train_dataset=Dataset.from_dict({"input_ids": documents}),
        processing_class=AutoTokenizer.from_pretrained(options.model_dir),
    )
    train_through_gate(gate, trainer, options)


def train_with_transformers(gate: Gate, documents: list[list[int]], options: argparse.Namespace) -> None:
    """transformers.Trainer with the collator that its documentation gives to language models."""
    from datasets import Dataset
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    tokenizer = AutoTokenizer.from_pretrained(options.model_dir)
    settings = trainer_settings(options) | {"per_device_train_batch_size": documents_per_step(options)}
    trainer = Trainer(
        model=load_model(options),
        args=TrainingArguments(**settings | options.changes),
        train_dataset=Dataset.from_dict({"input_ids": documents}),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    train_through_gate(gate, trainer, options)


def trainer_settings(options: argparse.Namespace, *, grouped: bool = False) -> dict[str, Any]:
    """What both peers train with; docs/benchmarks.md says which alternatives were tried."""
    return {
        "output_dir": str(options.model_dir.parent / "out"),
        "max_steps": ENDLESS,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": MAX_GRAD_NORM,
        "optim": "adamw_torch_fused",
        "use_cpu": options.device == "cpu",
        "bf16": options.bf16,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "group_by_length" if grouped else "sequential",
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": options.device == "cuda",
        "logging_strategy": "no",
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def train_through_gate(gate: Gate, trainer: Any, options: argparse.Namespace) -> None:  # Any: a Trainer of either peer
    """Train while the parent allows it. Tokens are counted where batches are made, losses where they are computed."""
    from transformers import TrainerCallback

    counts: deque[int] = deque()
    losses: deque[torch.Tensor] = deque()
    per_step = trainer.args.gradient_accumulation_steps
    collate, compute_loss = trainer.data_collator, trainer.compute_loss

    def counting_collate(examples: list[Any]) -> Any:
        batch = collate(examples)
        counts.append(int((batch["labels"][:, 1:] != -100).sum()))
        return batch

    def watched_loss(*positional: Any, **named: Any) -> Any:
        outcome = compute_loss(*positional, **named)
        losses.append((outcome[0] if isinstance(outcome, tuple) else outcome).detach())
        return outcome

    class StepGate(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            num_targets = sum(counts.popleft() for _ in range(per_step))
            loss = sum(float(losses.popleft()) for _ in range(per_step))
            gate.step_done(units=num_targets, loss=loss, **measure_peak(options))

    trainer.data_collator, trainer.compute_loss = counting_collate, watched_loss
    trainer.add_callback(StepGate())
    gate.start()
    trainer.train()


if __name__ == "__main__":
    main()
