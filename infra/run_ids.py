"""Shorten the id of a run to a few characters that differ between runs."""

from __future__ import annotations

_VERSION_AT = 14
"""Index of the version digit in a UUID's text."""


def short_id(run_id: str, num_chars: int = 8) -> str:
    """Return the random part of a run's id. The names of machines, folders and records contain this part.

    Prefect's server gives ids of UUID version 7 to scheduled runs. These ids begin with the time at which the server
    planned the run, which many runs share, and end with random digits. The ids of other runs begin with random digits.
    """
    is_of_a_time = run_id[_VERSION_AT : _VERSION_AT + 1] == "7" and run_id.count("-") == 4
    return run_id[-num_chars:] if is_of_a_time else run_id[:num_chars]
