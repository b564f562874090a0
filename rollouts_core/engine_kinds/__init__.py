"""The kinds of inference servers: one file and one row below for each.

To add one, copy vllm.py and write its client (engines/vllm.py). This folder imports no torch: a client is named here,
and imported by whoever connects. Not here: what a client does (engines/client.py), starting servers
(engines/launch.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from rollouts_core.engine_kinds.embedded import EMBEDDED
from rollouts_core.engine_kinds.sglang import SGLANG
from rollouts_core.engine_kinds.spec import EngineBuild, EngineSpec, LaunchPart, ScoringAPI
from rollouts_core.engine_kinds.vllm import VLLM

ENGINES: Mapping[str, EngineSpec] = {
    "embedded": EMBEDDED,
    "sglang": SGLANG,
    "vllm": VLLM,
}
"""By the name that `rollout.engine.kind` has for it."""

__all__ = ["EMBEDDED", "ENGINES", "SGLANG", "VLLM", "EngineBuild", "EngineSpec", "LaunchPart", "ScoringAPI"]
