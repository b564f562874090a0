"""`rollout`: how RL gets its data.

Not here: what is learned from it (rl.py), the sampling itself (rollouts_core/rollout/manager.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rollouts_core.config.engine import ENGINE_MARGINS, MIN_ENGINE_CONTEXT, EngineConfig
from rollouts_core.config.filter import FilterConfig
from rollouts_core.config.record import PLACEMENT, EnvironmentName, Finite, FunctionName, Record, name_of_function
from rollouts_core.config.reward import RewardConfig


class SamplingConfig(Record):
    """How a completion is sampled."""

    temperature: Annotated[Finite, Field(ge=0, le=10)] = 1.0
    """Softmax temperature; 0 takes the most likely token."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Token limit of a completion."""


class MultiTurnConfig(Record):
    """Limits of a conversation with an environment that answers the policy. All tokens of it, those of the environment
    too, count against `rollout.sampling.max_new_tokens`."""

    max_turns: int = Field(default=8, ge=1)
    """Turns of the policy; a conversation that is not over then is cut off."""
    max_tokens_per_turn: int = Field(default=0, ge=0)
    """Token limit of one turn of the policy; 0 leaves it all that the conversation has left."""
    timeout_s: Annotated[Finite, Field(gt=0)] = 3600.0
    """How long the environment may take for all its answers in a conversation, which is cut off then. How long the
    engines take does not count: what the policy says is limited in tokens and turns."""
    reply_timeout_s: Annotated[Finite, Field(gt=0)] = 120.0
    """How long the environment may take to answer one turn; longer counts as a failure of the environment. One that
    computes for so long without waiting for anything ends the run: it holds up all other conversations."""
    form: Literal["interleaved", "branching"] = "interleaved"
    """Whether a conversation is trained on as one sample, or as one per turn, which share its reward."""
    response_template: str = ""
    """How the policy writes tool calls: `hermes`, `qwen_xml`, `glm`, `llama3`, `gpt_oss`, `deepseek`, `gemma`, `lfm2`,
    or a response template of transformers as JSON. Empty finds out from the tokenizer and its chat template."""


InFlight = Literal["finish", "abort", "continue"]


