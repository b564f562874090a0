"""Release machines. A machine counts as released once its provider no longer has it; a request to end it is not enough.

    end requested ── looked up, by its id and in the list ── missing twice in a row ── row closed
                       | still there, or the provider unreachable, for too long: the row stays open, StillRentedError

The end is requested even if the ledger cannot be written, because the machine costs money also when the disk is full.
After a failed write, the machine's row stays open until a later check can write to the ledger.

Not here: renting (provision.py), the cleanup of machines that no run needs (reaper.py).
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from rollouts.infra.cloud import PATIENT, Cloud, Pace, look_up
from rollouts.infra.clouds import CloudName
from rollouts.infra.errors import InfraError, PermanentInfraError, StillRentedError, TransientInfraError
from rollouts.infra.ledger import Ledger
from rollouts.infra.offers import InstanceStatus
from rollouts.infra.renting.rentals import Rental, RentalState, change_rental, find_rental

FOUND_NOTE = "found by its name"
"""Note in the row of a machine that was found by its name after an unclear answer to its creation."""
_SIGHTINGS = 2
"""A machine counts as gone after it was missing this many times in a row."""

logger = logging.getLogger(__name__)


def release_machines(
    rentals: Sequence[Rental],
    ledger: Ledger,
    clouds: Mapping[CloudName, Cloud],
    *,
    note: str = "",
    pace: Pace = PATIENT,
) -> list[Rental]:
    """Release several machines like `release_machine`. The end of every machine is requested before the first wait.

    Raises:
        StillRentedError: a machine may still be rented. Raised for the first of these machines, after all machines were
            handled.
        TransientInfraError: all machines are gone, but the ledger could not be written.
    """
    gone, problems = _release_each(rentals, ledger, clouds, note=note, pace=pace)
    if problems:
        raise next((each for each in problems if isinstance(each, StillRentedError)), problems[0])
    return gone


def release_all(
    rentals: Sequence[Rental],
    ledger: Ledger,
    clouds: Mapping[CloudName, Cloud],
    *,
    note: str = "",
    pace: Pace = PATIENT,
) -> list[str]:
    """Release machines. A machine whose creation is unconfirmed is released if it appears.

    Returns:
        A sentence per released machine, and a sentence per machine that may still be rented.
    """
    known, left = [], []
    for rental in rentals:
        try:
            is_lost = rental.state is RentalState.INTENDED
            found = find_unconfirmed(rental, clouds[rental.provider], pace) if is_lost else rental
            reason = "it has not appeared yet"
        except InfraError as error:
            found, reason = None, str(error)
        if found is None:
            left.append(
                f"{rental.name} was requested at {rental.provider} and may be rented ({reason}): `rollouts reap` finds "
                "and ends it"
            )
        else:
            known.append(found)
    gone, problems = _release_each(known, ledger, clouds, note=note, pace=pace)
    return [*(f"gave back {rental.name} at {rental.provider}" for rental in gone), *map(str, problems), *left]


def _release_each(
    rentals: Sequence[Rental], ledger: Ledger, clouds: Mapping[CloudName, Cloud], *, note: str, pace: Pace
) -> tuple[list[Rental], list[InfraError]]:
    """Release the machines one after another. Returns the rows of released machines, and the errors of the others."""
    for rental in rentals if len(rentals) > 1 else ():
        try:
            clouds[rental.provider].terminate(rental.instance_id)
        except InfraError as error:  # the request in the second loop reports the error
            logger.info("%s is asked to end again: %s", rental.name, error)
    gone, problems = list[Rental](), list[InfraError]()
    for rental in rentals:
        try:
            gone.append(release_machine(rental, ledger, clouds[rental.provider], note=note, pace=pace))
        except InfraError as error:
            problems.append(error)
    return gone, problems


def release_machine(
    rental: Rental, ledger: Ledger, cloud: Cloud, *, note: str = "", is_unfit: bool = False, pace: Pace = PATIENT
) -> Rental:
    """End the machine, and return its row once the provider no longer has the machine. The call is idempotent.

    Args:
        is_unfit: whether the machine was unusable. An unusable machine is not rented again for a while.

    Raises:
        StillRentedError: the provider still has the machine, or does not answer. The row of the machine stays open for
            a later check.
        TransientInfraError: the machine is gone, but the ledger could not be written.
    """
    try:
        releasing = _note_releasing(rental, ledger, note=note, is_unfit=is_unfit)
    except InfraError as error:
        end_unnoted(rental, cloud, error, pace=pace)
    if releasing.state.is_over:
        return releasing
    _end_and_verify(releasing, cloud, pace)
    try:
        with ledger.transaction():
            gone = change_rental(ledger, releasing, state=RentalState.GONE, ended_at=time.time())
            ledger.drop_leases_on(releasing.name)  # the machine's jobs have ended with the machine
    except InfraError as error:
        raise _not_noted(releasing, error) from error
    logger.info("gave back %s at %s", releasing.name, releasing.provider)
    return gone or replace(releasing, state=RentalState.GONE)


def end_unnoted(rental: Rental, cloud: Cloud, problem: InfraError, *, pace: Pace = PATIENT) -> NoReturn:
    """End a machine whose row cannot be written. Always raises an error, because the row is still open.

    Args:
        problem: the ledger's error.

    Raises:
        StillRentedError: the provider still has the machine, or does not answer.
        TransientInfraError: the machine is gone.
    """
    _end_and_verify(rental, cloud, pace)
    raise _not_noted(rental, problem) from problem


def _not_noted(rental: Rental, problem: InfraError) -> TransientInfraError:
    return TransientInfraError(
        f"{rental.name} at {rental.provider} is given back, but the ledger still has it as rented ({problem}): run "
        "`rollouts reap` when the ledger can be written again"
    )


def _note_releasing(rental: Rental, ledger: Ledger, *, note: str, is_unfit: bool) -> Rental:
    """Mark a machine's row as releasing, before the end is requested. Returns the row. A closed row stays unchanged."""
    current = find_rental(ledger, rental.name)
    assert current is not None, f"{rental.name} is not in the ledger"
    if current.state.is_over:
        return current
    instance_id = current.instance_id or rental.instance_id
    assert instance_id, f"the provider's id of {current.name} is unknown"
    releasing = change_rental(
        ledger,
        current,
        state=RentalState.RELEASING,
        instance_id=instance_id,
        rented_at=current.rented_at or current.intended_at,
        note=note or current.note,
        is_unfit=is_unfit or current.is_unfit,
    )
    return releasing or _note_releasing(rental, ledger, note=note, is_unfit=is_unfit)  # another process changed the row


