"""Show the progress of a stage: a bar on a terminal, lines on other outputs, and always lines in Prefect's log.

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
from rich.text import Text

from rollouts.infra.foreign_text import shown_lines
from rollouts_core.report.charts import format_roughly
from rollouts_core.system.standard_error import standard_error

LINE_INTERVAL_S = 5.0
"""At least this many seconds pass between two progress lines in Prefect and on an output without a bar."""
PACE_PERIOD_S = 3600.0
"""The time left is estimated from the steps of this last period. rich's 30 s have no two steps of a slow training."""

SHOWN_METRICS = {
    "loss": "loss {:z.3f}",
    "reward": "reward {:z.3f}",
    "response_tokens": "{:.0f} tokens",
    "tokens_per_s": "{:,.0f} tokens/s",
}


class TimesColumn(ProgressColumn):
    """The elapsed time and the time left, in words that cannot be mistaken for each other."""

    max_refresh = 1.0  # seconds: the numbers change once per second

    def render(self, task: Task) -> Text:
        elapsed, left = int(task.elapsed or 0), task.time_remaining
        about = f", about {format_roughly(left)} left" if left and not task.finished else ""
        return Text(f"{elapsed // 60}:{elapsed % 60:02d}{about}")


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
        self._bar = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimesColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self.console,
            speed_estimate_period=PACE_PERIOD_S,
            disable=not self.console.is_terminal or num_steps == 0,
        )
        self._row = self._bar.add_task(stage, total=num_steps, numbers="")

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
        numbers = ", ".join(text.format(metrics[name]) for name, text in SHOWN_METRICS.items() if name in metrics)
        self._bar.update(self._row, completed=step, numbers=numbers)
        if step == self.num_steps or time.monotonic() - self._last_line_at > LINE_INTERVAL_S:
            self._last_line_at = time.monotonic()
            self._say(f"step {step} of {self.num_steps}" + (f", {numbers}" if numbers else ""), on_terminal=False)

    def say(self, message: str) -> None:
        """Show a sentence about the stage on the console and in Prefect, without control characters."""
        self._say(message, on_terminal=True)

    def _say(self, said: str, *, on_terminal: bool) -> None:
        message = shown_lines(said)
        if on_terminal or not self.console.is_terminal:
            self.console.print(f"{self.stage:<14} {message}", markup=False, highlight=False, soft_wrap=True)
        try:
            get_run_logger().info("%s: %s", self.stage, message)
        except MissingContextError:  # outside of a Prefect run, only the console shows the message
            return
