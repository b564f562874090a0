"""Who grades a completion: the `Environment` Protocol and the environments that ship, by name."""

from __future__ import annotations

from typing import Protocol

from rollouts_core.environments.arithmetic import ArithmeticEnvironment
from rollouts_core.environments.math import MathEnvironment
from rollouts_core.types import Sample


class Environment(Protocol):
    """What a sample's completion is held against."""

    def grade(self, sample: Sample) -> float:
        """The reward of a finished sample."""
        ...


ENVIRONMENTS: dict[str, type[Environment]] = {
    "arithmetic": ArithmeticEnvironment,
    "math": MathEnvironment,
}

__all__ = ["ENVIRONMENTS", "ArithmeticEnvironment", "Environment", "MathEnvironment"]
