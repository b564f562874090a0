"""The user's own machines, reached over SSH. A run neither rents nor releases these machines.

Not here: the session (ssh/ssh_session.py), the requirements on a machine (bootstrap.py).
"""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.node import HOST, Node, SSHAccess, SSHMachine, SSHNode
from rollouts.infra.node_agent import ISOLATED
from rollouts.infra.session import Session, last_line
from rollouts.infra.ssh.ssh_config import read_ssh_config

_FIRST_USE_FILE = "known_hosts"
_SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"
"""File in which a network's administrators may store host keys. OpenSSH's client reads the file too."""
_PROGRAMS_DIR = "programs"
CALL_TIMEOUT_S = 60.0

_EXPAND = "import json, os, sys; sys.stdout.write(json.dumps(os.path.abspath(os.path.expanduser(sys.argv[1]))))"

logger = logging.getLogger(__name__)


def provision_ssh(settings: SSHNode, store: Path) -> Node:
    """Return the node of the machine, with the further machines that the settings name for trainers and engines.

    Raises:
        NodeUnreachableError, HostKeyError, LoginError: a login failed.
        PermanentInfraError: an interpreter cannot be run, or a `root` is not a usable path.
    """
    node = reach_machine(settings, store)
    trainer_nodes, engine_nodes = (
        tuple(replace(reach_machine(each, store), address=each.reached_at) for each in further)
        for further in (settings.trainer_nodes, settings.engine_nodes)
    )
    return replace(node, trainer_nodes=trainer_nodes, engine_nodes=engine_nodes)


def reach_machine(settings: SSHMachine, store: Path) -> Node:
    """Return the node of one machine. Logs in once, so that login problems show before the run starts.

    Raises:
        NodeUnreachableError, HostKeyError, LoginError: the login failed.
        PermanentInfraError: the machine's interpreter cannot be run, or `root` is not a usable path.
    """
    from rollouts.infra.ssh.ssh_session import SSHSession  # this import loads paramiko

    access = read_access(settings, store)
    with SSHSession(access, python=settings.python, programs_dir="") as session:
        root = expand_root(session, settings.python, settings.root)
        believed_by = session.host_key_evidence.value
    return Node(
        name=access.address,
        kind="ssh",
        root=root,
        python=settings.python,
        mirror=str(store.expanduser().absolute()),
        access=access,
        believed_by=believed_by,
    )


def expand_root(session: Session, python: str, root: str) -> str:
    """Return `root` as an absolute path on the machine.

    Raises:
        PermanentInfraError: the interpreter cannot be run, or the path is unusable.
    """
    completed = session.run([python, ISOLATED, "-c", _EXPAND, root], timeout_s=CALL_TIMEOUT_S, may_repeat=True)
    expanded = str(json.loads(last_line(completed)))
    if expanded == "/":
        raise PermanentInfraError("node.root is /: name a separate directory")
    return expanded


def read_access(settings: SSHMachine, store: Path) -> SSHAccess:
    """Return the parameters for the login from the settings. If `settings.host` is a name without a user, OpenSSH's
    configuration completes the parameters.

    Raises:
        PermanentInfraError: OpenSSH cannot look up the name.
    """
    first_use_file = str(store.expanduser().absolute() / _FIRST_USE_FILE)
    is_usual = settings.known_hosts == type(settings).model_fields["known_hosts"].default
    own = (settings.known_hosts, _SYSTEM_KNOWN_HOSTS) if is_usual else (settings.known_hosts,)
    access = SSHAccess(
        host=settings.place[0],
        port=settings.place[1],
        user="",
        key_file=settings.key_file,
        key_variable=settings.key_variable,
        host_key=settings.host_key,
        known_hosts=(*own, first_use_file),
        first_use_file=first_use_file if settings.trust_first_use else "",
        pinned_file=first_use_file,
        proxy_jump=settings.proxy_jump,
        ssh_config=settings.ssh_config,
    )
    if parts := HOST.fullmatch(settings.host):
        return replace(access, user=parts["user"])
    found = read_ssh_config(settings.host, settings.ssh_config)
    key_files = () if settings.key_file or settings.key_variable else found.key_files
    return replace(
        access,
        host=found.host,
        port=found.port,
        user=found.user,
        key_file=key_files[0] if key_files else settings.key_file,
        further_key_files=key_files[1:],
        known_hosts=(*found.known_hosts, first_use_file) if is_usual else access.known_hosts,
        host_key_alias=found.host_key_alias,
        agent=found.agent,
        proxy_jump=settings.proxy_jump or found.proxy_jump,
    )


def release_ssh(node: Node) -> None:
    logger.info("kept %s: %s is not rented", node.root, node.name)


def open_ssh_session(node: Node, *, find_access: Callable[[], SSHAccess] | None = None) -> Session:
    """Return a session on the machine.

    Args:
        find_access: called before every connection attempt, for a machine whose address may change.
    """
    from rollouts.infra.ssh.ssh_session import SSHSession  # this import loads paramiko

    assert node.access is not None, f"{node.name} has no address"
    programs_dir = f"{node.root}/{_PROGRAMS_DIR}"
    return SSHSession(node.access, python=node.python, programs_dir=programs_dir, find_access=find_access)
