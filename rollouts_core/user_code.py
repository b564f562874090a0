"""Say what code of the user's raised, and where in the user's own files.

Not here: how such code is found (functions.py), who calls it (rewards.py, rollout.py, plain_rollouts.py,
conversation.py).
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollouts_core.config import name_of_function
from rollouts_core.errors import RewardError
from rollouts_core.messages import first_line
from rollouts_core.time_limits import OutOfTimeError
from rollouts_core.types import Sample

PACKAGE_FOLDER = Path(__file__).parent
STANDARD_LIBRARY = Path(os.__file__).parent
INSTALLED_FOLDERS = frozenset({"site-packages", "dist-packages"})


def describe_raised(error: BaseException) -> str:
    """`raised KeyError: 'x' (my_rewards.py, line 6)`: kind and first line of an error, and the place in user code."""
    return f"raised {type(error).__name__}: {first_line(error)}{find_user_place(error)}"


def failed_function_error(
    kind: str,
    function: Callable[..., Any],  # Any: a user's function made it
    group: Sequence[Sample],
    error: Exception,
) -> RewardError:
    """The error that names a function of the user's which raised, or took too long, and the prompt it was given."""
    where = f"{kind} function {name_of_function(function)} on prompt {group[0].metadata.get('prompt_id', '?')!r}"
    return RewardError(
        f"{where}: {error}" if isinstance(error, OutOfTimeError) else f"{where} {describe_raised(error)}"
    )


def find_user_place(error: BaseException) -> str:
    """` (file, line n)` of the innermost frame in a file of the user's own; empty where there is none.

    A syntax error names its place itself.
    """
    if isinstance(error, SyntaxError):
        return ""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(Path(file), line) for file, line in frames if _is_users(file)]
    return f" ({own[-1][0].name}, line {own[-1][1]})" if own else ""


def is_raised_by_user_code(error: BaseException) -> bool:
    """True if one of an error's causes was raised within code of the user's, whose traceback says more than we can."""
    cause = error.__cause__
    return cause is not None and (bool(find_user_place(cause)) or is_raised_by_user_code(cause))


def _is_users(file: str) -> bool:
    """True for a file that is neither ours nor of Python or an installed package; `<frozen ...>` is no file."""
    path = Path(file)
    is_installed = not INSTALLED_FOLDERS.isdisjoint(path.parts) or path.is_relative_to(STANDARD_LIBRARY)
    return not (file.startswith("<") or is_installed or path.is_relative_to(PACKAGE_FOLDER))
