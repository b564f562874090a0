"""The agents and connections of one machine that is reached over SSH, and the choice of an agent for each request.

Not here: the requests (ssh_session.py), connections and logins (connection.py), a single request (agent_call.py).

An agent is a process on the node that answers all kinds of requests. This machine sends the agent's program text before
the first request. The node's login shell therefore only has to start Python, and no shell interprets arguments. An
agent answers requests one after another and stays alive between requests. A request to a running agent therefore costs
one round trip. Concurrent requests use further agents on separate channels.

Small urgent requests (commands, jobs, logs) and large files use separate connections. A connection is opened on first
use and reopened after it broke. If the server allows too few channels per connection, a second connection serves the
urgent requests. A broken connection often shows only as a missing answer. An idempotent request without an answer is
retried once through a new agent.
"""

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar, get_args

from rollouts.infra.errors import (
    BannedError,
    InfraError,
    NodeUnreachableError,
    PermanentInfraError,
    RequestCutError,
    TransientInfraError,
)
from rollouts.infra.node import SSHAccess
from rollouts.infra.ssh import openssh
from rollouts.infra.ssh.agent_call import MAX_SENDERS, Agent, AgentCall, JsonObject
from rollouts.infra.ssh.connection import SSHConnection, connect
from rollouts.infra.ssh.openssh import OpenSSH

