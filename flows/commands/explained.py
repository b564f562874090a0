"""Turn expected exceptions of a command into one printed sentence and an exit code, without a traceback.

Not here: the commands. This module imports no settings, so that it loads quickly.
"""

from __future__ import annotations

import errno
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec

import typer

from rollouts.flows.command import INTERRUPTED_CODE, NO_IMPROVEMENT_CODE, USER_ERROR_CODE
from rollouts.flows.commands.terminal import console, emit
from rollouts.flows.no_improvement import NoImprovementError
from rollouts.flows.own_server.lend import ServerError
from rollouts.infra.errors import JobFailedError, MachineGoneError, PermanentInfraError, TransientInfraError
from rollouts.infra.foreign_text import shown_lines
from rollouts_core.errors import InputError, RolloutsError

FAILED_CODE = 1

ERROR_CODES = {FAILED_CODE: "failed", USER_ERROR_CODE: "user_error", NO_IMPROVEMENT_CODE: "no_improvement"}
"""The `code` of an error object in the output of --json, by exit code."""

GOES_ON = "Finished work is kept: the same command continues from there."
"""Printed if a run was interrupted or failed, and the user need not change anything before a retry."""
ACCEPTED_BY = "Change the training, the data or a seed, or accept any result with evaluation.max_p_value = 1."

P = ParamSpec("P")


def exit_code_of(error: Exception) -> int:
    """The exit code of a command that failed with an expected exception."""
    if isinstance(error, NoImprovementError):
        return NO_IMPROVEMENT_CODE
    if isinstance(error, JobFailedError | MachineGoneError):
        return FAILED_CODE
    return USER_ERROR_CODE if isinstance(error, InputError | PermanentInfraError | ServerError) else FAILED_CODE


def note_what_next(error: Exception) -> None:
    """Add a note to a run's exception that tells the user what to do next, if the exception's message lacks it."""
    if isinstance(error, NoImprovementError):
        error.add_note(ACCEPTED_BY)
    elif exit_code_of(error) == FAILED_CODE:
        error.add_note(GOES_ON)


def explained(function: Callable[P, None]) -> Callable[P, None]:
    """Wrap a command: an expected exception prints one sentence and exits with the code of `exit_code_of`."""

    @functools.wraps(function)
    def explaining(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except (RolloutsError, PermanentInfraError, TransientInfraError, ServerError) as error:
            said = "\n".join([str(error), *getattr(error, "__notes__", ())])
            if kwargs.get("as_json"):
                emit([{"kind": "error", "code": ERROR_CODES[exit_code_of(error)], "message": shown_lines(said)}])
            console.print(f"rollouts: {shown_lines(said)}", markup=False)
            raise typer.Exit(exit_code_of(error)) from error
        except PermissionError as error:
            said = f"rollouts: no permission for {error.filename} ({error.strerror}): change its owner or its mode"
            console.print(said, markup=False)
            raise typer.Exit(USER_ERROR_CODE) from error
        except OSError as error:
            if error.errno == errno.EROFS:
                said = f"{error.filename} is on a read-only file system: choose another store"
                console.print(f"rollouts: {said}", markup=False)
                raise typer.Exit(USER_ERROR_CODE) from error
            if error.errno != errno.ENAMETOOLONG:  # a too long name comes from the user's input
                raise
            given = str(error.filename)
            said = f"{given[:80]}... is too long for a path or a name: it has {len(given)} characters: shorten it"
            console.print(f"rollouts: {said}", markup=False)
            raise typer.Exit(USER_ERROR_CODE) from error
        except KeyboardInterrupt as interrupt:
            console.print(f"\nrollouts: {str(interrupt) or 'interrupted'}. {GOES_ON}")
            raise typer.Exit(INTERRUPTED_CODE) from interrupt

    explaining.__doc__ = unwrapped(function.__doc__ or "")
    return explaining


def unwrapped(docstring: str) -> str:
    """Join each paragraph of a docstring into one line, because Typer's help keeps line breaks."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(docstring).split("\n\n"))
