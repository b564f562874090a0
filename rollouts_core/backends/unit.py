"""Several machines that train one model together: how their launchers meet, and learn that another one is gone.

Not here: what the launchers start (launch.py), how the processes that they start talk (ranks.py).

    the leader's machine                                       each further machine
    launcher ── connects: "meet at HOST:PORT" ── proof.py ──> launcher, listening at its address
      └─ torchrun, which listens at HOST:PORT <─────────────────── torchrun
                <── a byte every BEAT_S, in both directions ──>
                <── "ended with code N" ── , or the end of the connection

One attempt is one connection. When it ends, whatever the reason, or is silent for SILENCE_S, both launchers end what
they started: no machine computes for one that is gone, whether or not anybody can log in to it. A further machine
counts each beat as a renewal of its job's lease.
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

from rollouts_core.backends.proof import ProofError, prove_as_asked, prove_as_asking
from rollouts_core.backends.store_tunnel import LOOPBACK, opened_gate, opened_tunnel
from rollouts_core.errors import MachineLostError
from rollouts_core.job import FurtherTrainer

JOIN_S = 300.0
"""For the launchers of further machines to listen: they load torch before, maybe from a cold disk."""
BEAT_S = 2.0
SILENCE_S = 30.0
LEAVE_S = 5.0
"""What was started gets this long to end by itself when the other launcher is gone."""
SETTLE_S = 5.0
"""When the leader's own processes failed, others are heard for this long: theirs may have failed first."""
CONNECT_TIMEOUT_S = 5.0
MAX_LINE_BYTES = 4096
MACHINE_LOST_CODE = os.EX_TEMPFAIL
"""The exit code of a training that ended because another machine is gone."""
TOLD_TO_END_CODE = 128 + signal.SIGTERM
_BEAT = b"\n"
_SIOCGIFADDR = 0x8915

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where torchrun's agents of one attempt meet."""

    num_nodes: int
    node_rank: int
    store_port: int
    """Port on this machine's loopback that leads to the store of all agents and ranks."""
    own_address: str
    """This machine's address in the network of all of them."""


class Unit(Protocol):
    """The machines that train together, as the launcher of one of them sees the others."""

    meeting: Meeting

    def conclude(self, exit_code: int) -> None:
        """Take part in the end of the attempt.

        Args:
            exit_code: how this machine's own processes ended.

        Raises:
            MachineLostError: it ended because another machine is gone.
        """


