"""`rollout`: sampling, grading and filtering for RL."""

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
    """Sampling of a completion."""

    temperature: Annotated[Finite, Field(ge=0, le=10)] = 1.0
    """Softmax temperature; 0 takes the most likely token."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Token limit of a completion."""


class MultiTurnConfig(Record):
    """Limits of a conversation with an environment that replies to the policy. All its tokens, including the
    environment's, count against `rollout.sampling.max_new_tokens`."""

    max_turns: int = Field(default=8, ge=1)
    """Highest number of the policy's turns; longer conversations are truncated."""
    max_tokens_per_turn: int = Field(default=0, ge=0)
    """Token limit of one turn of the policy. 0: the conversation's remaining tokens."""
    timeout_s: Annotated[Finite, Field(gt=0)] = 3600.0
    """Seconds for all replies of the environment in one conversation, which is truncated after that. The engines' time
    does not count: tokens and turns limit the policy."""
    reply_timeout_s: Annotated[Finite, Field(gt=0)] = 120.0
    """Seconds for the environment's reply to one turn; a slower reply counts as a failure of the environment. If the
    environment computes that long without awaiting, the run ends, because it blocks all other conversations."""
    form: Literal["interleaved", "branching"] = "interleaved"
    """Train on a conversation as one sample, or as one sample per turn with a shared reward."""
    response_template: str = ""
    """Dialect of the policy's tool calls: `hermes`, `qwen_xml`, `glm`, `llama3`, `gpt_oss`, `deepseek`, `gemma`,
    `lfm2`, or a response template of transformers as JSON. Empty: detected from the tokenizer and its chat template."""


InFlight = Literal["finish", "abort", "continue"]


