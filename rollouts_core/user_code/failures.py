"""Say what code of the user's raised, and where in the user's own files.

Not here: how such code is found (functions.py), who calls it (rewards.py, rollout/finish_group.py,
plain_rollouts.py, conversation.py).
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollouts_core.config import name_of_function
from rollouts_core.config.messages import first_line
from rollouts_core.errors import RewardError
from rollouts_core.system.time_limits import OutOfTimeError
from rollouts_core.types import Sample

PACKAGE_FOLDER = Path(__file__).parents[1]
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


def check_generated(
    generated: object,
    function: Callable[..., Any],  # Any: a user's function made it
    group: Sequence[Sample],
) -> list[Sample]:
    """What a generation function returned for a group: samples of all its places, and of no other group.

    Raises:
        RewardError: it is something else; names the function and the prompt.
    """
    if problem := _find_problem(generated, group):
        prompt = group[0].metadata.get("prompt_id", "?")
        raise RewardError(f"generation function {name_of_function(function)} on prompt {prompt!r} returned {problem}")
    return list(generated)  # type: ignore[call-overload,no-any-return]  # _find_problem looked


def _find_problem(generated: object, group: Sequence[Sample]) -> str:
    if not isinstance(generated, Sequence) or not all(isinstance(each, Sample) for each in generated):
        return f"{_describe_type(generated)}: a list of Sample is expected"
    derive = "derive each from one that it was given, by dataclasses.replace"
    number = group[0].group_index
    if foreign := [sample.group_index for sample in generated if sample.group_index != number]:
        return f"a sample of group {foreign[0]} for group {number}: {derive}"
    places = {sample.index for sample in group}
    if missing := sorted(places - {sample.index for sample in generated}):
        return f"no sample for {len(missing)} of {len(places)} places, {missing[0]} first: {derive}"
    if other := sorted({sample.index for sample in generated} - places):
        return f"a sample for the place {other[0]}, which it was not asked for: {derive}"
    turns = [(sample.index, sample.turn) for sample in generated]
    if len({*turns}) < len(turns):
        return "two samples for one place: number them by `turn` where each is a turn of a conversation"
    return ""


def _describe_type(value: object) -> str:
    kind = type(value).__name__
    others = [type(each).__name__ for each in value if not isinstance(each, Sample)] if isinstance(value, list) else []
    return f"a {kind} with a {others[0]} in it" if others else f"a {kind}"


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
