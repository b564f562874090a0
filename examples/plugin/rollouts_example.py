"""An objective, an environment, a reward and a tracker in a package of your own. Copy this folder to begin with.

    pip install ./examples/plugin
    rollouts plugins

Then these names may stand in a configuration:

    [training.rl.loss]
    objective = "soft_gate"
    [rollout]
    environment = "nearness"                # or: reward_fn = "nearness"
    [run]
    report_to = ["text"]

B rows of a micro-batch, T token positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rollouts_core.algorithms.objectives import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from rollouts.tasks.trackers import TrackedStage
    from rollouts_core import Sample, TrainBatch
    from rollouts_core.config import LossConfig

STEEPNESS = 1.0
"""How fast the gate closes."""


def soft_gate(
    logprobs_BT: Tensor, log_ratio_BT: Tensor, batch: TrainBatch, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """(B, T) -4 / tau x sigmoid(tau x (ratio - 1)) x advantage, and where the gate is less than half as steep.

    Source: arXiv:2511.20347, with one steepness.
    """
    import torch  # `rollouts plugins` and a run's own process import this file without it

    ratio_BT = log_ratio_BT.clamp(-20, 20).exp()
    open_BT = torch.sigmoid(STEEPNESS * (ratio_BT - 1))
    slope_BT = 4 * open_BT * (1 - open_BT)
    return -4 / STEEPNESS * open_BT * batch.advantages_BT, slope_BT.detach() < 0.5


SOFT_GATE = Objective(
    loss="rollouts_example:soft_gate",
    help="a smooth gate of the ratio times the advantage",
    has_ratio=True,
    is_clipped=False,
)


def nearness(sample: Sample) -> float:
    """1 if the response is the answer, and less the farther its number is away; 0 without a number."""
    try:
        return 1 / (1 + abs(float(sample.response.strip()) - float(sample.metadata["answer"])))
    except ValueError:
        return 0.0


class NearnessEnvironment:
    """Grades by `nearness`."""

    row_fields = ("answer",)

    def grade(self, sample: Sample) -> float:
        """From 0 to 1."""
        return nearness(sample)


class TextTracker:
    """A line per step in `<store>/text/<run>-<stage>.txt`."""

    def __init__(self, tracked: TrackedStage, next_step: int, say: Callable[[str], None]) -> None:
        path = tracked.store / "text" / f"{tracked.name}.txt"
        path.parent.mkdir(exist_ok=True)
        self.next_step, self.shown_at = next_step, f"metrics in {path}"
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Take the metrics of a step."""
        self._file.write(f"{step} {' '.join(f'{name}={value:g}' for name, value in values.items())}\n")

    def flush(self) -> None:
        """Hand the lines to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
