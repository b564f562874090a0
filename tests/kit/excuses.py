"""The reasons for a skip that continuous integration accepts; for any other a test fails there (tests/conftest.py).

They are what it cannot install: documents that are not ours, rights that it does not have, a kernel without a feature.
"""

from __future__ import annotations

import pytest

NOT_ALLOWED = ("not permitted", "permission denied", "not supported", "no space left on device", "unknown device type")
"""What programs say who lack rights, or a kernel with what they need; the fourth where the limit of namespaces is 0."""


class ExcusedSkip(pytest.skip.Exception):  # type: ignore[name-defined]  # a class, which its type does not say
    """A skip that counts as one everywhere; raise it where `pytest.skip` would be called."""


def is_want_of_rights(said: str) -> bool:
    """Whether what a program said on its standard error is that it may not, or that the kernel cannot."""
    return any(words in said.lower() for words in NOT_ALLOWED)