AnswerT = TypeVar("AnswerT")
Purpose = Literal["control", "beside", "bulk", "pieces 0", "pieces 1", "pieces 2", "pieces 3", "pieces 4", "pieces 5"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
PIECES = PURPOSES[3:]
assert len(PIECES) == MAX_SENDERS
"""Connections for parallel copies of large files to a distant node."""

_OPEN_ATTEMPTS = 4
"""Maximum number of attempts to start a request."""
PAUSE_S, BAN_PAUSE_S = 0.5, 4.0
"""Seconds of the pause after a failed first attempt. BAN_PAUSE_S applies if the server bans this machine. The pause
doubles after each attempt. The shortest bans of OpenSSH last 15 s."""
ANSWER_MARGIN_S = 30.0
"""Extra time to wait for the answer after a command's own time limit."""
_MAX_IDLE_AGENTS = 2
"""Number of idle agents that are kept per connection. Servers allow about ten channels."""
_MAX_IDLE_S = 60.0
"""Agents that were idle for more than this many seconds are ended, because their connection may have broken
unnoticed."""

logger = logging.getLogger(__name__)


class Agents:
    """The connections and agents of one machine. Several threads may use this object."""

    def __init__(self, access: SSHAccess, *, python: str, find_access: Callable[[], SSHAccess] | None) -> None:
        """The connections are opened by the first requests, not now.

        Args:
            find_access: called before every connection attempt, for a node whose address may change.
        """
        self.access = access
        self.programs: dict[str, str] = {}
        """Texts of the programs that requests have named, by program name."""
        self.may_use_openssh = True
        self._find_access = find_access
        self._python = python
        self._connections: dict[Purpose, SSHConnection] = {}
        self._idle_agents: dict[Purpose, list[tuple[float, Agent]]] = {purpose: [] for purpose in PURPOSES}
        """Idle agents, each with the time at which it became idle."""
        self._openssh_client: tuple[OpenSSH, SSHConnection] | None = None
        """OpenSSH's client, and the paramiko connection whose host key the client must find."""
        self._key_type = ""
        self._is_closed = False
        self._lock = threading.Lock()
        self._connecting = {purpose: threading.Lock() for purpose in PURPOSES}
        self._preparing = {purpose: threading.Lock() for purpose in PURPOSES}
        """Locks that are held while a spare agent for the purpose is being prepared."""

    @property
    def address(self) -> str:
        return self.access.address

    def close(self) -> None:
        with self._lock:
            self._is_closed = True  # keeps other threads from connecting again
            for _, agent in itertools.chain(*self._idle_agents.values()):
                agent.end_input()  # end all agents first, so that they end concurrently
            for purpose in PURPOSES:
                self._end_idle_agents(purpose)
            if self._openssh_client is not None:
                self._openssh_client[0].close()
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    def ask(self, purpose: Purpose, request: JsonObject, *, timeout_s: float | None = None) -> AgentCall:
        """Start a request. Reconnects and retries if the connection has broken."""
        for attempt in range(1, _OPEN_ATTEMPTS + 1):
            try:
                agent = self._idle_agent(purpose) or self._new_agent(purpose)
                return self._begin(purpose, agent, request, timeout_s=timeout_s)
            except TransientInfraError as error:
                if attempt == _OPEN_ATTEMPTS:
                    raise
                logger.info("attempt %d to reach %s failed: %s", attempt, self.address, error)
                time.sleep((BAN_PAUSE_S if isinstance(error, BannedError) else PAUSE_S) * 2.0 ** (attempt - 1))
        raise AssertionError("the last attempt returns or raises")

    def repeated_if_cut(self, ask: Callable[[], AnswerT]) -> AnswerT:
        """Return the answer of an idempotent "control" request. A request that was cut off is repeated once by a new
        agent."""
        try:
            return ask()
        except RequestCutError as error:
            logger.info("repeating a request: %s", error)
            with self._lock:
                self._end_idle_agents("control")  # these agents share the connection that may have broken
            return ask()

    def make_ready(self, purpose: Purpose) -> None:
        """In a thread, prepare an agent that has loaded all programs used so far. The next request then takes one round
        trip."""
        with self._lock:
            if self._is_closed or self._idle_agents[purpose] or not self._preparing[purpose].acquire(blocking=False):
                return
            programs = dict(self.programs) if purpose == "control" else {}

        def make() -> None:
            try:
                agent = self._new_agent(purpose)
                agent.programs.update(programs)
                give_back = functools.partial(self._give_back, purpose)
                request = {"verb": "load", "programs": programs}
                with AgentCall(agent, request, timeout_s=ANSWER_MARGIN_S, give_back=give_back) as call:
                    call.send_input(())
                    call.wait()
            except InfraError as error:
                logger.info("the program for requests could not be started at %s in advance: %s", self.address, error)
            finally:
                self._preparing[purpose].release()

        threading.Thread(target=make, name=f"agent for {purpose}", daemon=True).start()

    def _begin(self, purpose: Purpose, agent: Agent, request: JsonObject, *, timeout_s: float | None) -> AgentCall:
        program = request.get("program")
        missing = {program: self.programs[program]} if program and program not in agent.programs else {}
        agent.programs.update(missing)
        give_back = functools.partial(self._give_back, purpose)
        return AgentCall(agent, {**request, "programs": missing}, timeout_s=timeout_s, give_back=give_back)

    def _idle_agent(self, purpose: Purpose) -> Agent | None:
        """Return an idle agent, or wait for the agent that is being prepared. Returns None if no agent is idle or in
        preparation."""
        if not self._idle_agents[purpose] and self._preparing[purpose].acquire(timeout=ANSWER_MARGIN_S):
            self._preparing[purpose].release()
        while True:
            with self._lock:
                self._check_open()
                if not self._idle_agents[purpose]:
                    return None
                since, agent = self._idle_agents[purpose].pop()
            if agent.is_alive and time.monotonic() - since < _MAX_IDLE_S:
                return agent
            agent.end()

    def _end_idle_agents(self, purpose: Purpose) -> None:
        """End the idle agents of a purpose. The caller holds the lock."""
        for _, agent in self._idle_agents[purpose]:
            agent.end()
        self._idle_agents[purpose].clear()

    def forget(self, purposes: Sequence[Purpose]) -> None:
        """Close the connections and agents of these purposes after one connection broke, because the others may have
        broken unnoticed."""
        with self._lock:
            for purpose in purposes:
                self._end_idle_agents(purpose)
                if connection := self._connections.pop(purpose, None):
                    connection.close()

    def _new_agent(self, purpose: Purpose) -> Agent:
        client = self.openssh(purpose)
        if client is not None:
            try:
                agent = Agent(client.open_command, self._python, self.address)
                agent.begin()
                return agent
            except InfraError as error:
                with self._lock:
                    self._check_open()  # raises if the session was closed, which explains the failure
                logger.warning("OpenSSH's client failed, files use our own connection to %s: %s", self.address, error)
        try:
            agent = Agent(self.connection(purpose).open_command, self._python, self.address)
        except NodeUnreachableError:
            raise
        except TransientInfraError:  # the server allows no further channel: a followed log may occupy the only one
            if purpose != "control":
                raise
            agent = Agent(self.connection("beside").open_command, self._python, self.address)
        if client is not None:
            self.may_use_openssh = False  # our own connection works, so only OpenSSH's client has a problem
        return agent

    def openssh(self, purpose: Purpose) -> OpenSSH | None:
        """Return OpenSSH's client if it is installed, faster than our own connection, and can log in with the same
        key."""
        if not self.may_use_openssh or purpose == "control":
            return None
        believed = self.connection("control")
        with self._lock:
            self._check_open()
            # OpenSSH's small receive window slows data from a distant node, but not data to the node.
            is_slower = believed.is_far and purpose not in PIECES
            if is_slower or not believed.key_file or not openssh.is_installed():
                return None
            client, of = self._openssh_client or (None, None)
            if client is None or of is not believed:  # a new connection may have another address or host key
                if client is not None:
                    client.close()
                client = OpenSSH(self.access, believed)
                self._openssh_client = client, believed
            return client

    def _give_back(self, purpose: Purpose, agent: Agent) -> None:
        with self._lock:
            idle = self._idle_agents[purpose]
            if not self._is_closed and len(idle) < _MAX_IDLE_AGENTS:
                idle.append((time.monotonic(), agent))
                return
        agent.end()

    def connection(self, purpose: Purpose) -> SSHConnection:
        with self._connecting[purpose]:
            with self._lock:
                self._check_open()
                connection = self._connections.get(purpose)
            if connection is not None and connection.is_alive:
                return connection
            if connection is not None:
                connection.close()
            if self._find_access is not None:
                self.access = self._find_access()
            connection = connect(self.access, likely_type=self._key_type)
            with self._lock:
                self._connections[purpose] = connection
                self._key_type = connection.host_key.type
                if self._is_closed:
                    connection.close()
                self._check_open()
            return connection

    def _check_open(self) -> None:
        if self._is_closed:
            raise PermanentInfraError(f"the session on {self.address} is closed")
