"""The environments that ship, by name. What one is: protocol.py."""

from __future__ import annotations

from collections.abc import Callable

from rollouts_core.environments.arithmetic import ArithmeticEnvironment
from rollouts_core.environments.math import MathEnvironment
from rollouts_core.environments.protocol import (
    Conversation,
    Environment,
    MultiTurnEnvironment,
    Outcome,
    Reply,
    Tool,
    ToolError,
)

ENVIRONMENTS: dict[str, Callable[[], Environment]] = {
    "arithmetic": ArithmeticEnvironment,
    "math": MathEnvironment,
}

__all__ = [
    "ENVIRONMENTS",
    "ArithmeticEnvironment",
    "Conversation",
    "Environment",
    "MathEnvironment",
    "MultiTurnEnvironment",
    "Outcome",
    "Reply",
    "Tool",
    "ToolError",
]
