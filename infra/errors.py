"""Errors of machines. The class of an error says whether a retry can help.

    InfraError
    ├── TransientInfraError       the same call may succeed later
    │   ├── CommandTimeoutError
    │   ├── NodeUnreachableError
    │   │   ├── BannedError
    │   │   ├── KeyAgentError
    │   │   └── RequestCutError
    │   │       └── LoginShellError
    │   ├── JobLostError
    │   ├── FullGPUError
    │   ├── ProviderUnavailableError
    │   ├── OfferGoneError
    │   ├── UnclearAnswerError
    │   ├── UnfitMachineError
    │   ├── NoMachineError
    │   ├── StillRentedError
    │   ├── LedgerUnwritableError
    │   └── StoreUnavailableError
    └── PermanentInfraError       the call fails until a user changes something
        ├── CommandFailedError
        ├── FileMissingError
        ├── DiskFullError
        ├── NameUnknownError
        ├── HostKeyError
        ├── LoginError
        ├── JobFailedError
        ├── ProviderRefusedError
        ├── MissingKeyError
        ├── MachineGoneError
        ├── BudgetUsedUpError
        ├── StoreRefusedError
        ├── ObjectMissingError
        └── ObjectDamagedError

Every exception has all its arguments in `args`, so that it can be pickled.
"""

import shlex
from dataclasses import dataclass

from rollouts.infra.foreign_text import shown_lines

_SHOWN_STDERR_CHARACTERS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedCommand:
    """Exit code and output of a command on a node."""

    argv: tuple[str, ...]
    exit_code: int
    """0 means success. A negative number is the number of the signal that killed the command."""
    stdout: bytes
    stderr: bytes


class InfraError(Exception):
    """An error of a machine. Only TransientInfraError, PermanentInfraError and their subclasses are raised."""


class TransientInfraError(InfraError):
    """The same call may succeed later without any change of settings."""


class PermanentInfraError(InfraError):
    """The same call fails again until a user changes something."""


class CommandTimeoutError(TransientInfraError):
    """A command on a node did not end in time and was killed."""

    def __init__(self, argv: tuple[str, ...], timeout_s: float) -> None:
        super().__init__(argv, timeout_s)
        self.argv = argv
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return f"`{shlex.join(self.argv)}` did not end within {self.timeout_s:g} s and was killed"


class NodeUnreachableError(TransientInfraError):
    """A node does not answer, or the connection to the node broke. The node's jobs may still be running."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(address, reason)
        self.address = address
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.address} does not answer ({self.reason}): check its address and the network, then try again"


class BannedError(NodeUnreachableError):
    """The SSH server of a node, or of a jump host, refuses connections from this machine's address for some time."""

    def __init__(self, address: str, reason: str, jump: str = "") -> None:
        super().__init__(address, reason)
        self.args = (address, reason, jump)
        self.jump = jump
        """The jump hosts one of which refuses the connection, or "" if the node does."""

    def __str__(self) -> str:
        advice = (
            "OpenSSH ends a ban by itself after some seconds to ten minutes: try again then, or exempt this machine by "
            "PerSourcePenaltyExemptList in the server's sshd_config"
        )
        if self.jump:
            return (
                f"{self.address} is not reached through {self.jump} ({self.reason}): a jump host ends connections like "
                f"this while it bans this machine, because too many logins failed or were under way. {advice}"
            )
        return (
            f"the SSH server of {self.address} refuses connections from this machine for now ({self.reason!r}): too "
            f"many logins failed or were under way. {advice}"
        )


class RequestCutError(NodeUnreachableError):
    """The connection broke before the node's answer arrived. The node may have executed the request, or may still be
    executing it."""


class LoginShellError(RequestCutError):
    """The login shell of a node ended before it ran Python. The node may be starting or overloaded."""

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
    """The SSH agent does not sign with a candidate key: the agent is locked or waits for a user's confirmation."""

    def __str__(self) -> str:
        return f"no login at {self.address}: {self.reason}"


class ProviderUnavailableError(TransientInfraError):
    """A provider of machines gives no usable answer. The caller does not know which machines the provider has."""


class OfferGoneError(TransientInfraError):
    """A provider refused to create an offered machine. Another offer may work."""


class UnclearAnswerError(TransientInfraError):
    """A provider may or may not have created the requested machine."""


class NoMachineError(TransientInfraError):
    """No offer led to a usable machine. Nothing is rented."""


class StillRentedError(TransientInfraError):
    """The provider still lists a machine after the request to end it. The machine may still cost money."""


