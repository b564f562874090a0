"""End rented machines that no run needs, by comparing the lists of all providers with the ledger. The rules:

    named for this ledger    its run is alive, and it has not expired          kept
                             its run failed and keeps it for a while           kept until that time is over
                             its run died, and it has not expired              ended, or kept for a next start (`spare`)
                             its run died or failed, and the machine stopped   ended
                             it has expired, or the ledger has no row of it    ended
    named for another ledger another store rents it                            shown; ended only if that ledger is named
    named otherwise          it does not belong to this project                never touched
    a row without a machine  looked up again; after an hour it counts as never created

Several checks may run at the same time: by hand, by a schedule, at the start of runs. The check that changes a
machine's row first handles the machine. A provider that does not answer is reported as a failure, because its machines
are unknown. If the ledger's disk is full, machines are ended without writing to the ledger.

Not here: renting (provision.py) and releasing (release.py).
"""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rollouts.infra.cloud import PATIENT, Cloud, Pace
from rollouts.infra.clouds import CloudName
from rollouts.infra.errors import InfraError, LedgerUnwritableError, PermanentInfraError, ProviderUnavailableError
from rollouts.infra.ledger import Ledger
from rollouts.infra.offers import Instance, InstanceStatus
from rollouts.infra.renting.release import FOUND_NOTE, end_unnoted, find_unconfirmed, release_machine, status_of
from rollouts.infra.renting.rentals import (
    NAME,
    NAME_PREFIX,
    NEVER_SEEN,
    Rental,
    RentalState,
    change_rental,
    find_rental,
    in_utc,
    note_found,
    open_rentals,
)

UNSEEN_AFTER_S = 3600.0
"""A requested machine that has not appeared after this many seconds counts as not created. If the machine appears
later, the reaper ends it."""

