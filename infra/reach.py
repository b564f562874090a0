"""Find a node's own address, and check before a run that two nodes can reach each other's ports.

node A     listens at its address
node B     listens at its own address towards A, connects to A, and sends A the port
node A     connects back to B at this port, and sends the result
"""

from rollouts.infra.errors import CommandFailedError, CommandTimeoutError, PermanentInfraError
from rollouts.infra.node import Node
from rollouts.infra.node_agent import ISOLATED
from rollouts.infra.session import Session, last_line

PATIENCE_S = 10.0
"""Time limit of one connection in seconds."""
CALL_TIMEOUT_S = 3 * PATIENCE_S

_LISTEN = """
import socket, sys
address, patience_s = sys.argv[1], float(sys.argv[2])
family = socket.AF_INET6 if ":" in address else socket.AF_INET
try:
    listener = socket.create_server((address, 0), family=family)
except OSError as error:
    sys.exit(f"nothing can listen there: {error.strerror}")
listener.settimeout(2 * patience_s)
print(listener.getsockname()[1], flush=True)
peer, place = listener.accept()
peer.settimeout(patience_s)
port = int(peer.makefile().readline())
try:
    socket.create_connection((place[0], port), patience_s).close()
    peer.sendall(b"both ways")
except OSError as error:
    peer.sendall(f"{place[0]}:{port} does not answer: {error}".encode())
"""
_OWN_ADDRESS = """
import socket
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
probe.connect(("192.0.2.1", 9))  # an address for documentation: this sends nothing
print(probe.getsockname()[0])
"""
_CONNECT = """
import socket, sys
address, port, patience_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
try:
    peer = socket.create_connection((address, port), patience_s)
except OSError as error:
    sys.exit(f"{address}:{port} does not answer: {error}")
own = peer.getsockname()[0]
listener = socket.create_server((own, 0), family=peer.family)
peer.settimeout(2 * patience_s)
peer.sendall(f"{listener.getsockname()[1]}\\n".encode())
answer = peer.makefile().read()
if answer != "both ways":
    sys.exit(answer or "it ended the connection")
"""


def own_address(session: Session) -> str:
    """Return the IP address of the node's network interface that has the default route.

    Raises:
        PermanentInfraError: the node has no default route.
    """
    try:
        completed = session.run(
            [session.python, ISOLATED, "-c", _OWN_ADDRESS], timeout_s=CALL_TIMEOUT_S, may_repeat=True
        )
    except CommandFailedError as error:
        raise PermanentInfraError(f"the machine has no address of its own ({_reason(error)})") from error
    return last_line(completed).strip()


def check_both_ways(session: Session, node: Node, further: Session, further_node: Node) -> None:
    """Check that each of the two nodes can connect to a port of the other node.

    Raises:
        PermanentInfraError: a connection failed.
    """
    listen = [further.python, ISOLATED, "-c", _LISTEN, further_node.address, str(PATIENCE_S)]
    try:
        with further.stream(listen) as lines:
            port = next(lines).decode().strip()
            connect = [session.python, ISOLATED, "-c", _CONNECT, further_node.address, port, str(PATIENCE_S)]
            session.run(connect, timeout_s=CALL_TIMEOUT_S)
    except (CommandFailedError, CommandTimeoutError, StopIteration) as error:
        raise PermanentInfraError(
            f"{node.name} and {further_node.name} do not reach each other by {further_node.address} "
            f"({_reason(error)}): give the address of a shared network, and open all ports between them"
        ) from error


def _reason(error: Exception) -> str:
    said = error.completed.stderr.decode(errors="replace").strip() if isinstance(error, CommandFailedError) else ""
    return said.rpartition("\n")[2] or str(error) or "it said nothing"
