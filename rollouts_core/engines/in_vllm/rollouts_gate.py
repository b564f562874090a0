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
"""Paths that need no API key, as in SGLang."""
_gate = runpy.run_path(str(Path(__file__).parents[2] / "embedded/gate.py"))["Gate"]


class Gate:
    """Checks requests to an app for vLLM's API key, which comes from the environment."""

    def __init__(self, app: Any) -> None:  # Any: vLLM's types are not here
        self._guarded = _gate(app, os.environ.get("VLLM_API_KEY", ""), OPEN_PATHS)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request to the app, or refuse a request without the API key."""
        await self._guarded(scope, receive, send)
