"""Supervised fine-tuning written out: every line of the loop that `run_sft_training` runs, in the order it runs them.

An untrained model of 150 000 parameters learns three-digit addition from the quickstart's demonstrations, which work
some additions column by column and blurt the others out. The loop is: demonstrations -> one batch of tensors ->
log-probs of the trained tokens -> their mean loss -> gradient -> optimizer step.

`run_sft_training` is this loop with what a long run needs besides: rows packed with several demonstrations,
micro-batches, checkpoints from which it goes on, metrics in a file. Without packing it gives the losses printed here.

    python examples/sft_by_hand.py --steps 400 --out sft_model
    python examples/rl_by_hand.py sft_model
"""

import argparse
import itertools
import tempfile
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from rollouts_core import (
    build_batch,
    create_adamw_optimizer,
    create_warmup_cosine_scheduler,
    load_hf_model,
    load_sft_dataset,
    load_tokenizer,
    score_targets,
)
from rollouts_core.algorithms.loss import cross_entropy_loss
from rollouts_core.config import ModelConfig, OptimConfig
from rollouts_core.data.steps import iterate_epochs
from rollouts_core.model.loading import pad_token_id
from rollouts_core.quickstart import QuickstartSize, write_quickstart_files


def train(files: Path, *, num_steps: int, batch_size: int, out: Path | None) -> None:
    """Train the model in `files` on the demonstrations beside it, and write it to `out`."""
    config = ModelConfig(path=str(files / "base_model"))
    model, tokenizer = load_hf_model(config), load_tokenizer(config)
    samples = load_sft_dataset(files / "sft.jsonl", tokenizer, max_length=128)
    optim = OptimConfig(lr=5e-3, num_warmup_steps=num_steps // 20, weight_decay=0.01)
    optimizer = create_adamw_optimizer(model, optim)
    scheduler = create_warmup_cosine_scheduler(optimizer, optim, num_steps=num_steps)

    endless = iterate_epochs(samples, seed=0)
    for step in range(1, num_steps + 1):
        rows = [[sample] for sample in itertools.islice(endless, batch_size)]
        batch = build_batch(rows, pad_id=pad_token_id(tokenizer))
        loss, _ = cross_entropy_loss(score_targets(model, batch), batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step == 1 or step % 20 == 0 or step == num_steps:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
    if out:
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        print(f"saved {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Supervised fine-tuning by hand.")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=32, help="demonstrations per step")
    parser.add_argument("--out", type=Path, help="folder for the trained model")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "quickstart"
        write_quickstart_files(files, size=QuickstartSize())
        train(files, num_steps=arguments.steps, batch_size=arguments.batch_size, out=arguments.out)
