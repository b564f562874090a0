"""The kinds of inference servers: one file and one row below for each.

To add a kind, copy vllm.py and write its client as in engines/vllm.py. This folder must not import torch, so it has
only the name of each client. Not here: the clients (engines/client.py), starting servers (engines/launch.py).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping

from rollouts_core.engine_kinds.auto import AUTO, CHOSEN_ON_NODE
from rollouts_core.engine_kinds.embedded import EMBEDDED
from rollouts_core.engine_kinds.sglang import SGLANG
from rollouts_core.engine_kinds.spec import EngineBuild, EngineSpec, LaunchPart, ScoringAPI
from rollouts_core.engine_kinds.vllm import VLLM

ENGINES: MutableMapping[str, EngineSpec] = {
    "embedded": EMBEDDED,
    "sglang": SGLANG,
    "vllm": VLLM,
}
"""The engines by their values of `rollout.engine.kind`."""
ENGINE_CHOICES: Mapping[str, EngineSpec] = ChainMap({CHOSEN_ON_NODE: AUTO}, ENGINES)
"""All values of `rollout.engine.kind`: the engines, and "auto", which a run replaces by an engine."""

__all__ = [
    "EMBEDDED",
    "ENGINES",
    "ENGINE_CHOICES",
    "SGLANG",
    "VLLM",
    "EngineBuild",
    "EngineSpec",
    "LaunchPart",
    "ScoringAPI",
]
