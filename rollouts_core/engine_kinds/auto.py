"""`rollout.engine.kind = "auto"`: the engine for a machine with GPUs, and the one for a machine without.

Until the run has chosen on its node, the settings are checked as those of the engine for GPUs. Not here: the choice
(tasks/engine_choice.py).
"""

from __future__ import annotations

from dataclasses import replace

from rollouts_core.engine_kinds.sglang import SGLANG

CHOSEN_ON_NODE = "auto"
"""The kind in the settings until the run has chosen one."""
FOR_GPUS, WITHOUT_GPUS = "sglang", "embedded"
AUTO = replace(SGLANG, title="the engine that auto chooses", transfers=("auto",))
"""The record of a kind that is not chosen yet: both engines know its ways of taking weights."""
