"""End what is rented in our name and wanted by nobody: join the lists of all providers with the ledger.

Not here: renting and giving back (provision.py). Who may be ended:

    named for this ledger   its run lives, and it has not expired            kept
                            its run failed, and keeps it for a while         kept, until that is over
                            its run died, and it has not expired             ended, or kept for the next start (`spare`)
                            its run died or failed, and it runs no more      ended
                            it has expired, or the ledger has no row of it   ended
    named for another one   another store rents it                           shown, ended only when that one is named
    named otherwise         not ours                                         never touched
    a row without machine   looked for again; after an hour it never existed

Several may look at once, by hand, by a schedule and at the start of runs: whoever changes a machine's row first goes on
with it, others leave it. A provider that cannot be asked is a failure of its own in the report: what it has is unknown,
not nothing. Where the ledger can be read and not written, for its disk is full, machines are ended all the same.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from infra.cloud import PATIENT, Cloud, Pace
from infra.errors import InfraError, LedgerUnwritableError, PermanentInfraError, ProviderUnavailableError
from infra.ledger import Ledger
from infra.offers import CloudName, Instance, InstanceStatus
from infra.renting.release import end_unnoted, release_machine, status_of
from infra.renting.rentals import (
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
from infra.renting.unanswered import FOUND_NOTE, find_machine

UNSEEN_AFTER_S = 3600.0
"""A machine that was asked for and has not appeared for this long does not exist; one that does later is ended."""

BEING_CHANGED = "somebody else ends it, or took it over, at this moment"

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ReapReport:
    """What was found; one line each."""

    ended: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    """In use, or spared for the next start."""
    foreign: list[str] = field(default_factory=list)
    """Rented by other stores."""
    failures: list[str] = field(default_factory=list)
    """What could not be looked at, or not be ended."""

    def add(self, other: "ReapReport") -> None:
        """Take over what another look found."""
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
    """End every machine of ours that nobody wants, of those in the given accounts.

    Args:
        credentials: the name of those by which the accounts were opened; machines of others are left to them.
        spare: machines of dead runs are kept as long as the next start may go on with them, which is until shortly
            before they expire. Those that failed runs keep for a while stay in any case, and are ended in any case when
            that is over.
        other_ledger: the identity of another ledger, for instance of a store that was deleted, all of whose machines
            are ended too.
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
        f"{rental.name} at {rental.provider} cannot be looked at: there is no key of that provider"
        for rental in without_key
    ]
    return report


def release_named(name: str, ledger: Ledger, clouds: Mapping[CloudName, Cloud], *, pace: Pace = PATIENT) -> Rental:
    """End one machine of the ledger, whoever uses it, and return its row.

    Raises:
        PermanentInfraError: the ledger has no such machine.
        StillRentedError: its provider still has it.
        ProviderUnavailableError: it was asked for, and has not appeared so far.
    """
    rental = find_rental(ledger, name)
    if rental is None:
        raise PermanentInfraError(f"the ledger knows no machine {name}: `rollouts nodes` shows those that it knows")
    if rental.state.is_over:
        return rental
    cloud = clouds[rental.provider]
    if rental.state is RentalState.INTENDED:
        found = find_machine(rental, cloud, pace)
        if found is None:
            raise ProviderUnavailableError(f"{name} was asked for and has not appeared so far: try again in an hour")
        rental = found
    return release_machine(rental, ledger, cloud, note="ended by hand", pace=pace)


@contextmanager
def _failures_noted(report: ReapReport) -> Iterator[None]:
    """One machine about which nothing can be done hinders no other."""
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
    if rental.state.is_over:  # it was refused, or gone, and is there all the same
        current = cloud.get(instance.id)
        if current is not None and current.status is not InstanceStatus.GONE:  # else it ended since it was listed
            # Its run may be long over, and count as alive: where it does not end now, it is nobody's all the same.
            changes = {"instance_id": instance.id, "rented_at": began, "ended_at": None, "expires_at": time.time()}
            _end(rental, ledger, cloud, report, pace=pace, note="it is there all the same", **changes)
    elif rental.state is RentalState.INTENDED and not _why_wanted(rental, ledger, spare=False):
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
        report.kept.append(f"{rental.name}: asked for, and not seen so far")


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
    reason = _why_wanted(rental, ledger, spare=spare)
    # One that was taken away or stopped would only cost its run's money: no next start goes on with it.
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
    """End a machine that is wanted by nobody.

    Args:
        changes: what is written into its row besides.
    """
    # Nothing is written where the row is not the one that was judged: another look ends it, or a run took it over.
    try:
        claimed = change_rental(ledger, rental, state=RentalState.RELEASING, **changes)
    except LedgerUnwritableError as error:  # so nobody else can have changed the row either
        end_unnoted(replace(rental, **changes), cloud, error, pace=pace)
    if claimed is None:
        report.kept.append(f"{rental.name}: {BEING_CHANGED}")
        return
    release_machine(claimed, ledger, cloud, note="ended by the reaper", pace=pace)
    report.ended.append(f"{rental.name} at {rental.provider}, {rental.gpu}")


def _why_wanted(rental: Rental, ledger: Ledger, *, spare: bool) -> str:
    """Why a machine stays; "" for one that nobody wants."""
    now = time.time()
    if rental.expires_at <= now:
        return ""
    if rental.is_kept and not ledger.is_alive(rental.run_id):  # a run that lives again is about to take it over
        until = f"which failed and keeps it until {in_utc(rental.ends_at)}: `rollouts nodes release` ends it now"
        return until if rental.ends_at > now else ""
    if not ledger.has_died(rental.run_id):
        return "which lives"  # it is renting it, uses it, or is giving it back
    if not spare or rental.state is not RentalState.READY or rental.taken_until <= now:
        return ""
    return f"whose next start may take it until {in_utc(rental.taken_until)}"


def _row_of(instance: Instance, credentials: str, *, asked_at: float) -> Rental:
    """A row for a machine that carries our name and that the ledger does not know: already expired.

    Args:
        asked_at: when it was asked for, as its name says; it cost money from then on.
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
