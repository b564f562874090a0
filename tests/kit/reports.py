"""Reports of tests as pytest-xdist can send them: a name of a file that is no UTF-8 would end all workers.

Not here: which tests there are, and in what order (conftest.py).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:  # Any: what a report is made of
    """Have what a worker says of a test be text that can be encoded."""
    return _encodable((yield))


def _encodable(value: Any) -> Any:  # Any: JSON
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_encodable, value))
    return value