class Link:
    """The connection to another launcher; when it ends, this process is asked to end what it started.

    Args:
        name: the other machine, for people.
        on_beat: called whenever the other launcher is heard.
    """

    def __init__(self, name: str, connection: socket.socket, *, on_beat: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.exit_code: int | None = None
        """How the other machine's processes ended, where it said so."""
        self.problem = ""
        """Why it is not heard any more, where it did not."""
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
        """Tell the other launcher how the processes of this one ended."""
        with suppress(OSError):
            self._connection.sendall(json.dumps({"exit_code": exit_code}).encode() + b"\n")

    def conclude(self) -> None:
        """Ask this process to end nothing any more: what it started has ended."""
        self._is_concluded.set()

    def wait_for_end(self, timeout_s: float) -> bool:
        """Whether the connection has ended, or does so in time."""
        return self._has_ended.wait(timeout_s)

    def _watch(self) -> None:
        try:
            self._listen()
        except (OSError, ValueError, TypeError, KeyError) as error:
            self.problem = f"cannot be understood ({error})"
        finally:
            self._has_ended.set()
        # Not before: what it started may just be ending for the same reason, or because all work is done.
        if self._is_concluded.wait(LEAVE_S):
            return
        logger.error("%s %s", self.name, self.problem or f"ended with code {self.exit_code}")
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # torchrun's agent waits for the other one, deaf
            os._exit(MACHINE_LOST_CODE)
        os.kill(os.getpid(), signal.SIGTERM)  # it ends its processes

    def _listen(self) -> None:
        """Return when the other launcher has told its end, or is not heard any more."""
        heard = told = time.monotonic()
        rest = b""
        while not self._is_closed.is_set():
            if time.monotonic() >= told:
                told = time.monotonic() + BEAT_S
                with suppress(OSError):  # what it said before it closed the connection is still to be read
                    self._connection.sendall(_BEAT)
            try:
                is_heard = bool(select.select([self._connection], [], [], BEAT_S)[0])
                chunk = self._connection.recv(MAX_LINE_BYTES) if is_heard else b""
            except ConnectionResetError:
                is_heard, chunk = True, b""
            except OSError as error:
                self.problem = f"is not reached any more ({error.strerror or error})"
                return
            if chunk:
                heard = time.monotonic()
                self._on_beat()
                *lines, rest = (rest + chunk).split(b"\n")
                for line in filter(None, lines):
                    self.exit_code = int(json.loads(line)["exit_code"])
                    self.problem = "was told to end" if self.exit_code == TOLD_TO_END_CODE else ""
                    return
            elif is_heard:
                self.problem = "was ended or killed"
                return
            elif time.monotonic() > heard + SILENCE_S:
                self.problem = f"has given no sign of life for {SILENCE_S:.0f} s"
                return


class LeaderUnit:
    """The unit as the leader's launcher sees it."""

    def __init__(self, meeting: Meeting, trainers: Sequence[FurtherTrainer], links: Sequence[Link]) -> None:
        self.meeting = meeting
        self._trainers = trainers
        self._links = links

    def conclude(self, exit_code: int) -> None:
        """See `Unit`; a machine whose processes failed by themselves is named in the log."""
        for link in self._links:
            link.conclude()
        if exit_code == 0:
            return
        deadline = time.monotonic() + SETTLE_S
        for link in self._links:
            link.wait_for_end(max(0.0, deadline - time.monotonic()))
        for trainer, link in zip(self._trainers, self._links, strict=True):
            if link.problem:
                raise MachineLostError(
                    f"{link.name} {link.problem} amid the training ({where_its_log_is(trainer)}): start again to go on "
                    "from the last checkpoint"
                )
        for trainer, link in zip(self._trainers, self._links, strict=True):
            if link.exit_code:
                logger.error("%s ended with code %d (%s)", link.name, link.exit_code, where_its_log_is(trainer))


class FurtherUnit:
    """The unit as the launcher of a further machine sees it: its leader."""

    def __init__(self, meeting: Meeting, leader: Link) -> None:
        self.meeting = meeting
        self._leader = leader

    def conclude(self, exit_code: int) -> None:
        """See `Unit`; the leader hears how it ended, which takes until it closes the connection."""
        self._leader.conclude()
        if exit_code != 0 and self._leader.wait_for_end(0.0):
            raise MachineLostError(f"the launcher on {self._leader.name}, which leads, {self._leader.problem}")
        self._leader.tell_end(exit_code)
        self._leader.wait_for_end(SETTLE_S)


def where_its_log_is(trainer: FurtherTrainer) -> str:
    """Where people look for what happened on a further machine."""
    return f"its log: {trainer.run_dir}/log.txt there"


@contextmanager
def lead(trainers: Sequence[FurtherTrainer], key: str) -> Iterator[LeaderUnit]:
    """Bring the launchers of all further machines together, and stay connected while the block runs.

    Raises:
        MachineLostError: one of them did not come within JOIN_S.
    """
    from rollouts_core.backends.process_group import open_store  # torch loads here

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
        del store  # until here: it ends with its last reference


def _connect(trainer: FurtherTrainer, key: str, deadline: float) -> socket.socket:
    while True:
        try:
            return _connect_once(trainer, key)
        except (OSError, ProofError) as error:
            reason = error.strerror or error if isinstance(error, OSError) else error
            if time.monotonic() > deadline:
                raise MachineLostError(
                    f"{trainer.name} did not come to train at {trainer.host}:{trainer.port} within {JOIN_S:.0f} s "
                    f"({reason}; {where_its_log_is(trainer)}): start again"
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
    """Wait for the leader, which the job's lease bounds, and stay connected while the block runs.

    Raises:
        MachineLostError: nothing can listen at this machine's address.
    """
    with ExitStack() as stack:
        with _listen_at(own.host, own.port) as listener:
            connection, greeting = _accept_leader(listener, key)
        stack.enter_context(connection)

        def renew() -> None:
            with suppress(OSError):  # nobody supervises it, or the disk is gone, which ends the lease
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
        raise MachineLostError(f"nothing can listen at {host}:{port}: {error.strerror}") from error


def _accept_leader(listener: socket.socket, key: str) -> tuple[socket.socket, dict[str, Any]]:  # Any: JSON
    """The connection of whoever has the key, and what it said."""
    while True:
        connection, _ = listener.accept()
        try:
            prove_as_asked(connection, key)
            connection.settimeout(JOIN_S)  # the leader says where to meet when all have come
            with connection.makefile("rb") as reader:
                return connection, json.loads(reader.readline(MAX_LINE_BYTES))
        except (OSError, ProofError, ValueError) as error:
            logger.info("somebody else connected, or went away again: %s", error)
        connection.close()


def network_variables(address: str) -> dict[str, str]:
    """The variables that make gloo and NCCL use the network of this machine's `address`; {} if it cannot be found.

    Without them, gloo takes the network that the machine's own name leads to, and NCCL the one that it likes best.
    """
    interface = find_interface(address)
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}


def find_interface(address: str) -> str:
    """The name of the interface that has an IP address of this machine; empty where that is not found out."""
    if sys.platform != "linux":
        return ""
    if ":" in address:
        wanted = socket.inet_pton(socket.AF_INET6, address).hex()
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines()]
        return next((row[-1] for row in rows if row[0] == wanted), "")
    import fcntl  # Unix alone

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
