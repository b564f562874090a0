"""The stages that score checkpoints: the selection after a training, and the evaluation at the end of a run."""

from __future__ import annotations

from rollouts_core.stages.kind import StageKind

SELECT = StageKind(name="select", title="checkpoint selection")
EVALUATE = StageKind(name="evaluate", title="held-out evaluation")
