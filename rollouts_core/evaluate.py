"""Score checkpoints on the same rows with the same random numbers, and record their completions.

A score is one number per row, and a higher score is better. With the metric accuracy, the score is the mean reward of a
prompt's completions. With the metric loss, the score is minus the mean loss of a demonstration.

Not here: the statistical comparison (comparison.py).
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollouts_core.batch import build_batch
from rollouts_core.config import EvaluationConfig, ModelConfig, RolloutConfig
from rollouts_core.data.chat import stop_token_ids, tokenize_prompt, tokenize_prompts
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.offline import generate_tokens
from rollouts_core.embedded.running import Completion as EmbeddedCompletion
from rollouts_core.embedded.sampling import SamplingParams
from rollouts_core.engine_kinds import EMBEDDED
from rollouts_core.engines.completion import Completion, status_of_finish
from rollouts_core.engines.in_process import serve_in_process
from rollouts_core.engines.protocol import InferenceEngine
from rollouts_core.environments.protocol import describe_tools, is_multi_turn
from rollouts_core.errors import DivergedError, NoNumbersError, RewardError
from rollouts_core.model.loading import (
    check_attention,
    count_token_ids,
    default_device,
    describe_diverged,
    load_hf_model,
    load_tokenizer,
    pad_token_id,
)
from rollouts_core.pass_rates import majority_at_n
from rollouts_core.rewards import VoteFn, grade_sample
from rollouts_core.rollout.generate import (
    Group,
    build_pending_group,
    complete_sample,
    create_engine_generate_fn,
    generate_whole,
    sampling_seed,
)
from rollouts_core.rollout.outage import OutagePauses
from rollouts_core.rollout.resolve import resolve_environment, resolve_reward_fn
from rollouts_core.rollout.validity import InvalidWatch
from rollouts_core.system.concurrency import gather
from rollouts_core.types import Prompt, Sample, Status, group_samples
from rollouts_core.user_code.failures import describe_raised

logger = logging.getLogger(__name__)

MAX_BATCH_TOKENS = 8192
"""Largest number of tokens in a batch of demonstrations, including padding."""


async def generate_samples(
    model: ModelConfig, prompts: Sequence[Prompt], config: RolloutConfig, *, num_slots: int
) -> list[Sample]:
    """Generate `config.n_samples_per_prompt` ungraded completions of every prompt with the decoder in this process.

    The random numbers of a sample depend only on its prompt's index, its index in the group and `config.seed`. All
    compared checkpoints therefore use the same random numbers.

    Raises:
        DivergedError: a token's log-probs are not finite.
    """
    tokenizer = load_tokenizer(model)
    environment = resolve_environment(config)
    tools = describe_tools(environment)
    prompt_tokens = [tokenize_prompt(tokenizer, prompt.messages, tools) for prompt in prompts]
    longest = max(len(tokens) for tokens in prompt_tokens)
    context_length = longest + config.sampling.max_new_tokens + EMBEDDED.reserved_tokens
    if is_multi_turn(environment):
        async with serve_in_process(
            model.path, max_running_requests=num_slots, context_length=context_length
        ) as engine:
            return await ask_engine(engine, model, prompts, config, num_running=num_slots)
    decoder = Decoder(Path(model.path), num_slots=num_slots, context_length=context_length)
    pending = list(itertools.chain(*pending_groups(prompts, config)))
    ends, num_tokens = stop_token_ids(tokenizer), count_token_ids(tokenizer)
    with _explained_no_numbers(model):
        completions = generate_tokens(
            decoder,
            [prompt_tokens[sample.group_index] for sample in pending],
            [_sampling_params(sample, config, ends, num_tokens=num_tokens) for sample in pending],
        )
    return [
        complete_sample(sample, prompt_tokens[sample.group_index], _as_engine_completion(completion), tokenizer)
        for sample, completion in zip(pending, completions, strict=True)
    ]


async def ask_engine(
    engine: InferenceEngine, model: ModelConfig, prompts: Sequence[Prompt], config: RolloutConfig, *, num_running: int
) -> list[Sample]:
    """Generate completions like `generate_samples`, but through an engine that serves the model.

    Args:
        num_running: number of completions that the engine generates concurrently.

    Raises:
        DivergedError: a token's log-probs are not finite.
        EnvironmentOutageError: an environment was unavailable for longer than the settings allow.
    """
    one_sample_each = config.multi_turn.model_copy(update={"form": "interleaved"})
    config = config.model_copy(update={"multi_turn": one_sample_each})
    generate = create_engine_generate_fn([engine], load_tokenizer(model), config)
    wait_out = OutagePauses(config).wait_out
    calls = [partial(wait_out, partial(generate_whole, generate, group)) for group in pending_groups(prompts, config)]
    # Send twice as many requests as the engine runs, so that the engine stays busy while environments take time.
    max_concurrent = max(1, 2 * num_running // config.n_samples_per_prompt)
    with _explained_no_numbers(model):
        return list(itertools.chain(*await gather(calls, max_concurrent=max_concurrent)))


async def grade_completions(samples: Sequence[Sample], config: RolloutConfig) -> list[Sample]:
    """Grade the completions of an evaluation concurrently. Invalid completions get the reward 0, with a warning.

    Raises:
        DataError: too many completions are invalid.
        RewardError: the reward failed.
        EnvironmentOutageError: the environment was unavailable for longer than the settings allow.
    """
    if failure := InvalidWatch(window=len(samples)).note(samples):
        raise failure
    reward_fn, wait_out = resolve_reward_fn(config), OutagePauses(config).wait_out
    grade = partial(grade_sample, reward_fn=reward_fn, timeout_s=config.reward_timeout_s)
    graded = await gather([partial(wait_out, partial(grade, sample)) for sample in samples])
    invalid = [sample for sample in graded if sample.status is Status.INVALID]
    if invalid:
        problem = invalid[0].metadata.get("invalid", invalid[0].finish_reason)
        logger.warning("%d of %d completions are invalid and count as 0: %s", len(invalid), len(graded), problem)
    return [replace(sample, reward=0.0) if sample.status is Status.INVALID else sample for sample in graded]


def pending_groups(prompts: Sequence[Prompt], config: RolloutConfig) -> list[Group]:
    return [
        build_pending_group(prompt, group_index=i, size=config.n_samples_per_prompt) for i, prompt in enumerate(prompts)
    ]


def longest_prompt(model: ModelConfig, prompts: Sequence[Prompt], config: RolloutConfig) -> int:
    """The number of tokens of the longest prompt, including the environment's tool descriptions."""
    tools = describe_tools(resolve_environment(config))
    tokens = tokenize_prompts(load_tokenizer(model), [prompt.messages for prompt in prompts], tools)
    return max(map(len, tokens))


