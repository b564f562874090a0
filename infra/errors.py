"""What can go wrong with machines, sorted by the one question a caller has: can a retry help?

    InfraError
    ├── TransientInfraError       the same call may succeed later
    │   ├── CommandTimeoutError   a command on a node did not end in time
    │   ├── NodeUnreachableError  a node does not answer; whatever runs there may well run on
    │   │   ├── BannedError       its SSH server takes no connections from here for a while
    │   │   ├── KeyAgentError     the SSH agent does not sign with a key that might let us in
    │   │   └── RequestCutError   the connection broke before the answer
    │   │       └── LoginShellError   what a node begins at a login ended before it ran Python
    │   ├── JobLostError          a job's supervisor is gone (reboot, kill -9); starting again is the next attempt
    │   ├── ProviderUnavailableError  a provider of machines gives no usable answer
    │   ├── OfferGoneError        a provider did not create the machine that it offered; nothing was created
    │   ├── UnclearAnswerError    a provider may or may not have created a machine
    │   ├── UnfitMachineError     a fresh machine will not do; another one may
    │   ├── NoMachineError        no offer led to a machine that can be used
    │   ├── StillRentedError      a machine is not gone although its end was asked for; it may cost money
    │   ├── LedgerUnwritableError nothing can be written into the ledger: its disk is full, or broken
    │   └── StoreUnavailableError an object store does not answer, or what was sent did not arrive whole
    └── PermanentInfraError       somebody has to change something first
        ├── CommandFailedError    a command on a node ended with another code than 0
        ├── FileMissingError      a file on a node does not exist
        ├── DiskFullError         a node's disk has no room
        ├── NameUnknownError      nobody knows a host by its name
        ├── HostKeyError          a host shows another key than it should
        ├── LoginError            a node does not let us in, or our key cannot be used
        ├── JobFailedError        a job ended without its result.json
        ├── ProviderRefusedError  a provider refuses the key, the account or the request
        ├── MissingKeyError       the key of a provider is in no environment variable
        ├── MachineGoneError      a rented machine is no more; the same command goes on with another one
        ├── BudgetUsedUpError     work on a rented machine was ended before its hours or its money were used up
        ├── StoreRefusedError     an object store refuses the credentials, the bucket or the request
        ├── ObjectMissingError    an object store has nothing at a URL
        └── ObjectDamagedError    an object is not the one that its manifest lists

Every exception keeps all its arguments in `args`, so it survives pickling.
"""

import shlex
from dataclasses import dataclass

from infra.foreign_text import shown_lines

_SHOWN_STDERR_CHARACTERS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedCommand:
    """How a command on a node ended, and everything it wrote."""

    argv: tuple[str, ...]
    exit_code: int
    """0 is success; a negative number is the signal that killed it."""
    stdout: bytes
    stderr: bytes


class InfraError(Exception):
    """Something about a machine went wrong; raised only as one of its two kinds."""


class TransientInfraError(InfraError):
    """The same call may succeed later, without anybody changing anything."""


class PermanentInfraError(InfraError):
    """The same call will fail again until somebody changes something."""


class CommandTimeoutError(TransientInfraError):
    """A command on a node did not end in time and was killed."""

    def __init__(self, argv: tuple[str, ...], timeout_s: float) -> None:
        super().__init__(argv, timeout_s)
        self.argv = argv
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return f"`{shlex.join(self.argv)}` did not end within {self.timeout_s:g} s and was killed"


class NodeUnreachableError(TransientInfraError):
    """A node does not answer, or the connection to it broke; never taken for the end of what runs there."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(address, reason)
        self.address = address
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.address} does not answer ({self.reason}): check its address and the network, then try again"


class BannedError(NodeUnreachableError):
    """A node's SSH server takes no connections from this address for a while."""

    def __str__(self) -> str:
        return (
            f"the SSH server of {self.address} takes no connection from this machine for now ({self.reason!r}): too "
            "many logins failed or were under way. OpenSSH ends a ban by itself after some seconds to ten minutes: try "
            "again then, or exempt this machine by PerSourcePenaltyExemptList in the server's sshd_config"
        )


class RequestCutError(NodeUnreachableError):
    """The connection broke before the answer; what was asked for may have happened, or happen now."""


class LoginShellError(RequestCutError):
    """What a node begins at a login ended before it ran Python; it may be about to start, or to be full."""

    def __init__(self, address: str, reason: str, python: str) -> None:
        super().__init__(address, reason)
        self.args = (address, reason, python)
        self.python = python

    def __str__(self) -> str:
        return (
            f"{self.address} lets us in and does not run {self.python} ({self.reason}): log in as this user by hand "
            "and run it; it has to be Python 3.10 or newer"
        )


class KeyAgentError(NodeUnreachableError):
    """The SSH agent does not sign with a key that might do: it is locked, or asks a person, who may come back."""

    def __str__(self) -> str:
        return f"no login at {self.address}: {self.reason}"


