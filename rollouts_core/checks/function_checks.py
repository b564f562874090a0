"""Call the functions that grade and filter with made-up completions, before a run samples any completion."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rollouts_core.config import Config, RolloutConfig, SamplingConfig, name_of_function
from rollouts_core.data.chat import encode_texts, tokenize_prompt
from rollouts_core.engines.completion import Completion
from rollouts_core.environments import ENVIRONMENTS
from rollouts_core.environments.protocol import Outcome, describe_tools, is_multi_turn
from rollouts_core.errors import ConfigError, EnvironmentUnavailableError, RewardError
from rollouts_core.filters import FilterDecision, FilterFn
from rollouts_core.findings import Caution
from rollouts_core.mistakes import Mistakes
from rollouts_core.rewards import RewardFn, WeightedRewards, grade_sample
from rollouts_core.rollout.conversation import hold_conversation
from rollouts_core.rollout.generate import build_pending_group, complete_sample
from rollouts_core.rollout.resolve import (
    resolve_buffer_filter_fn,
    resolve_environment,
    resolve_filter,
    resolve_filter_fn,
    resolve_generate_fn,
    resolve_reward,
    resolve_reward_fn,
)
from rollouts_core.system.time_limits import interrupt_after
from rollouts_core.types import Message, Prompt, Sample, Status
from rollouts_core.user_code.failures import describe_raised

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRIED_TEXT = "It is 2."
"""Made-up completion for a prompt without an answer."""
ANSWER_FORMS = ("{}", "\\boxed{{{}}}", "#### {}", ":{}", "<answer>{}</answer>", "The answer is {}")
"""Forms of made-up completions that contain a row's answer. Different graders expect the answer in different forms."""
MAX_TRIED_PROMPTS = 8
MAX_SHOWN_CHARS = 80


