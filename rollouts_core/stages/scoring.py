"""The stages that score checkpoints: the selection after each training, and the evaluation at the end of a run."""

from __future__ import annotations

from rollouts_core.stages.kind import StageKind

SELECT = StageKind(
    name="select",
    title="checkpoint selection",
    purpose="Score the checkpoints of a training and choose the best.",
)
EVALUATE = StageKind(
    name="evaluate",
    title="held-out evaluation",
    purpose="Score the start model and the chosen checkpoints on the held-out rows.",
)
