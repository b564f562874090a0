"""`rollout.engine.kind = "auto"`: one engine for machines with GPUs, another for machines without GPUs.

Until the run has chosen on its node, the settings are checked as for the engine for GPUs. Not here: the choice
(tasks/engine_choice.py).
"""

from __future__ import annotations

from dataclasses import replace

from rollouts_core.engine_kinds.sglang import SGLANG

CHOSEN_ON_NODE = "auto"
"""The kind in the settings until the run has chosen an engine."""
FOR_GPUS, WITHOUT_GPUS = "sglang", "embedded"
AUTO = replace(SGLANG, title="the engine that auto chooses", transfers=("auto",))
"""The record for "auto" before the choice. Its ways of sending weights work with both engines."""
