"""Pins that a run plans only the stages that it knows.

Without it a new kind of stage that does not train would be planned as an evaluation.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rollouts.infra.node import LocalNode
from rollouts.infra.providers import provision_node
from rollouts.tasks import stage_order
from rollouts.tasks.records import RunScope, Stage, StageRecord
from rollouts_core.stages import StagePlace
from rollouts_core.stages.kind import StageKind
from tests.tasks.finished_stages import config_at


def test_a_stage_that_nothing_plans_is_no_evaluation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(stage: Stage) -> StageRecord:
        pytest.fail(f"the stage {stage.name} was planned")

    export = StagePlace("export", StageKind(name="export", title="export"))
    monkeypatch.setattr(stage_order, "stages_of", lambda mode: (export,))
    scope = RunScope(run_id="run-a", run_name="small", store=str(tmp_path / "store"))
    node = provision_node(LocalNode(), tmp_path / "store")
    with pytest.raises(AssertionError, match="nothing plans the stage export"):
        stage_order.run_stages(config_at(tmp_path / "inputs"), scope, node, refuse)
