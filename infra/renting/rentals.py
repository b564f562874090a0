"""The ledger's rows of rented machines: their run, their times, their price.

    intended ──created──> rented ──logged in──> ready ──> releasing ──verified──> gone
                                                  └ its run failed: kept until ..., then releasing or used again
        \\──refused, or never seen──> refused                       gone and refused machines cost nothing more

Not here: the database (ledger_file.py), the reasons for changes (provision.py, reaper.py).
"""

import re
import sqlite3
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rollouts.infra.clouds import CloudName
from rollouts.infra.ledger import Ledger
from rollouts.infra.run_ids import short_id

NAME_PREFIX = "rollouts-"
_TOO_LATE_S = 1200.0
"""Another run takes a machine over only if more than this many seconds remain. Half of this time is reserved for ending
the work on the machine (tasks/budget.py)."""
_TOO_LATE_SHARE = 0.2
"""Share of a machine's whole rental time. If this share is shorter than `_TOO_LATE_S`, the share is the limit."""
NEVER_SEEN = "it never appeared"
"""Note in the row of a machine that was requested and never appeared."""
NAME = re.compile(r"rollouts-(?P<ledger>[0-9a-f]{8})-(?P<run>[A-Za-z0-9]+)-a(?P<attempt>\d+)-t(?P<epoch>\d+)")


