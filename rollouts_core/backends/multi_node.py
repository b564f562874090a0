"""Several machines that train one model together: how their launchers connect, and detect a lost machine.

    the leader's machine                                       each further machine
    launcher ── connects: "meet at HOST:PORT" ── handshake ──> launcher, listening at its address
      └─ torchrun, which listens at HOST:PORT <─────────────────── torchrun
                <── a heartbeat every BEAT_S, in both directions ──>
                <── "ended with code N" ── , or the end of the connection

One attempt is one connection. When the connection ends or is silent for SILENCE_S, both launchers end their processes,
so a machine stops computing for a lost machine even if no login to it is possible. A further machine renews its job's
lease at each heartbeat.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from rollouts_core.backends.key_handshake import ProofError, prove_as_asked, prove_as_asking
from rollouts_core.backends.store_tunnel import LOOPBACK, opened_gate, opened_tunnel
from rollouts_core.errors import MachineLostError
from rollouts_core.job import FurtherTrainer
from rollouts_core.less_memory import FULL_GPU_CODE

JOIN_S = 300.0
"""Seconds until the launchers of further machines must listen. They first import torch, possibly from a slow disk."""
BEAT_S = 2.0
SILENCE_S = 30.0
LEAVE_S = 5.0
"""Seconds for this machine's processes to end by themselves when the other launcher is gone."""
SETTLE_S = 5.0
"""Seconds to listen to other machines after the leader's processes failed: other processes may have failed first."""
CONNECT_TIMEOUT_S = 5.0
MAX_LINE_BYTES = 4096
MACHINE_LOST_CODE = os.EX_TEMPFAIL
"""Exit code of a training that ended because another machine is gone."""
TOLD_TO_END_CODE = 128 + signal.SIGTERM
_BEAT = b"\n"
_SIOCGIFADDR = 0x8915

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The meeting point of torchrun's agents for one attempt."""

    num_nodes: int
    node_rank: int
    store_port: int
    """Port on this machine's loopback that leads to the store of all agents and ranks."""
    own_address: str
    """This machine's address in the common network."""


class Unit(Protocol):
    """The machines of a training, seen from one machine's launcher."""

    meeting: Meeting

    def conclude(self, exit_code: int) -> int:
        """Exchange the end of the attempt with the other machines; returns the exit code of the attempt.

        Args:
            exit_code: result of this machine's own processes.

        Raises:
            MachineLostError: the attempt ended because another machine is gone.
        """


