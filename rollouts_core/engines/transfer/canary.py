"""Verify an engine's weights by its log-probs, if it has no comparable checksums.

The engine samples a few tokens with the settings of RL, and the trainer computes their log-probs under the published
weights. Engine and trainer compute log-probs of the same distribution, which differ only by the rounding of the number
format: 1e-5 nats in float32, about 0.02 nats in bfloat16. An engine with a stale output head, another temperature or
another rotary embedding differs by more than a nat. checksums.py decides which tensors can be compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from rollouts_core.backends.threaded import ThreadedBackend
from rollouts_core.batch import build_batch, place_samples, split_by_sample
from rollouts_core.config import MIN_ENGINE_CONTEXT, ModelConfig, SamplingConfig
from rollouts_core.engine_kinds import ENGINES
from rollouts_core.engines.completion import Completion, GenerationRequest
from rollouts_core.engines.transfer.adapters import AdaptedWeights
from rollouts_core.engines.transfer.versions import SentWeights
from rollouts_core.errors import EngineUnavailableError, WeightSyncError
from rollouts_core.system.concurrency import in_short_thread
from rollouts_core.types import Sample, Status

if TYPE_CHECKING:
    from rollouts_core.backends.protocol import TrainingBackend

PROMPT_TOKENS = list(range(2, 10))
"""Token ids of the canary's prompt. Every model has these ids, and their text does not matter."""
NUM_COMPLETIONS = 4
NUM_TOKENS = MIN_ENGINE_CONTEXT - len(PROMPT_TOKENS) - max(each.reserved_tokens for each in ENGINES.values())
"""Number of tokens of each completion, which is 16."""
MAX_GAP_NATS = 0.1
"""Largest mean difference between the engine's and the trainer's log-probs, nats, that rounding explains."""

CompleteFn = Callable[[Sequence[GenerationRequest]], Awaitable[list[Completion]]]
ScoreFn = Callable[[list[Sample]], Awaitable[list[list[float]]]]
"""Computes the log-probs of the completion tokens of samples under the published weights, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """The settings of the canary's requests, and the function that computes the expected log-probs of the
    completions."""

    temperature: float
    """The rollouts' temperature, so that an engine that ignores the temperature is detected too."""
    score: ScoreFn
    """Computes the expected log-probs of the engine's completions."""
    num_tokens: int | None = None
    """The distribution includes only token ids below this number, or all token ids if None."""


def backend_canary(
    backend: TrainingBackend, weights: Path | SentWeights | AdaptedWeights, *, temperature: float
) -> Canary:
    """A canary whose log-probs come from a backend. The backend computes them only while it has the published weights
    and is not training.

    Args:
        weights: the published weights. If the backend is busy or has trained since, a model with these weights computes
            the log-probs instead.
        temperature: the backend's temperature.
    """
    published = backend.weight_version
    num_tokens = getattr(backend, "num_tokens", None)  # `TrainingBackend` does not require this attribute
    of_published = published_canary(weights, temperature=temperature, num_tokens=num_tokens)

    async def score(samples: list[Sample]) -> list[list[float]]:
        is_busy = isinstance(backend, ThreadedBackend) and backend.is_busy
        if not is_busy and backend.weight_version == published:
            rows = [samples] * backend.num_ranks  # one copy of the row per rank, because every rank takes part
            scores = await backend.score(build_batch(rows, pad_id=0)).result()
            if backend.weight_version == published:  # the backend may have begun to train before it scored
                layouts = [place_samples(row) for row in rows]
                return [row.tolist() for row in split_by_sample(scores.logprobs_BT, layouts)[0]]
        return await of_published.score(samples)

    return Canary(temperature=temperature, score=score, num_tokens=num_tokens)


def published_canary(
    weights: Path | SentWeights | AdaptedWeights, *, temperature: float = 1.0, num_tokens: int | None = None
) -> Canary:
    """A canary whose log-probs come from a forward pass of the published weights on the CPU."""
    if isinstance(weights, Path):
        return checkpoint_canary(weights, temperature=temperature, num_tokens=num_tokens)

    async def score(samples: list[Sample]) -> list[list[float]]:
        with TemporaryDirectory(prefix="rollouts-weights-") as folder:
            await in_short_thread(partial(weights.write, Path(folder)))
            canary = checkpoint_canary(Path(folder), temperature=temperature, num_tokens=num_tokens)
            return await canary.score(samples)

    return Canary(temperature=temperature, score=score, num_tokens=num_tokens)


