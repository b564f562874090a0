"""The embedded engine in the test's own process, reached over HTTP without a socket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from rollouts_core.embedded.app import build_app
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.scheduler import Scheduler
from rollouts_core.engines import SGLangEngine


@contextmanager
def served_engine(model_dir: Path, *, num_slots: int = 16) -> Iterator[tuple[SGLangEngine, Scheduler]]:
    """A client and the scheduler behind the server that it talks to."""
    with Scheduler(Decoder(model_dir, num_slots=num_slots), model_dir=model_dir) as scheduler:
        transport = httpx.ASGITransport(app=build_app(scheduler))
        yield SGLangEngine("http://engine", transport=transport, restart_timeout_s=5.0), scheduler
