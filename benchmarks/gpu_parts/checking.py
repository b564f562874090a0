"""Run the checks of a part in turn.

Not here: the parts' time limits (gpu_check.py), the file (record.py).
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gpu_parts.record import Figures, Outcome, Record, Row

Value = TypeVar("Value")

ENDED = "the part ended before"


class BrokenError(Exception):
    """Something that should hold does not; the text says the numbers."""


class NotHereError(Exception):
    """This machine cannot run the check; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where checks compute."""

    device: str
    """cuda or cpu."""
    folder: Path
    """For files of this check; removed after the part."""
    models: Path
    """For large models, which the checks of a part share; removed after the part."""

    @property
    def is_rehearsal(self) -> bool:
        """Whether this runs on the CPU, at the smallest sizes."""
        return self.device == "cpu"

    def choose(self, on_gpu: Value, in_rehearsal: Value) -> Value:
        """One of two sizes."""
        return in_rehearsal if self.is_rehearsal else on_gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the table."""

    name: str
    """What it checks, in words."""
    run: Callable[[Place], Figures]
    """Returns figures; raises BrokenError if what it checks does not hold."""
    needs_gpu: bool = False
    """Whether a rehearsal skips it."""
    needs: Sequence[str] = ()
    """Modules without which it is skipped."""
    is_measurement: bool = False
    """Whether it only measures. A measurement cannot fail; after an error it counts as not measured."""


def hold(holds: bool, sentence: str) -> None:
    """Raise BrokenError with the sentence unless something holds."""
    if not holds:
        raise BrokenError(sentence)


def hold_close(name: str, found: float, expected: float, *, tolerance: float) -> None:
    """Raise BrokenError unless two numbers differ by at most this share of the expected one."""
    limit = tolerance * max(abs(expected), 1e-12)
    hold(abs(found - expected) <= limit, f"{name} is {found:.8g}, expected {expected:.8g} within {tolerance:.1g} of it")


def run_checks(part: str, checks: Sequence[Check], record: Record, device: str) -> None:
    """Run the checks of a part that are not settled yet, and write a row for each as soon as it ends."""
    waiting = [check for check in checks if not record.is_settled(part, check.name)]
    for check in waiting:  # what a process that is ended leaves behind
        record.put(Row(part=part, check=check.name, outcome=without_result(check, "not reached"), detail=ENDED))
    with tempfile.TemporaryDirectory(prefix=f"gpu-check-{part}-") as folder:
        for number, check in enumerate(waiting):
            own = Path(folder) / str(number)
            own.mkdir()
            row = run_check(part, check, Place(device=device, folder=own, models=Path(folder)))
            record.put(row)
            print(f"  {row.outcome:<9} {row.seconds:6.1f} s  {part}: {check.name}  {row.detail}", flush=True)


def without_result(check: Check, otherwise: Outcome) -> Outcome:
    """The outcome of a check that has no result: `otherwise`, but a measurement cannot fail."""
    return "not measured" if check.is_measurement else otherwise


def run_check(part: str, check: Check, place: Place) -> Row:
    """The row of one check; whatever goes wrong in it becomes its outcome."""
    reason = why_skipped(check, place)
    if reason:
        return Row(part=part, check=check.name, outcome="skipped", detail=reason)
    began = time.perf_counter()
    figures: Figures = {}
    detail = ""
    outcome: Outcome = "measured" if check.is_measurement else "held"
    try:
        figures = check.run(place)
    except NotHereError as error:
        outcome, detail = "skipped", str(error)
    except BrokenError as error:
        outcome, detail = without_result(check, "failed"), str(error)
    except Exception as error:  # noqa: BLE001  # a check that breaks off must not take the others along
        traceback.print_exc(file=sys.stderr)
        outcome, detail = without_result(check, "failed"), f"{type(error).__name__}: {error}"[:1000]
    seconds = time.perf_counter() - began
    return Row(part=part, check=check.name, outcome=outcome, detail=detail, figures=figures, seconds=round(seconds, 2))


def why_skipped(check: Check, place: Place) -> str:
    """Why a check cannot run here; empty if it can."""
    if check.needs_gpu and place.is_rehearsal:
        return "only on a GPU"
    missing = [name for name in check.needs if not is_installed(name)]
    return f"{', '.join(missing)} is not installed" if missing else ""


def is_installed(module: str) -> bool:
    """Whether a module can be imported here."""
    return importlib.util.find_spec(module) is not None
