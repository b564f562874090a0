"""Training on several machines: connect the launchers of all machines, and detect the loss of a machine.

    the leader's machine                                       each further machine
    launcher ── connects: "meet at HOST:PORT" ── handshake ──> launcher, listening at its address
      └─ torchrun, which listens at HOST:PORT <─────────────────── torchrun
                <── a heartbeat every BEAT_S, in both directions ──>
                <── "ended with code N" ── , or the connection ends

Each attempt of a training has a new connection. If the connection ends, or is silent for SILENCE_S, both launchers end
their processes. A machine therefore stops computing if another machine is lost, even if no SSH login can stop it. At
each heartbeat, a further machine renews its job's lease.
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
"""Seconds within which the launchers of further machines must listen. They import torch first, which may be slow."""
BEAT_S = 2.0
SILENCE_S = 30.0
LEAVE_S = 5.0
"""Seconds in which this machine's processes may end by themselves after the connection to another launcher ended."""
SETTLE_S = 5.0
"""Seconds to wait for other machines' exit codes after the leader's processes failed. The cause may be on another
machine."""
CONNECT_TIMEOUT_S = 5.0
MAX_LINE_BYTES = 4096
MACHINE_LOST_CODE = os.EX_TEMPFAIL
"""Exit code of a launcher whose training ended because another machine was lost."""
TOLD_TO_END_CODE = 128 + signal.SIGTERM
_BEAT = b"\n"
_SIOCGIFADDR = 0x8915

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """How torchrun's agent on one machine finds the agents of all machines, in one attempt of a training."""

    num_nodes: int
    node_rank: int
    store_port: int
    """Port of the store at this machine's loopback address. On further machines, a tunnel to the leader's store."""
    own_address: str
    """This machine's address in the network that connects the machines."""


class Unit(Protocol):
    """The connections of one machine's launcher to the other machines of a training."""

    meeting: Meeting

    def conclude(self, exit_code: int) -> int:
        """Exchange exit codes with the other machines after the processes ended, and return the exit code of the
        attempt.

        Args:
            exit_code: exit code of this machine's own processes.

        Raises:
            MachineLostError: the attempt ended because another machine was lost.
        """


class Link:
    """The connection to another machine's launcher. At its end, this launcher sends itself SIGTERM.

    Args:
        name: name of the other machine, for messages.
        on_beat: called for each message from the other launcher.
    """

    def __init__(self, name: str, connection: socket.socket, *, on_beat: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.exit_code: int | None = None
        """The exit code that the other launcher reported, or None before its report."""
        self.problem = ""
        """Why the other machine counts as lost, or empty if it is not lost."""
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
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
        self._thread.join()
        self._connection.close()

    def tell_end(self, exit_code: int) -> None:
        """Report the exit code of this machine's processes to the other launcher."""
        with suppress(OSError):
            self._connection.sendall(json.dumps({"exit_code": exit_code}).encode() + b"\n")

    def conclude(self) -> None:
        """Record that this machine's processes have ended, so that a lost connection no longer causes a signal."""
        self._is_concluded.set()

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait until the connection ends, and return False if it did not end within `timeout_s`."""
        return self._has_ended.wait(timeout_s)

    def _watch(self) -> None:
        try:
            self._listen()
        except (OSError, ValueError, TypeError, KeyError) as error:
            self.problem = f"sent an unreadable message ({error})"
        finally:
            self._has_ended.set()
        # First give this machine's processes time to end by themselves: they may be done, or fail together with the
        # others.
        if self._is_concluded.wait(LEAVE_S):
            return
        logger.error("%s %s", self.name, self.problem or f"ended with code {self.exit_code}")
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # torchrun's agent has set no handler yet
            os._exit(MACHINE_LOST_CODE)
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun's agent then ends its processes

    def _listen(self) -> None:
        """Exchange heartbeats until the other launcher reports its exit code or is lost. Sets `exit_code` or
        `problem`."""
        heard = told = time.monotonic()
        rest = b""
        while not self._is_closed.is_set():
            if time.monotonic() >= told:
                told = time.monotonic() + BEAT_S
                with suppress(OSError):  # after a failed send, still read what the other launcher sent before
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
    """The connections of the leader's launcher to all further machines."""

    def __init__(self, meeting: Meeting, trainers: Sequence[FurtherTrainer], links: Sequence[Link]) -> None:
        self.meeting = meeting
        self._trainers = trainers
        self._links = links

    def conclude(self, exit_code: int) -> int:
        """See `Unit`. Logs the name of each further machine whose processes failed."""
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
    """The connection of a further machine's launcher to the leader."""

    def __init__(self, meeting: Meeting, leader: Link) -> None:
        self.meeting = meeting
        self._leader = leader

    def conclude(self, exit_code: int) -> int:
        """See `Unit`. Waits until the leader has got the exit code and closed the connection."""
        self._leader.conclude()
        if exit_code != 0 and self._leader.wait_for_end(0.0):
            raise MachineLostError(f"the leader's launcher on {self._leader.name} {self._leader.problem}")
        self._leader.tell_end(exit_code)
        self._leader.wait_for_end(SETTLE_S)
        return exit_code


def where_its_log_is(trainer: FurtherTrainer) -> str:
    """The path of a further machine's log, as text for messages."""
    return f"its log: {trainer.run_dir}/log.txt there"


@contextmanager
def lead(trainers: Sequence[FurtherTrainer], key: str) -> Iterator[LeaderUnit]:
    """On the leader: connect to the launchers of all further machines for the duration of the `with` block.

    Raises:
        MachineLostError: a machine was not reachable within JOIN_S.
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
        del store  # the store closes with its last reference


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
    """On a further machine: wait for the leader's connection, and keep it for the duration of the `with` block.

    Raises:
        MachineLostError: this machine cannot listen at its address.
    """
    with ExitStack() as stack:
        with _listen_at(own.host, own.port) as listener:
            connection, greeting = _accept_leader(listener, key)
        stack.enter_context(connection)

        def renew() -> None:
            with suppress(OSError):  # without a supervisor there is no lease file
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
    """Accept connections until a client proves knowledge of the key. Return its connection and its first message."""
    while True:
        connection, _ = listener.accept()
        try:
            prove_as_asked(connection, key)
            connection.settimeout(JOIN_S)  # the leader sends its first message when all machines are connected
            with connection.makefile("rb") as reader:
                return connection, json.loads(reader.readline(MAX_LINE_BYTES))
        except (OSError, ProofError, ValueError) as error:
            logger.info("ignored a connection: %s", error)
        connection.close()


def network_variables(address: str) -> dict[str, str]:
    """Environment variables that make gloo and NCCL use the network interface with this address, or {} without one.

    By default gloo uses the interface of the machine's hostname, and NCCL chooses an interface by itself.
    """
    interface = find_interface(address)
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}


def find_interface(address: str) -> str:
    """Name of the network interface with this IP address, or "" if no interface has it."""
    if sys.platform != "linux":
        return ""
    if ":" in address:
        wanted = socket.inet_pton(socket.AF_INET6, address).hex()
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines()]
        return next((row[-1] for row in rows if row[0] == wanted), "")
    import fcntl  # exists on Unix only

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface may have no address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
