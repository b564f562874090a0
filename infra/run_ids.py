"""Shorten the id of a run to a few digits that no other run has.

Not here: what is named after them (rentals.py, publication.py, tasks/records.py).
"""

from __future__ import annotations

VERSION_AT = 14
"""The place of the version's digit in a UUID."""


def short_id(run_id: str, num_chars: int = 8) -> str:
    """The part of a run's id that things are named after: random, so that no two runs share it.

    Ids of version 7, which Prefect's server gives to the runs of a schedule, begin with the time at which they were
    planned. It plans many at once, so they begin alike, and end with random digits.
    """
    is_of_a_time = run_id[VERSION_AT : VERSION_AT + 1] == "7" and run_id.count("-") == 4
    return run_id[-num_chars:] if is_of_a_time else run_id[:num_chars]
