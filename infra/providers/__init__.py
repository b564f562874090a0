"""From a node's settings to a node, to a session on it, and back to nothing: one entry per kind of node.

Not here: the clouds that rent machines out (clouds.py); the kind `rented` stands for all of them.

settings --provision_node--> Node --open_session--> Session ... Node --release_node--> gone
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.node import NO_NODE, Node, NodeSettings
from rollouts.infra.providers.instance import open_instance_session, provision_instance, release_instance
from rollouts.infra.providers.local import open_local_session, provision_local, release_local
from rollouts.infra.providers.rented import open_rented_session, provision_rented, release_rented
from rollouts.infra.providers.ssh import open_ssh_session, provision_ssh, release_ssh
from rollouts.infra.session import Session

Say = Callable[[str], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """The functions of a kind of node."""

    provision: Callable[[Any, Path, str, Say], Node]  # Any: each has settings of a type of its own
    release: Callable[[Node], None]
    open_session: Callable[[Node], Session]


NODE_KINDS: Mapping[str, NodeKind] = {
    "local": NodeKind(
        provision=lambda settings, store, run_id, say: provision_local(settings, store),
        release=release_local,
        open_session=open_local_session,
    ),
    "ssh": NodeKind(
        provision=lambda settings, store, run_id, say: provision_ssh(settings, store),
        release=release_ssh,
        open_session=open_ssh_session,
    ),
    "instance": NodeKind(
        provision=lambda settings, store, run_id, say: provision_instance(settings, store, say),
        release=release_instance,
        open_session=open_instance_session,
    ),
    "rented": NodeKind(provision=provision_rented, release=release_rented, open_session=open_rented_session),
}


def provision_node(settings: NodeSettings, store: Path, *, run_id: str = "", say: Say = logger.info) -> Node:
    """A node that answers to the settings.

    Args:
        store: where run directories lie when the settings do not say.
        run_id: who wants it; what is rented is rented for this run.
        say: told what happens meanwhile.
    """
    return NODE_KINDS[settings.kind].provision(settings, store, run_id, say)


def release_node(node: Node) -> None:
    """Give the node back; harmless when it is gone already."""
    NODE_KINDS[node.kind].release(node)


def open_session(node: Node) -> Session:
    """A session on the node, to be used in a `with` block.

    Raises:
        PermanentInfraError: there is no machine, because nothing was left to do on one.
    """
    if node.kind == NO_NODE:
        raise PermanentInfraError(
            "no machine was rented, because every stage was finished when the run began, and one of them is not any "
            "more: start the run again"
        )
    return NODE_KINDS[node.kind].open_session(node)
