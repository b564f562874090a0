"""Show the progress of a stage: a bar on a terminal, lines on other outputs, and always lines in Prefect's log.

    sft            ━━━━━━━━━╺━━━━  740/1200 0:46, about 23 s left loss 0.264

The bar fits on one line of a terminal with 60 columns or more. Narrower terminals show no bar, only its numbers.

Not here: reading the numbers from the job (stage.py).
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from rollouts.infra.foreign_text import shown_lines
from rollouts.tasks.folded_lines import MIN_WIDTH, folded
from rollouts_core.report.charts import format_roughly
from rollouts_core.system.standard_error import standard_error

LINE_INTERVAL_S = 5.0
"""At least this many seconds pass between two progress lines in Prefect and on an output without a bar."""
PACE_PERIOD_S = 3600.0
"""The time left is estimated from the steps of this last period. rich's 30 s have no two steps of a slow training."""

SHOWN_METRICS = {
    "reward": "reward {:z.3f}",
    "loss": "loss {:z.3f}",
    "response_tokens": "{:.0f} tokens",
    "tokens_per_s": "{:,.0f} tokens/s",
}
"""The format of each shown metric. A narrow terminal shows only the first ones."""
MAX_BAR = 40
TEXTS_WIDTH = 52
"""Columns for the stage's name, the steps, and the times with the spaces between them, at most."""


class TimesColumn(ProgressColumn):
    """The elapsed time and the time left, in words that cannot be mistaken for each other."""

    max_refresh = 1.0  # seconds: the numbers change once per second

    def __init__(self) -> None:
        super().__init__(Column(no_wrap=True))

    def render(self, task: Task) -> Text:
        elapsed, left = int(task.elapsed or 0), task.time_remaining
        about = f", about {format_roughly(left)} left" if left and not task.finished else ""
        return Text(f"{elapsed // 60}:{elapsed % 60:02d}{about}")


class NumbersColumn(ProgressColumn):
    """The first metrics of a step, as many as fit beside the bar."""

    def __init__(self, room: int) -> None:
        super().__init__(Column(no_wrap=True))
        self.room = room

    def render(self, task: Task) -> Text:
        shown = ""
        for text in task.fields["numbers"]:
            longer = f"{shown}, {text}" if shown else text
            if len(longer) > self.room:
                break
            shown = longer
        return Text(shown)


class StageProgress:
    """Shows the progress of one stage. The bar is visible inside the `with` block.

    Args:
        num_steps: the number of steps that fill the bar; 0 shows no bar.
        console: the output; None uses standard error, so that standard output stays machine-readable.
    """

    def __init__(self, stage: str, *, num_steps: int = 0, console: Console | None = None) -> None:
        self.stage = stage
        self.num_steps = num_steps
        self.console = console or Console(file=standard_error())
        self._last_line_at = 0.0
        self._has_bar = self.console.is_terminal and not self.console.is_dumb_terminal
        width = self.console.width
        bar = min(MAX_BAR, (width - TEXTS_WIDTH) // 2) if width >= MIN_WIDTH else 0
        self._bar = Progress(
            TextColumn("{task.description:<14}" if bar else "{task.description}", table_column=Column(no_wrap=True)),
            *([BarColumn(bar_width=bar)] if bar else []),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimesColumn(),
            NumbersColumn(width - TEXTS_WIDTH - bar - 1),
            console=self.console,
            speed_estimate_period=PACE_PERIOD_S,
            disable=not self._has_bar or num_steps == 0,
        )
        self._row = self._bar.add_task(stage, total=num_steps, numbers=())

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def on_metrics(self, metrics: dict[str, Any]) -> None:  # Any: JSON
        """Show the metrics of a training step on the bar, and every `LINE_INTERVAL_S` seconds also as a line."""
        step = int(metrics["step"])
        numbers = [text.format(metrics[name]) for name, text in SHOWN_METRICS.items() if name in metrics]
        self._bar.update(self._row, completed=step, numbers=numbers)
        if step == self.num_steps or time.monotonic() - self._last_line_at > LINE_INTERVAL_S:
            self._last_line_at = time.monotonic()
            self._say(", ".join([f"step {step} of {self.num_steps}", *numbers]), beside_bar=False)

    def say(self, message: str) -> None:
        """Show a sentence about the stage on the console and in Prefect, without control characters."""
        self._say(message, beside_bar=True)

    def _say(self, said: str, *, beside_bar: bool) -> None:
        message = shown_lines(said)
        if beside_bar or not self._has_bar:
            line = folded(f"{self.stage:<14} ", message, self.console)
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        try:
            get_run_logger().info("%s: %s", self.stage, message)
        except MissingContextError:  # outside of a Prefect run, only the console shows the message
            return
