"""The kinds of inference servers: each kind has one file in this folder and one entry in `ENGINES`.

To add a kind, copy vllm.py and write its client as in engines/vllm.py. This folder must not import torch, so it
contains only the names of the clients. Not here: the clients (engines/client.py), starting servers (engines/launch.py).
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
"""Value of `rollout.engine.kind` -> the kind's `EngineSpec`, without "auto"."""
ENGINE_CHOICES: Mapping[str, EngineSpec] = ChainMap({CHOSEN_ON_NODE: AUTO}, ENGINES)
"""All values of `rollout.engine.kind`: the engines, and "auto", which the run replaces by one of the engines."""

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