class ProviderUnavailableError(TransientInfraError):
    """A provider of machines gives no usable answer; what it has is unknown, not nothing."""


class OfferGoneError(TransientInfraError):
    """A provider did not create the machine that it offered, and nothing was created; another offer may work."""


class UnclearAnswerError(TransientInfraError):
    """A provider was asked to create a machine, and nobody knows whether it did."""


class NoMachineError(TransientInfraError):
    """No offer led to a machine that can be used; nothing is rented."""


class StillRentedError(TransientInfraError):
    """The end of a machine was asked for, and its provider still has it: it may cost money."""


class LedgerUnwritableError(TransientInfraError):
    """Nothing can be written into the ledger, by nobody: its disk is full, read-only or broken."""


class JobLostError(TransientInfraError):
    """A job's supervisor is gone without having written how the job ended."""

    def __init__(self, run_dir: str, attempt: int, reason: str) -> None:
        super().__init__(run_dir, attempt, reason)
        self.run_dir = run_dir
        self.attempt = attempt
        self.reason = reason

    def __str__(self) -> str:
        return f"attempt {self.attempt} of {self.run_dir} was lost ({self.reason}): start it again to resume"


class CommandFailedError(PermanentInfraError):
    """A command on a node ended with another code than 0; `completed` says what it wrote."""

    def __init__(self, completed: CompletedCommand) -> None:
        super().__init__(completed)
        self.completed = completed

    def __str__(self) -> str:
        stderr = shown_lines(self.completed.stderr.decode(errors="replace")).strip()[-_SHOWN_STDERR_CHARACTERS:]
        command = shlex.join(self.completed.argv)
        return f"`{command}` ended with code {self.completed.exit_code}: {stderr or 'it wrote no reason'}"


class FileMissingError(PermanentInfraError):
    """A file that was to be read does not exist on the node."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path} does not exist on the node"


class DiskFullError(PermanentInfraError):
    """The disk under `path` has no room for what was to be written there."""

    def __init__(self, path: str, needed_bytes: int) -> None:
        super().__init__(path, needed_bytes)
        self.path = path
        self.needed_bytes = needed_bytes

    def __str__(self) -> str:
        return f"the disk of {self.path} is full: {self.needed_bytes} bytes are needed there, free some space"


class NameUnknownError(PermanentInfraError):
    """Nobody knows a host by its name: there is none, or whoever knows it cannot be asked."""


class HostKeyError(PermanentInfraError):
    """A host shows a key that is not the right one, or that nobody has confirmed; nothing was sent to it."""

    def __init__(self, address: str, fingerprint: str, problem: str) -> None:
        super().__init__(address, fingerprint, problem)
        self.address = address
        self.fingerprint = fingerprint
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.address} shows the host key {self.fingerprint}, but {self.problem}"


class LoginError(PermanentInfraError):
    """A node does not let us in, or our key cannot be used."""

    def __init__(self, address: str, problem: str) -> None:
        super().__init__(address, problem)
        self.address = address
        self.problem = problem

    def __str__(self) -> str:
        return f"no login at {self.address}: {self.problem}"


class JobFailedError(PermanentInfraError):
    """A job ended without the result.json that would mean success."""

    def __init__(self, run_dir: str, attempt: int, exit_code: int, message: str) -> None:
        super().__init__(run_dir, attempt, exit_code, message)
        self.run_dir = run_dir
        self.attempt = attempt
        self.exit_code = exit_code
        self.message = message

    def __str__(self) -> str:
        return f"attempt {self.attempt} of {self.run_dir} ended with code {self.exit_code}: {self.message}"


class ProviderRefusedError(PermanentInfraError):
    """A provider refuses the key, the account or the request."""


class MissingKeyError(PermanentInfraError):
    """The key of a provider is in no environment variable."""


class MachineGoneError(PermanentInfraError):
    """A rented machine is no more, and what ran on it neither; starting again goes on with another one."""


class UnfitMachineError(TransientInfraError):
    """A fresh machine will not do, and waiting does not help; another one may."""


class BudgetUsedUpError(PermanentInfraError):
    """What a run did on a rented machine was ended, because its time or the run's money are nearly used up."""

    def __init__(self, machine: str) -> None:
        super().__init__(machine)
        self.machine = machine

    def __str__(self) -> str:
        return (
            f"the work on {self.machine} was ended, because its hours (node.max_hours), the run's money (node.max_usd) "
            "or the time for which its provider lends it are nearly used up: started with more of them, it goes on "
            "from the last checkpoint"
        )


class StoreUnavailableError(TransientInfraError):
    """An object store does not answer, or what was sent or fetched did not arrive whole."""


class StoreRefusedError(PermanentInfraError):
    """An object store refuses the credentials, the bucket or the request, or its driver is not installed."""


class ObjectMissingError(PermanentInfraError):
    """An object store has nothing at a URL."""


class ObjectDamagedError(PermanentInfraError):
    """An object is not the one that the manifest of its folder lists."""
