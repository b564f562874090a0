"""gpu_check.json: what was found so far, written after each check, and its Markdown table.

Not here: the checks (correctness.py and the others), which of them run (gpu_check.py).

One process writes at a time: the part that runs, or the parent when no part runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from side_by_side import render_table

from rollouts_core.system.files import write_atomically

FORMAT = 1
"""Version of the file; a file of another one is begun anew."""
NAME, TABLE_NAME = "gpu_check.json", "gpu_check.md"

Outcome = Literal["held", "failed", "measured", "skipped", "not reached", "not measured"]
FINAL: tuple[Outcome, ...] = ("held", "measured", "skipped")
"""Outcomes that a repeated run keeps; checks with another one run again."""

Figures = dict[str, float | str]
"""The figures of a check by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One check and what came of it."""

    part: str
    """The part that it belongs to."""
    check: str
    """What it checks."""
    outcome: Outcome
    """held or failed for a check of correctness; measured for a measurement, not measured after an error; skipped if
    this machine cannot run it; not reached or not measured if the part's time was over."""
    detail: str = ""
    """Why it failed or was skipped."""
    figures: Figures = field(default_factory=dict)
    """Numbers with their units in their names."""
    seconds: float = 0.0
    """Wall-clock time."""


class Record:
    """The file of one output folder.

    Args:
        about: the device, the versions and the mode that all rows were found with.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:  # Any: JSON
        self.path = folder / NAME
        self.about = dict(about)
        self.rows: list[Row] = []

    @classmethod
    def load(cls, folder: Path) -> Record | None:
        """Load the record of a folder; None if the folder has no readable record."""
        try:
            saved = json.loads((folder / NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if saved.get("format") != FORMAT:
            return None
        record = cls(folder, saved["about"])
        record.rows = [Row(**row) for row in saved["rows"]]
        return record

    def put(self, row: Row) -> None:
        """Add a row in place of that of the same check, and write the file."""
        places = [place for place, each in enumerate(self.rows) if (each.part, each.check) == (row.part, row.check)]
        if places:
            self.rows[places[0]] = row
        else:
            self.rows.append(row)
        self.write()

    def is_settled(self, part: str, check: str) -> bool:
        """Whether a repeated run keeps the row of this check."""
        return any((row.part, row.check) == (part, check) and row.outcome in FINAL for row in self.rows)

    def write(self) -> None:
        """Write the file and the table; a reader sees the old or the new content."""
        content = {"format": FORMAT, "about": self.about, "rows": [_as_json(row) for row in self.rows]}
        write_atomically(self.path, json.dumps(content, indent=1) + "\n")
        write_atomically(self.path.with_name(TABLE_NAME), self.render() + "\n")

    def failures(self) -> list[Row]:
        """The checks of correctness that did not hold, or were not reached."""
        return [row for row in self.rows if row.outcome in ("failed", "not reached")]

    def unmeasured(self) -> list[Row]:
        """The measurements without figures, which a repeated run tries again."""
        return [row for row in self.rows if row.outcome == "not measured"]

    def render(self) -> str:
        """The table in Markdown, with where its figures come from."""
        rows = [[row.part, row.check, row.outcome, f"{row.seconds:.1f}", _say(row)] for row in self.rows]
        return f"{describe(self.about)}\n\n{_left_aligned(['part', 'check', 'outcome', 's', 'found'], rows)}"


def describe(about: Mapping[str, Any]) -> str:  # Any: JSON
    """One paragraph of provenance: the device, the driver, the versions."""
    mode = "Rehearsal on a CPU. " if about["is_rehearsal"] else ""
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    return f"{mode}{about['device']}; Python {about['python']}, {packages}; commit {about['commit']}; {about['date']}."


def _say(row: Row) -> str:
    figures = ", ".join(f"{name} {_number(value)}" for name, value in row.figures.items())
    return "; ".join(filter(None, (row.detail, figures))).replace("\n", " ")


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.3g}"


def _left_aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return render_table(header, rows).replace("|---:", "|---")


def _as_json(row: Row) -> dict[str, Any]:  # Any: JSON
    return {name: getattr(row, name) for name in Row.__slots__}
