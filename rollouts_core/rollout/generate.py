"""Generate functions for groups of pending samples: one engine request per group, or one conversation per sample.

A single conversation: `conversation.py`. The choice of groups to generate: `manager.py`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from rollouts_core.config import RolloutConfig, SamplingConfig
from rollouts_core.data.bad_rows import BadRows, noted_rows
from rollouts_core.data.chat import CHUNK_TEXTS, encode_texts, render_prompt, stop_token_ids, tokenize_prompt
from rollouts_core.data.decoding import decode_turn
from rollouts_core.engines.completion import Completion, GenerationRequest
from rollouts_core.engines.in_flight import InFlightEngine, InterruptibleEngine
from rollouts_core.engines.protocol import InferenceEngine
from rollouts_core.environments.protocol import MultiTurnEnvironment, describe_tools, is_multi_turn
from rollouts_core.errors import DataError, EngineError, EnvironmentUnavailableError
from rollouts_core.model.loading import count_token_ids
from rollouts_core.rollout.agent import Trajectory, agent_integration, place_version_spans
from rollouts_core.rollout.conversation import hold_conversation, policy_dialect
from rollouts_core.rollout.resolve import resolve_environment
from rollouts_core.rollout.turn_log import TurnLog
from rollouts_core.rollout.validity import mark_foreign_tokens
from rollouts_core.seeds import derive_seed
from rollouts_core.system.concurrency import gather
from rollouts_core.types import Prompt, Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0

Group = list[Sample]
"""The samples of one prompt."""
UNFINISHED = (Status.PENDING, Status.ABORTED)
"""Statuses of samples without a whole completion: not generated, or interrupted."""
AT_LIMIT = "length"
"""Finish reason of engines for a completion that reached its token limit."""
MAX_INTERRUPTIONS = 1000
"""Number of interruptions of one completion after which generation fails."""


def create_engine_generate_fn(
    engines: Sequence[InferenceEngine], tokenizer: PreTrainedTokenizerBase, config: RolloutConfig
) -> CompletionGenerator | ConversationGenerator:
    """Create a `generate_fn` that samples from `engines`: one request per group, or per turn of a conversation.

    Samples that already have tokens are continued from these tokens.
    """
    environment = resolve_environment(config)
    if is_multi_turn(environment):
        return create_conversation_generate_fn(engines, tokenizer, config, environment)
    return CompletionGenerator(engines, tokenizer, config, tools=describe_tools(environment))


class CompletionGenerator:
    """A `generate_fn` that generates a group with one engine request.

    Args:
        tools: JSON schemas of the tools that the prompts describe.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig,
        *,
        tools: Sequence[dict[str, Any]] = (),  # Any: JSON schemas
    ) -> None:
        self.engines = _interruptible(engines, config)
        self.tokenizer = tokenizer
        self.config = config
        self.tools = tools
        self._ends = stop_token_ids(tokenizer)
        self._num_tokens = count_token_ids(tokenizer)

    async def __call__(self, group: Sequence[Sample]) -> list[Sample]:
        prompt_tokens = tokenize_prompt(self.tokenizer, group[0].messages, self.tools)
        limit = len(prompt_tokens) + self.config.sampling.max_new_tokens
        # If a resumed run has a lower max_new_tokens, a sample may already have more tokens than the new limit.
        finished = {
            sample.index: replace(sample, status=Status.TRUNCATED, finish_reason=AT_LIMIT)
            for sample in group
            if sample.status in UNFINISHED and len(sample.tokens) >= limit
        }
        unfinished = [sample for sample in group if sample.status in UNFINISHED and sample.index not in finished]
        requests = [
            continue_request(
                GenerationRequest(
                    prompt_tokens=prompt_tokens,
                    sampling=self.config.sampling,
                    stop_token_ids=self._ends,
                    seed=sampling_seed(self.config.seed, sample.group_index, sample.index),
                    num_tokens=self._num_tokens,
                ),
                sample.tokens[len(prompt_tokens) :],
            )
            for sample in unfinished
        ]
        engine = self.engines[group[0].group_index % len(self.engines)]
        completions = await engine.generate(requests) if requests else []
        finished |= {
            sample.index: complete_sample(sample, prompt_tokens, completion, self.tokenizer)
            for sample, completion in zip(unfinished, completions, strict=True)
        }
        completed = (finished.get(sample.index, sample) for sample in group)
        return [
            sample if sample.status in UNFINISHED else mark_foreign_tokens(sample, self._num_tokens)
            for sample in completed
        ]

    async def break_off(self) -> None:
        """Interrupt running requests, whose samples keep the tokens generated so far. New requests wait until
        `go_on`."""
        await _break_off(self.engines)

    def go_on(self) -> None:
        """Allow engine requests again after `break_off`."""
        _go_on(self.engines)


