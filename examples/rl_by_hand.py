"""Reinforcement learning (GRPO) written out: every line of the loop that `run_rl_training` runs, in its order.

A model that `sft_by_hand.py` trained works some additions column by column and blurts the others out; rewarded for
right answers, it learns to work them all. The loop is: prompts -> a group of completions each -> rewards -> advantages
within each group -> clipped policy loss -> gradient -> optimizer step -> the new weights into the decoder.

`run_rl_training` is this loop with what a long run needs besides: engines reached over HTTP that prove which weights
they serve, completions sampled in parallel and filtered, micro-batches, checkpoints, metrics in a file.

    python examples/sft_by_hand.py --out sft_model
    python examples/rl_by_hand.py sft_model --steps 30
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from rollouts_core import (
    DataBuffer,
    Prompt,
    Sample,
    Status,
    build_batch,
    create_adamw_optimizer,
    group_advantages,
    load_hf_model,
    load_prompts_from_jsonl,
    load_tokenizer,
    policy_loss,
    score_targets,
    tokenize_prompt,
)
from rollouts_core.config import LossConfig, ModelConfig, OptimConfig
from rollouts_core.data.decoding import decode_turn
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.offline import generate_tokens
from rollouts_core.embedded.sampling import SamplingParams
from rollouts_core.environments.arithmetic import ArithmeticEnvironment
from rollouts_core.model.loading import pad_token_id
from rollouts_core.quickstart import QuickstartSize, write_quickstart_files

GROUP_SIZE = 8
MAX_PROMPT_TOKENS, MAX_NEW_TOKENS = 24, 40


def sample_group(decoder: Decoder, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, *, seed: int) -> list[Sample]:
    """Completions of one prompt, with the log-probs that the decoder sampled them at."""
    asked = tokenize_prompt(tokenizer, prompt.messages)
    status_of = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}
    params = [SamplingParams(max_new_tokens=MAX_NEW_TOKENS, sampling_seed=seed + i) for i in range(GROUP_SIZE)]
    return [
        Sample(
            prompt=prompt.messages,
            response=decode_turn(tokenizer, completion.output_ids, status_of[completion.finish_reason.kind]),
            tokens=[*asked, *completion.output_ids],
            loss_mask=[0.0] * len(asked) + [1.0] * len(completion.output_ids),
            rollout_log_probs=[0.0] * len(asked) + list(completion.output_logprobs),
            status=status_of[completion.finish_reason.kind],
            metadata={"answer": prompt.answer},
        )
        for completion in generate_tokens(decoder, [asked] * GROUP_SIZE, params)
    ]


def train(model_dir: Path, files: Path, *, num_steps: int, batch_size: int) -> None:
    """Improve the model in `model_dir` on the prompts in `files`, where the decoder's weights are put too."""
    config = ModelConfig(path=str(model_dir))
    model, tokenizer = load_hf_model(config), load_tokenizer(config)
    optim = OptimConfig(lr=3e-4)
    optimizer = create_adamw_optimizer(model, optim)
    decoder = Decoder(model_dir, num_slots=GROUP_SIZE, context_length=MAX_PROMPT_TOKENS + MAX_NEW_TOKENS)
    environment = ArithmeticEnvironment()
    data_buffer = DataBuffer(load_prompts_from_jsonl(files / "prompts.jsonl"))

    for step in range(1, num_steps + 1):
        groups = [
            sample_group(decoder, tokenizer, prompt, seed=1_000_000 * step + 1_000 * i)
            for i, prompt in enumerate(data_buffer.get_prompts(batch_size))
        ]
        rewards = [[environment.grade(sample) for sample in group] for group in groups]
        advantages = [[advantage] for group in rewards for advantage in group_advantages(group)]
        rows = [[sample] for group in groups for sample in group]
        batch = build_batch(rows, advantages=advantages, pad_id=pad_token_id(tokenizer))
        loss, metrics = policy_loss(score_targets(model, batch), batch, LossConfig())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        model.save_pretrained(files / "weights")
        decoder.load_weights(files / "weights")
        reward = statistics.fmean(reward for group in rewards for reward in group)
        length = batch.num_loss_tokens / len(rows)
        kl = metrics["kl_rollout_policy"]
        print(f"step {step:3d}  reward {reward:.3f}  tokens {length:4.1f}  kl {kl:.0e}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Reinforcement learning by hand.")
    parser.add_argument("model", type=Path, help="folder that sft_by_hand.py wrote")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=16, help="prompts per step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "quickstart"
        write_quickstart_files(files, size=QuickstartSize())
        train(arguments.model, files, num_steps=arguments.steps, batch_size=arguments.batch_size)
