"""What a machine may send in place of an agent's answers, that of somebody else who has it, too.

Without these tests a node that never ends an answer keeps whoever wants to give it back waiting, while it costs money,
and one that sends nonsense ends a run by a traceback.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator

import pytest

from rollouts.infra.errors import NodeUnreachableError, PermanentInfraError
from rollouts.infra.node_agent import DONE, FRAME_HEAD, STDOUT
from rollouts.infra.ssh import agent_call
from rollouts.infra.ssh.agent_call import MAX_ANSWER_BYTES, Agent, AgentCall

PIECE = FRAME_HEAD.pack(STDOUT, 1 << 16) + bytes(1 << 16)


class ScriptedChannel:
    """A channel to a machine that sends what it wants, as fast as it is read."""

    has_ended = False

    def __init__(self) -> None:
        self.pieces: Iterator[bytes] = iter(())
        self._unread = b""

    def send(self, *parts: bytes | memoryview) -> None:
        """Nobody reads it."""

    def receive(self, max_bytes: int, *, timeout_s: float | None = None) -> bytes:
        self._unread = self._unread or next(self.pieces, b"")
        piece, self._unread = self._unread[:max_bytes], self._unread[max_bytes:]
        return piece

    def receive_stderr(self) -> bytes:
        return b""

    def exit_code(self) -> int | None:
        return None

    def end_input(self) -> None:
        """Nobody waits for it."""

    def close(self) -> None:
        """Nothing is open."""


def ask(pieces: Iterable[bytes], *, timeout_s: float | None = None) -> AgentCall:
    """A request to a machine that greets as an agent and then sends these."""
    channel = ScriptedChannel()
    agent = Agent(lambda _: channel, "python", "user@node:22")
    channel.pieces = itertools.chain([agent._nonce.encode()], pieces)
    return AgentCall(agent, {"verb": "run"}, timeout_s=timeout_s)


def done(answer: bytes) -> bytes:
    return FRAME_HEAD.pack(DONE, len(answer)) + answer


@pytest.mark.parametrize(
    "sent",
    [
        done(b"{{{"),
        done(b"[1]"),
        done(b"\xff\xfe"),
        done(b"[" * 100_000),
        FRAME_HEAD.pack(b"z", 1) + b"z",
        FRAME_HEAD.pack(DONE, MAX_ANSWER_BYTES + 1),
    ],
    ids=["no JSON", "a list", "no text", "brackets without end", "an unknown frame", "more than an answer can have"],
)
def test_nonsense_in_place_of_an_answer_is_said_in_a_sentence(sent: bytes) -> None:
    with (
        pytest.raises(PermanentInfraError, match=r"user@node:22 sends .* another program than ours answers"),
        ask([sent]) as call,
    ):
        list(call.frames())


def test_what_an_answer_lacks_is_said_in_a_sentence() -> None:
    with ask([done(b'{"is_reusable": true}')]) as call, pytest.raises(PermanentInfraError, match="without 'exit_code'"):
        call.wait()["exit_code"]


def test_output_of_a_request_that_has_none_is_not_collected() -> None:
    with pytest.raises(PermanentInfraError, match="unexpected output"), ask(itertools.repeat(PIECE)) as call:
        call.wait()


@pytest.fixture(autouse=True)
def short_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_call, "CLOSE_TIMEOUT_S", 0.05)


def takes(act: Callable[[], None]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


def for_a_while(piece: bytes) -> Iterator[bytes]:
    """As good as without end, but for a test that would wait for it."""
    until = time.monotonic() + 5.0
    yield from itertools.takewhile(lambda _: time.monotonic() < until, itertools.repeat(piece))


def test_an_answer_without_end_has_no_more_time_than_any_other() -> None:
    def wait_for_it() -> None:
        with pytest.raises(NodeUnreachableError, match="in time"), ask(for_a_while(PIECE), timeout_s=0.2) as call:
            for _ in call.frames():
                pass

    assert takes(wait_for_it) < 2.0


def test_a_machine_that_never_stops_sending_is_left_all_the_same() -> None:
    def leave_it() -> None:
        with ask(for_a_while(PIECE)) as call:
            next(call.frames())

    assert takes(leave_it) < 2.0
