"""Describe errors of the user's code for messages, with file and line in the user's files."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Collection, Sequence
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
    """Text such as "raised KeyError: 'x' (my_rewards.py, line 6)", with the error's place in the user's files."""
    return f"raised {type(error).__name__}: {first_line(error)}{find_user_place(error)}"


def failed_function_error(
    kind: str,
    function: Callable[..., Any],  # Any: a user's function made it
    group: Sequence[Sample],
    error: Exception,
) -> RewardError:
    """Convert an exception of a user's function, or its timeout, to a RewardError that names function and prompt."""
    where = f"{kind} function {name_of_function(function)} on prompt {group[0].metadata.get('prompt_id', '?')!r}"
    return RewardError(
        f"{where}: {error}" if isinstance(error, OutOfTimeError) else f"{where} {describe_raised(error)}"
    )


def check_generated(
    generated: object,
    function: Callable[..., Any],  # Any: a user's function made it
    pending: Sequence[Sample],
) -> list[Sample]:
    """Check the result of a user's generation function. The result must have one sample for each pending sample, and no
    other samples.

    Args:
        generated: the result of the function.
        pending: the samples to complete, which the function got.

    Raises:
        RewardError: the result is wrong. The message names the function and the first prompt.
    """
    if problem := _find_problem(generated, pending):
        prompt = pending[0].metadata.get("prompt_id", "?")
        raise RewardError(f"generation function {name_of_function(function)} on prompt {prompt!r} returned {problem}")
    return list(generated)  # type: ignore[call-overload,no-any-return]  # _find_problem looked


def _find_problem(generated: object, pending: Sequence[Sample]) -> str:
    if not isinstance(generated, Sequence) or not all(isinstance(each, Sample) for each in generated):
        return f"{_describe_type(generated)}: expected a list of Sample"
    derive = "make each sample from a given sample with dataclasses.replace"
    groups = {sample.group_index for sample in pending}
    if foreign := [sample.group_index for sample in generated if sample.group_index not in groups]:
        return f"a sample of group {foreign[0]} for group {pending[0].group_index}: {derive}"
    places = {(sample.group_index, sample.index) for sample in pending}
    filled = {(sample.group_index, sample.index) for sample in generated}
    if missing := sorted(places - filled):
        first = _name_place(missing[0], groups)
        return f"no sample for {len(missing)} of {len(places)} places, {first} first: {derive}"
    if other := sorted(filled - places):
        return f"a sample for the place {_name_place(other[0], groups)}, which was not requested: {derive}"
    turns = [(sample.group_index, sample.index, sample.turn) for sample in generated]
    if len({*turns}) < len(turns):
        return "two samples for one place: if each sample is a turn of a conversation, number them by `turn`"
    return ""


def _name_place(place: tuple[int, int], groups: Collection[int]) -> str:
    group, index = place
    return str(index) if len(groups) == 1 else f"{index} of group {group}"


def _describe_type(value: object) -> str:
    kind = type(value).__name__
    others = [type(each).__name__ for each in value if not isinstance(each, Sample)] if isinstance(value, list) else []
    return f"a {kind} with a {others[0]} in it" if others else f"a {kind}"


def find_user_place(error: BaseException) -> str:
    """Text " (FILE, line N)" with the innermost frame of the traceback in the user's files. Empty without such a frame.

    The text is also empty for syntax errors, because their messages already have file and line.
    """
    if isinstance(error, SyntaxError):
        return ""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(Path(file), line) for file, line in frames if _is_users(file)]
    return f" ({own[-1][0].name}, line {own[-1][1]})" if own else ""


def is_raised_by_user_code(error: BaseException) -> bool:
    """True if a cause of the error was raised in the user's code, so that the traceback helps the user."""
    cause = error.__cause__
    return cause is not None and (bool(find_user_place(cause)) or is_raised_by_user_code(cause))


def _is_users(file: str) -> bool:
    """True for a file of the user: outside of this project, Python and installed packages."""
    path = Path(file)
    is_installed = not INSTALLED_FOLDERS.isdisjoint(path.parts) or path.is_relative_to(STANDARD_LIBRARY)
    return not (file.startswith("<") or is_installed or path.is_relative_to(PACKAGE_FOLDER))
