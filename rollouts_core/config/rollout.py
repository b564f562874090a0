"""`rollout`: how completions are sampled, graded and filtered for RL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rollouts_core.config.engine import MIN_ENGINE_CONTEXT, EngineConfig
from rollouts_core.config.filter import FilterConfig
from rollouts_core.config.record import (
    PLACEMENT,
    RUNS_PROGRAM,
    EnvironmentName,
    Finite,
    FunctionName,
    Record,
    name_of_function,
)
from rollouts_core.config.reward import RewardConfig


class SamplingConfig(Record):
    """How completions are sampled."""

    temperature: Annotated[Finite, Field(ge=0, le=10)] = 1.0
    """Temperature of sampling. 0: always the most likely token."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Largest number of tokens of a completion."""


class MultiTurnConfig(Record):
    """Limits of a conversation in which an environment replies to the policy.

    All tokens of the conversation, including the environment's, count against `rollout.sampling.max_new_tokens`.
    """

    max_turns: int = Field(default=8, ge=1)
    """Largest number of turns of the policy. A longer conversation is truncated."""
    max_tokens_per_turn: int = Field(default=0, ge=0)
    """Largest number of tokens of one turn of the policy. 0: the tokens that are left for the conversation."""
    timeout_s: Annotated[Finite, Field(gt=0)] = 3600.0
    """Seconds for all replies of the environment in one conversation together. After that, the conversation is
    truncated. The time in which engines generate does not count, because limits of tokens and turns apply to the
    policy."""
    reply_timeout_s: Annotated[Finite, Field(gt=0)] = 120.0
    """Seconds for the environment's reply to one turn. A slower reply counts as a failure of the environment. If the
    environment computes for longer than this without an `await`, the run ends, because the computation blocks all other
    conversations."""
    form: Literal["interleaved", "branching"] = "interleaved"
    """interleaved: a conversation is one sample. branching: each turn of the policy is its own sample, and all samples
    of a conversation have the same reward."""
    response_template: str = ""
    """Format of the policy's tool calls: `hermes`, `qwen_xml`, `glm`, `llama3`, `gpt_oss`, `deepseek`, `gemma`, `lfm2`,
    or a response template of transformers as JSON. Empty: detected from the tokenizer and its chat template."""


InFlight = Literal["finish", "abort", "continue"]


