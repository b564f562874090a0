"""Pins that an infra error is transient or permanent and arrives in another process as it was raised.

Without it a retry policy has nothing to decide on, or a worker dies while it reports why something failed.
"""

import pickle

import pytest

from rollouts.infra.errors import (
    BannedError,
    CommandFailedError,
    CommandTimeoutError,
    CompletedCommand,
    DiskFullError,
    FileMissingError,
    HostKeyError,
    InfraError,
    JobFailedError,
    JobLostError,
    KeyAgentError,
    LedgerUnwritableError,
    LoginError,
    LoginShellError,
    MachineGoneError,
    MissingKeyError,
    NameUnknownError,
    NodeUnreachableError,
    NoMachineError,
    ObjectDamagedError,
    ObjectMissingError,
    OfferGoneError,
    PermanentInfraError,
    ProviderRefusedError,
    ProviderUnavailableError,
    RequestCutError,
    StillRentedError,
    StoreRefusedError,
    StoreUnavailableError,
    TransientInfraError,
    UnclearAnswerError,
)

FAILED = CompletedCommand(argv=("nvidia-smi", "-q x"), exit_code=9, stdout=b"", stderr=b"no driver\n")
ERRORS = [
    TransientInfraError("again"),
    PermanentInfraError("never"),
    CommandTimeoutError(("sleep", "9"), 1.5),
    CommandFailedError(FAILED),
    FileMissingError("/a"),
    DiskFullError("/a", 5),
    JobFailedError("/runs/sft", 2, 1, "it failed"),
    JobLostError("/runs/sft", 2, "the node was rebooted"),
    NodeUnreachableError("a@h:22", "timed out"),
    BannedError("a@h:22", "kex_exchange_identification: read: Connection reset by peer", "jump"),
    RequestCutError("a@h:22", "the connection broke"),
    KeyAgentError("a@h:22", "it refuses"),
    LoginShellError("a@h:22", "code 1: no", "/usr/bin/python3"),
    NameUnknownError("h"),
    HostKeyError("h", "SHA256:x", "that key is unconfirmed"),
    LoginError("a@h:22", "no key"),
    ProviderUnavailableError("away"),
    OfferGoneError("sold"),
    UnclearAnswerError("no answer"),
    NoMachineError("nothing"),
    StillRentedError("m1"),
    LedgerUnwritableError("full"),
    ProviderRefusedError("401"),
    MissingKeyError("RUNPOD_API_KEY"),
    MachineGoneError("taken"),
    StoreUnavailableError("away"),
    StoreRefusedError("403"),
    ObjectMissingError("404"),
    ObjectDamagedError("another one"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_and_is_of_exactly_one_kind(error: InfraError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error) and vars(copy) == vars(error)
    assert isinstance(error, TransientInfraError) != isinstance(error, PermanentInfraError)


def test_a_failed_command_says_what_it_was_and_what_it_wrote() -> None:
    assert str(CommandFailedError(FAILED)) == "`nvidia-smi '-q x'` ended with code 9: no driver"
