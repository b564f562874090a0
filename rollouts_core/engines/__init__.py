"""Clients of inference engines. The clients request completions, deliver new weights, and never return completions from
old weights.

Not here: the embedded server itself (embedded/), the choice of the completions to request (rollout/generate.py).
"""

from __future__ import annotations

from rollouts_core.engines.colocated import memory_handed_over
from rollouts_core.engines.completion import Completion, GenerationRequest
from rollouts_core.engines.endpoint import Endpoint, connect, create_engine
from rollouts_core.engines.in_flight import InFlightEngine
from rollouts_core.engines.pool import EnginePool
from rollouts_core.engines.protocol import InferenceEngine
from rollouts_core.engines.router import RoutedPool, SGLangRouter
from rollouts_core.engines.scoring import ScoredTokens, ScoringRequest
from rollouts_core.engines.sglang import SGLangEngine
from rollouts_core.engines.transfer.weight_sync import (
    PublishTarget,
    WeightSyncResult,
    open_target,
    publish_weights,
    sync_weights_to_engines,
)
from rollouts_core.engines.vllm import VLLMEngine

__all__ = [
    "Completion",
    "Endpoint",
    "EnginePool",
    "GenerationRequest",
    "InFlightEngine",
    "InferenceEngine",
    "PublishTarget",
    "RoutedPool",
    "SGLangEngine",
    "SGLangRouter",
    "ScoredTokens",
    "ScoringRequest",
    "VLLMEngine",
    "WeightSyncResult",
    "connect",
    "create_engine",
    "memory_handed_over",
    "open_target",
    "publish_weights",
    "sync_weights_to_engines",
]
