"""Pins that an environment may be given as an object, as `reward_fn` may be a function."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from pydantic import ValidationError

from rollouts_core.config import RolloutConfig
from rollouts_core.environments.arithmetic import ArithmeticEnvironment
from rollouts_core.fingerprint import training_settings
from rollouts_core.rollout.resolve import resolve_environment, resolve_reward_fn
from rollouts_core.types import Sample


@dataclass
class Counting:
    """An environment with a setting, which Python cannot hash."""

    best: float

    def grade(self, sample: Sample) -> float:
        """The setting."""
        return self.best


@dataclass
class Callable(Counting):
    """One that can be called, too."""

    def __call__(self) -> float:
        return 0.0


@pytest.mark.parametrize("given", [Counting(2.0), Callable(2.0)])
def test_an_object_is_taken_as_it_is(given: Counting) -> None:
    config = RolloutConfig(environment=given)
    assert resolve_environment(config) is given
    assert config.environment_name == f"{__name__}:{type(given).__name__}" == config.reward_names[0]
    assert config.modules_named == {"rollout.environment": __name__}
    assert training_settings(config)["environment"] == config.environment_name
    assert resolve_reward_fn(config) is not None
    with pytest.raises(ValueError, match="cannot be named in a file"):
        config.model_dump_json()


def test_a_class_is_made_anew_and_named() -> None:
    config = RolloutConfig(environment=ArithmeticEnvironment)
    assert isinstance(resolve_environment(config), ArithmeticEnvironment)
    written = config.model_dump(mode="json")["environment"]
    assert written == "rollouts_core.environments.arithmetic:ArithmeticEnvironment"
    assert isinstance(resolve_environment(RolloutConfig(environment=written)), ArithmeticEnvironment)


@pytest.mark.parametrize("given", [3, None, ["arithmetic"]])
def test_what_is_no_environment_is_refused(given: object) -> None:
    with pytest.raises(ValidationError, match="an object with a method grade, found"):
        RolloutConfig(environment=given)
