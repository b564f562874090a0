"""The functions, rewards and environment that the rollout settings name.

Not here: how a name becomes a function (user_code/functions.py), what the shipped functions do (rewards.py, filters.py,
environments/).
"""

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
from rollouts_core.rewards import ALL_REWARDS, RewardFn, WeightedRewards
from rollouts_core.types import Sample
from rollouts_core.user_code.failures import describe_raised
from rollouts_core.user_code.functions import resolve_function

NO_GRADER = (
    "nothing says how good a completion is: set rollout.environment to one that ships "
    f'({", ".join(sorted(ENVIRONMENTS))}) or to your own "package.module:Class", or set rollout.reward_fn or '
    "rollout.rewards"
)

GenerateFn = Callable[..., Sequence[Sample] | Awaitable[Sequence[Sample]]]
"""Takes the pending samples of a group (and the caller's keywords) and returns them finished, in order.

A trajectory may come back as several samples, one per turn (`Sample.turn`). A group of which some samples come back as
`Status.ABORTED` is handed in again, to be continued from the tokens that they have. One that is `Resumable`, too, is
saved with each checkpoint; one that is `Interruptible` can end what is under way with the tokens that it has, and says
how old they are where it is `Remembering`."""


@runtime_checkable
class Resumable(Protocol):
    """A generate function with a state of its own: what it knows of the groups under way."""

    def state_dict(self) -> dict[str, Any]:  # Any: JSON
        """The state as JSON values. Called at a checkpoint, amid groups."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: JSON
        """Go on with what `state_dict` gave, before the first group is asked for."""
        ...


@runtime_checkable
class Interruptible(Protocol):
    """A generate function whose work can be broken off without losing it."""

    async def break_off(self) -> None:
        """Stop generating. Calls under way return their samples as `Status.ABORTED`, or wait to be cancelled, with what
        there is of theirs kept for the call that asks for the same samples again. Other calls wait."""
        ...

    def go_on(self) -> None:
        """Generate again after `break_off`."""
        ...


@runtime_checkable
class Remembering(Protocol):
    """A generate function that keeps tokens of groups under way itself, not in their samples."""

    def versions_of(self, group: Sequence[Sample]) -> Sequence[int]:
        """The versions of the weights that sampled what it would go on from."""
        ...

    def forget(self, group: Sequence[Sample]) -> None:
        """Begin the group anew when it is asked for: what there is of it has become too old to be trained on."""
        ...


def resolve_generate_fn(config: RolloutConfig) -> GenerateFn:
    """The function that `rollout.generate_fn` names."""
    if config.generate_fn == "":
        raise ConfigError("rollout.generate_fn is empty: give a function, or make one with create_engine_generate_fn")
    return resolve_function(config.generate_fn, {}, setting="rollout.generate_fn")


class NoEnvironment:
    """Stands where `rollout.environment` is empty: it answers nothing, offers no tools and grades nothing."""

    def grade(self, sample: Sample) -> float:
        """Raise ConfigError."""
        raise ConfigError(NO_GRADER)


def resolve_environment(config: RolloutConfig) -> Environment:
    """The environment that `rollout.environment` names, made anew, or the object that it is.

    Without one it is `NoEnvironment`.

    Raises:
        ConfigError: no such name, something else than an environment, or one that cannot be made.
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
    except RolloutsError:  # its own sentence
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"rollout.environment: {name} cannot be made: it {describe_raised(error)}") from error
    raise ConfigError(
        f"rollout.environment: {name} is no environment ({problem}): "
        "expected a class that is made without arguments and has the method grade(sample)"
    )


def _check_tools(environment: Environment, name: str) -> None:
    tools = getattr(environment, "tools", ())
    others = [tool for tool in tools if not isinstance(tool, Tool)] if isinstance(tools, Collection) else [tools]
    if others:
        raise ConfigError(
            f"rollout.environment: {name} has among its tools something of the type {type(others[0]).__name__}: "
            "expected `tools` to be a sequence of rollouts_core.Tool, which has name, description, parameters (the "
            "JSON Schema) and function"
        )
    for tool in tools:
        if problem := find_schema_problem(tool):
            raise ConfigError(
                f"rollout.environment: {name} has a tool {tool.name!r} whose parameters are no JSON Schema: "
                f"parameters{problem}"
            )


def _check_row_fields(environment: Environment, name: str) -> None:
    fields = getattr(environment, "row_fields", ())
    if isinstance(fields, str):  # a tuple of one whose comma is missing; each letter would be taken for a field
        raise ConfigError(
            f"rollout.environment: {name} has the text {fields!r} as row_fields: expected a sequence of names, as "
            f'("{fields}",)'
        )


def check_graded(config: RolloutConfig) -> None:
    """Raise ConfigError where nothing is named that grades completions: no grader is usual enough to be taken."""
    if "" in config.reward_names:
        raise ConfigError(NO_GRADER)


def resolve_reward_fn(config: RolloutConfig) -> RewardFn:
    """The function that `rollout.reward_fn` names, the sum of `rollout.rewards`, or the environment's grade.

    Raises:
        ConfigError: none of them is named, or by a name that stands for nothing.
    """
    check_graded(config)
    if config.rewards:
        pairs = zip(config.reward_names, config.rewards, strict=True)
        return WeightedRewards([(name, reward.weight, resolve_reward(reward, config)) for name, reward in pairs])
    if config.reward_fn != "":
        return resolve_function(config.reward_fn, ALL_REWARDS, setting="rollout.reward_fn")
    return resolve_environment(config).grade


def resolve_reward(reward: RewardConfig, config: RolloutConfig) -> RewardFn:
    """The function or service that one of `rollout.rewards` names."""
    if reward.kind != "function":
        return REWARD_SERVICES[reward.kind](reward)
    if reward.name == "":
        return resolve_environment(config).grade
    return resolve_function(reward.name, ALL_REWARDS, setting="rollout.rewards")


def resolve_filter_fn(config: RolloutConfig) -> FilterFn | None:
    """The function that `rollout.filter_fn` names, or all of `rollout.filters` as one, if any."""
    if config.filters:
        return compose_filters(*map(resolve_filter, config.filters))
    if config.filter_fn == "":
        return None
    return resolve_function(config.filter_fn, FILTERS, setting="rollout.filter_fn")


def resolve_filter(config: FilterConfig) -> FilterFn:
    """The function that one of `rollout.filters` names, with its settings."""
    function = resolve_function(config.name, FILTERS, setting="rollout.filters")
    taken = [name for name, each in inspect.signature(function).parameters.items() if each.kind is each.KEYWORD_ONLY]
    if unknown := sorted(config.settings.keys() - set(taken)):
        raise ConfigError(
            f"rollout.filters: {name_of_function(config.name)} takes no setting {unknown[0]!r}; "
            f"it takes {', '.join(taken) or 'none'}"
        )
    return partial(function, **config.settings)


def resolve_buffer_filter_fn(config: RolloutConfig) -> BufferFilterFn | None:
    """The function that `rollout.buffer_filter_fn` names, if any."""
    if config.buffer_filter_fn == "":
        return None
    return resolve_function(config.buffer_filter_fn, {}, setting="rollout.buffer_filter_fn")
