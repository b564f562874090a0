"""Who answers the requests to a machine that is reached over SSH, and over which connection.

Not here: what is asked (ssh_session.py), connections and logins (connection.py), one request (agent_call.py).

Every request is answered by a process on the node, the agent, whose text travels ahead of its first request. So nothing
depends on the node's login shell but that it can start Python, and arguments are never interpreted. An agent answers
one request at a time and waits for the next, so that a request costs one round trip; those that come at the same time
take another agent, on a channel of its own. What matters quickly (commands, jobs, logs) and what is large (files) use
connections of their own, opened when first needed and again when they have broken; of the first kind a second one where
the server allows a connection fewer channels than are needed at once. Often only a request that is not answered shows
that one has broken; it is made once more, of another agent, where it does no harm to carry it out twice.
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
from rollouts.infra.ssh.agent_call import Agent, AgentCall, JsonObject
from rollouts.infra.ssh.connection import SSHConnection, connect
from rollouts.infra.ssh.openssh import OpenSSH
from rollouts.infra.ssh.parallel_write import MAX_SENDERS

AnswerT = TypeVar("AnswerT")
Purpose = Literal["control", "beside", "bulk", "pieces 0", "pieces 1", "pieces 2", "pieces 3", "pieces 4", "pieces 5"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
PIECES = PURPOSES[3:]
assert len(PIECES) == MAX_SENDERS
"""For large files to a distant node."""

OPEN_ATTEMPTS = 4
"""So often a request is begun."""
PAUSE_S, BAN_PAUSE_S = 0.5, 4.0
"""After the first attempt, twice as long after each further one. The shortest bans of OpenSSH last 15 s."""
ANSWER_MARGIN_S = 30.0
"""An answer may come this much later than the command's own time limit."""
MAX_IDLE_AGENTS = 2
"""So many wait for requests, on each connection: servers allow some ten channels."""
MAX_IDLE_S = 60.0
"""An agent that has waited longer is not asked: its connection may have broken unnoticed."""

logger = logging.getLogger(__name__)


class Agents:
    """The connections to a machine, and the agents that wait on them; may be used by several threads."""

    def __init__(self, access: SSHAccess, *, python: str, find_access: Callable[[], SSHAccess] | None) -> None:
        """Nothing is connected before the first request.

        Args:
            find_access: asked before every connection where the node's address may change.
        """
        self.access = access
        self.programs: dict[str, str] = {}
        """The texts of those that agents have been asked to run."""
        self.may_use_openssh = True
        self._find_access = find_access
        self._python = python
        self._connections: dict[Purpose, SSHConnection] = {}
        self._idle_agents: dict[Purpose, list[tuple[float, Agent]]] = {purpose: [] for purpose in PURPOSES}
        """With the time since when each waits."""
        self._openssh_client: tuple[OpenSSH, SSHConnection] | None = None
        """With the connection whose host key it demands."""
        self._key_type = ""
        """Of the host key that the last connection was shown."""
        self._is_closed = False
        self._lock = threading.Lock()
        self._connecting = {purpose: threading.Lock() for purpose in PURPOSES}
        self._preparing = {purpose: threading.Lock() for purpose in PURPOSES}
        """Held while an agent is made ready before it is needed."""

    @property
    def address(self) -> str:
        """Where the machine is, for messages."""
        return self.access.address

    def close(self) -> None:
        """End the agents, and close the connections."""
        with self._lock:
            self._is_closed = True  # a thread that still uses it must not connect again
            for _, agent in itertools.chain(*self._idle_agents.values()):
                agent.end_input()  # all say goodbye at the same time
            for purpose in PURPOSES:
                self._end_idle_agents(purpose)
            if self._openssh_client is not None:
                self._openssh_client[0].close()
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    def ask(self, purpose: Purpose, request: JsonObject, *, timeout_s: float | None = None) -> AgentCall:
        """A request under way, over a new connection where the old one has broken."""
        for attempt in range(1, OPEN_ATTEMPTS + 1):
            try:
                agent = self._idle_agent(purpose) or self._new_agent(purpose)
                return self._begin(purpose, agent, request, timeout_s=timeout_s)
            except TransientInfraError as error:
                if attempt == OPEN_ATTEMPTS:
                    raise
                logger.info("attempt %d to reach %s failed: %s", attempt, self.address, error)
                time.sleep((BAN_PAUSE_S if isinstance(error, BannedError) else PAUSE_S) * 2.0 ** (attempt - 1))
        raise AssertionError("the last attempt returns or raises")

    def repeated_if_cut(self, ask: Callable[[], AnswerT]) -> AnswerT:
        """What a "control" request answers; made once more, over a new agent, where it was cut off before that."""
        try:
            return ask()
        except RequestCutError as error:
            logger.info("a request is made once more: %s", error)
            with self._lock:
                self._end_idle_agents("control")  # they may be as dead without its having been noticed
            return ask()

    def make_ready(self, purpose: Purpose) -> None:
        """Begin to make an agent, with all programs so far, that answers the next request within one round trip."""
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
                logger.info("no agent at %s is ready before it is needed: %s", self.address, error)
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
        """One that waits for a request, or is about to."""
        if not self._idle_agents[purpose] and self._preparing[purpose].acquire(timeout=ANSWER_MARGIN_S):
            self._preparing[purpose].release()
        while True:
            with self._lock:
                self._check_open()
                if not self._idle_agents[purpose]:
                    return None
                since, agent = self._idle_agents[purpose].pop()
            if agent.is_alive and time.monotonic() - since < MAX_IDLE_S:
                return agent
            agent.end()

    def _end_idle_agents(self, purpose: Purpose) -> None:
        """With the lock held."""
        for _, agent in self._idle_agents[purpose]:
            agent.end()
        self._idle_agents[purpose].clear()

    def forget(self, purposes: Sequence[Purpose]) -> None:
        """Where one broke, the others may be as dead without its having been noticed."""
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
                    self._check_open()  # else the session's end is why the client failed
                logger.warning("files take our own connection to %s: %s", self.address, error)
        try:
            agent = Agent(self.connection(purpose).open_command, self._python, self.address)
        except NodeUnreachableError:
            raise
        except TransientInfraError:  # it allows no more channels: a followed log has the only one where that is all
            if purpose != "control":
                raise
            agent = Agent(self.connection("beside").open_command, self._python, self.address)
        if client is not None:
            self.may_use_openssh = False  # the node is there, so it was the client that failed
        return agent

    def openssh(self, purpose: Purpose) -> OpenSSH | None:
        """The client that is installed here, where it is faster and can log in as we do."""
        if not self.may_use_openssh or purpose == "control":
            return None
        believed = self.connection("control")
        with self._lock:
            self._check_open()
            # What a distant node sends is limited by the client's window, what it is sent by its own.
            is_slower = believed.is_far and purpose not in PIECES
            if is_slower or not believed.key_file or not openssh.is_installed():
                return None
            client, of = self._openssh_client or (None, None)
            if client is None or of is not believed:  # another address perhaps, and another key
                if client is not None:
                    client.close()
                client = OpenSSH(self.access, believed)
                self._openssh_client = client, believed
            return client

    def _give_back(self, purpose: Purpose, agent: Agent) -> None:
        with self._lock:
            idle = self._idle_agents[purpose]
            if not self._is_closed and len(idle) < MAX_IDLE_AGENTS:
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
