"""Two machines in namespaces of their own that share nothing but a network which this machine is not in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.flows.test_separate_node import node_settings
from tests.infra.separate_node import PrivateLink, SeparateNode, private_link, separate_node
from tests.kit.commands import Rollouts


@dataclass(frozen=True)
class Cluster:
    """Two nodes and what connects them."""

    leader: SeparateNode
    further: SeparateNode
    link: PrivateLink

    def settings(self, kind: str) -> dict[str, Any]:  # Any: settings of every type
        """The table [node].

        Args:
            kind: what the further node is for, engine_nodes or trainer_nodes.
        """
        return {**node_settings(self.leader), kind: [further_node_settings(self.further, self.link)]}


def further_node_settings(node: SeparateNode, link: PrivateLink) -> dict[str, Any]:  # Any: settings of every type
    """A further node's table: this machine reaches the node by another way than the leader does."""
    settings = {key: value for key, value in node_settings(node).items() if key != "kind"}
    return {**settings, "address": link.addresses[1]}


@contextmanager
def two_machines(rollouts: Rollouts, folder: Path, *, client_key: Path | None = None) -> Iterator[Cluster]:
    """Nodes that see neither the store nor the files of the configuration, in `folder`/small.

    Args:
        client_key: one that may log in to both; each has its own if None.
    """
    small = folder / "small"
    small.mkdir()
    with ExitStack() as stack:
        leader, further = (
            stack.enter_context(separate_node(folder / name, hidden=[rollouts.store, small], client_key=client_key))
            for name in ("leader", "further")
        )
        yield Cluster(leader, further, stack.enter_context(private_link(leader, further)))
