"""What the checks before a run tell: facts, and warnings of what somebody probably did not mean.

Not here: the checks themselves (validate.py), mistakes that no run can begin with (errors.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Caution(str):
    """A finding that somebody should look at before the run begins; any other finding is a fact.

    A kind of text, so that checks which tell facts and those which warn can be put together in one list.
    """

    __slots__ = ()


def split_findings(findings: Iterable[str]) -> tuple[list[str], list[Caution]]:
    """The facts and the warnings, each in their order."""
    facts: list[str] = []
    cautions: list[Caution] = []
    for finding in findings:
        if isinstance(finding, Caution):
            cautions.append(finding)
        else:
            facts.append(finding)
    return facts, cautions


def count_cautions(cautions: Sequence[Caution]) -> str:
    """How many there are, for people."""
    return "1 warning" if len(cautions) == 1 else f"{len(cautions)} warnings"
