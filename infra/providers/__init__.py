"""From a node's settings to a node, to a session on it, and back to nothing: one entry per provider.

settings --provision_node--> Node --open_session--> Session ... Node --release_node--> gone
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra.node import Node, NodeSettings
from infra.providers.local import open_local_session, provision_local, release_local
from infra.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """What every provider can do."""

    provision: Callable[[NodeSettings, Path], Node]
    release: Callable[[Node], None]
    open_session: Callable[[Node], Session]


PROVIDERS = {
    "local": Provider(provision=provision_local, release=release_local, open_session=open_local_session),
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
