"""From a node's settings to a node, to a session on it, and back to nothing: one entry per provider.

settings --provision_node--> Node --open_session--> Session ... Node --release_node--> gone
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.node import Node, NodeSettings
from infra.providers.local import open_local_session, provision_local, release_local
from infra.providers.ssh import open_ssh_session, provision_ssh, release_ssh
from infra.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """What every provider can do."""

    provision: Callable[[Any, Path], Node]  # Any: each has settings of a type of its own
    release: Callable[[Node], None]
    open_session: Callable[[Node], Session]


PROVIDERS: Mapping[str, Provider] = {
    "local": Provider(provision=provision_local, release=release_local, open_session=open_local_session),
    "ssh": Provider(provision=provision_ssh, release=release_ssh, open_session=open_ssh_session),
}


def provision_node(settings: NodeSettings, store: Path) -> Node:
    """A node that answers to the settings; `store` is where run directories lie when the settings do not say."""
    return PROVIDERS[settings.provider].provision(settings, store)


def release_node(node: Node) -> None:
    """Give the node back; harmless when it is gone already."""
    PROVIDERS[node.provider].release(node)


def open_session(node: Node) -> Session:
    """A session on the node, to be used in a `with` block."""
    return PROVIDERS[node.provider].open_session(node)