class Link:
    """The connection to another launcher. When it ends, this process is asked to end its processes.

    Args:
        name: the other machine, for messages.
        on_beat: called at each message of the other launcher.
    """

    def __init__(self, name: str, connection: socket.socket, *, on_beat: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.exit_code: int | None = None
        """The exit code that the other machine reported; None without a report."""
        self.problem = ""
        """Why the connection ended without a report; empty otherwise."""
        self._connection = connection
        self._on_beat = on_beat
        self._has_ended = threading.Event()
        self._is_closed = threading.Event()
        self._is_concluded = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"link to {name}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()
        self.conclude()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._connection.close()

    def tell_end(self, exit_code: int) -> None:
        """Report the exit code of this machine's processes."""
        with suppress(OSError):
            self._connection.sendall(json.dumps({"exit_code": exit_code}).encode() + b"\n")

    def conclude(self) -> None:
        """Mark this machine's processes as ended, so that nothing is signalled any more."""
        self._is_concluded.set()

    def wait_for_end(self, timeout_s: float) -> bool:
        """True if the connection has ended, or ends within `timeout_s`."""
        return self._has_ended.wait(timeout_s)

    def _watch(self) -> None:
        try:
            self._listen()
        except (OSError, ValueError, TypeError, KeyError) as error:
            self.problem = f"sent an unreadable message ({error})"
        finally:
            self._has_ended.set()
        # Wait first: this machine's processes may be ending for the same reason, or because all work is done.
        if self._is_concluded.wait(LEAVE_S):
            return
        logger.error("%s %s", self.name, self.problem or f"ended with code {self.exit_code}")
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # torchrun's agent is still waiting and would not react
            os._exit(MACHINE_LOST_CODE)
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun then ends its processes

    def _listen(self) -> None:
        """Return when the other launcher reported its end or is no longer heard."""
        heard = told = time.monotonic()
        rest = b""
        while not self._is_closed.is_set():
            if time.monotonic() >= told:
                told = time.monotonic() + BEAT_S
                with suppress(OSError):  # messages sent before a close must still be read
                    self._connection.sendall(_BEAT)
            try:
                is_heard = bool(select.select([self._connection], [], [], BEAT_S)[0])
                chunk = self._connection.recv(MAX_LINE_BYTES) if is_heard else b""
            except ConnectionResetError:
                is_heard, chunk = True, b""
            except OSError as error:
                self.problem = f"is no longer reachable ({error.strerror or error})"
                return
            if chunk:
                heard = time.monotonic()
                self._on_beat()
                *lines, rest = (rest + chunk).split(b"\n")
                for line in filter(None, lines):
                    self.exit_code = int(json.loads(line)["exit_code"])
                    self.problem = "was asked to end" if self.exit_code == TOLD_TO_END_CODE else ""
                    return
            elif is_heard:
                self.problem = "was ended or killed"
                return
            elif time.monotonic() > heard + SILENCE_S:
                self.problem = f"sent no heartbeat for {SILENCE_S:.0f} s"
                return


class LeaderUnit:
    """The machines of a training, seen from the leader's launcher."""

    def __init__(self, meeting: Meeting, trainers: Sequence[FurtherTrainer], links: Sequence[Link]) -> None:
        self.meeting = meeting
        self._trainers = trainers
        self._links = links

    def conclude(self, exit_code: int) -> int:
        """See `Unit`. If the processes of a machine failed first, the log names this machine."""
        for link in self._links:
            link.conclude()
        if exit_code == 0:
            return 0
        deadline = time.monotonic() + SETTLE_S
        for link in self._links:
            link.wait_for_end(max(0.0, deadline - time.monotonic()))
        for trainer, link in zip(self._trainers, self._links, strict=True):
            if link.problem:
                raise MachineLostError(
                    f"{link.name} {link.problem} during the training ({where_its_log_is(trainer)}): start again to "
                    "resume from the last checkpoint"
                )
        for trainer, link in zip(self._trainers, self._links, strict=True):
            if link.exit_code:
                logger.error("%s ended with code %d (%s)", link.name, link.exit_code, where_its_log_is(trainer))
        is_full = any(link.exit_code == FULL_GPU_CODE for link in self._links)
        return FULL_GPU_CODE if is_full and exit_code != 2 else exit_code


class FurtherUnit:
    """The machines of a training, seen from a further machine's launcher: its leader."""

    def __init__(self, meeting: Meeting, leader: Link) -> None:
        self.meeting = meeting
        self._leader = leader

    def conclude(self, exit_code: int) -> int:
        """See `Unit`. The leader gets the exit code, and then closes the connection."""
        self._leader.conclude()
        if exit_code != 0 and self._leader.wait_for_end(0.0):
            raise MachineLostError(f"the leader's launcher on {self._leader.name} {self._leader.problem}")
        self._leader.tell_end(exit_code)
        self._leader.wait_for_end(SETTLE_S)
        return exit_code


def where_its_log_is(trainer: FurtherTrainer) -> str:
    """The place of a further machine's log, for messages."""
    return f"its log: {trainer.run_dir}/log.txt there"


@contextmanager
def lead(trainers: Sequence[FurtherTrainer], key: str) -> Iterator[LeaderUnit]:
    """Connect to the launchers of all further machines for the duration of the block.

    Raises:
        MachineLostError: a machine is not reachable within JOIN_S.
    """
    from rollouts_core.backends.process_group import open_store  # imports torch

    with ExitStack() as stack:
        deadline = time.monotonic() + JOIN_S
        connections = [stack.enter_context(_connect(trainer, key, deadline)) for trainer in trainers]
        own_address = str(connections[0].getsockname()[0])
        store, store_port = open_store(LOOPBACK, multi_tenant=True)
        gate = _listen_at(own_address, 0)
        port = gate.getsockname()[1]
        stack.enter_context(opened_gate(gate, store_port, key))
        links = []
        for trainer, connection in zip(trainers, connections, strict=True):
            greeting = {"host": connection.getsockname()[0], "port": port, "num_nodes": 1 + len(trainers)}
            connection.sendall(json.dumps(greeting).encode() + b"\n")
            links.append(stack.enter_context(Link(trainer.name, connection)))
        meeting = Meeting(num_nodes=1 + len(trainers), node_rank=0, store_port=store_port, own_address=own_address)
        yield LeaderUnit(meeting, trainers, links)
        del store  # kept until here, because a store closes with its last reference


def _connect(trainer: FurtherTrainer, key: str, deadline: float) -> socket.socket:
    while True:
        try:
            return _connect_once(trainer, key)
        except (OSError, ProofError) as error:
            reason = error.strerror or error if isinstance(error, OSError) else error
            if time.monotonic() > deadline:
                raise MachineLostError(
                    f"{trainer.name} was not reachable for training at {trainer.host}:{trainer.port} within "
                    f"{JOIN_S:.0f} s ({reason}; {where_its_log_is(trainer)}): start again"
                ) from error
            time.sleep(BEAT_S / 4)


def _connect_once(trainer: FurtherTrainer, key: str) -> socket.socket:
    connection = socket.create_connection((trainer.host, trainer.port), CONNECT_TIMEOUT_S)
    try:
        prove_as_asking(connection, key)
    except ProofError:
        connection.close()
        raise
    connection.settimeout(CONNECT_TIMEOUT_S)
    return connection


@contextmanager
def follow(own: FurtherTrainer, *, node_rank: int, key: str, lease_file: Path) -> Iterator[FurtherUnit]:
    """Wait for the leader, limited by the job's lease, and stay connected for the duration of the block.

    Raises:
        MachineLostError: this machine's address cannot be listened on.
    """
    with ExitStack() as stack:
        with _listen_at(own.host, own.port) as listener:
            connection, greeting = _accept_leader(listener, key)
        stack.enter_context(connection)

        def renew() -> None:
            with suppress(OSError):  # without a supervisor there is no file; a lost disk ends the lease
                os.utime(lease_file)

        leader = stack.enter_context(Link(str(greeting["host"]), connection, on_beat=renew))
        tunnel = opened_tunnel(str(greeting["host"]), int(greeting["port"]), key)
        meeting = Meeting(
            num_nodes=int(greeting["num_nodes"]),
            node_rank=node_rank,
            store_port=stack.enter_context(tunnel),
            own_address=own.host,
        )
        yield FurtherUnit(meeting, leader)


def _listen_at(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise MachineLostError(f"{host}:{port} cannot be listened on: {error.strerror}") from error


def _accept_leader(listener: socket.socket, key: str) -> tuple[socket.socket, dict[str, Any]]:  # Any: JSON
    """Accept the connection that proves the key; returns the connection and the leader's greeting."""
    while True:
        connection, _ = listener.accept()
        try:
            prove_as_asked(connection, key)
            connection.settimeout(JOIN_S)  # the leader greets when all machines are connected
            with connection.makefile("rb") as reader:
                return connection, json.loads(reader.readline(MAX_LINE_BYTES))
        except (OSError, ProofError, ValueError) as error:
            logger.info("ignored a connection: %s", error)
        connection.close()


def network_variables(address: str) -> dict[str, str]:
    """Variables that make gloo and NCCL use the network of this machine's `address`; {} if no interface has it.

    By default gloo uses the network of the machine's hostname, and NCCL chooses a network by itself.
    """
    interface = find_interface(address)
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}


def find_interface(address: str) -> str:
    """Name of the network interface with this IP address; "" if not found."""
    if sys.platform != "linux":
        return ""
    if ":" in address:
        wanted = socket.inet_pton(socket.AF_INET6, address).hex()
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines()]
        return next((row[-1] for row in rows if row[0] == wanted), "")
    import fcntl  # exists on Unix only

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
