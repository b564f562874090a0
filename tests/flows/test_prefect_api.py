"""Pins that a request is sent once more if a store's server drops it, which it does when it begins anew.

Without this a command on a busy machine would end with an error, although the server answers a second later.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollouts.flows.own_server.https import HOST, own_certificate, server_context
from rollouts.flows.own_server.lend import ServerAddress, ServerError
from rollouts.flows.prefect_api import ask

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n[]"


@contextmanager
def dropping(home: Path, num_dropped: int) -> Iterator[tuple[ServerAddress, list[bytes]]]:
    """A server that reads this many requests and closes their connections without an answer; and what it read."""
    certificate, context = own_certificate(home), server_context(home)
    heard: list[bytes] = []

    def serve() -> None:
        for number in range(num_dropped + 1):
            connection, _ = listener.accept()
            with context.wrap_socket(connection, server_side=True) as wrapped:
                heard.append(b"")
                while not heard[-1].endswith(b"}"):  # headers and body may come apart
                    heard[-1] += wrapped.recv(65536)
                if number == num_dropped:
                    wrapped.sendall(ANSWER)

    with socket.create_server((HOST, 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        url = f"https://{HOST}:{listener.getsockname()[1]}/api"
        yield ServerAddress(api_url=url, ui_url=url, is_local=True, certificate=certificate, password="a:b"), heard


def test_a_dropped_request_is_sent_once_more(tmp_path: Path) -> None:
    with dropping(tmp_path, 1) as (address, heard):
        assert ask(address, "POST", "/flows/filter", {"limit": 3}) == []
    assert len(heard) == 2 and heard[0] == heard[1]


def test_a_server_that_drops_every_request_is_told_after_the_second(tmp_path: Path) -> None:
    with dropping(tmp_path, 2) as (address, heard):
        with pytest.raises(ServerError, match="does not answer: Server disconnected"):
            ask(address, "POST", "/flows/filter", {})
        assert len(heard) == 2