def checkpoint_canary(directory: Path, *, temperature: float = 1.0, num_tokens: int | None = None) -> Canary:
    """A canary whose log-probs come from a forward pass of a checkpoint on the CPU: for small models and for tests."""

    def compute(samples: list[Sample]) -> list[list[float]]:
        from rollouts_core.model.loading import load_hf_model
        from rollouts_core.model.policy import compute_logprobs

        model = load_hf_model(ModelConfig(path=str(directory))).eval()
        with torch.no_grad():
            batch = build_batch([samples], pad_id=0)
            logprobs_BT = compute_logprobs(model, batch, temperature=temperature, num_tokens=num_tokens)
        return [row.tolist() for row in split_by_sample(logprobs_BT, [place_samples(samples)])[0]]

    async def score(samples: list[Sample]) -> list[list[float]]:
        return await in_short_thread(partial(compute, samples))

    return Canary(temperature=temperature, score=score, num_tokens=num_tokens)


def canary_requests(temperature: float, num_tokens: int | None = None) -> list[GenerationRequest]:
    """The requests whose completions show which weights an engine has."""
    sampling = SamplingConfig(temperature=temperature, max_new_tokens=NUM_TOKENS)
    return [
        GenerationRequest(
            prompt_tokens=PROMPT_TOKENS, sampling=sampling, stop_token_ids=(), seed=seed, num_tokens=num_tokens
        )
        for seed in range(NUM_COMPLETIONS)
    ]


async def prove(name: str, complete: CompleteFn, canary: Canary) -> float:
    """The mean gap between an engine's log-probs and the expected log-probs, in nats.

    Raises:
        WeightSyncError: the gap is larger than a difference of number formats explains.
        EngineUnavailableError: another call interrupted the canary's requests, and a retry may work.
    """
    completions = await complete(canary_requests(canary.temperature, canary.num_tokens))
    if num_aborted := sum(completion.status is Status.ABORTED for completion in completions):
        raise EngineUnavailableError(
            f"{name} interrupted {num_aborted} of the {len(completions)} completions that verify its weights"
        )
    limit = canary.num_tokens
    samples_foreign = limit is not None and any(token >= limit for each in completions for token in each.tokens)
    completions = _cut_before_foreign(completions, canary.num_tokens)
    if not completions:
        raise WeightSyncError(f"{name} samples only token ids that the tokenizer lacks ({canary.num_tokens} and above)")
    expected = await canary.score([_sample_of(completion) for completion in completions])
    gap = statistics.fmean(
        abs(engine - trainer)
        for completion, right in zip(completions, expected, strict=True)
        for engine, trainer in zip(completion.logprobs, right[-len(completion.tokens) :], strict=True)
    )
    if not gap <= MAX_GAP_NATS:
        reason = "it serves other weights, or samples from another distribution"
        if samples_foreign:
            reason = (
                f"it samples token ids that the tokenizer lacks ({canary.num_tokens} and above): use an engine that "
                "can exclude them"
            )
        raise WeightSyncError(
            f"{name}: its log-probs are {gap:.3g} nats per token away from those of the published weights, but number "
            f"formats explain at most {MAX_GAP_NATS}: {reason}"
        )
    return gap


def _cut_before_foreign(completions: Sequence[Completion], num_tokens: int | None) -> list[Completion]:
    """Cut each completion before its first token id of `num_tokens` or above, and drop empty completions."""
    if num_tokens is None:
        return list(completions)
    cut = []
    for completion in completions:
        end = next((i for i, token in enumerate(completion.tokens) if token >= num_tokens), len(completion.tokens))
        cut.append(replace(completion, tokens=completion.tokens[:end], logprobs=completion.logprobs[:end]))
    return [completion for completion in cut if completion.tokens]


def _sample_of(completion: Completion) -> Sample:
    num_prompt = len(PROMPT_TOKENS)
    return Sample(
        prompt="",
        tokens=[*PROMPT_TOKENS, *completion.tokens],
        loss_mask=[0.0] * num_prompt + [1.0] * len(completion.tokens),
        rollout_log_probs=[0.0] * num_prompt + completion.logprobs,
        status=Status.COMPLETED,
    )