class LedgerUnwritableError(TransientInfraError):
    """The ledger cannot be written: its disk is full, read-only or broken."""


class JobLostError(TransientInfraError):
    """A job's supervisor died without writing an exit record. The next start begins a new attempt."""

    def __init__(self, run_dir: str, attempt: int, reason: str) -> None:
        super().__init__(run_dir, attempt, reason)
        self.run_dir = run_dir
        self.attempt = attempt
        self.reason = reason

    def __str__(self) -> str:
        return f"attempt {self.attempt} of {self.run_dir} was lost ({self.reason}): start it again to resume"


class FullGPUError(TransientInfraError):
    """A training on several machines ran out of GPU memory. The next attempt of the training needs less GPU memory."""


class CommandFailedError(PermanentInfraError):
    """A command on a node ended with a code other than 0. The field `completed` has the command's output."""

    def __init__(self, completed: CompletedCommand) -> None:
        super().__init__(completed)
        self.completed = completed

    def __str__(self) -> str:
        stderr = shown_lines(self.completed.stderr.decode(errors="replace")).strip()[-_SHOWN_STDERR_CHARACTERS:]
        command = shlex.join(self.completed.argv)
        return f"`{command}` ended with code {self.completed.exit_code}: {stderr or 'it wrote no reason'}"


class FileMissingError(PermanentInfraError):
    """A file does not exist on the node."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path} does not exist on the node"


class DiskFullError(PermanentInfraError):
    """The disk of `path` has too little room."""

    def __init__(self, path: str, needed_bytes: int) -> None:
        super().__init__(path, needed_bytes)
        self.path = path
        self.needed_bytes = needed_bytes

    def __str__(self) -> str:
        return f"the disk of {self.path} is full: {self.needed_bytes} bytes are needed there, free some space"


class NameUnknownError(PermanentInfraError):
    """A host name cannot be resolved, because it does not exist or no name server answers."""


class HostKeyError(PermanentInfraError):
    """A host shows a wrong or unconfirmed key. No login was attempted."""

    def __init__(self, address: str, fingerprint: str, problem: str) -> None:
        super().__init__(address, fingerprint, problem)
        self.address = address
        self.fingerprint = fingerprint
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.address} shows the host key {self.fingerprint}, but {self.problem}"


class LoginError(PermanentInfraError):
    """A node refuses the login, or the login key is unusable."""

    def __init__(self, address: str, problem: str) -> None:
        super().__init__(address, problem)
        self.address = address
        self.problem = problem

    def __str__(self) -> str:
        return f"no login at {self.address}: {self.problem}"


class JobFailedError(PermanentInfraError):
    """A job ended without writing result.json."""

    def __init__(self, run_dir: str, attempt: int, exit_code: int, message: str) -> None:
        super().__init__(run_dir, attempt, exit_code, message)
        self.run_dir = run_dir
        self.attempt = attempt
        self.exit_code = exit_code
        self.message = message

    def __str__(self) -> str:
        return f"attempt {self.attempt} of {self.run_dir} ended with code {self.exit_code}: {self.message}"


class ProviderRefusedError(PermanentInfraError):
    """A provider refuses the API key, the account or the request."""


class MissingKeyError(PermanentInfraError):
    """No environment variable has the API key of a provider."""


class MachineGoneError(PermanentInfraError):
    """A rented machine and its jobs are gone. The same command, run again, uses another machine."""


class UnfitMachineError(TransientInfraError):
    """A new machine is unusable, and waiting does not help. Another machine may work."""


class BudgetUsedUpError(PermanentInfraError):
    """The work on a rented machine was ended because the machine's hours or the run's money are nearly used up."""

    def __init__(self, machine: str) -> None:
        super().__init__(machine)
        self.machine = machine

    def __str__(self) -> str:
        return (
            f"the work on {self.machine} was ended, because its hours (node.max_hours), the run's money (node.max_usd) "
            "or its provider's time limit are nearly used up: with more of them, the same command continues from the "
            "last checkpoint"
        )


class StoreUnavailableError(TransientInfraError):
    """An object store does not answer, or data arrived incomplete."""


class StoreRefusedError(PermanentInfraError):
    """An object store refuses the credentials, the bucket or the request, or its driver is not installed."""


class ObjectMissingError(PermanentInfraError):
    """An object store has no object at the requested URL."""


class ObjectDamagedError(PermanentInfraError):
    """An object differs from the manifest of its folder."""