class RolloutConfig(Record):
    """How RL gets its data: sample, grade, filter."""

    batch_size: int = Field(default=16, ge=1)
    """Prompts per step."""
    n_samples_per_prompt: int = Field(default=8, ge=1)
    """Completions per prompt: the group that shares a baseline."""
    over_sampling_factor: Annotated[Finite, Field(ge=1)] = 1.0
    """Prompts asked for at a time, as a multiple of the batch size: when a step begins, and when so many groups were
    dropped that too few are left. A step trains on the groups that finish first."""
    max_refills: int = Field(default=10, ge=1, json_schema_extra=PLACEMENT)
    """How often a step may ask for further prompts before it ends with an error."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Prompts longer than this are an error that names the row."""
    sampling: SamplingConfig = SamplingConfig()
    """How completions are sampled."""
    engine: EngineConfig = EngineConfig()
    """Who samples."""
    environment: EnvironmentName = ""
    """The environment that answers the policy and grades it: a name of `rollouts_core.environments.ENVIRONMENTS` or
    `package.module:Class`. May be empty if `reward_fn` or `rewards` grade."""
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    """Limits of conversations, where the environment answers the policy."""
    max_environment_retries: int = Field(default=3, ge=0)
    """How often a conversation is begun again after a failure of the environment's machinery, waiting longer each
    time. Then its group is dropped and counted; nothing is graded."""
    max_environment_failure_share: Annotated[Finite, Field(ge=0, le=1)] = 0.1
    """The run pauses when more than this share of the last 50 groups had such a failure, and ends when that lasts."""
    max_outage_minutes: Annotated[Finite, Field(ge=0)] = Field(default=30.0, json_schema_extra=PLACEMENT)
    """How long such pauses may take together before the run ends; after each, longer and longer, it asks again. 0 ends
    it at once. Selection and evaluation, which drop nothing, wait so long for a prompt."""
    generate_fn: FunctionName = ""
    """Takes the pending samples of a group and returns them finished, with the log-probs of what was sampled; empty
    asks the engines. Completions that checkpoints are compared by come from an engine all the same."""
    generate_timeout_s: Annotated[Finite, Field(gt=0)] = Field(default=3600.0, json_schema_extra=PLACEMENT)
    """A `generate_fn` that takes longer for one call ends the run with a sentence, also where it never waits for
    anything."""
    reward_fn: FunctionName = ""
    """A name of `rollouts_core.rewards.REWARDS` or `package.module:function`; empty takes the environment's grade."""
    rewards: tuple[RewardConfig, ...] = ()
    """Several rewards, added with their weights, in place of `reward_fn`."""
    reward_timeout_s: Annotated[Finite, Field(gt=0)] = Field(default=1800.0, json_schema_extra=PLACEMENT)
    """A reward or a filter that takes longer ends the run with a sentence, also where it never waits for anything. The
    wait for a processor of the environment `code` does not count, nor a service's answer, which has its own limit."""
    filter_fn: FunctionName = ""
    """Which groups are trained on: a name of `rollouts_core.filters.FILTERS` or `package.module:function`."""
    filters: tuple[FilterConfig, ...] = ()
    """Several filters, in place of `filter_fn`: a group is trained on that all of them keep. The first that does not
    gives the reason."""
    buffer_filter_fn: FunctionName = ""
    """Which of the groups that were given up when a batch was full are asked for next: `package.module:function`, which
    takes them and how many are wanted, and returns some of them. The others wait. Empty takes all, in order."""
    max_staleness: int = Field(default=0, ge=0)
    """How many publications of weights the oldest token of a completion may be behind the weights it trains. Above 0,
    so many batches are generated ahead while the trainer trains; 0 generates and trains in turns."""
    max_partial_staleness: int = Field(default=0, ge=0)
    """With max_staleness 0, what becomes of completions under way when a batch is full, because over-sampling or a
    filter asked for more. 0 begins them anew in the next step. Above 0 they are broken off, and the next weights go on
    from their tokens, the oldest of which may be so many publications behind."""
    in_flight: InFlight = "finish"
    """What becomes of completions under way when weights are published. finish: the publication waits for them. abort:
    they are broken off, and the new weights go on from their tokens. continue: the engine pauses, takes the weights,
    reads their tokens again with them and goes on; not with vLLM."""
    seed: int = Field(default=0, ge=0)
    """Order of the prompts and the randomness of sampling."""
    request_timeout_s: Annotated[Finite, Field(gt=0)] = Field(default=600.0, json_schema_extra=PLACEMENT)
    """How long one engine request may take before it is asked again."""
    silence_timeout_s: Annotated[Finite, Field(gt=0)] = Field(default=120.0, json_schema_extra=PLACEMENT)
    """An engine that has requests and for this long gives no sign of life counts as gone: none of them ended, and it
    did not answer what it answers between two steps, however full its queue is, and also while it is paused.
    Until its first request has ended it has rollout.engine.start_timeout_s, where that is longer. Raise it where one
    step takes as long, for instance because the engine compiles amid a run."""

    @field_validator("reward_fn", mode="before")
    @classmethod
    def _refuse_several(cls, given: Any) -> Any:  # Any: unchecked
        if isinstance(given, list | tuple):
            raise ValueError('expected one name, "package.module:function"; several, with weights, stand in rewards')
        return given

    @model_validator(mode="after")
    def _check_functions(self) -> Self:
        if self.rewards and self.reward_fn != "":
            raise ValueError("give reward_fn or rewards, not both: reward_fn may be one of the rewards")
        if self.filters and self.filter_fn != "":
            raise ValueError("give filter_fn or filters, not both: filter_fn may be one of the filters")
        return self

    @model_validator(mode="after")
    def _check_ahead(self) -> Self:
        if self.max_staleness and self.over_sampling_factor > 1:
            raise ValueError(
                f"over_sampling_factor {self.over_sampling_factor:g} is for max_staleness 0: with max_staleness "
                f"{self.max_staleness} other groups are under way anyway, leave it out"
            )
        if self.max_partial_staleness and self.max_staleness:
            raise ValueError(
                f"max_partial_staleness {self.max_partial_staleness} is for max_staleness 0: with max_staleness "
                f"{self.max_staleness} what is under way is kept anyway, leave it out"
            )
        if self.max_partial_staleness and self.over_sampling_factor == 1 and not self.is_filtered:
            raise ValueError(
                f"max_partial_staleness {self.max_partial_staleness} keeps what is under way when a batch is full: set "
                "over_sampling_factor above 1 or a filter, else nothing is"
            )
        if self.in_flight == "continue" and self.engine.kind == "vllm":
            raise ValueError(
                'in_flight "continue" needs an engine that says of each token which weights sampled it, and vLLM does '
                'not: set in_flight = "finish" or "abort"'
            )
        return self

    @property
    def is_filtered(self) -> bool:
        """Whether there is a filter."""
        return bool(self.filters) or self.filter_fn != ""

    @property
    def max_token_age(self) -> int:
        """How many publications the oldest token that is trained on may be behind."""
        return max(self.max_staleness, self.max_partial_staleness)

    def engine_context(self, num_prompt_tokens: int) -> int:
        """Tokens for which the engine must have room: of a prompt, and of its completion or conversation."""
        if self.engine.context_length:
            return self.engine.context_length
        longest = num_prompt_tokens + self.sampling.max_new_tokens + ENGINE_MARGINS[self.engine.kind]
        return longest if self.engine.kind == "embedded" else max(longest, MIN_ENGINE_CONTEXT)

    @property
    def environment_name(self) -> str:
        """The environment as a configuration writes it; "" without one."""
        return name_of_function(self.environment)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """What grades, by name: functions as a configuration writes them, services by their kind; "" for none."""
        if not self.rewards:
            return (name_of_function(self.reward_fn) or self.environment_name,)
        return tuple(name_of_function(each.name) or self._unnamed(each) for each in self.rewards)

    @property
    def modules_named(self) -> dict[str, str]:
        """The modules of users' functions, by the settings that name them; what the library has is left out."""
        functions = {
            "environment": self.environment,
            "generate_fn": self.generate_fn,
            "reward_fn": self.reward_fn,
            "filter_fn": self.filter_fn,
            "buffer_filter_fn": self.buffer_filter_fn,
            **{f"rewards.{index}.name": reward.name for index, reward in enumerate(self.rewards)},
            **{f"filters.{index}.name": each.name for index, each in enumerate(self.filters)},
        }
        named = {f"rollout.{setting}": name_of_function(each).partition(":") for setting, each in functions.items()}
        return {setting: module for setting, (module, colon, _) in named.items() if colon}

    def _unnamed(self, reward: RewardConfig) -> str:
        return self.environment_name if reward.kind == "function" else reward.kind
