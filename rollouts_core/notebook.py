"""For notebooks: curves of a training, and a progress bar.

    history = await run_sft_training(backend, samples, config, ProgressBar(config.num_steps))
    plot(history)
    plot("store/stages/sft-0c2f...")

Not here: the report of a pipeline's run (report/page.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from rollouts_core.errors import InputError
from rollouts_core.metrics import read_metrics
from rollouts_core.report.charts import Chart
from rollouts_core.report.curves import draw_curve
from rollouts_core.report.page import page_templates
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import STAGES
from rollouts_core.stages.kind import Curve

SHOWN_ON_BAR = ("loss", "eval_loss", "reward")


@dataclass(frozen=True, slots=True)
class Plot:
    """Drawn curves. A notebook shows the object; `save` writes a page."""

    charts: tuple[Chart, ...]

    def _repr_html_(self) -> str:
        return page_templates().get_template("plot.html.jinja").render(charts=self.charts)

    def save(self, path: str | Path) -> None:
        """Write the curves as an HTML page that needs no other file."""
        Path(path).write_text(f'<!doctype html><meta charset="utf-8">{self._repr_html_()}', encoding="utf-8")


def plot(training: str | Path | Sequence[Mapping[str, float]], *names: str) -> Plot:
    """Draw metrics of a training over its steps.

    Args:
        training: the metrics of consecutive steps, as `run_sft_training` and `run_rl_training` return them (the first
            is drawn as step 1), or a folder with metrics.jsonl, such as a stage of a run.
        names: the metrics to draw. By default, the metrics that the report draws.

    Raises:
        InputError: there is no metric to draw. The message names the metrics.
    """
    if isinstance(training, str | Path):
        lines = read_metrics(RunDirectory(Path(training)).metrics)
    else:
        lines = [{"step": step, **metrics} for step, metrics in enumerate(training, start=1)]
    known = {curve.metric: curve for kind in STAGES.values() for curve in kind.curves}
    curves = [known.get(name, Curve(name, name, "")) for name in names or known]
    charts = [chart for curve in curves if (chart := draw_curve(lines, curve, mark_step=None))]
    if not charts:
        found = ", ".join(sorted({name for line in lines for name in line})) or "none"
        raise InputError(
            f"plot: no step has a metric {' or '.join(names) or 'that the report draws'}; metrics: {found}"
        )
    return Plot(tuple(charts))


class ProgressBar:
    """A metrics logger that shows a bar with the steps, the time left, and the newest loss or reward.

    Args:
        num_steps: number of steps of the training.
    """

    def __init__(self, num_steps: int) -> None:
        self._bar = tqdm(total=num_steps, file=sys.stdout, unit="step", dynamic_ncols=True)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Move the bar to a step. The bar is closed at the last step."""
        shown = {name: f"{metrics[name]:.3f}" for name in SHOWN_ON_BAR if name in metrics}
        if shown:
            self._bar.set_postfix(shown, refresh=False)
        self._bar.update(step - self._bar.n)
        if self._bar.total is not None and step >= self._bar.total:
            self._bar.close()