class RolloutConfig(Record):
    """How completions are sampled, graded and filtered for RL."""

    batch_size: int = Field(default=16, ge=1)
    """Number of prompts per step."""
    n_samples_per_prompt: int = Field(default=8, ge=1)
    """Number of completions per prompt. The completions of a prompt form a group, whose rewards are compared with each
    other."""
    over_sampling_factor: Annotated[Finite, Field(ge=1)] = 1.0
    """Number of prompts that are requested at once, as a multiple of the batch size. The prompts are requested at the
    start of a step, and again if too few groups are left because groups were dropped. A step trains on the groups that
    finish first."""
    max_refills: int = Field(default=10, ge=1, json_schema_extra=PLACEMENT)
    """Number of times that a step may request further prompts. After that, the run ends with an error."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Largest number of tokens of a prompt. A longer prompt is an error; the message names its row."""
    sampling: SamplingConfig = SamplingConfig()
    """How completions are sampled."""
    engine: EngineConfig = EngineConfig()
    """The inference engine."""
    environment: EnvironmentName = ""
    """The environment that replies to the policy and grades it: a name of `rollouts_core.environments.ENVIRONMENTS` or
    `package.module:Class`. May be empty if `reward_fn` or `rewards` grade the completions."""
    tasksets: tuple[str, ...] = Field(default=(), json_schema_extra=RUNS_PROGRAM)
    """For the environment `verifiers`: the tasksets that rows may name. A taskset is Python code that the run
    imports."""
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    """Limits of conversations, for environments that reply to the policy."""
    max_environment_retries: int = Field(default=3, ge=0)
    """Number of times that a conversation is repeated, after growing pauses, if the environment fails. After that, the
    prompt's group is dropped without being graded, and the drop is counted."""
    max_environment_failure_share: Annotated[Finite, Field(ge=0, le=1)] = 0.1
    """Largest share of the last 50 groups for which the environment or a reward may be unavailable. Above this share,
    the run pauses. The run ends if the pauses add up to `max_outage_minutes`."""
    max_outage_minutes: Annotated[Finite, Field(ge=0)] = Field(default=30.0, json_schema_extra=PLACEMENT)
    """Largest total length of the pauses of an outage, minutes. After that, the run ends. 0: the run ends without a
    pause. Pauses grow from 15 s to 5 min. Selection and evaluation never drop a prompt, so they may pause for this long
    at each prompt."""
    generate_fn: FunctionName = ""
    """Your own function in place of the engines' sampling: `package.module:function`. The function takes the pending
    samples of a group, and returns the finished samples with the log-probs of the sampled tokens. Empty: the engines
    sample. Selection and evaluation always use an engine."""
    generate_timeout_s: Annotated[Finite, Field(gt=0)] = Field(default=3600.0, json_schema_extra=PLACEMENT)
    """Time limit of one call of `generate_fn`, seconds. A longer call ends the run, even if the function never
    awaits."""
    reward_fn: FunctionName = ""
    """The reward function: a name of `rollouts_core.rewards.REWARDS` or `package.module:function`. Empty: the
    environment's grade."""
    rewards: tuple[RewardConfig, ...] = ()
    """Several rewards in place of `reward_fn`, whose weighted sum is the reward."""
    reward_timeout_s: Annotated[Finite, Field(gt=0)] = Field(default=1800.0, json_schema_extra=PLACEMENT)
    """Time limit of one call of a reward or a filter, seconds. A longer call ends the run, even if the function never
    awaits. The wait for a free processor in the environment `code` does not count. Requests to a service have their own
    time limit."""
    filter_fn: FunctionName = ""
    """Filter that chooses the groups to train on: a name of `rollouts_core.filters.FILTERS` or
    `package.module:function`."""
    filters: tuple[FilterConfig, ...] = ()
    """Several filters in place of `filter_fn`. A group is kept only if all filters keep it. A drop is counted under the
    reason of the first filter that drops the group."""
    buffer_filter_fn: FunctionName = ""
    """Function that chooses which groups to generate next, among groups that were left unfinished when a batch was
    full: `package.module:function`. The function takes the unfinished groups and the number of groups wanted, and
    returns the groups to generate now; the other groups wait. Empty: all groups, in order."""
    max_staleness: int = Field(default=0, ge=0)
    """Largest age of a token when it is trained on, as the number of weight publications since it was sampled. Above 0:
    this number of batches is generated ahead while the trainer trains. 0: engines and trainer take turns."""
    max_partial_staleness: int = Field(default=0, ge=0)
    """Treatment of completions that over-sampling or a filter leaves unfinished when a batch is full; only with
    max_staleness 0. 0: the completions start again in the next step. Above 0: the completions continue with the next
    weights, until their oldest token was sampled this number of weight publications ago."""
    in_flight: InFlight = "finish"
    """Treatment of running completions when weights are published. finish: the publication waits until the completions
    are finished. abort: completions are stopped, and continue after their last token with the new weights. continue:
    the engine pauses, loads the weights, recomputes the keys and values of the tokens, and continues; not supported by
    vLLM."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of prompts and of the sampling of completions."""
    request_timeout_s: Annotated[Finite, Field(gt=0)] = Field(default=600.0, json_schema_extra=PLACEMENT)
    """Seconds that a request to an engine may take. After that, the request is repeated."""
    silence_timeout_s: Annotated[Finite, Field(gt=0)] = Field(default=120.0, json_schema_extra=PLACEMENT)
    """Seconds after which a busy engine counts as dead if no request finished and no liveness probe was answered.
    Engines answer probes between decoding steps, also with a full queue and while paused. Until the first request has
    finished, rollout.engine.start_timeout_s is used if it is longer. Raise the value if one decoding step takes longer,
    for example because the engine compiles during a run."""

    @field_validator("reward_fn", mode="before")
    @classmethod
    def _refuse_several(cls, given: Any) -> Any:  # Any: unchecked
        if isinstance(given, list | tuple):
            raise ValueError('expected one name, "package.module:function"; for several, with weights, use rewards')
        return given

    def _broken_rules(self) -> Iterator[str]:
        if self.rewards and self.reward_fn != "":
            yield "reward_fn and rewards exclude each other: add reward_fn to the rewards"
        if self.filters and self.filter_fn != "":
            yield "filter_fn and filters exclude each other: add filter_fn to the filters"
        if self.tasksets and self.environment != "verifiers":
            yield 'tasksets are for environment = "verifiers": set that, or remove tasksets'
        if self.max_staleness and self.over_sampling_factor > 1:
            yield (
                f"over_sampling_factor {self.over_sampling_factor:g} has an effect only with max_staleness 0: with "
                f"max_staleness {self.max_staleness} other groups run ahead anyway, so remove it"
            )
        if self.max_partial_staleness and self.max_staleness:
            yield (
                f"max_partial_staleness {self.max_partial_staleness} has an effect only with max_staleness 0: with "
                f"max_staleness {self.max_staleness} running groups are kept anyway, so remove it"
            )
        if self.max_partial_staleness and self.over_sampling_factor == 1 and not self.is_filtered:
            yield (
                f"max_partial_staleness {self.max_partial_staleness} keeps groups left over from a full batch, but no "
                "groups are left over: set over_sampling_factor above 1, or a filter"
            )
        if self.in_flight == "continue" and not self.engine.spec.can_continue:
            yield (
                'in_flight "continue" needs an engine that reports the weight version of each token, and '
                f'{self.engine.spec.title} does not: set in_flight = "finish" or "abort"'
            )

    @property
    def is_filtered(self) -> bool:
        """True if a filter of groups is configured."""
        return bool(self.filters) or self.filter_fn != ""

    @property
    def max_token_age(self) -> int:
        """The largest age that a trained token can have, in weight publications."""
        return max(self.max_staleness, self.max_partial_staleness)

    def engine_context(self, num_prompt_tokens: int) -> int:
        """The context length that an engine needs for a prompt and its completion or conversation, tokens."""
        if self.engine.context_length:
            return self.engine.context_length
        longest = num_prompt_tokens + self.sampling.max_new_tokens + self.engine.spec.reserved_tokens
        return longest if self.engine.spec.is_own else max(longest, MIN_ENGINE_CONTEXT)

    @property
    def environment_name(self) -> str:
        """The environment's name for a configuration; "" without an environment."""
        return name_of_function(self.environment)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Names of the rewards: a function's name in the configuration, a service's name or kind; "" without a
        reward.
        """
        if not self.rewards:
            return (name_of_function(self.reward_fn) or self.environment_name,)
        return tuple(name_of_function(each.name) or self._unnamed(each) for each in self.rewards)

    @property
    def modules_named(self) -> dict[str, str]:
        """For each setting with a function of the user: the module that it names. Built-in functions are left out."""
        named = {setting: name.partition(":")[0] for setting, name in self.functions_named.items()}
        return named | self.taskset_modules

    @property
    def functions_named(self) -> dict[str, str]:
        """The functions of the user and of installed packages as `package.module:name`, by setting."""
        from rollouts_core.environments import ALL_ENVIRONMENTS
        from rollouts_core.rewards import ALL_REWARDS

        rewards = [name_of_function(each.name) for each in self.rewards]
        functions = {
            "environment": ALL_ENVIRONMENTS.locate(self.environment_name),
            "generate_fn": self.generate_fn,
            "reward_fn": ALL_REWARDS.locate(name_of_function(self.reward_fn)),
            **{f"rewards.{index}.name": ALL_REWARDS.locate(each) for index, each in enumerate(rewards)},
            "filter_fn": self.filter_fn,
            **{f"filters.{index}.name": each.name for index, each in enumerate(self.filters)},
            "buffer_filter_fn": self.buffer_filter_fn,
        }
        named = {f"rollout.{setting}": name_of_function(each) for setting, each in functions.items()}
        return {setting: name for setting, name in named.items() if ":" in name}

    @property
    def taskset_modules(self) -> dict[str, str]:
        """For each setting with a taskset: the module that verifiers imports for it. Tasksets inside verifiers are
        left out.
        """
        # not at the top, because that module imports this package
        from rollouts_core.user_code.own_files import find_code

        names = (each.rpartition("/")[2].partition("@")[0] for each in self.tasksets)
        modules = (name.replace("-", "_").lower() for name in names)
        return {f"rollout.tasksets.{index}": each for index, each in enumerate(modules) if find_code(each)}

    def _unnamed(self, reward: RewardConfig) -> str:
        return self.environment_name if reward.kind == "function" else reward.kind
