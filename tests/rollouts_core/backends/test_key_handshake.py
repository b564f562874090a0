"""Pins that who trains with us knows the key of the run, and that the key itself is shown to nobody.

Without it a stranger that listens at the address of a machine would be told the key of all engines of a store.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest

from rollouts_core.backends import key_handshake
from rollouts_core.backends.key_handshake import ProofError, prove_as_asked, prove_as_asking

KEY = "known-to-all-machines"
NUM_BYTES = 32


class Tap:
    """A connection of which somebody hears what is sent."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.sent: list[bytes] = []
        self.settimeout, self.recv = connection.settimeout, connection.recv

    def sendall(self, content: bytes) -> None:
        self.sent.append(content)
        self._connection.sendall(content)


def meet(asking_key: str, asked_key: str) -> tuple[Exception | None, Exception | None]:
    """What each of two ends that have these keys raises."""
    raised: dict[str, Exception] = {}

    def prove(name: str, act: Callable[[socket.socket, str], None], connection: socket.socket, key: str) -> None:
        try:
            act(connection, key)
        except ProofError as error:
            raised[name] = error
        connection.close()

    ours, theirs = socket.socketpair()
    other = threading.Thread(target=prove, args=("asked", prove_as_asked, theirs, asked_key))
    other.start()
    prove("asking", prove_as_asking, ours, asking_key)
    other.join()
    return raised.get("asking"), raised.get("asked")


def test_two_that_know_the_key_believe_each_other() -> None:
    assert meet(KEY, KEY) == (None, None)


@pytest.mark.parametrize(("asking", "asked"), [("other", KEY), (KEY, "other")])
def test_whoever_has_another_key_is_believed_by_nobody(asking: str, asked: str) -> None:
    first, second = meet(asking, asked)
    assert "does not know the key" in str(first) and second is not None


def test_a_stranger_that_mirrors_what_it_hears_is_not_believed() -> None:
    ours, theirs = socket.socketpair()

    def mirror() -> None:
        nonce = theirs.recv(NUM_BYTES)
        theirs.sendall(nonce + nonce)

    stranger = threading.Thread(target=mirror)
    stranger.start()
    with ours, theirs, pytest.raises(ProofError, match="does not know the key"):
        prove_as_asking(ours, KEY)
    stranger.join()


def test_what_was_heard_of_others_cannot_be_used_again_and_is_not_the_key() -> None:
    ours, theirs = socket.socketpair()
    asked = threading.Thread(target=prove_as_asked, args=(theirs, KEY))
    asked.start()
    with ours, theirs:
        heard_by_us = Tap(ours)
        prove_as_asking(heard_by_us, KEY)  # type: ignore[arg-type]
        asked.join()
        heard = heard_by_us.sent
    assert [len(content) for content in heard] == [NUM_BYTES, NUM_BYTES] and KEY.encode() not in b"".join(heard)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"".join(heard))
        with pytest.raises(ProofError, match="does not know the key"):
            prove_as_asked(ours, KEY)


@pytest.mark.slow
@pytest.mark.parametrize("drips", [False, True])
def test_who_says_nothing_or_little_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, drips: bool) -> None:
    monkeypatch.setattr(key_handshake, "ASKED_S", 0.5)
    ours, theirs = socket.socketpair()
    began = time.monotonic()
    with ours, theirs:
        stop = threading.Event()

        def drip() -> None:
            while drips and not stop.wait(0.1):
                theirs.send(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        with pytest.raises(ProofError, match="did not prove in time"):
            prove_as_asked(ours, KEY)
        stop.set()
        dripping.join()
    assert time.monotonic() - began < 5
