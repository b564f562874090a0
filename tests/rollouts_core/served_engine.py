"""The embedded engine in the test's own process, reached over HTTP without a socket, or with one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import httpx
import torch
import uvicorn

from rollouts_core.embedded.app import build_app
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.scheduler import Scheduler
from rollouts_core.engines import SGLangEngine
from rollouts_core.system.listening import bind_port


@contextmanager
def served_engine(
    model_dir: Path,
    *,
    num_slots: int = 16,
    dtype: torch.dtype = torch.float32,
    client: type[SGLangEngine] = SGLangEngine,
) -> Iterator[tuple[SGLangEngine, Scheduler]]:
    """A client and the scheduler behind the server that it talks to."""
    with Scheduler(Decoder(model_dir, num_slots=num_slots, dtype=dtype), model_dir=model_dir) as scheduler:
        transport = httpx.ASGITransport(app=build_app(scheduler))
        yield client("http://engine", transport=transport, restart_timeout_s=5.0), scheduler


@contextmanager
def engine_url(model_dir: Path, *, num_slots: int = 16) -> Iterator[str]:
    """The address of a server that a thread of this process runs."""
    with Scheduler(Decoder(model_dir, num_slots=num_slots), model_dir=model_dir) as scheduler:
        server = uvicorn.Server(uvicorn.Config(build_app(scheduler), log_config=None, lifespan="off", ws="none"))
        with bind_port("127.0.0.1", 0) as listener:
            thread = Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
            thread.start()
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            server.should_exit = True
            thread.join()