def create_conversation_generate_fn(
    engines: Sequence[InferenceEngine],
    tokenizer: PreTrainedTokenizerBase,
    config: RolloutConfig,
    environment: MultiTurnEnvironment,
) -> ConversationGenerator:
    """Create a `generate_fn` that holds one conversation per sample; the conversations of a group run concurrently."""
    return ConversationGenerator(engines, tokenizer, config, environment)


class ConversationGenerator:
    """A `generate_fn` that holds conversations and logs the policy's turns, so that an interrupted conversation can
    continue."""

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig,
        environment: MultiTurnEnvironment,
    ) -> None:
        self.engines = _interruptible(engines, config)
        self.tokenizer = tokenizer
        self.config = config
        self.environment = environment
        calls_end = policy_dialect(tokenizer, environment, config).ends if describe_tools(environment) else ()
        self._ends = tuple(dict.fromkeys([*stop_token_ids(tokenizer), *calls_end]))
        self._num_tokens = count_token_ids(tokenizer)
        self._log = TurnLog()
        self._is_broken_off = False

    async def __call__(self, group: Sequence[Sample]) -> list[Sample]:
        try:
            samples = list(itertools.chain(*await gather([partial(self._converse, pending) for pending in group])))
        except BaseException:
            self._log.end(group, is_kept=self._is_broken_off)
            raise
        # The group is complete, so its log is not needed even if other groups were interrupted meanwhile.
        self._log.end(group)
        return samples

    async def break_off(self) -> None:
        """Interrupt running requests. A conversation cancelled before `go_on` continues from its logged turns when it
        is requested again."""
        self._is_broken_off = True
        await _break_off(self.engines)

    def go_on(self) -> None:
        """Allow engine requests again after `break_off`."""
        self._is_broken_off = False
        _go_on(self.engines)

    def versions_of(self, group: Sequence[Sample]) -> list[int]:
        """Weight versions of the logged turns from which the group's conversations would continue."""
        return self._log.versions_of(group)

    def forget(self, group: Sequence[Sample]) -> None:
        """Discard the logged turns of the group's conversations."""
        self._log.forget(group)

    def state_dict(self) -> dict[str, Any]:  # Any: JSON
        """The logged turns of unfinished groups, as JSON values."""
        return self._log.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: JSON
        """Restore logged turns. A conversation reuses its logged turns as long as the environment repeats the logged
        replies."""
        self._log.load_state_dict(state)

    async def _converse(self, pending: Sample) -> list[Sample]:
        trajectory = await _hold_with_retries(partial(self._hold, pending), self.config)
        samples = agent_integration(trajectory, pending, form=self.config.multi_turn.form)
        return [mark_foreign_tokens(sample, self._num_tokens) for sample in samples]

    async def _hold(self, pending: Sample) -> Trajectory:
        log = self._log.begin(pending)
        # All conversations of a group use the same engine, because its prefix cache then has the prompt that they
        # share.
        engine = self.engines[pending.group_index % len(self.engines)]

        async def sample_turn(tokens: list[int], sampling: SamplingConfig, turn: int) -> Completion:
            request = GenerationRequest(
                prompt_tokens=tokens,
                sampling=sampling,
                stop_token_ids=self._ends,
                seed=sampling_seed(self.config.seed, pending.group_index, pending.index, turn),
                affinity=pending.group_index,
                num_tokens=self._num_tokens,
            )
            return await complete_request(
                engine, request, begun=log.recall(turn, tokens), note=partial(log.note, turn, tokens)
            )

        return await hold_conversation(pending, self.environment, sample_turn, self.tokenizer, self.config)