_BEING_CHANGED = "another process ends it or takes it over at this moment"

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ReapReport:
    """The results of a check: one line per machine."""

    ended: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    """Machines in use, or spared for the next start."""
    foreign: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Machines that could not be checked or ended."""

    def add(self, other: "ReapReport") -> None:
        self.ended += other.ended
        self.kept += other.kept
        self.foreign += other.foreign
        self.failures += other.failures


def reap(
    ledger: Ledger,
    clouds: Mapping[CloudName, Cloud],
    *,
    spare: bool = False,
    other_ledger: str = "",
    credentials: str = "",
    pace: Pace = PATIENT,
) -> ReapReport:
    """End every machine of this ledger in the given accounts that no run needs.

    Args:
        credentials: name of the accounts' credentials. Machines of other credentials are skipped.
        spare: keep a dead run's machines, which the next start may take over, until shortly before they expire.
            Machines of failed runs are always kept until their `kept_until`.
        other_ledger: identity of another ledger, for example of a deleted store. The machines of that ledger are ended
            too.
    """
    report = ReapReport()
    for name, cloud in clouds.items():
        try:
            listed = cloud.list_named(NAME_PREFIX)
        except InfraError as error:
            report.failures.append(str(error))
            continue
        for instance in listed:
            with _failures_noted(report):
                _judge_instance(
                    instance,
                    ledger,
                    cloud,
                    report,
                    spare=spare,
                    other_ledger=other_ledger,
                    credentials=credentials,
                    pace=pace,
                )
        names = {instance.name for instance in listed if instance.status is not InstanceStatus.GONE}
        for rental in _rentals_by(credentials, ledger):
            if rental.provider == name and rental.name not in names:
                with _failures_noted(report):
                    _judge_unlisted(rental, ledger, cloud, report, spare=spare, pace=pace)
    without_key = [rental for rental in _rentals_by(credentials, ledger) if rental.provider not in clouds]
    report.failures += [
        f"{rental.name} at {rental.provider} cannot be checked: the key of that provider is missing"
        for rental in without_key
    ]
    return report


def release_named(name: str, ledger: Ledger, clouds: Mapping[CloudName, Cloud], *, pace: Pace = PATIENT) -> Rental:
    """End one machine of the ledger, even if it is in use. Returns its row.

    Raises:
        PermanentInfraError: the ledger has no such machine.
        StillRentedError: its provider still has the machine.
        ProviderUnavailableError: the machine was requested and has not appeared yet.
    """
    rental = find_rental(ledger, name)
    if rental is None:
        raise PermanentInfraError(f"the ledger has no machine {name}: `rollouts nodes` lists its machines")
    if rental.state.is_over:
        return rental
    cloud = clouds[rental.provider]
    if rental.state is RentalState.INTENDED:
        found = find_unconfirmed(rental, cloud, pace)
        if found is None:
            raise ProviderUnavailableError(f"{name} was requested and has not appeared yet: try again in an hour")
        rental = found
    return release_machine(rental, ledger, cloud, note="ended by hand", pace=pace)


@contextmanager
def _failures_noted(report: ReapReport) -> Iterator[None]:
    try:
        yield
    except InfraError as error:
        report.failures.append(str(error))


def _rentals_by(credentials: str, ledger: Ledger) -> list[Rental]:
    return [rental for rental in open_rentals(ledger) if rental.credentials == credentials]


def _judge_instance(
    instance: Instance,
    ledger: Ledger,
    cloud: Cloud,
    report: ReapReport,
    *,
    spare: bool,
    other_ledger: str,
    credentials: str,
    pace: Pace,
) -> None:
    match = NAME.fullmatch(instance.name)
    if match is None or instance.status is InstanceStatus.GONE:
        return
    rental = find_rental(ledger, instance.name)
    if rental is None and match["ledger"] not in (ledger.identity, other_ledger):
        report.foreign.append(
            f"{instance.name} at {instance.provider}, {instance.status}: of the store {match['ledger']}"
        )
        return
    if rental is None:
        found = _row_of(instance, credentials, asked_at=float(match["epoch"]))
        try:
            rental = note_found(ledger, found)
        except LedgerUnwritableError as error:
            end_unnoted(found, cloud, error, pace=pace)
    began = rental.rented_at or rental.intended_at
    if rental.state.is_over:  # the machine exists, although its row says refused or gone
        current = cloud.get(instance.id)
        if current is not None and current.status is not InstanceStatus.GONE:  # the machine still exists
            # A finished run may still count as alive. The expired time ends the machine also in that case.
            changes = {"instance_id": instance.id, "rented_at": began, "ended_at": None, "expires_at": time.time()}
            _end(rental, ledger, cloud, report, pace=pace, note="it exists all the same", **changes)
    elif rental.state is RentalState.INTENDED and not _reason_to_keep(rental, ledger, spare=False):
        changes = {"instance_id": instance.id, "rented_at": began}
        _end(rental, ledger, cloud, report, pace=pace, note=FOUND_NOTE, **changes)
    else:
        _end_unless_wanted(rental, instance.status, ledger, cloud, report, spare=spare, pace=pace)


def _judge_unlisted(
    rental: Rental, ledger: Ledger, cloud: Cloud, report: ReapReport, *, spare: bool, pace: Pace
) -> None:
    if rental.state is not RentalState.INTENDED:
        _end_unless_wanted(rental, status_of(rental, cloud), ledger, cloud, report, spare=spare, pace=pace)
    elif time.time() - rental.intended_at > UNSEEN_AFTER_S:
        change_rental(ledger, rental, state=RentalState.REFUSED, ended_at=time.time(), note=NEVER_SEEN)
    else:
        report.kept.append(f"{rental.name}: requested, and not seen yet")


def _end_unless_wanted(
    rental: Rental,
    status: InstanceStatus,
    ledger: Ledger,
    cloud: Cloud,
    report: ReapReport,
    *,
    spare: bool,
    pace: Pace,
) -> None:
    reason = _reason_to_keep(rental, ledger, spare=spare)
    # End a stopped machine of a dead run: no start can use it, and it costs money.
    if reason and (status.may_become_usable or not ledger.has_died(rental.run_id)):
        report.kept.append(f"{rental.name}: {rental.state}, of run {rental.run_id}, {reason}")
    else:
        _end(rental, ledger, cloud, report, pace=pace)


def _end(
    rental: Rental,
    ledger: Ledger,
    cloud: Cloud,
    report: ReapReport,
    *,
    pace: Pace,
    **changes: Any,  # values of columns
) -> None:
    """End a machine that no run needs, and report it.

    Args:
        changes: further columns to write into the machine's row.
    """
    # If the row has changed, do nothing: another check ends the machine, or a run has taken it over.
    try:
        claimed = change_rental(ledger, rental, state=RentalState.RELEASING, **changes)
    except LedgerUnwritableError as error:  # no other process can have changed the row, so end the machine anyway
        end_unnoted(replace(rental, **changes), cloud, error, pace=pace)
    if claimed is None:
        report.kept.append(f"{rental.name}: {_BEING_CHANGED}")
        return
    release_machine(claimed, ledger, cloud, note="ended by the reaper", pace=pace)
    report.ended.append(f"{rental.name} at {rental.provider}, {rental.gpu}")


def _reason_to_keep(rental: Rental, ledger: Ledger, *, spare: bool) -> str:
    """Return why a machine is kept, or "" if no run needs the machine."""
    now = time.time()
    if rental.expires_at <= now:
        return ""
    if rental.is_kept and not ledger.is_alive(rental.run_id):  # a live run is about to take back its kept machine
        until = f"which failed and keeps it until {in_utc(rental.ends_at)}: `rollouts nodes release` ends it now"
        return until if rental.ends_at > now else ""
    if not ledger.has_died(rental.run_id):
        return "which lives"  # the run is renting, using or releasing the machine
    if not spare or rental.state is not RentalState.READY or rental.taken_until <= now:
        return ""
    return f"whose next start may take it until {in_utc(rental.taken_until)}"


def _row_of(instance: Instance, credentials: str, *, asked_at: float) -> Rental:
    """Return an expired row for a machine that has this ledger's name but no row.

    Args:
        asked_at: time of the request, from the machine's name. The machine has cost money since this time.
    """
    now = time.time()
    began = min(asked_at, now)
    return Rental(
        name=instance.name,
        run_id="",
        provider=instance.provider,
        purpose="",
        credentials=credentials,
        state=RentalState.RENTED,
        instance_id=instance.id,
        gpu="unknown",
        region="",
        usd_per_hour=instance.usd_per_hour or 0.0,
        intended_at=began,
        rented_at=began,
        expires_at=now,
        note="it was not in the ledger",
    )
