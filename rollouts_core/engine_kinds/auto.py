"""`rollout.engine.kind = "auto"`: one engine for machines with GPUs, another for machines without GPUs.

Until the run has chosen an engine on its node, checks of settings assume the engine for GPUs. Not here: the choice
(tasks/engine_choice.py).
"""

from __future__ import annotations

from dataclasses import replace

from rollouts_core.engine_kinds.sglang import SGLANG

CHOSEN_ON_NODE = "auto"
"""The value of `rollout.engine.kind` until the run has chosen an engine."""
FOR_GPUS, WITHOUT_GPUS = "sglang", "embedded"
AUTO = replace(SGLANG, title="the engine that auto chooses", transfers=("auto", "gloo"))
"""The `EngineSpec` of "auto" until the run has chosen an engine. Its weight transfers work with both engines."""
