"""Find the functions, rewards, filters and the environment that the rollout settings name."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

from rollouts_core.config import FilterConfig, RewardConfig, RolloutConfig, name_of_function
from rollouts_core.config.messages import first_line
from rollouts_core.environments import ALL_ENVIRONMENTS, ENVIRONMENTS
from rollouts_core.environments.protocol import Environment, Tool
from rollouts_core.environments.tools import find_schema_problem
from rollouts_core.errors import ConfigError, RolloutsError
from rollouts_core.filters import FILTERS, BufferFilterFn, FilterFn, compose_filters
from rollouts_core.reward_services import REWARD_SERVICES
from rollouts_core.rewards import ALL_REWARDS, VOTES, RewardFn, VoteFn, WeightedRewards
from rollouts_core.types import Sample
from rollouts_core.user_code.failures import describe_raised
from rollouts_core.user_code.functions import resolve_function

NO_GRADER = (
    f"no reward is configured: set rollout.environment to a built-in environment ({', '.join(sorted(ENVIRONMENTS))}) "
    'or to your own "package.module:Class", or set rollout.reward_fn or rollout.rewards'
)

GenerateFn = Callable[..., Sequence[Sample] | Awaitable[Sequence[Sample]]]
"""Generates the completions of a group: takes the group's pending samples (and keyword arguments from the caller), and
returns the finished samples in the same order.

A trajectory may be returned as several samples, one per turn (`Sample.turn`). If the function returns samples with
`Status.ABORTED`, it is called again with these samples, to continue from their tokens. Optional protocols: `Resumable`
saves the function's state in checkpoints. `Interruptible` returns partial completions on request. `ReportsVersions`
reports the weight versions of tokens that the function keeps itself."""


@runtime_checkable
class Resumable(Protocol):
    """A generate function with state about running groups that checkpoints must save."""

    def state_dict(self) -> dict[str, Any]:  # Any: JSON
        """The state as JSON values. Called at each checkpoint, while groups run."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: JSON
        """Restore the state from the result of `state_dict`. Called before the first group."""
        ...


@runtime_checkable
class Interruptible(Protocol):
    """A generate function that can interrupt running groups without losing their tokens."""

    async def break_off(self) -> None:
        """Stop generating without losing tokens. New calls wait until `go_on`.

        A running call may return its samples as `Status.ABORTED` with their tokens. The manager cancels a call that
        keeps running. The function then keeps the tokens for the next request of these samples.
        """
        ...

    def go_on(self) -> None:
        """Allow generation again after `break_off`."""
        ...


@runtime_checkable
class ReportsVersions(Protocol):
    """A generate function that keeps the tokens of unfinished groups itself instead of in their samples."""

    def versions_of(self, group: Sequence[Sample]) -> Sequence[int]:
        """Weight versions of the kept tokens from which the group would continue."""
        ...

    def forget(self, group: Sequence[Sample]) -> None:
        """Discard the kept tokens of the group, because they are too old to train on."""
        ...


def resolve_generate_fn(config: RolloutConfig) -> GenerateFn:
    """The function that `rollout.generate_fn` names.

    Raises:
        ConfigError: the setting is empty, or the function does not exist.
    """
    if config.generate_fn == "":
        raise ConfigError("rollout.generate_fn is empty: give a function, or make one with create_engine_generate_fn")
    return resolve_function(config.generate_fn, {}, setting="rollout.generate_fn")


class NoEnvironment:
    """Environment of a run without `rollout.environment`. The class has no replies and no tools, and grading raises an
    error."""

    def grade(self, sample: Sample) -> float:
        """Always raise ConfigError with a hint how to configure a reward."""
        raise ConfigError(NO_GRADER)


def resolve_environment(config: RolloutConfig) -> Environment:
    """Create the environment that `rollout.environment` names. If the setting is an environment object, return it
    unchanged. If the setting is "", return a `NoEnvironment`.

    Raises:
        ConfigError: the name is unknown, is not an environment, or cannot be created.
    """
    if config.environment == "":
        return NoEnvironment()
    given, name = config.environment, config.environment_name
    is_made = not isinstance(given, str | type) and hasattr(given, "grade")
    make = resolve_function(given, ALL_ENVIRONMENTS, setting="rollout.environment")
    made_with = {"tasksets": config.tasksets} if config.tasksets else {}
    problem = "it has no method grade"
    try:
        environment: Environment = cast(Environment, given) if is_made else make(**made_with)
        if hasattr(environment, "grade"):
            _check_tools(environment, name)
            _check_row_fields(environment, name)
            return environment
    except TypeError as error:
        problem = first_line(error)
    except RolloutsError:  # its message already says what is wrong with the setting
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"rollout.environment: {name} cannot be created: it {describe_raised(error)}") from error
    raise ConfigError(
        f"rollout.environment: {name} is not an environment ({problem}): "
        "expected a class with a constructor without arguments and a method grade(sample)"
    )


