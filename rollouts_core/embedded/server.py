"""Run the embedded engine as a process: bind, load, serve, and end in order.

Not here: the endpoints (app.py), whom they answer (gate.py), generation (scheduler.py), the command line.

    socket bound -> weights loaded -> /health 200 -> SIGTERM: requests end with what they have -> serve() returns
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
"""Environment variable with the key of a server that is reached from other machines."""
KEEP_ALIVE_S = 300
SHUTDOWN_GRACE_S = 1
LISTEN_BACKLOG = 2048
MAX_SENT_SHARE = 2
"""Limit of a sent update, relative to the bytes of the weights: trainers may send a tied output head beside its
embedding."""
TICKS_PER_S = 10
"""Of uvicorn's."""


class PortInUseError(InputError):
    """The address is taken; the process should end with exit code 2."""


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
        model_dir: a Hugging Face directory: config.json, safetensors, and tokenizer.json where text is wanted.
        port: 0 takes a free one; `on_ready` learns which.
        name: what requests call the model; the directory by default.
        host: address to listen on.
        num_threads: CPU threads of the whole process.
        max_running_requests: completions that are generated together.
        context_length: prompt and completion together; None: the model's own limit.
        api_key: what every request must carry as `Authorization: Bearer KEY`; none where empty, which only a loopback
            address allows.
        on_ready: called with the server's URL when it accepts requests.

    Raises:
        InputError: an address beyond this machine without a key, or a key that no request can carry.
        PortInUseError: another process listens on the port.
        CheckpointError: the model cannot be loaded.
        NoMemoryError, EngineError: generation failed; requests that were under way got the same error.
    """
    if not api_key and not is_loopback(host):
        raise InputError(
            f"{host} is an address beyond this machine, where a server needs an API key: set {API_KEY_VARIABLE}, or "
            "listen on 127.0.0.1"
        )
    if api_key and not SENDABLE.fullmatch(api_key):
        raise InputError(
            "the API key has spaces, accents or the end of a line, with which no request can carry it: take another one"
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
    """The decoder, made in a thread that then ends.

    A thread that computed keeps its OpenMP workers as long as it lives. With those of this thread beside those of the
    generation thread there would be more than cores, and OpenMP would then put workers to sleep at every barrier: two
    threads decode half as fast as with one team.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="loading") as loading:
        return loading.submit(Decoder, model_dir, num_slots=num_slots, context_length=context_length).result()


def bind_port(host: str, port: int) -> socket.socket:
    """A listening socket; connections wait in its backlog until the server runs."""
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
        """Why the generation thread ended by itself; None while it lives."""

    async def on_tick(self, counter: int) -> bool:
        """Close slow connections, and stop when the generation thread has failed: its supervisor starts it anew."""
        if counter % TICKS_PER_S == 0:
            self._slow_clients.close_overdue(self.server_state.connections, time.monotonic())  # type: ignore[arg-type]
        self.failure = self._scheduler.failure
        return await super().on_tick(counter) or bool(self.failure)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept requests, and say so."""
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all requests with the tokens they have, and what arrives, then close connections."""
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

    Uvicorn takes the signals over while it serves and raises them again when it has ended; by default that would
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
