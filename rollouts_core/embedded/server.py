"""Run the embedded engine as a process: bind, load, serve, and end in order.

Not here: the endpoints (app.py), the check of keys (gate.py), generation (scheduler.py), the command line.

    socket bound -> weights loaded -> /health 200 -> SIGTERM: requests end with their tokens -> serve() returns
         |                                  |
         +-> PortInUseError                 +-> the generation thread failed -> EngineError
"""

from __future__ import annotations

import asyncio
import errno
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
from rollouts_core.keys import SENDABLE

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "ROLLOUTS_API_KEY"
"""Environment variable with the key of a server that other machines can reach."""
KEEP_ALIVE_S = 300
SHUTDOWN_GRACE_S = 1
LISTEN_BACKLOG = 2048
MAX_SENT_SHARE = 2
"""Limit of a sent update, relative to the bytes of the weights: trainers may send a tied output head beside its
embedding."""
TICKS_PER_S = 10
"""Number of times per second that uvicorn calls `on_tick`."""


class PortInUseError(InputError):
    """Another process listens at the address. The process should end with exit code 2."""


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
    """Serve the model in this process until SIGTERM or SIGINT; call it from the main thread.

    Args:
        model_dir: a Hugging Face directory with config.json, safetensors, and, for requests with text, tokenizer.json.
        port: port to listen on. 0 takes a free port, which is part of the URL for `on_ready`.
        name: name of the model in requests; the directory by default.
        host: address to listen on.
        num_threads: CPU threads of the whole process.
        max_running_requests: completions that are generated together.
        context_length: highest number of tokens of a prompt with its completion; None for the model's own limit.
        api_key: key that every request must have as `Authorization: Bearer KEY`. Empty requires no key, which is only
            permitted with a loopback address.
        on_ready: called with the server's URL when it accepts requests.

    Raises:
        InputError: other machines can reach the address without a key, or no HTTP header can carry the key.
        PortInUseError: another process listens on the port.
        CheckpointError: the model cannot be loaded.
        NoMemoryError, EngineError: generation failed; running requests got the same error.
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
    """The decoder, created in a thread that then ends.

    A thread that computed keeps its OpenMP workers as long as it lives. Together with the workers of the generation
    thread they would outnumber the cores, and OpenMP would put workers to sleep at every barrier. With two threads,
    decoding would be half as fast.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="loading") as loading:
        return loading.submit(Decoder, model_dir, num_slots=num_slots, context_length=context_length).result()


def bind_port(host: str, port: int) -> socket.socket:
    """A listening socket. Connections wait in its backlog until the server runs."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise InputError(f"cannot listen on {host}:{port} ({error}): choose another address") from error
        raise PortInUseError(
            f"port {port} on {host} is in use by another process: stop that process or choose another port"
        ) from error
    # Accepted connections inherit this. asyncio would set it only on sockets that name their protocol, and without
    # it an answer's body waits 40 ms for the client's delayed acknowledgement of the header.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class _Server(uvicorn.Server):
    """Uvicorn, which ends running requests before it waits for connections to close."""

    def __init__(
        self, config: uvicorn.Config, scheduler: Scheduler, receiver: WeightReceiver, *, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._scheduler = scheduler
        self._receiver = receiver
        self._on_ready = on_ready
        self._slow_clients = SlowClients()
        self.failure: RolloutsError | None = None
        """Error that ended the generation thread; None while the thread runs."""

    async def on_tick(self, counter: int) -> bool:
        """Close slow connections. Stop if the generation thread failed, so that the supervisor restarts the server."""
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
    """Make SIGTERM and SIGINT end the server and nothing else.

    Uvicorn handles the signals while it serves and raises them again at its end. Without this context they would then
    kill the process before `serve` returns.
    """

    def stop(_number: int, _frame: object) -> None:
        server.should_exit = True

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, action in previous.items():
            signal.signal(number, action)
