"""The `EngineSpec` of this project's own engine, which serves small models on a CPU through SGLang's API."""

from __future__ import annotations

from rollouts_core.engine_kinds.sglang import SGLANG
from rollouts_core.engine_kinds.spec import EngineSpec

EMBEDDED = EngineSpec(
    title="the embedded engine",
    client=SGLANG.client,
    probe=SGLANG.probe,
    resume_paths=SGLANG.resume_paths,
    transfers=("auto", "gloo"),
    reserved_tokens=1,
    adapter_form="beside",
)
