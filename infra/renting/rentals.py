"""The ledger's rows about rented machines: their run, their times, their price.

    intended ──created──> rented ──logged in──> ready ──> releasing ──verified──> gone
                                                  └ its run failed: kept until ..., then releasing, or a run's again
        \\──refused, or never seen──> refused                                 the last two cost nothing more

Not here: the database (ledger_file.py), the causes of changes (provision.py, reaper.py).
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
"""No other run takes a machine over with less time left: half of it is needed to end its work (tasks/budget.py)."""
_TOO_LATE_SHARE = 0.2
"""Used instead of `_TOO_LATE_S` if the machine's whole time is short."""
NEVER_SEEN = "it never appeared"
"""Note of a machine that was requested and never appeared."""
NAME = re.compile(r"rollouts-(?P<ledger>[0-9a-f]{8})-(?P<run>[A-Za-z0-9]+)-a(?P<attempt>\d+)-t(?P<epoch>\d+)")


class RentalState(StrEnum):
    """Progress of a machine's rental."""

    INTENDED = "intended"
    """It was or will be requested; it may exist."""
    RENTED = "rented"
    """It exists and costs money."""
    READY = "ready"
    """It can be used."""
    RELEASING = "releasing"
    """Its end was requested; it costs money until the provider no longer lists it."""
    GONE = "gone"
    REFUSED = "refused"
    """It never existed."""

    @property
    def is_over(self) -> bool:
        return self in (RentalState.GONE, RentalState.REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rental:
    """The ledger's row about one machine."""

    name: str
    """Unique among all machines of all stores."""
    run_id: str
    provider: CloudName
    purpose: str
    """Hash of the settings behind the rental: a later run with the same settings may take the machine over."""
    credentials: str = ""
    """Name of the credentials whose account it is in; empty for keys of the environment."""
    state: RentalState = RentalState.INTENDED
    instance_id: str = ""
    """The provider's id of the machine; empty while unknown."""
    gpu: str
    """The GPUs in words, for example `1x NVIDIA H100`."""
    region: str
    usd_per_hour: float
    intended_at: float
    """Seconds since 1970, like all times here."""
    rented_at: float | None = None
    ended_at: float | None = None
    expires_at: float
    """The machine is ended at this time, even while it is used."""
    kept_until: float | None = None
    """The run failed, and the machine stays until then for inspection or a retry; None while a run uses it."""
    host_key: str = ""
    """Fingerprint of its SSH server's key, from the first login on."""
    note: str = ""
    """The latest event, for users."""
    vram_gb: float = 0.0
    """Memory of each GPU as offered; 0 if unknown."""
    host: str = ""
    """The provider's name of the physical machine; empty if unknown."""
    is_unfit: bool = False
    """It was given back right after its creation, because it was unusable."""
    expected_key: str = ""
    """Fingerprint required of its host key at the first login; empty if it is not known before."""
    believed_by: str = "first_use"
    """Why its host key is believed at the first login: injected, provider or first_use (host_keys.py)."""

    @property
    def is_kept(self) -> bool:
        return self.state is RentalState.READY and self.kept_until is not None

    @property
    def ends_at(self) -> float:
        """Time at which it is ended, unless it is given back or taken over earlier."""
        return self.expires_at if self.kept_until is None else min(self.kept_until, self.expires_at)

    @property
    def taken_until(self) -> float:
        """Time until which another run may take it over. After that, the machine of a dead run is unwanted."""
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
    """The remaining time that is too short to start with, given the machine's whole time."""
    return min(_TOO_LATE_S, _TOO_LATE_SHARE * whole_s)


def in_utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def describe_keeping(rental: Rental) -> str:
    """Return a phrase for how long the machine of a failed run is kept; empty if it is not kept."""
    return f"kept until {in_utc(rental.ends_at)} after its run failed" if rental.is_kept else ""


_COLUMNS = ", ".join(Rental.__slots__)


def machine_name(ledger: Ledger, run_id: str) -> str:
    """Return a unique name that contains the ledger's identity and the run's id."""
    run = re.sub(r"[^A-Za-z0-9]", "", short_id(run_id, 13))[:12] or "x"  # 13, because a dash may be among them
    stem = f"{NAME_PREFIX}{ledger.identity}-{run}-a"
    attempt = 1 + len(_select(ledger, "WHERE name LIKE ?", f"{stem}%"))  # including machines that other runs took over
    return f"{stem}{attempt}-t{int(time.time())}"


def add_rental(ledger: Ledger, rental: Rental) -> None:
    values = [getattr(rental, column) for column in Rental.__slots__]
    with ledger.transaction() as database:
        database.execute(f"INSERT INTO rentals ({_COLUMNS}) VALUES ({', '.join('?' * len(values))})", values)


def note_found(ledger: Ledger, rental: Rental) -> Rental:
    """Add a row for a machine that was found without a row, or return the row of a concurrent finder."""
    with suppress(sqlite3.IntegrityError):
        add_rental(ledger, rental)
    found = find_rental(ledger, rental.name)
    assert found is not None, f"{rental.name} has a row, and rows are never deleted"
    return found


def change_rental(ledger: Ledger, rental: Rental, **changes: Any) -> Rental | None:  # Any: values of columns
    """Write the changes and return the new row; None, with nothing written, if the row has changed since it was read.

    A row counts as changed if its state, its run or its `kept_until` differs from `rental`. Without `kept_until`, a
    reaper would end a machine that a Retry of its run took over in the meantime.
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


def rentals_of(ledger: Ledger, run_id: str) -> list[Rental]:
    """Return all machines of a run, including those that are gone, oldest first."""
    return _select(ledger, "WHERE run_id = ? ORDER BY intended_at, name", run_id)


def all_rentals(ledger: Ledger) -> list[Rental]:
    return _select(ledger, "ORDER BY intended_at, name")


def open_rentals(ledger: Ledger) -> list[Rental]:
    """Return machines that cost or may cost money."""
    return [rental for rental in all_rentals(ledger) if not rental.state.is_over]


def given_up(ledger: Ledger, since: float) -> list[Rental]:
    """Return machines that never appeared and were given up since that time. A later appearance is possible."""
    return _select(ledger, "WHERE state = ? AND note = ? AND ended_at >= ?", RentalState.REFUSED, NEVER_SEEN, since)


def unfit_hosts(ledger: Ledger, since: float) -> set[tuple[CloudName, str]]:
    """Return providers and names of physical machines that were unusable when rented since that time."""
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
