"""Pins that nodes which do not reach each other are told before a run stands on it, and in one sentence.

Without it a run trains for hours, and its engines are then found to be behind a firewall.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from rollouts.infra import reach
from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.node import Node
from rollouts.infra.providers import open_session
from rollouts.infra.reach import check_both_ways
from rollouts.infra.session import Session
from tests.infra.separate_node import PrivateLink, SeparateNode, private_link, separate_node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.namespaces]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SeparateNode, SeparateNode, PrivateLink]]:
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(separate_node(tmp_path_factory.mktemp(name), hidden=[])) for name in ("first", "second")
        )
        yield first, second, stack.enter_context(private_link(first, second))


def record_of(node: SeparateNode, address: str) -> Node:
    return Node(
        name=node.access.address,
        kind="ssh",
        root=str(node.folder / "root"),
        python=sys.executable,
        mirror="/nowhere",
        access=node.access,
        address=address,
    )


@pytest.fixture
def nodes(pair: tuple[SeparateNode, SeparateNode, PrivateLink]) -> tuple[Node, Node]:
    """The one that trains, and the one of the engines."""
    first, second, link = pair
    return record_of(first, ""), record_of(second, link.addresses[1])


@pytest.fixture
def sessions(nodes: tuple[Node, Node]) -> Iterator[tuple[Session, Session]]:
    with open_session(nodes[0]) as trainer, open_session(nodes[1]) as engine:
        yield trainer, engine


def test_nodes_with_a_network_of_their_own_reach_each_other(
    nodes: tuple[Node, Node], sessions: tuple[Session, Session]
) -> None:
    check_both_ways(sessions[0], nodes[0], sessions[1], nodes[1])


def test_a_port_of_another_node_is_reached_through_one_that_reaches_it(
    nodes: tuple[Node, Node], sessions: tuple[Session, Session]
) -> None:
    serve = [sys.executable, "-I", "-c", reach._LISTEN, nodes[1].address, "10"]
    with (
        sessions[1].stream(serve) as lines,
        sessions[0].forward(int(next(lines)), nodes[1].address) as local_port,
        socket.create_connection(("127.0.0.1", local_port), 10) as client,
    ):
        client.sendall(b"1\n")  # a port where nobody listens
        assert b"does not answer" in client.recv(200)


def test_an_address_that_the_engines_node_does_not_have_is_named(
    nodes: tuple[Node, Node], sessions: tuple[Session, Session]
) -> None:
    elsewhere = replace(nodes[1], address="10.99.99.99")
    with pytest.raises(PermanentInfraError, match=r"reach each other by 10\.99\.99\.99 \(nothing can listen there"):
        check_both_ways(sessions[0], nodes[0], sessions[1], elsewhere)


def test_a_cut_link_is_told(
    pair: tuple[SeparateNode, SeparateNode, PrivateLink],
    nodes: tuple[Node, Node],
    sessions: tuple[Session, Session],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reach, "PATIENCE_S", 2.0)
    address = nodes[1].address.replace(".", r"\.")
    with pair[2].cut_off(), pytest.raises(PermanentInfraError, match=rf"{address} \({address}:\d+ does not answer"):
        check_both_ways(sessions[0], nodes[0], sessions[1], nodes[1])
    check_both_ways(sessions[0], nodes[0], sessions[1], nodes[1])


def test_a_node_that_is_not_reached_from_its_engines_is_told(
    nodes: tuple[Node, Node], sessions: tuple[Session, Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a firewall that lets connections out alone."""
    closed = reach._CONNECT.replace("listener.getsockname()[1]", "1")
    assert closed != reach._CONNECT
    monkeypatch.setattr(reach, "_CONNECT", closed)
    with pytest.raises(PermanentInfraError, match=r":1 does not answer"):
        check_both_ways(sessions[0], nodes[0], sessions[1], nodes[1])
