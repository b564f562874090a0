"""Run the embedded engine as a server process: bind the port, load the model, serve requests, shut down in order.

Not here: endpoints (app.py), the check of API keys (gate.py), generation (scheduler.py), the command line.

    socket bound -> weights loaded -> /health 200 -> SIGTERM: requests end with the tokens so far -> serve() returns
         |                                  |
         +-> PortInUseError                 +-> the generation thread failed -> EngineError
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import uvicorn

from rollouts_core.embedded.app import build_app
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.gate import Gate, is_loopback
from rollouts_core.embedded.receiving import WeightReceiver
from rollouts_core.embedded.scheduler import Scheduler
from rollouts_core.embedded.slow_clients import BoundedProtocol, SlowClients
from rollouts_core.errors import EngineError, InputError, NoMemoryError, RolloutsError
from rollouts_core.keys import API_KEY_VARIABLE, SENDABLE
from rollouts_core.system.listening import bind_port

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 300
SHUTDOWN_GRACE_S = 1
MAX_SENT_SHARE = 2
"""Limit of the size of a sent weight update, relative to the size of the model's weights. Updates may be larger than
the weights, because trainers may send a tied output head besides the embedding."""
TICKS_PER_S = 10
"""Number of times per second that uvicorn calls `on_tick`."""


def serve(
    model_dir: Path,
    *,
    port: int,
    name: str = "",
    host: str = "127.0.0.1",
    num_threads: int = 1,
    max_running_requests: int = 64,
    context_length: int | None = None,
    api_key: str = "",
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve a model in this process until SIGTERM or SIGINT. Must be called from the main thread.

    Args:
        model_dir: Hugging Face directory with config.json, safetensors, and, for requests with text, tokenizer.json.
        port: port to listen on. 0 uses a free port; `on_ready` gets a URL with its number.
        name: name of the model in requests; by default the name of the directory.
        host: address to listen on.
        num_threads: CPU threads of the whole process.
        max_running_requests: highest number of completions that are generated together.
        context_length: limit of the tokens of a prompt with its completion; None for the model's own limit.
        api_key: key that every request must have as `Authorization: Bearer KEY`. If "", requests need no key, which is
            permitted only with a loopback address.
        on_ready: called with the server's URL as soon as it accepts requests.

    Raises:
        InputError: a server that other machines can reach has no key, or the key is not valid in HTTP headers.
        PortInUseError: another process listens on the port.
        CheckpointError: the model cannot be loaded.
        NoMemoryError, EngineError: generation failed. Running requests failed with the same error.
    """
    if not api_key and not is_loopback(host):
        raise InputError(
            f"{host} is reachable from other machines, so the server needs an API key: set {API_KEY_VARIABLE}, or "
            "listen on 127.0.0.1"
        )
    if api_key and not SENDABLE.fullmatch(api_key):
        raise InputError(
            "the API key has spaces, accents or a line end, which an HTTP header cannot carry: choose another key"
        )
    with bind_port(host, port) as listener:
        torch.set_num_threads(num_threads)
        decoder = _load_decoder(model_dir, num_slots=max_running_requests, context_length=context_length)
        url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        with Scheduler(decoder, model_dir=model_dir) as scheduler:
            receiver = WeightReceiver(max_bytes=MAX_SENT_SHARE * decoder.num_weight_bytes)
            app = build_app(scheduler, receiver, name=name)
            config = uvicorn.Config(
                Gate(app, api_key),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                http=BoundedProtocol,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
            )
            server = _Server(config, scheduler, receiver, on_ready=partial(_announce, url, on_ready))
            with _signals_stop(server):
                server.run(sockets=[listener])
    if isinstance(server.failure, NoMemoryError):
        raise server.failure
    if server.failure:
        raise EngineError(f"the engine stopped generating: {server.failure}")
    logger.info("stopped serving %s", model_dir)


def _load_decoder(model_dir: Path, *, num_slots: int, context_length: int | None) -> Decoder:
    """Load the decoder in a temporary thread.

    OpenMP keeps worker threads for every thread that has computed, as long as that thread lives. Loading in the main
    thread would leave workers besides those of the generation thread: more workers than cores. OpenMP workers would
    then sleep at every barrier, and with two CPU threads decoding would be half as fast.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="loading") as loading:
        return loading.submit(Decoder, model_dir, num_slots=num_slots, context_length=context_length).result()


class _Server(uvicorn.Server):
    """A uvicorn server that ends running requests at shutdown before it waits for connections to close."""

    def __init__(
        self, config: uvicorn.Config, scheduler: Scheduler, receiver: WeightReceiver, *, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._scheduler = scheduler
        self._receiver = receiver
        self._on_ready = on_ready
        self._slow_clients = SlowClients()
        self.failure: RolloutsError | None = None
        """The error that ended the generation thread; None while the thread runs."""

    async def on_tick(self, counter: int) -> bool:
        """Close slow connections. If the generation thread failed, stop, so that the supervisor restarts the server."""
        if counter % TICKS_PER_S == 0:
            self._slow_clients.close_overdue(self.server_state.connections, time.monotonic())  # type: ignore[arg-type]
        self.failure = self._scheduler.failure
        return await super().on_tick(counter) or bool(self.failure)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept requests, then call `on_ready`."""
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all running and arriving requests with the tokens sampled so far, then close connections."""
        self._receiver.close()
        await asyncio.to_thread(self._scheduler.close)
        await super().shutdown(sockets)


def _announce(url: str, on_ready: Callable[[str], None] | None) -> None:
    logger.info("serving on %s", url)
    if on_ready is not None:
        on_ready(url)


@contextmanager
def _signals_stop(server: uvicorn.Server) -> Iterator[None]:
    """Make SIGTERM and SIGINT only stop the server, without killing the process.

    Uvicorn handles these signals while it serves, and raises them again after it stopped. Without this context they
    would then kill the process before `serve` returns.
    """

    def stop(_number: int, _frame: object) -> None:
        server.should_exit = True

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, action in previous.items():
            signal.signal(number, action)
