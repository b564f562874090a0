"""Find a function by the name that a configuration gives it: the one place where such names are resolved.

Not here: the functions themselves (rewards.py, filters.py, environments/).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rollouts_core.errors import ConfigError
from rollouts_core.messages import closest_name

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])  # Any: user functions of many shapes


def resolve_function(name: str | FunctionT, known: Mapping[str, FunctionT], *, setting: str) -> FunctionT:
    """The function that `name` stands for: a key of `known`, or `package.module:function`.

    Args:
        setting: the configuration key, for messages.

    Raises:
        ConfigError: no such name, module or function.
    """
    if not isinstance(name, str):
        return name
    if name in known:
        return known[name]
    module_name, colon, function_name = name.partition(":")
    if not colon:
        raise ConfigError(f"{setting}: unknown name {name!r}{closest_name(name, list(known))}")
    try:
        found = getattr(importlib.import_module(module_name), function_name)
    except ImportError as error:
        raise ConfigError(
            f"{setting}: {module_name!r} cannot be imported ({error}); is its folder on PYTHONPATH?"
        ) from error
    except AttributeError as error:
        raise ConfigError(f"{setting}: module {module_name!r} has no {function_name!r}") from error
    if not callable(found):
        raise ConfigError(f"{setting}: {name!r} is not a function")
    function: FunctionT = found
    return function
