"""Convert values to coordinates of charts, which the page's template draws as SVG.

Not here: the choice of the metrics to draw (curves.py, results.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

CHART_WIDTH, CHART_HEIGHT = 360, 200
CHART_LEFT, CHART_RIGHT, CHART_TOP, CHART_BOTTOM = 46, 344, 10, 168


class Tick(NamedTuple):
    """A label and its coordinate on an axis."""

    at: float
    label: str


class Axis(NamedTuple):
    """Maps the values from `low` to `high` to the coordinates from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float


class Line(NamedTuple):
    """An SVG path with its CSS class."""

    css: str
    path: str


class Bar(NamedTuple):
    """A mean with its confidence interval, as coordinates of a drawing."""

    x: float
    mean_y: float
    low_y: float
    high_y: float
    is_selected: bool
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """The coordinates and texts of one drawing."""

    title: str
    headline: str
    """The curve's first and last value, or a summary of its values, as text."""
    note: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    areas: tuple[Line, ...] = ()
    lines: tuple[Line, ...] = ()
    bars: tuple[Bar, ...] = ()
    """The bars in drawing order. The selected bar is last, so that this bar is on top."""
    mark_x: float | None = None
    """The x coordinate of the selected checkpoint on a curve."""
    x_name: str = "step"
    legend: tuple[Line, ...] = ()
    """(CSS class, label) of each series; empty for charts with one series."""


def axis_place(axis: Axis, value: float) -> float:
    share = (value - axis.low) / (axis.high - axis.low)
    return round(axis.start + share * (axis.end - axis.start), 1)


def axis_ticks(axis: Axis, *, max_ticks: int, is_whole: bool = False) -> tuple[Tick, ...]:
    """At most `max_ticks` ticks at round values of the axis."""
    rough = (axis.high - axis.low) / max_ticks
    magnitude = 10.0 ** math.floor(math.log10(rough))
    spacing = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough)
    if is_whole:
        spacing = max(1.0, spacing)
    first = math.ceil(axis.low / spacing - 1e-9)
    last = math.floor(axis.high / spacing + 1e-9)
    values = [n * spacing for n in range(first, last + 1)]
    return tuple(Tick(axis_place(axis, value), _tick_label(value, spacing)) for value in values)


def format_number(value: float) -> str:
    """The number as text with three significant digits, or as a whole number. Exponents are short: 1e6."""
    if not math.isfinite(value):
        return f"{value}".replace("-", "−")
    if abs(value) >= 1e6:
        return f"{value:.3g}".replace("e+0", "e").replace("-", "−")
    if abs(value) >= 100 or value == round(value):
        return f"{value:z,.0f}".replace("-", "−")
    return f"{value:.3g}".replace("e-0", "e-").replace("-", "−")


def format_seconds(seconds: float) -> str:
    """A duration in seconds, minutes or hours: 12.3 s, 4 min 05 s, 2 h 07 min."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    return f"{hours} h {rest_minutes:02d} min" if hours else f"{minutes} min {rest_s:02d} s"


def format_roughly(seconds: float) -> str:
    """An estimated duration: 50 s, 11 min, 2.5 h."""
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _tick_label(value: float, spacing: float) -> str:
    decimals = max(0, math.ceil(-math.log10(spacing) - 1e-9))
    if decimals > 4 or abs(value) >= 1e6:
        return format_number(value)
    return f"{value:,.{decimals}f}".replace("-", "−")


def step_axis(steps: Sequence[float]) -> Axis:
    low, high = min(steps), max(steps)
    margin = 0.5 if low == high else 0.0
    return Axis(low - margin, high + margin, CHART_LEFT, CHART_RIGHT)


def padded_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """An axis that covers all values with a small margin, and extends below zero only if a value is negative."""
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 0.5
    return Axis(max(0.0, low - room) if low >= 0 else low - room, high + room, start, end)


def line_path(points: Sequence[tuple[float, float]]) -> str:
    """The SVG path through the points; a single point becomes a short dash."""
    if len(points) == 1:
        (x, y) = points[0]
        return f"M{x - 6:g},{y:g}H{x + 6:g}"
    return "M" + "L".join(f"{x:g},{y:g}" for x, y in points)


def area_path(edges: Sequence[tuple[float, float, float]]) -> str:
    """The SVG path of the area between a lower and an upper edge, given as (x, lower y, upper y)."""
    wide = edges if len(edges) > 1 else [(edges[0][0] + shift, *edges[0][1:]) for shift in (-6, 6)]
    upper = [f"{x:g},{high:g}" for x, _, high in wide]
    lower = [f"{x:g},{low:g}" for x, low, _ in reversed(wide)]
    return f"M{'L'.join(upper + lower)}Z"