def _end_and_verify(rental: Rental, cloud: Cloud, pace: Pace) -> None:
    """End the machine, and any other machine of the same name. A proxy in front of an API may have sent the creation
    request twice."""
    _end_one(rental, cloud, pace)
    try:
        listed = cloud.list_named(rental.name)
    except InfraError as error:
        raise StillRentedError(
            f"{rental.name} is gone, but a second machine of that name may be rented: {error}. `rollouts reap` checks"
        ) from error
    for each in listed:
        if each.name == rental.name and each.id != rental.instance_id and each.status is not InstanceStatus.GONE:
            logger.warning("%s is also the name of %s at %s, which is ended, too", each.name, each.id, each.provider)
            _end_one(replace(rental, instance_id=each.id), cloud, pace)


def _end_one(rental: Rental, cloud: Cloud, pace: Pace) -> None:
    assert rental.instance_id, f"the provider's id of {rental.name} is unknown"
    started, patience_s = time.monotonic(), pace.gone_within_s
    num_absent = 0
    problem = "its provider still has it"
    while num_absent < _SIGHTINGS:
        try:
            failure = None if num_absent else _ask_to_end(rental, cloud)
            status = status_of(rental, cloud)
            num_absent = num_absent + 1 if status is InstanceStatus.GONE else 0
            if failure and status not in (InstanceStatus.ENDING, InstanceStatus.GONE):
                problem = str(failure)
                patience_s = pace.refused_within_s if isinstance(failure, PermanentInfraError) else patience_s
        except InfraError as error:
            num_absent, problem = 0, str(error)
            if isinstance(error, PermanentInfraError):
                patience_s = 0.0
        if num_absent == _SIGHTINGS:
            return
        if time.monotonic() - started > patience_s:
            raise StillRentedError(
                f"{rental.name} ({rental.instance_id} at {rental.provider}, {rental.usd_per_hour:.2f} USD/h) may still "
                f"be rented: {problem}. End it by `rollouts reap`, or on the provider's own pages"
            )
        time.sleep(pace.poll_s)


def _ask_to_end(rental: Rental, cloud: Cloud) -> InfraError | None:
    """Request a machine's end. A provider's error is returned, not raised, because some providers refuse the request
    for machines that are ending or gone."""
    try:
        cloud.terminate(rental.instance_id)
    except InfraError as error:
        return error
    return None


def status_of(rental: Rental, cloud: Cloud) -> InstanceStatus:
    """Return the status of a machine. GONE if the provider has the machine neither under its id nor in its list."""
    instance = look_up(cloud, rental.instance_id, rental.name)
    return InstanceStatus.GONE if instance is None else instance.status


def find_unconfirmed(rental: Rental, cloud: Cloud, pace: Pace) -> Rental | None:
    """Look up a machine whose creation is unconfirmed, by its name.

    Returns:
        The machine's row with the found id, which the caller has to write into the ledger, or None if the provider
        lists no machine of this name.

    Raises:
        ProviderUnavailableError: the provider does not answer.
    """
    for pause_s in pace.looks_s:
        time.sleep(pause_s)
        for instance in cloud.list_named(rental.name):
            if instance.name == rental.name and instance.status is not InstanceStatus.GONE:
                return replace(rental, instance_id=instance.id)
    return None
