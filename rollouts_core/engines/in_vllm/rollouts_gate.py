"""The gate of the embedded engine before all endpoints of vLLM, whose own key protects its completions alone.

vLLM adds `Gate` to its server (`--middleware`). This project's packages are not there: its file is loaded by its path.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

OPEN_PATHS = ("/health", "/metrics")
"""As SGLang leaves them open."""
_gate = runpy.run_path(str(Path(__file__).parents[2] / "embedded/gate.py"))["Gate"]


class Gate:
    """The gate before an app, with the key that vLLM was given by its environment."""

    def __init__(self, app: Any) -> None:  # Any: vLLM's types are not here
        self._guarded = _gate(app, os.environ.get("VLLM_API_KEY", ""), OPEN_PATHS)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or refuse it."""
        await self._guarded(scope, receive, send)
