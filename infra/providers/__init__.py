"""Provision a node from its settings, open sessions on the node, and release the node. `NODE_KINDS` has an entry for
each kind of node.

    settings --provision_node--> Node --open_session--> Session ... Node --release_node--> gone

Not here: the providers of rented machines (infra/clouds.py). All rented machines are one kind of node.
"""

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.node import NO_NODE, LocalNode, Node, NodeSettings
from rollouts.infra.providers.instance import open_instance_session, provision_instance, release_instance
from rollouts.infra.providers.rented import open_rented_session, provision_rented, release_rented
from rollouts.infra.providers.ssh import open_ssh_session, provision_ssh, release_ssh
from rollouts.infra.session import LocalSession, Session


def _provision_local(settings: LocalNode, store: Path) -> Node:
    """Return the node of this machine, and create the directory for the runs.

    Raises:
        PermanentInfraError: the directory cannot be created.
    """
    root = (Path(settings.root) if settings.root else store).expanduser().absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PermanentInfraError(
            f"the directory {root} for the runs cannot be created ({error.strerror}): choose another root"
        ) from error
    return Node(name="local", kind="local", root=str(root), python=settings.python or sys.executable)


def _release_local(node: Node) -> None:
    logger.info("kept %s: %s is this machine", node.root, node.name)


def _open_local_session(node: Node) -> Session:
    return LocalSession(node.python)


Say = Callable[[str], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    provision: Callable[[Any, Path, str, Say], Node]  # Any: each kind has its own type of settings
    release: Callable[[Node], None]
    open_session: Callable[[Node], Session]


NODE_KINDS: Mapping[str, NodeKind] = {
    "local": NodeKind(
        provision=lambda settings, store, run_id, say: _provision_local(settings, store),
        release=_release_local,
        open_session=_open_local_session,
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
    """Return a node for the settings.

    Args:
        store: parent of the run directories, unless the settings name another directory.
        run_id: the run that uses the node. Machines are rented for this run.
        say: called with progress messages.
    """
    return NODE_KINDS[settings.kind].provision(settings, store, run_id, say)


def release_node(node: Node) -> None:
    NODE_KINDS[node.kind].release(node)


def open_session(node: Node) -> Session:
    """Return a session on the node, for use in a `with` block.

    Raises:
        PermanentInfraError: the node is only a placeholder, because no stage needed a machine when the run began.
    """
    if node.kind == NO_NODE:
        raise PermanentInfraError(
            "no machine was rented, because every stage was finished when the run began, but one of them no longer is: "
            "start the run again"
        )
    return NODE_KINDS[node.kind].open_session(node)