class RolloutConfig(Record):
    """Sampling, grading and filtering for RL."""

    batch_size: int = Field(default=16, ge=1)
    """Prompts per step."""
    n_samples_per_prompt: int = Field(default=8, ge=1)
    """Completions per prompt: the group that shares a baseline."""
    over_sampling_factor: Annotated[Finite, Field(ge=1)] = 1.0
    """Prompts requested at once, as a multiple of the batch size: at the start of a step, and when too few groups are
    left after drops. A step trains on the groups that finish first."""
    max_refills: int = Field(default=10, ge=1, json_schema_extra=PLACEMENT)
    """How often a step may request further prompts before the run ends with an error."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Highest number of tokens of a prompt. A longer prompt is an error that names its row."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of completions."""
    engine: EngineConfig = EngineConfig()
    """The inference engine."""
    environment: EnvironmentName = ""
    """The environment that replies to the policy and grades it: a name of `rollouts_core.environments.ENVIRONMENTS` or
    `package.module:Class`. May be empty if `reward_fn` or `rewards` grade."""
    tasksets: tuple[str, ...] = Field(default=(), json_schema_extra=RUNS_PROGRAM)
    """Tasksets that rows may name, for the environment `verifiers`. A taskset is Python code, which is imported."""
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    """Limits of conversations, for environments that reply to the policy."""
    max_environment_retries: int = Field(default=3, ge=0)
    """How often a conversation is repeated after a failure of the environment, with growing pauses. After that its
    group is dropped, counted and not graded."""
    max_environment_failure_share: Annotated[Finite, Field(ge=0, le=1)] = 0.1
    """The run pauses if the environment or a reward was unavailable for more than this share of the last 50 groups, and
    ends after `max_outage_minutes`."""
    max_outage_minutes: Annotated[Finite, Field(ge=0)] = Field(default=30.0, json_schema_extra=PLACEMENT)
    """Total minutes of pauses in an outage after which the run ends. 0: the run ends instead of the first pause. Pauses
    grow from 15 s to 5 min. Selection and evaluation drop no prompt: they pause up to this long for each."""
    generate_fn: FunctionName = ""
    """Function that takes the pending samples of a group and returns them finished, with log-probs of the sampled
    tokens. Empty: the engines sample. Selection and evaluation always use an engine."""
    generate_timeout_s: Annotated[Finite, Field(gt=0)] = Field(default=3600.0, json_schema_extra=PLACEMENT)
    """Seconds for one call of `generate_fn`. A longer call ends the run, also if it never awaits."""
    reward_fn: FunctionName = ""
    """A name of `rollouts_core.rewards.REWARDS` or `package.module:function`; empty takes the environment's grade."""
    rewards: tuple[RewardConfig, ...] = ()
    """Several rewards, added with their weights, in place of `reward_fn`."""
    reward_timeout_s: Annotated[Finite, Field(gt=0)] = Field(default=1800.0, json_schema_extra=PLACEMENT)
    """Seconds for one call of a reward or a filter. A longer call ends the run, also if it never awaits. Waiting for a
    processor in the environment `code` does not count, and a service's answer has its own limit."""
    filter_fn: FunctionName = ""
    """Chooses the groups to train on: a name of `rollouts_core.filters.FILTERS` or `package.module:function`."""
    filters: tuple[FilterConfig, ...] = ()
    """Several filters, instead of `filter_fn`. A group must pass all of them. The first failing filter gives the reason
    of a drop."""
    buffer_filter_fn: FunctionName = ""
    """Chooses the next groups among those left over from full batches: `package.module:function`, which takes the
    groups and the wanted number, and returns some of them. The others wait. Empty: all, in order."""
    max_staleness: int = Field(default=0, ge=0)
    """Limit on a token's age when it is trained on, counted in publications of weights. Above 0, this many batches are
    generated ahead during training. 0: generate and train in turns."""
    max_partial_staleness: int = Field(default=0, ge=0)
    """Treatment of completions that over-sampling or a filter leaves unfinished when a batch is full; only with
    max_staleness 0. 0: start them again in the next step. Above 0: continue them with the next weights, until their
    oldest token is this many publications old."""
    in_flight: InFlight = "finish"
    """Treatment of running completions at a publication of weights. finish: the publication waits for them. abort: they
    stop, and the new weights continue from their tokens. continue: the engine pauses, loads the weights, recomputes the
    tokens' keys and values, and continues; not with vLLM."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of prompts and of sampling."""
    request_timeout_s: Annotated[Finite, Field(gt=0)] = Field(default=600.0, json_schema_extra=PLACEMENT)
    """Seconds for one engine request before it is repeated."""
    silence_timeout_s: Annotated[Finite, Field(gt=0)] = Field(default=120.0, json_schema_extra=PLACEMENT)
    """Seconds after which a busy engine counts as dead: no request finished and no liveness probe was answered. Engines
    answer probes between decoding steps, also with a full queue and while paused. Until the first request has finished,
    rollout.engine.start_timeout_s counts if it is longer. Raise the value if one decoding step takes longer, for
    example because the engine compiles during a run."""

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
        """True if a filter is configured."""
        return bool(self.filters) or self.filter_fn != ""

    @property
    def max_token_age(self) -> int:
        """Highest age of a trained token, in publications."""
        return max(self.max_staleness, self.max_partial_staleness)

    def engine_context(self, num_prompt_tokens: int) -> int:
        """Context length that an engine needs: tokens of a prompt and its completion or conversation."""
        if self.engine.context_length:
            return self.engine.context_length
        longest = num_prompt_tokens + self.sampling.max_new_tokens + self.engine.spec.reserved_tokens
        return longest if self.engine.spec.is_own else max(longest, MIN_ENGINE_CONTEXT)

    @property
    def environment_name(self) -> str:
        """The environment's name in a configuration; "" without one."""
        return name_of_function(self.environment)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Names of the rewards: functions as in the configuration, services by kind; "" without a reward."""
        if not self.rewards:
            return (name_of_function(self.reward_fn) or self.environment_name,)
        return tuple(name_of_function(each.name) or self._unnamed(each) for each in self.rewards)

    @property
    def modules_named(self) -> dict[str, str]:
        """The modules of the user's functions, by setting; built-in functions are left out."""
        named = {setting: name.partition(":")[0] for setting, name in self.functions_named.items()}
        return named | self.taskset_modules

    @property
    def functions_named(self) -> dict[str, str]:
        """Functions of the user and of installed packages as `package.module:name`, by setting."""
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
        """The modules that verifiers imports for the tasksets, by setting; tasksets inside verifiers are left out."""
        from rollouts_core.user_code.own_files import find_code  # it imports this package

        names = (each.rpartition("/")[2].partition("@")[0] for each in self.tasksets)
        modules = (name.replace("-", "_").lower() for name in names)
        return {f"rollout.tasksets.{index}": each for index, each in enumerate(modules) if find_code(each)}

    def _unnamed(self, reward: RewardConfig) -> str:
        return self.environment_name if reward.kind == "function" else reward.kind