class RentalState(StrEnum):
    INTENDED = "intended"
    """The machine was requested, or is about to be requested. The machine may exist."""
    RENTED = "rented"
    """The machine exists and costs money."""
    READY = "ready"
    RELEASING = "releasing"
    """The machine's end was requested. The machine costs money until the provider no longer lists it."""
    GONE = "gone"
    REFUSED = "refused"
    """The machine never existed."""

    @property
    def is_over(self) -> bool:
        return self in (RentalState.GONE, RentalState.REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rental:
    """The ledger's row of one machine."""

    name: str
    """The machine's name, unique among all machines of all stores."""
    run_id: str
    provider: CloudName
    purpose: str
    """Hash of the settings for which the machine was rented. A later run with the same settings may take the machine
    over."""
    credentials: str = ""
    """Name of the credentials of the machine's account, or "" for keys from plain environment variables."""
    state: RentalState = RentalState.INTENDED
    instance_id: str = ""
    """The provider's id of the machine, or "" while unknown."""
    gpu: str
    """The number and type of the GPUs, for example `1x NVIDIA H100`."""
    region: str
    usd_per_hour: float
    intended_at: float
    """Time of the request in seconds since 1970, like all times of this record."""
    rented_at: float | None = None
    ended_at: float | None = None
    expires_at: float
    """Time at which the machine is ended, even if it is in use."""
    kept_until: float | None = None
    """Time until which the machine of a failed run is kept for inspection or a retry, or None while a run uses the
    machine."""
    host_key: str = ""
    """Fingerprint of the machine's host key, or "" before the first login."""
    note: str = ""
    """Text for users about the machine's latest event."""
    vram_gb: float = 0.0
    """Offered memory of each GPU in GB, or 0 if unknown."""
    host: str = ""
    """The provider's name of the physical machine, or "" if unknown."""
    is_unfit: bool = False
    """Whether the machine was unusable and was therefore released right after its creation."""
    expected_key: str = ""
    """Fingerprint that the host key must have at the first login, or "" if the key is unknown before the first
    login."""
    believed_by: str = "first_use"
    """Evidence for the host key of the first login: injected, provider or first_use (host_keys.py)."""

    @property
    def is_kept(self) -> bool:
        return self.state is RentalState.READY and self.kept_until is not None

    @property
    def ends_at(self) -> float:
        """Time at which the machine is ended, unless it is released or taken over before."""
        return self.expires_at if self.kept_until is None else min(self.kept_until, self.expires_at)

    @property
    def taken_until(self) -> float:
        """Time until which another run may take the machine over. After this time, the reaper ends a dead run's
        machine."""
        return self.expires_at - too_late_s(self.expires_at - self.intended_at)

    def usd(self, now: float) -> float:
        if self.rented_at is None:
            return 0.0
        return max(0.0, (self.ended_at or now) - self.rented_at) / 3600 * self.usd_per_hour

    def usd_within(self, since: float, until: float) -> float:
        if self.rented_at is None:
            return 0.0
        ended_at = until if self.ended_at is None else min(until, self.ended_at)
        return max(0.0, ended_at - max(since, self.rented_at)) / 3600 * self.usd_per_hour


def too_late_s(whole_s: float) -> float:
    """Return the number of remaining seconds below which no other run takes the machine over, given its whole rental
    time."""
    return min(_TOO_LATE_S, _TOO_LATE_SHARE * whole_s)


def in_utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def describe_keeping(rental: Rental) -> str:
    """Return a phrase that says how long a failed run's machine is kept, or "" if the machine is not kept."""
    return f"kept until {in_utc(rental.ends_at)} after its run failed" if rental.is_kept else ""


_COLUMNS = ", ".join(Rental.__slots__)


def machine_name(ledger: Ledger, run_id: str) -> str:
    """Return a unique name that contains the ledger's identity and the run's id."""
    run = re.sub(r"[^A-Za-z0-9]", "", short_id(run_id, 13))[:12] or "x"  # 13, because one character may be a dash
    stem = f"{NAME_PREFIX}{ledger.identity}-{run}-a"
    attempt = 1 + len(_select(ledger, "WHERE name LIKE ?", f"{stem}%"))  # other runs may share the stem
    return f"{stem}{attempt}-t{int(time.time())}"


def add_rental(ledger: Ledger, rental: Rental) -> None:
    values = [getattr(rental, column) for column in Rental.__slots__]
    with ledger.transaction() as database:
        database.execute(f"INSERT INTO rentals ({_COLUMNS}) VALUES ({', '.join('?' * len(values))})", values)


def note_found(ledger: Ledger, rental: Rental) -> Rental:
    """Add a row for a machine that was found but has no row. If another process has added the row, return that row."""
    with suppress(sqlite3.IntegrityError):
        add_rental(ledger, rental)
    found = find_rental(ledger, rental.name)
    assert found is not None, f"{rental.name} has a row, and rows are never deleted"
    return found


def change_rental(ledger: Ledger, rental: Rental, **changes: Any) -> Rental | None:  # Any: values of columns
    """Write the changes and return the new row. If the row changed since it was read, write nothing and return None.

    A row counts as changed if its state, its run or its `kept_until` differs from `rental`. `kept_until` is compared
    because a reaper must not end a machine that a Retry of its run has taken over in the meantime.
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
    return next(iter(_select(ledger, "WHERE name = ?", name)), None)


def age_order(rental: Rental) -> tuple[float, str]:
    """A key that sorts machines as the ledger lists them: the machine that was requested first comes first."""
    return rental.intended_at, rental.name


def rentals_of(ledger: Ledger, run_id: str) -> list[Rental]:
    """Return all machines of a run, including machines that are gone, oldest first."""
    return _select(ledger, "WHERE run_id = ? ORDER BY intended_at, name", run_id)


def all_rentals(ledger: Ledger) -> list[Rental]:
    return _select(ledger, "ORDER BY intended_at, name")


def open_rentals(ledger: Ledger) -> list[Rental]:
    """Return the machines that cost money or may cost money."""
    return [rental for rental in all_rentals(ledger) if not rental.state.is_over]


def given_up(ledger: Ledger, since: float) -> list[Rental]:
    """Return machines that never appeared and were given up after the time `since`. These machines may still appear."""
    return _select(ledger, "WHERE state = ? AND note = ? AND ended_at >= ?", RentalState.REFUSED, NEVER_SEEN, since)


def unfit_hosts(ledger: Ledger, since: float) -> set[tuple[CloudName, str]]:
    """Return provider and name of each physical machine that was rented after the time `since` and was unusable."""
    rows = _select(ledger, "WHERE is_unfit AND host != '' AND intended_at >= ?", since)
    return {(rental.provider, rental.host) for rental in rows}


def usd_spent(ledger: Ledger, run_id: str, now: float) -> float:
    return sum(rental.usd(now) for rental in rentals_of(ledger, run_id))


def _select(ledger: Ledger, condition: str, *values: str | float) -> list[Rental]:
    rows = ledger.read(f"SELECT {_COLUMNS} FROM rentals {condition}", values)
    return [
        Rental(**{**dict(zip(Rental.__slots__, row, strict=True)), "state": RentalState(row[_STATE])}) for row in rows
    ]


_STATE = Rental.__slots__.index("state")
