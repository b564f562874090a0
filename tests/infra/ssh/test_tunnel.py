"""Pins that the way to a port of a node stays open as long as it is needed, whatever happens to single connections.

Without it an engine on another machine does not answer any more, though it runs. What goes through is pinned in
test_ssh_session.py.
"""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from contextlib import suppress

from rollouts.infra.errors import TransientInfraError
from rollouts.infra.ssh.connection import SSHChannel
from rollouts.infra.ssh.ssh_session import forwarded_port


def test_a_tunnel_goes_on_when_for_a_while_too_many_files_were_open() -> None:
    has_begun, is_over = threading.Event(), threading.Event()

    def refuse_late() -> SSHChannel:
        if has_begun.is_set():
            is_over.wait(20)
        raise TransientInfraError("nobody listens there")

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    with forwarded_port(refuse_late) as port, socket.socket() as early, socket.socket() as late:
        has_begun.set()
        resource.setrlimit(resource.RLIMIT_NOFILE, (late.fileno() + 8, hard))
        try:
            with suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            early.connect(("127.0.0.1", port))  # takes the place that was left for it
            late.connect(("127.0.0.1", port))
            time.sleep(0.3)
        finally:
            for descriptor in taken:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        is_over.set()
        for client in (early, late):
            client.settimeout(20)
            assert client.recv(1) == b"", "closed, as by a server that is not there"