def scores_by_prompt(samples: Sequence[Sample]) -> list[float]:
    """Mean reward of each prompt's samples, in order of the prompts.

    Raises:
        RewardError: a sample has no reward. A mean of the other samples would compare checkpoints on different rows.
    """
    scores = []
    for group in group_samples(samples):
        rewards = [sample.reward for sample in group if sample.reward is not None]
        if len(rewards) < len(group):
            raise RewardError(
                f"a completion of prompt {group[0].metadata.get('prompt_id', '?')!r} has no reward: an evaluation "
                "needs a number from the reward function for every completion"
            )
        scores.append(sum(rewards) / len(rewards))
    return scores


def outcomes_by_prompt(
    samples: Sequence[Sample], evaluation: EvaluationConfig, vote_fn: VoteFn | None
) -> dict[str, Any]:  # Any: JSON
    """The number of right samples of each prompt, and the outcome of their majority vote if there is a vote function.

    The dict has the fields that result.json adds for a checkpoint with several samples per prompt.

    Raises:
        RewardError: the environment's vote function raised.
    """
    groups = [list(group) for group in group_samples(samples)]
    passed = [[sample.reward is not None and sample.reward >= evaluation.pass_reward for sample in g] for g in groups]
    outcomes: dict[str, Any] = {
        "samples_per_prompt": evaluation.samples_per_prompt,
        "num_right": [sum(each) for each in passed],
    }
    if vote_fn is not None:
        votes = [[_vote(vote_fn, sample) for sample in group] for group in groups]
        outcomes["majority"] = [majority_at_n(said, right) for said, right in zip(votes, passed, strict=True)]
    return outcomes