def _interruptible(engines: Sequence[InferenceEngine], config: RolloutConfig) -> Sequence[InferenceEngine]:
    """The engines, wrapped to keep the tokens of interrupted requests if the settings allow partial completions."""
    if not config.max_partial_staleness:
        return engines
    return [InFlightEngine(each) if isinstance(each, InterruptibleEngine) else each for each in engines]


async def _break_off(engines: Sequence[InferenceEngine]) -> None:
    await gather([engine.break_off for engine in engines if isinstance(engine, InFlightEngine)])


def _go_on(engines: Sequence[InferenceEngine]) -> None:
    for engine in engines:
        if isinstance(engine, InFlightEngine):
            engine.go_on()


async def _hold_with_retries(hold: Callable[[], Awaitable[Trajectory]], config: RolloutConfig) -> Trajectory:
    """Hold a conversation; restart it while the environment is unavailable, at most `max_environment_retries` times."""
    for attempt in itertools.count(1):
        try:
            return await hold()
        except EnvironmentUnavailableError as error:
            if attempt > config.max_environment_retries:
                raise
            logger.warning(
                "restarting a conversation, because its environment was unavailable in attempt %d: %s", attempt, error
            )
            await anyio.sleep(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (attempt - 1)))
    raise AssertionError("the loop only ends by returning or raising")


async def generate_whole(
    generate: Callable[[Group], Awaitable[Sequence[Sample]]],
    group: Group,
    *,
    note: Callable[[Group], None] = lambda group: None,
) -> Group:
    """Call `generate` until no completion of the group is interrupted. Each call continues from the tokens so far.

    Args:
        note: called with the group's samples after each call of `generate`.

    Raises:
        EngineError: the group was interrupted in `MAX_INTERRUPTIONS` calls.
    """
    generated = group
    for _ in range(MAX_INTERRUPTIONS):
        generated = list(await generate(generated))
        note(generated)
        if all(sample.status is not Status.ABORTED for sample in generated):
            return generated
    index = group[0].group_index
    raise EngineError(
        f"the completions of group {index} were interrupted {MAX_INTERRUPTIONS} times: check the engine's log"
    )


async def complete_request(
    engine: InferenceEngine,
    request: GenerationRequest,
    *,
    begun: Completion | None = None,
    note: Callable[[Completion], None] = lambda completion: None,
) -> Completion:
    """Generate the whole completion of a request. After an interruption, the completion is continued from its tokens.

    Args:
        begun: completion to continue. A whole completion is returned unchanged.
        note: called with the completion after each engine request.

    Raises:
        EngineError: the completion was interrupted `MAX_INTERRUPTIONS` times.
    """
    completion = begun
    for _ in range(MAX_INTERRUPTIONS):
        if completion is None:
            [completion] = await engine.generate([request])
        elif completion.status is Status.ABORTED and len(completion.tokens) >= request.sampling.max_new_tokens:
            completion = replace(completion, status=Status.TRUNCATED, finish_reason=AT_LIMIT)
        elif completion.status is Status.ABORTED:
            [rest] = await engine.generate([continue_request(request, completion.tokens)])
            completion = join_completions(completion, rest)
        note(completion)
        if completion.status is not Status.ABORTED:
            return completion
    raise EngineError(f"{engine.name} interrupted a completion {MAX_INTERRUPTIONS} times: check the log of the engine")


def continue_request(request: GenerationRequest, tokens: Sequence[int]) -> GenerationRequest:
    """A request that continues a partial completion: its tokens join the prompt and reduce the token limit."""
    if not tokens:
        return request
    num_left = request.sampling.max_new_tokens - len(tokens)
    sampling = request.sampling.model_copy(update={"max_new_tokens": num_left})
    return replace(
        request,
        prompt_tokens=[*request.prompt_tokens, *tokens],
        sampling=sampling,
        num_continued=request.num_continued + len(tokens),
    )


