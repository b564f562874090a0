"""The findings of checks before a run: facts, and warnings about probable mistakes.

Errors that prevent a run are exceptions in `errors.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Caution(str):
    """A finding that warns the user before the run starts. A finding of another type is a fact.

    The class is a subclass of str, so that checks can return facts and warnings in one list.
    """

    __slots__ = ()


def split_findings(findings: Iterable[str]) -> tuple[list[str], list[Caution]]:
    """Split findings into facts and warnings, each in order."""
    facts: list[str] = []
    cautions: list[Caution] = []
    for finding in findings:
        if isinstance(finding, Caution):
            cautions.append(finding)
        else:
            facts.append(finding)
    return facts, cautions


def count_cautions(cautions: Sequence[Caution]) -> str:
    return "1 warning" if len(cautions) == 1 else f"{len(cautions)} warnings"