def _check_tools(environment: Environment, name: str) -> None:
    tools = getattr(environment, "tools", ())
    others = [tool for tool in tools if not isinstance(tool, Tool)] if isinstance(tools, Collection) else [tools]
    if others:
        raise ConfigError(
            f"rollout.environment: {name} has a tool of the type {type(others[0]).__name__}: expected `tools` to be a "
            "sequence of rollouts_core.Tool, with name, description, parameters (the JSON Schema) and function"
        )
    for tool in tools:
        if problem := find_schema_problem(tool):
            raise ConfigError(
                f"rollout.environment: {name} has a tool {tool.name!r} whose parameters are not a JSON Schema: "
                f"parameters{problem}"
            )


def _check_row_fields(environment: Environment, name: str) -> None:
    fields = getattr(environment, "row_fields", ())
    # Iterating over a string would give one field per letter. Often the comma of a tuple is missing, as in ("answer").
    if isinstance(fields, str):
        raise ConfigError(
            f"rollout.environment: {name} has the string {fields!r} as row_fields: expected a sequence of names, for "
            f'example ("{fields}",)'
        )


def check_graded(config: RolloutConfig) -> None:
    """Raise ConfigError if the run would need an environment's grade but names no environment."""
    if "" in config.reward_names:
        raise ConfigError(NO_GRADER)


def resolve_reward_fn(config: RolloutConfig) -> RewardFn:
    """The run's reward: `rollout.reward_fn`, the weighted sum of `rollout.rewards`, or the environment's grade.

    Raises:
        ConfigError: no reward is configured, or a name is unknown.
    """
    check_graded(config)
    if config.rewards:
        pairs = zip(config.reward_names, config.rewards, strict=True)
        return WeightedRewards([(name, reward.weight, resolve_reward(reward, config)) for name, reward in pairs])
    if config.reward_fn != "":
        return resolve_function(config.reward_fn, ALL_REWARDS, setting="rollout.reward_fn")
    return resolve_environment(config).grade


def resolve_reward(reward: RewardConfig, config: RolloutConfig) -> RewardFn:
    """The reward function or reward service of one entry of `rollout.rewards`."""
    if reward.kind != "function":
        return REWARD_SERVICES[reward.kind](reward)
    if reward.name == "":
        return resolve_environment(config).grade
    return resolve_function(reward.name, ALL_REWARDS, setting="rollout.rewards")


def resolve_vote_fn(config: RolloutConfig) -> VoteFn | None:
    """The function that extracts the final answer of a completion for majority votes; None if no reward has such a
    function.

    Built-in rewards and environments may have such a function. If several have one, the first is returned.
    """
    rewards = [each.name for each in config.rewards if each.kind == "function"]
    for reward in rewards if config.rewards else [config.reward_fn]:
        if isinstance(reward, str) and reward in VOTES:
            return VOTES[reward]
        vote = getattr(resolve_environment(config), "vote", None) if reward == "" else None
        if callable(vote):
            return cast(VoteFn, vote)
    return None


def resolve_filter_fn(config: RolloutConfig) -> FilterFn | None:
    """The group filter: `rollout.filter_fn`, or all of `rollout.filters` combined; None if both settings are empty."""
    if config.filters:
        return compose_filters(*map(resolve_filter, config.filters))
    if config.filter_fn == "":
        return None
    return resolve_function(config.filter_fn, FILTERS, setting="rollout.filter_fn")


def resolve_filter(config: FilterConfig) -> FilterFn:
    """The filter function of one entry of `rollout.filters`, with its settings bound.

    Raises:
        ConfigError: the filter does not exist, or does not take one of the settings.
    """
    function = resolve_function(config.name, FILTERS, setting="rollout.filters")
    taken = [name for name, each in inspect.signature(function).parameters.items() if each.kind is each.KEYWORD_ONLY]
    if unknown := sorted(config.settings.keys() - set(taken)):
        raise ConfigError(
            f"rollout.filters: {name_of_function(config.name)} takes no setting {unknown[0]!r}; "
            f"it takes {', '.join(taken) or 'none'}"
        )
    return partial(function, **config.settings)


def resolve_buffer_filter_fn(config: RolloutConfig) -> BufferFilterFn | None:
    """The function that `rollout.buffer_filter_fn` names, which selects cancelled groups to request again; None if the
    setting is empty."""
    if config.buffer_filter_fn == "":
        return None
    return resolve_function(config.buffer_filter_fn, {}, setting="rollout.buffer_filter_fn")