def join_completions(first: Completion, rest: Completion) -> Completion:
    """Join an interrupted completion and its continuation to one completion."""
    start = len(first.tokens)
    return replace(
        rest,
        tokens=[*first.tokens, *rest.tokens],
        logprobs=[*first.logprobs, *rest.logprobs],
        version_spans=(
            *first.version_spans,
            *((version, start + begin, start + end) for version, begin, end in rest.version_spans),
        ),
    )


def complete_sample(
    pending: Sample, prompt_tokens: list[int], completion: Completion, tokenizer: PreTrainedTokenizerBase
) -> Sample:
    """Append an engine's completion to the tokens, masks, log-probs and versions of a sample."""
    before = pending.tokens or prompt_tokens
    start = len(before)
    tokens = [*before, *completion.tokens]
    return replace(
        pending,
        response=decode_turn(tokenizer, tokens[len(prompt_tokens) :], completion.status),
        tokens=tokens,
        loss_mask=[*(pending.loss_mask or [0.0] * start), *[1.0] * len(completion.tokens)],
        rollout_log_probs=[*(pending.rollout_log_probs or [0.0] * start), *completion.logprobs],
        status=completion.status,
        finish_reason=completion.finish_reason,
        policy_versions=(*pending.policy_versions, *place_version_spans(completion, start)),
    )


def build_pending_group(prompt: Prompt, *, group_index: int, size: int) -> Group:
    """Create the samples of one prompt, before their generation.

    Each sample has its own copy of the metadata, so that a reward that changes the metadata of a sample does not affect
    other samples or later epochs.
    """
    metadata = {**prompt.metadata, "prompt_id": prompt.id, "answer": prompt.answer}
    return [
        Sample(prompt=prompt.messages, group_index=group_index, index=i, metadata=deepcopy(metadata))
        for i in range(size)
    ]


def check_prompt_lengths(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    source: str,
    tools: Sequence[dict[str, Any]] = (),  # Any: JSON schemas
    bad: BadRows | None = None,
) -> int:
    """Check the length of all prompts. Returns the number of tokens of the longest prompt, including tool descriptions.

    Args:
        tools: JSON schemas of the tools that the chat template adds to each prompt.
        bad: collects the errors of bad rows. None raises the first error.

    Raises:
        DataError: a prompt has more than `max_tokens` tokens, or the chat template cannot render it.
    """
    texts: list[tuple[Prompt, str]] = []
    longest = 0
    refused: dict[int, DataError] = {}
    for prompt in prompts:
        try:
            texts.append((prompt, render_prompt(tokenizer, prompt.messages, tools)))
        except DataError as error:
            refused[prompt.row] = error
    if not texts and len({str(error) for error in refused.values()}) == 1 < len(prompts):
        # if every row has the same error, the chat template is wrong and not the rows
        raise next(iter(refused.values()))
    with noted_rows(source, bad) as noted:
        for row, refusal in refused.items():
            noted.note(row, refusal)
        for start in range(0, len(texts), CHUNK_TEXTS):
            chunk = texts[start : start + CHUNK_TEXTS]
            for (prompt, _), tokens in zip(chunk, encode_texts(tokenizer, [text for _, text in chunk]), strict=True):
                longest = max(longest, len(tokens))
                if len(tokens) > max_tokens:
                    problem = f"the prompt {prompt.id!r} has {len(tokens)} tokens, the limit is {max_tokens}"
                    noted.note(prompt.row, DataError(f"{problem}: shorten it or raise rollout.max_prompt_tokens"))
    return longest


def sampling_seed(seed: int, group_index: int, index: int, turn: int = 0) -> int:
    """Seed below 2**31 for one turn of a sample. The seed depends only on the arguments, so timing does not change
    samples."""
    return derive_seed(seed, group_index, index, turn) if turn else derive_seed(seed, group_index, index)