def _vote(vote_fn: VoteFn, sample: Sample) -> str | None:
    if sample.status is Status.INVALID:
        return None
    try:
        vote = vote_fn(sample)
    except (Exception, SystemExit) as error:
        prompt = sample.metadata.get("prompt_id", "?")
        raise RewardError(f"the vote of the environment on prompt {prompt!r} {describe_raised(error)}") from error
    return None if vote is None else str(vote)


@torch.inference_mode()
def score_demonstrations(model: ModelConfig, samples: Sequence[Sample]) -> list[float]:
    """The score of each demonstration: minus the mean loss over its trained tokens. Computes on the machine's first
    GPU, or on the CPU if it has none.

    Raises:
        DivergedError: a loss is not finite.
    """
    from rollouts_core.model.policy import compute_logprobs  # slow import (2 s) that reward evaluations do not need

    hf_model = load_hf_model(model, device=default_device()).eval()
    check_attention(hf_model)
    pad_id = pad_token_id(load_tokenizer(model))
    scores = [0.0] * len(samples)
    for places in split_by_length(samples):
        batch = build_batch([[samples[place]] for place in places], pad_id=pad_id).to(hf_model.device)
        sums_B = (compute_logprobs(hf_model, batch) * batch.loss_mask_BT).sum(dim=1)
        for place, score in zip(places, (sums_B / batch.loss_mask_BT.sum(dim=1)).tolist(), strict=True):
            scores[place] = score
    if not all(map(math.isfinite, scores)):
        raise DivergedError(describe_diverged(model.path))
    return scores


def split_by_length(samples: Sequence[Sample]) -> Iterator[list[int]]:
    """Indices of the samples in batches of similar length. A batch has at most `MAX_BATCH_TOKENS`, or is a single
    sample."""
    by_length = sorted(range(len(samples)), key=lambda place: len(samples[place].tokens), reverse=True)
    while by_length:
        num_rows = max(1, MAX_BATCH_TOKENS // len(samples[by_length[0]].tokens))
        yield by_length[:num_rows]
        by_length = by_length[num_rows:]


def evaluation_rollouts(evaluation: EvaluationConfig, rollout: RolloutConfig) -> RolloutConfig:
    sampling = rollout.sampling.model_copy(update={"temperature": evaluation.temperature})
    return rollout.model_copy(
        update={
            "sampling": sampling,
            "n_samples_per_prompt": evaluation.samples_per_prompt,
            "seed": evaluation.seed,
        }
    )


@contextmanager
def _explained_no_numbers(model: ModelConfig) -> Iterator[None]:
    """Raise an engine's non-finite log-probs as DivergedError, because only the model can cause them, not settings."""
    try:
        yield
    except NoNumbersError as error:
        raise DivergedError(describe_diverged(model.path)) from error


def _sampling_params(
    sample: Sample, config: RolloutConfig, ends: tuple[int, ...], *, num_tokens: int
) -> SamplingParams:
    return SamplingParams(
        temperature=config.sampling.temperature,
        max_new_tokens=config.sampling.max_new_tokens,
        stop_token_ids=ends,
        num_tokens=num_tokens,
        sampling_seed=sampling_seed(config.seed, sample.group_index, sample.index),
    )


def _as_engine_completion(completion: EmbeddedCompletion) -> Completion:
    reason, _, message, _ = completion.finish_reason
    return Completion(
        tokens=list(completion.output_ids),
        logprobs=list(completion.output_logprobs),
        status=status_of_finish("the embedded decoder", reason, message),
        finish_reason=reason,
        version_spans=(),
    )
