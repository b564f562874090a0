"""Find free TCP ports on a node, and report ports that are in use.

Another process may take a free port a moment later. The process that binds the port must therefore handle "address in
use".
"""

import socket

from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.node_agent import ISOLATED
from rollouts.infra.session import LOOPBACK, Session, last_line

_FIND_FREE = """
import socket, sys
with socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET) as probe:
    probe.bind((sys.argv[1], 0))
    sys.stdout.write(str(probe.getsockname()[1]))
"""

# Set SO_REUSEADDR as servers do, so that a port counts as free although connections of an ended server linger.
_IS_FREE = """
import errno, socket, sys
with socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET) as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((sys.argv[1], int(sys.argv[2])))
        sys.stdout.write("free")
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        sys.stdout.write("taken")
"""

_TIMEOUT_S = 30.0
_LOOPBACK_TIMEOUT_S = 5.0


def check_loopback() -> None:
    """Raise PermanentInfraError if the loopback interface of this machine does not work.

    In a new network namespace (`unshare -n`) the loopback interface is down. Connections then hang, or fail after
    minutes.
    """
    with socket.create_server((LOOPBACK, 0)) as listener:
        try:
            socket.create_connection(listener.getsockname(), _LOOPBACK_TIMEOUT_S).close()
        except OSError as error:
            raise PermanentInfraError(
                f"nothing reaches {LOOPBACK} on this machine ({error.strerror or error}): its loopback interface is "
                "down, as in a new network namespace: `ip link set lo up`"
            ) from error


def find_free_port(session: Session, host: str = LOOPBACK) -> int:
    completed = session.run([session.python, ISOLATED, "-c", _FIND_FREE, host], timeout_s=_TIMEOUT_S, may_repeat=True)
    return int(last_line(completed))


def is_port_free(session: Session, host: str, port: int) -> bool:
    """Return whether a server on the node could bind the port now."""
    argv = [session.python, ISOLATED, "-c", _IS_FREE, host, str(port)]
    completed = session.run(argv, timeout_s=_TIMEOUT_S, may_repeat=True)
    return last_line(completed) == "free"


def check_port(session: Session, port: int, host: str = LOOPBACK) -> None:
    """Check that a server on the node could bind the port now. Port 0 is always allowed.

    Raises:
        PermanentInfraError: another process uses the port.
    """
    if port and not is_port_free(session, host, port):
        raise PermanentInfraError(f"port {port} is in use by another process: choose another, or 0 for any free one")
