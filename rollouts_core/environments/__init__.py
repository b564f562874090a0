"""The registry of environments by name: built-in environments, and environments of installed packages. `protocol.py`
has the interface of environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollouts_core.environments.arithmetic import ArithmeticEnvironment
from rollouts_core.environments.calculator import CalculatorEnvironment
from rollouts_core.environments.code import CodeEnvironment
from rollouts_core.environments.countdown import CountdownEnvironment
from rollouts_core.environments.json_schema import JSONSchemaEnvironment
from rollouts_core.environments.math import MathEnvironment, MathVerifyEnvironment
from rollouts_core.environments.multiple_choice import MultipleChoiceEnvironment
from rollouts_core.environments.protocol import (
    Conversation,
    Environment,
    MultiTurnEnvironment,
    Outcome,
    Reply,
    Tool,
    ToolError,
)
from rollouts_core.environments.text_transformation import TextTransformationEnvironment
from rollouts_core.plugins import Registry, find_fault_of_callable


def make_verifiers_environment(**settings: Any) -> Environment:  # Any: settings of every type
    """Create a `VerifiersEnvironment`. verifiers_tasks.py is also a command (`python -m`), so importing this package
    must not import it."""
    from rollouts_core.environments.verifiers_tasks import VerifiersEnvironment

    return VerifiersEnvironment(**settings)


ENVIRONMENTS: dict[str, Callable[[], Environment]] = {
    "arithmetic": ArithmeticEnvironment,
    "calculator": CalculatorEnvironment,
    "code": CodeEnvironment,
    "countdown": CountdownEnvironment,
    "json_schema": JSONSchemaEnvironment,
    "math": MathEnvironment,
    "math_verify": MathVerifyEnvironment,
    "multiple_choice": MultipleChoiceEnvironment,
    "text_transformation": TextTransformationEnvironment,
    "verifiers": make_verifiers_environment,
}
ALL_ENVIRONMENTS = Registry[Callable[[], Environment]]("rollouts.environments", ENVIRONMENTS, find_fault_of_callable)
"""The built-in environments, and the environments of installed packages."""

__all__ = [
    "ALL_ENVIRONMENTS",
    "ENVIRONMENTS",
    "ArithmeticEnvironment",
    "CalculatorEnvironment",
    "CodeEnvironment",
    "Conversation",
    "CountdownEnvironment",
    "Environment",
    "JSONSchemaEnvironment",
    "MathEnvironment",
    "MathVerifyEnvironment",
    "MultiTurnEnvironment",
    "MultipleChoiceEnvironment",
    "Outcome",
    "Reply",
    "TextTransformationEnvironment",
    "Tool",
    "ToolError",
]
