"""Remember what is rented, for whom, since when and at what price: the rows of the ledger about machines.

Not here: the database (ledger_file.py), when a row changes (provision.py, reaper.py).

    intended ──created──> rented ──logged in──> ready ──> releasing ──verified──> gone
                                                  └ its run failed: kept until ..., then releasing, or a run's again
        \\──refused, or never seen──> refused                                 the last two cost nothing more
"""

import re
import sqlite3
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from infra.ledger import Ledger
from infra.offers import CloudName
from infra.run_ids import short_id

NAME_PREFIX = "rollouts-"
TOO_LATE_S = 1200.0
"""With less time left no further run goes on with a machine: half of it is for ending its work (tasks/budget.py)."""
TOO_LATE_SHARE = 0.2
"""Of a time so short that `TOO_LATE_S` would leave little of it."""
NEVER_SEEN = "it never appeared"
"""The note of a machine that was asked for, and given up."""
NAME = re.compile(r"rollouts-(?P<ledger>[0-9a-f]{8})-(?P<run>[A-Za-z0-9]+)-a(?P<attempt>\d+)-t(?P<epoch>\d+)")


class RentalState(StrEnum):
    """How far the rental of a machine has come."""

    INTENDED = "intended"
    """It was or will be asked for; nobody knows whether it exists."""
    RENTED = "rented"
    """It exists and costs money."""
    READY = "ready"
    """It can be used."""
    RELEASING = "releasing"
    """Its end was asked for; it costs money until its provider has it no more."""
    GONE = "gone"
    REFUSED = "refused"
    """It never existed."""

    @property
    def is_over(self) -> bool:
        """True when it costs nothing."""
        return self in (RentalState.GONE, RentalState.REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rental:
    """What the ledger knows about one machine."""

    name: str
    """Unique among all machines of all stores."""
    run_id: str
    provider: CloudName
    purpose: str
    """Hash of the settings that it was rented by: a later run with the same may take it over."""
    credentials: str = ""
    """Name of the credentials whose account it is in; empty for keys of the environment."""
    state: RentalState = RentalState.INTENDED
    instance_id: str = ""
    """The provider's name for it; empty as long as nobody knows it."""
    gpu: str
    """For people: 1x NVIDIA H100."""
    region: str
    usd_per_hour: float
    intended_at: float
    """Seconds since 1970, like all times here."""
    rented_at: float | None = None
    ended_at: float | None = None
    expires_at: float
    """It is ended then, whoever uses it."""
    kept_until: float | None = None
    """Its run failed, and so long it stays for a person to look or for a run to go on; None while a run uses it."""
    host_key: str = ""
    """Fingerprint of its SSH server's key, from the first login on."""
    note: str = ""
    """What happened to it last, in words."""
    vram_gb: float = 0.0
    """Memory of each GPU as it was offered; 0 where nobody knows."""
    host: str = ""
    """The provider's name for the physical machine, where it has told one."""
    is_unfit: bool = False
    """It was given back fresh, because it could not be used."""
    expected_key: str = ""
    """Fingerprint that its host key has to have at the first login; empty where nobody knows it before."""
    believed_by: str = "first_use"
    """Why its host key is believed at the first login: injected, provider or first_use (host_keys.py)."""

    @property
    def is_kept(self) -> bool:
        """True when no run uses it, because its run failed and keeps it for a while."""
        return self.state is RentalState.READY and self.kept_until is not None

    @property
    def ends_at(self) -> float:
        """When it is ended, unless it is given back or taken over before."""
        return self.expires_at if self.kept_until is None else min(self.kept_until, self.expires_at)

    @property
    def taken_until(self) -> float:
        """Until when a further run may take it over; after that nobody wants one whose run has died."""
        return self.expires_at - too_late_s(self.expires_at - self.intended_at)

    def usd(self, now: float) -> float:
        """What it has cost until `now`."""
        if self.rented_at is None:
            return 0.0
        return max(0.0, (self.ended_at or now) - self.rented_at) / 3600 * self.usd_per_hour

    def usd_within(self, since: float, until: float) -> float:
        """What it cost between two times."""
        if self.rented_at is None:
            return 0.0
        ended_at = until if self.ended_at is None else min(until, self.ended_at)
        return max(0.0, ended_at - max(since, self.rented_at)) / 3600 * self.usd_per_hour


def too_late_s(whole_s: float) -> float:
    """How much is too little to begin with, of so long a time."""
    return min(TOO_LATE_S, TOO_LATE_SHARE * whole_s)


def in_utc(seconds: float) -> str:
    """A time of the ledger, for people."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def describe_keeping(rental: Rental) -> str:
    """Until when a machine stays that no run uses; empty where it is not kept."""
    return f"kept until {in_utc(rental.ends_at)} after its run failed" if rental.is_kept else ""


_COLUMNS = ", ".join(Rental.__slots__)


def machine_name(ledger: Ledger, run_id: str) -> str:
    """A name that no other machine has, and that tells for whom it is rented."""
    run = re.sub(r"[^A-Za-z0-9]", "", short_id(run_id, 13))[:12] or "x"  # one of them is a dash
    stem = f"{NAME_PREFIX}{ledger.identity}-{run}-a"
    attempt = 1 + len(_select(ledger, "WHERE name LIKE ?", f"{stem}%"))  # also those that other runs took over
    return f"{stem}{attempt}-t{int(time.time())}"


def add_rental(ledger: Ledger, rental: Rental) -> None:
    """Write the row, durably."""
    values = [getattr(rental, column) for column in Rental.__slots__]
    with ledger.transaction() as database:
        database.execute(f"INSERT INTO rentals ({_COLUMNS}) VALUES ({', '.join('?' * len(values))})", values)


def note_found(ledger: Ledger, rental: Rental) -> Rental:
    """The row of a machine that was found and had none; that of somebody else who found it in the same moment."""
    with suppress(sqlite3.IntegrityError):
        add_rental(ledger, rental)
    found = find_rental(ledger, rental.name)
    assert found is not None, f"{rental.name} has a row, and rows are never deleted"
    return found


def change_rental(ledger: Ledger, rental: Rental, **changes: Any) -> Rental | None:  # Any: values of columns
    """Write the changes and return the row as it is now; None, with nothing written, when somebody else was faster.

    Somebody else was when the row is in another state, belongs to another run, or is kept until another time, than
    `rental`. Without the last a reaper would end what the Retry of its own run took over since it was judged.
    """
    assert set(changes) <= set(Rental.__slots__), changes
    columns = ", ".join(f"{column} = ?" for column in changes)
    with ledger.transaction() as database:
        changed = database.execute(
            f"UPDATE rentals SET {columns} WHERE name = ? AND run_id = ? AND state = ? AND kept_until IS ?",
            (*changes.values(), rental.name, rental.run_id, rental.state, rental.kept_until),
        )
    return find_rental(ledger, rental.name) if changed.rowcount == 1 else None


def find_rental(ledger: Ledger, name: str) -> Rental | None:
    """The row about a machine."""
    return next(iter(_select(ledger, "WHERE name = ?", name)), None)


def rentals_of(ledger: Ledger, run_id: str) -> list[Rental]:
    """All machines of a run, also those that are gone, oldest first."""
    return _select(ledger, "WHERE run_id = ? ORDER BY intended_at, name", run_id)


def all_rentals(ledger: Ledger) -> list[Rental]:
    """All machines of all runs, oldest first."""
    return _select(ledger, "ORDER BY intended_at, name")


def open_rentals(ledger: Ledger) -> list[Rental]:
    """The machines that cost money, or may."""
    return [rental for rental in all_rentals(ledger) if not rental.state.is_over]


def given_up(ledger: Ledger, since: float) -> list[Rental]:
    """The machines that were asked for and, since then, given up because they did not appear; one may all the same."""
    return _select(ledger, "WHERE state = ? AND note = ? AND ended_at >= ?", RentalState.REFUSED, NEVER_SEEN, since)


def unfit_hosts(ledger: Ledger, since: float) -> set[tuple[CloudName, str]]:
    """Providers and their names of machines that could not be used when they were rented since then."""
    rows = _select(ledger, "WHERE is_unfit AND host != '' AND intended_at >= ?", since)
    return {(rental.provider, rental.host) for rental in rows}


def usd_spent(ledger: Ledger, run_id: str, now: float) -> float:
    """What the machines of a run have cost until `now`."""
    return sum(rental.usd(now) for rental in rentals_of(ledger, run_id))


def _select(ledger: Ledger, condition: str, *values: str | float) -> list[Rental]:
    rows = ledger.read(f"SELECT {_COLUMNS} FROM rentals {condition}", values)
    return [
        Rental(**{**dict(zip(Rental.__slots__, row, strict=True)), "state": RentalState(row[_STATE])}) for row in rows
    ]


_STATE = Rental.__slots__.index("state")