def one_of_each_shape(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The first prompt with each set of fields, because functions may need certain fields.

    Returns at most `MAX_TRIED_PROMPTS` prompts.
    """
    shapes: dict[tuple[bool, frozenset[str]], Prompt] = {}
    for prompt in prompts:
        shapes.setdefault(shape_of(prompt), prompt)
    return list(shapes.values())[:MAX_TRIED_PROMPTS]


def find_functions(rollout: RolloutConfig, mistakes: Mistakes) -> None:
    """Import every function that the rollout settings name. Errors, such as unknown names, go to `mistakes`."""
    for index, reward in enumerate(rollout.rewards):
        if not mistakes.has(f"rollout.rewards.{index}"):  # else the model of this reward could not be downloaded
            with mistakes.at(f"rollout.rewards.{index}"):
                resolve_reward(reward, rollout)
    for index, each in enumerate(rollout.filters):
        with mistakes.at(f"rollout.filters.{index}"):
            resolve_filter(each)
    with mistakes.at("rollout.environment"):
        resolve_environment(rollout)
    named: dict[str, Callable[[RolloutConfig], object]] = {
        "reward_fn": resolve_reward_fn,
        "filter_fn": resolve_filter_fn,
        "buffer_filter_fn": resolve_buffer_filter_fn,
        "generate_fn": resolve_generate_fn,
    }
    for setting, resolve in named.items():
        if getattr(rollout, setting) != "":
            with mistakes.at(f"rollout.{setting}"):
                resolve(rollout)


def shape_of(prompt: Prompt) -> tuple[bool, frozenset[str]]:
    """Whether a prompt has an answer, and the names of its other fields. A function may depend on both."""
    return prompt.answer != "", frozenset(prompt.metadata)


def check_functions(config: Config, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Call the functions that grade, converse and filter with made-up completions.

    For each prompt, an empty completion and completions with the prompt's answer are graded.

    Returns:
        A sentence with the rewards for each prompt, and warnings.

    Raises:
        ConfigError: a service or environment that grades failed, or a name is unknown (see `find_functions`).
        RewardError: a function raised an exception, or returned an unusable value.
    """
    filter_fn = resolve_filter_fn(config.rollout)
    graded = asyncio.run(_grade_each(prompts, config, tokenizer))
    if filter_fn is not None:
        group = [graded[0][0]] * config.rollout.n_samples_per_prompt
        _check_filter(filter_fn, group, timeout_s=config.rollout.reward_timeout_s)
    graders = ", ".join(config.rollout.reward_names)
    said = [
        f"graded by {graders}: reward {empty.reward} for an empty completion of prompt {prompt.id!r}, "
        f"{answer.reward} for {answer.response[:MAX_SHOWN_CHARS]!r}"
        for prompt, (empty, answer) in zip(prompts, graded, strict=True)
    ]
    said += warn_of_equal_rewards(config.rollout, prompts, graded) + _warn_of_unscored(config.rollout, graded)
    said += warn_of_missing_answers(config.rollout, prompts, graded)
    return said + asyncio.run(_converse(prompts, config.rollout, tokenizer))


def _warn_of_unscored(rollout: RolloutConfig, graded: Sequence[tuple[Sample, Sample]]) -> list[Caution]:
    """Warn if a made-up completion got no score (None). RL can leave out such completions, but an evaluation cannot."""
    if all(sample.reward is not None for pair in graded for sample in pair):
        return []
    return [
        Caution(
            f"{', '.join(rollout.reward_names)} returned None for a test completion. RL leaves out such completions, "
            "but an evaluation on data.selection or data.heldout fails: return a number"
        )
    ]


def warn_of_equal_rewards(
    rollout: RolloutConfig, prompts: Sequence[Prompt], graded: Sequence[tuple[Sample, Sample]]
) -> list[Caution]:
    """Warn if right completions got the same reward as empty completions.

    Rewards of 0 for all completions give a warning only if the completions with the row's answer should be right.

    Args:
        graded: for each prompt, the graded empty completion, and a completion with the answer.
    """
    if not graded or any(empty.reward != answer.reward for empty, answer in graded):
        return []
    has_shown_answers = looks_at_answers(rollout) and any(prompt.answer for prompt in prompts)
    if not has_shown_answers and not any(empty.reward for empty, _ in graded):
        return []
    given = ", ".join(dict.fromkeys(str(empty.reward) for empty, _ in graded))
    return [
        Caution(
            f"{', '.join(rollout.reward_names)} gave every test completion the reward of an empty completion "
            f"({given}), also the rows' answers in {len(ANSWER_FORMS)} forms. A reward that is equal for right and "
            "wrong completions teaches nothing: check the function, and the form of `answer` in the rows"
        )
    ]


def warn_of_missing_answers(
    rollout: RolloutConfig, prompts: Sequence[Prompt], graded: Sequence[tuple[Sample, Sample]]
) -> list[Caution]:
    """Warn if every completion of a row without `answer` gets the same reward as the right answer of another row.

    For example, a grader may read the missing answer as the empty text, and find this text in every completion.
    """
    pairs = [(prompt, empty.reward, answer.reward) for prompt, (empty, answer) in zip(prompts, graded, strict=True)]
    scored = [(prompt, empty, answer) for prompt, empty, answer in pairs if empty is not None and answer is not None]
    right = [(max(empty, answer), prompt) for prompt, empty, answer in scored if prompt.answer and empty != answer]
    if not right:
        return []
    most, told_apart = max(right, key=lambda each: each[0])
    return [
        Caution(
            f"{', '.join(rollout.reward_names)} gave every completion of prompt {prompt.id!r}, which has no `answer`, "
            f"the reward {empty}, like the right completion of prompt {told_apart.id!r}, which has an `answer`: add "
            "`answer` to such rows, or let the function read another field of these rows"
        )
        for prompt, empty, answer in scored
        if not prompt.answer and empty == answer and empty >= most
    ][:1]


def looks_at_answers(rollout: RolloutConfig) -> bool:
    """True if a completion that contains the row's `answer` probably should get a high reward.

    False for conversations, and for built-in environments that do not compare with `answer`.
    """
    environment = resolve_environment(rollout)
    if rollout.environment_name not in rollout.reward_names:
        return True
    if rollout.environment_name in ENVIRONMENTS:
        return "answer" in getattr(environment, "row_fields", ())
    return not is_multi_turn(environment)


def texts_to_try(prompt: Prompt) -> list[str]:
    """Made-up completions for a prompt: its answer in several forms, or `TRIED_TEXT` if it has no answer."""
    return [form.format(prompt.answer) for form in ANSWER_FORMS] if prompt.answer else [TRIED_TEXT]


def build_completion(prompt: Prompt, text: str, tokenizer: PreTrainedTokenizerBase, rollout: RolloutConfig) -> Sample:
    """The sample that reward functions get if a policy completes the prompt with this text."""
    [pending] = build_pending_group(prompt, group_index=0, size=1)
    environment = resolve_environment(rollout)
    tokens = [*encode_texts(tokenizer, [text])[0], int(tokenizer.eos_token_id)]
    completion = Completion(
        tokens=tokens,
        logprobs=[0.0] * len(tokens),
        status=Status.COMPLETED,
        finish_reason="stop",
        version_spans=(),
    )
    prompt_tokens = tokenize_prompt(tokenizer, prompt.messages, describe_tools(environment))
    sample = replace(complete_sample(pending, prompt_tokens, completion, tokenizer), response=text)
    if not is_multi_turn(environment):
        return sample
    said: Message = {"role": "assistant", "content": text}
    held = {"conversation": [*prompt.messages, said], "outcomes": [Outcome.OK.value]}
    return replace(sample, metadata={**sample.metadata, **held})


async def _grade_each(
    prompts: Sequence[Prompt], config: Config, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[Sample, Sample]]:
    """For each prompt, grade an empty completion, and the first completion with the answer that gets another reward.

    All prompts are graded in one event loop, because the clients of reward services belong to one event loop.
    """
    reward_fn = resolve_reward_fn(config.rollout)
    pairs = []
    for prompt in prompts:
        empty = await _grade(build_completion(prompt, "", tokenizer, config.rollout), reward_fn, config)
        tried: list[Sample] = []
        for text in texts_to_try(prompt):
            tried.append(await _grade(build_completion(prompt, text, tokenizer, config.rollout), reward_fn, config))
            if tried[-1].reward != empty.reward:
                break
        pairs.append((empty, tried[-1] if tried[-1].reward != empty.reward else tried[0]))
    return pairs


async def _converse(
    prompts: Sequence[Prompt], rollout: RolloutConfig, tokenizer: PreTrainedTokenizerBase
) -> list[Caution]:
    """Hold one conversation per prompt with an environment that replies to the policy.

    Returns a warning if a service that the environment needs is not available.
    """
    environment = resolve_environment(rollout)
    if not is_multi_turn(environment) or rollout.generate_fn != "":
        return []
    for prompt in prompts:
        text = texts_to_try(prompt)[0]

        async def say(_: list[int], __: SamplingConfig, turn: int, text: str = text) -> Completion:
            status = Status.TRUNCATED if turn else Status.COMPLETED  # the second turn ends the conversation
            tokens = encode_texts(tokenizer, [text])[0]
            logprobs = [0.0] * len(tokens)
            return Completion(tokens=tokens, logprobs=logprobs, status=status, finish_reason="stop", version_spans=())

        [pending] = build_pending_group(prompt, group_index=0, size=1)
        try:
            await hold_conversation(pending, environment, say, tokenizer, rollout)
        except EnvironmentUnavailableError as error:
            return [Caution(f"{error}; if it also fails in a run, the run pauses until it is available")]
        except RewardError as error:
            raise RewardError(f"{error}; the assistant's message was {text[:MAX_SHOWN_CHARS]!r}") from error
    return []


async def _grade(completion: Sample, reward_fn: RewardFn, config: Config) -> Sample:
    """The completion with its reward. Errors quote the graded text."""
    said = completion.response
    what = f"the completion {said[:MAX_SHOWN_CHARS]!r}" if said else "an empty completion"
    try:
        sample = await grade_sample(completion, reward_fn, timeout_s=config.rollout.reward_timeout_s)
    except EnvironmentUnavailableError as error:
        raise ConfigError(f"{what} cannot be graded: {error}") from error
    except RewardError as error:
        raise RewardError(f"{error}; it graded {what}") from error
    leaves_out = config.is_graded and config.training.rl.advantage.unscored == "exclude"
    if sample.reward is None and not leaves_out:
        other = ', or training.rl.advantage.unscored = "exclude" if some completions cannot be scored'
        name = await _name_unscoring(completion, reward_fn, config)
        raise RewardError(
            f"reward function {name} on {what} returned None: expected a finite number"
            f"{other if config.is_graded else ''}"
        )
    return sample


async def _name_unscoring(completion: Sample, reward_fn: RewardFn, config: Config) -> str:
    """The name of the first reward function that returns None for a completion. The weighted sum is then None, too."""
    if not isinstance(reward_fn, WeightedRewards):
        return name_of_function(reward_fn)
    limit = config.rollout.reward_timeout_s
    scored = {name: await grade_sample(completion, each, timeout_s=limit) for name, _, each in reward_fn.terms}
    return next(name for name, sample in scored.items() if sample.reward is None)


def _check_filter(filter_fn: FilterFn, group: list[Sample], *, timeout_s: float) -> None:
    where = f"filter function {name_of_function(filter_fn)} on a group of {len(group)} empty completions"
    try:
        with interrupt_after(timeout_s):
            outcome = filter_fn(group)
    except Exception as error:
        raise RewardError(f"{where} {describe_raised(error)}") from error
    if not isinstance(outcome, bool | FilterDecision):
        raise RewardError(f"{where} returned {outcome!r}: expected True or False")
