"""This machine as a node: nothing to rent, nothing to release."""

import logging
import sys
from pathlib import Path

from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.node import LocalNode, Node
from rollouts.infra.session import LocalSession, Session

logger = logging.getLogger(__name__)


def provision_local(settings: LocalNode, store: Path) -> Node:
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
    return Node(name="local", provider="local", root=str(root), python=settings.python or sys.executable)


def release_local(node: Node) -> None:
    """Leave this machine as it is."""
    logger.info("kept %s: %s is this machine", node.root, node.name)


def open_local_session(node: Node) -> Session:
    """A session on this machine."""
    return LocalSession(node.python)
