"""Check the API key at all endpoints of vLLM, because vLLM's own check protects only the endpoints below /v1.

vLLM adds `Gate` to its server (`--middleware`). This project is not installed in vLLM's environment, so the file of the
embedded engine's gate is loaded by its path.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

OPEN_PATHS = ("/health", "/metrics")
"""Paths without a key, as in SGLang."""
_gate = runpy.run_path(str(Path(__file__).parents[2] / "embedded/gate.py"))["Gate"]


class Gate:
    """The gate before an app, with vLLM's key from the environment."""

    def __init__(self, app: Any) -> None:  # Any: vLLM's types are not here
        self._guarded = _gate(app, os.environ.get("VLLM_API_KEY", ""), OPEN_PATHS)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or refuse it."""
        await self._guarded(scope, receive, send)
