"""Rent machines. The ledger gets a row for every machine before the provider is asked for the machine, so that a
failure loses no machine.

    intent written ── one request to create ── id written ── waited until usable ── ready
         |                   | unclear answer: looked up by name, and adopted
         |                   | refused, or never usable: ended, verified, next offer
    killed at any step: the same run resumes from the row; else a run with the same settings takes over the machine, or
        the reaper ends the machine
    the run failed and keeps its machine: as above, but the reaper ends the machine only after `kept_until`
    an error here, or Ctrl-C: `released_on_failure` releases the run's machines at any step

The machines of a run form a unit: they have the same kind, region and provider. If a machine cannot be rented, or is
lost and has no replacement in its region, all machines of the unit are released.

Not here: the providers' APIs (providers/), the ledger's rows (rentals.py), releasing machines and looking up
unconfirmed creations (release.py), machines of dead runs (reaper.py).
"""

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace

from rollouts.infra.cloud import Cloud, look_up
from rollouts.infra.clouds import CloudName
from rollouts.infra.errors import (
    InfraError,
    LoginError,
    MissingKeyError,
    NameUnknownError,
    NoMachineError,
    OfferGoneError,
    PermanentInfraError,
    ProviderRefusedError,
    ProviderUnavailableError,
    TransientInfraError,
    UnclearAnswerError,
    UnfitMachineError,
)
from rollouts.infra.foreign_text import shown_line
from rollouts.infra.interrupts import uninterrupted
from rollouts.infra.ledger import Ledger
from rollouts.infra.offers import (
    GPUQuery,
    HostKeyPair,
    Instance,
    MachineSpec,
    Offer,
    Offered,
    describe_closest,
)
from rollouts.infra.renting.release import FOUND_NOTE, find_unconfirmed, release_all, release_machines
from rollouts.infra.renting.rentals import (
    Rental,
    RentalState,
    add_rental,
    age_order,
    all_rentals,
    change_rental,
    find_rental,
    in_utc,
    machine_name,
    rentals_of,
    too_late_s,
    unfit_hosts,
    usd_spent,
)
from rollouts.infra.renting.request import Renting, RentRequest, is_in_use
from rollouts.infra.ssh.host_keys import HostKeyEvidence, fingerprint_of, make_host_key

MAX_OFFERS = 6
UNFIT_FOR_S = 24 * 3600.0
"""Seconds for which an unusable machine is not rented again."""
_UNSEEN_S = 60.0
"""Seconds after a machine's creation during which the provider may not list the machine yet."""
_PRICE_TOLERANCE = 1.001
"""Largest accepted ratio of the actual price to the offered price. The ratio is above 1, because providers round
prices."""

logger = logging.getLogger(__name__)


def rent_machines(renting: Renting) -> list[Rental]:
    """Return usable machines: the run's own, then machines that a dead run with the same settings left, then new
    machines.

    Returns:
        The rows of the requested number of machines: reused machines first, then new machines.

    Raises:
        NoMachineError: no offer led to usable machines, and all rented machines were released. The error's text lists
            the attempts.
        StillRentedError: an unusable machine could not be ended.
        ProviderRefusedError: every provider with offers refuses the API key or the account.
        PermanentInfraError: the run's money is used up, or the machines do not match the settings.
        MissingKeyError: the run has a machine in an account whose API key is missing.
    """
    num_machines = renting.request.num_machines
    unit: list[Rental] = []
    with renting.ledger.renting(renting.request.run_id), released_on_failure(renting):
        for rental in _inherited(renting):
            if len(unit) < num_machines and _is_same_place(rental, unit):
                usable = _settle(rental, renting, beside=unit)
                if usable is not None:
                    renting.say(f"reuses {usable.name}, {usable.gpu} at {usable.provider}")
                    unit.append(usable)
            elif rental.instance_id:  # another machine has replaced this one
                renting.say(f"gives back {rental.name}: other machines replaced it")
                renting.release(rental)
            else:
                _leave_unconfirmed(rental, renting)
        if len(unit) < num_machines:
            _rent_new(unit, renting)
        return sorted(unit, key=age_order)  # the first machine leads the others, also for whoever reads the ledger


@contextmanager
def released_on_failure(renting: Renting) -> Iterator[None]:
    """Release the run's machines if the block fails.

    After an error, the machines in use are released. After Ctrl-C, all machines are released, including machines that
    were only requested. After SIGTERM, usable machines stay rented, because the next start takes them over; all other
    machines are released.
    """
    try:
        yield
    except BaseException as error:
        with uninterrupted():
            ledger, clouds, pace = renting.ledger, renting.clouds, renting.pace
            rows = [row for row in renting.own_rows() if row.provider in clouds and _is_released_after(error, row)]
            note = f"given back: {str(error) or type(error).__name__}"
            if isinstance(error, Exception):
                release_machines(rows, ledger, clouds, note=note, pace=pace)
            elif rows:
                names = ", ".join(row.name for row in rows)
                renting.say(f"interrupted: gives back {names}, which may take some minutes")
                for sentence in release_all(rows, ledger, clouds, note=note, pace=pace):
                    renting.say(sentence)
        raise


def _is_released_after(error: BaseException, rental: Rental) -> bool:
    if isinstance(error, Exception):
        return is_in_use(rental)  # other machines were already looked up or released
    return isinstance(error, KeyboardInterrupt) or rental.state is not RentalState.READY


# ── machines from before ──


def _inherited(renting: Renting) -> list[Rental]:
    """Return the run's own machines, or else the machines that one dead or failed run with the same settings left.

    Machines in accounts without an API key are skipped.

    Raises:
        MissingKeyError: the run itself has a machine in an account without an API key, so it must not rent a second
            machine.
    """
    own = [rental for rental in renting.own_rows() if _is_reached(rental, renting)]
    if own:
        return sorted(own, key=lambda rental: rental.state is not RentalState.READY)  # list usable machines first
    request, ledger = renting.request, renting.ledger
    mine: list[Rental] = []
    for rental in all_rentals(ledger):
        is_same = (rental.purpose, rental.credentials) == (request.purpose, request.credentials)
        is_beside = not mine or mine[0].note == _left_by(rental)
        is_free = rental.state is RentalState.READY and rental.provider in renting.clouds
        if is_free and is_same and is_beside and ledger.has_died(rental.run_id):
            taken = _take_over(rental, renting, beside=mine)
            mine += [taken] if taken is not None else []
        if len(mine) == request.num_machines:
            break
    return mine


def _is_reached(rental: Rental, renting: Renting) -> bool:
    if rental.provider in renting.clouds:
        return True
    if is_in_use(rental):
        raise MissingKeyError(
            f"the run has {rental.name} at {rental.provider}, whose key is missing here, or which node.query.providers "
            "does not name: with both the run reuses that machine"
        )
    return False


def _take_over(rental: Rental, renting: Renting, *, beside: Sequence[Rental]) -> Rental | None:
    """Assign a dead run's machine to this run, within this run's limits of hours and money. Returns the new row.

    Returns None if too little time remains, or if another process changed the row first. The reaper ends machines that
    no run takes over.
    """
    request, now = renting.request, time.time()
    expires_at = min(rental.expires_at, _allowed_until(rental, renting, now, beside=beside))
    fresh_s = 3600 * min(request.max_hours, _hours(request.max_usd / request.num_machines, rental.usd_per_hour))
    is_too_late = min(rental.ends_at, rental.taken_until) <= now
    if is_too_late or expires_at - now < too_late_s(fresh_s):
        return None
    changes = {"run_id": request.run_id, "kept_until": None, "expires_at": expires_at}
    return change_rental(renting.ledger, rental, **changes, note=_left_by(rental))


def _left_by(rental: Rental) -> str:
    return f"left by run {rental.run_id}"


def _is_same_place(rental: Rental, unit: Sequence[Rental]) -> bool:
    return len({(each.provider, each.region, each.gpu) for each in (rental, *unit)}) == 1


def _settle(rental: Rental, renting: Renting, *, beside: Sequence[Rental]) -> Rental | None:
    """Make a machine that an earlier process rented usable for this unit. If that fails, end the machine and return
    None."""
    if rental.kept_until is not None:
        current = change_rental(renting.ledger, rental, kept_until=None) or find_rental(renting.ledger, rental.name)
        if current is None or current.run_id != renting.request.run_id or current.state.is_over:
            return None  # another process has taken over or ended the machine
        rental = current
    if rental.state is RentalState.INTENDED:
        found = find_unconfirmed(rental, renting.cloud_of(rental), renting.pace)
        if found is None:
            _leave_unconfirmed(rental, renting)
            return None
        rental = _adopt_or_release(rental, found.instance_id, renting, note=FOUND_NOTE)
    if rental.state is RentalState.RELEASING or rental.expires_at <= time.time():
        renting.release(rental)
        return None
    try:
        return _use_or_release(rental, renting, beside=beside)
    except _OfferFailedError:
        return None


# ── new machines ──


class _OfferFailedError(Exception):
    """The offer did not lead to a machine. Another offer may still succeed."""


class _RefusedError(_OfferFailedError):
    """The provider refuses the API key or the account. Only offers of other providers can still succeed."""


class _UnconfirmedError(_OfferFailedError):
    """The provider may have created a machine and does not answer. Only offers of other providers can still succeed."""


def _rent_new(unit: list[Rental], renting: Renting) -> None:
    """Add the missing machines to the unit. If none is available beside the unit, release the unit and rent all
    machines elsewhere."""
    request = renting.request
    tried: list[str] = []
    offered = search_offers(request.query, renting.clouds)
    unfit = unfit_hosts(renting.ledger, time.time() - UNFIT_FOR_S)
    offers = [offer for offer in offered.fitting if (offer.provider, offer.host) not in unfit]
    if num_unfit := len(offered.fitting) - len(offers):
        tried.append(f"{num_unfit} offered machines were unusable within the last day")
    # The sort is stable: offers keep the order by price within each group.
    offers.sort(key=lambda offer: (bool(unit) and not _is_beside(offer, unit[0]), _is_short(offer, request)))
    refusals: dict[CloudName, str] = {}
    closed: set[CloudName] = set()
    for offer in _few(offers, closed):
        if unit and not _is_beside(offer, unit[0]):
            renting.say(f"gives back {', '.join(rental.name for rental in unit)}: no machine is available beside them")
            release_machines(unit, renting.ledger, renting.clouds, pace=renting.pace)
            unit.clear()
        try:
            unit += _rent_at(offer, unit, renting)
        except (_RefusedError, _UnconfirmedError) as error:
            closed.add(offer.provider)
            if isinstance(error, _RefusedError):
                refusals[offer.provider] = str(error)
            else:
                tried.append(str(error))
            if any(other.provider not in closed for other in offers):
                renting.say(f"continues without {offer.provider}: {error}")
        except _OfferFailedError as error:
            tried.append(str(error))
        else:
            return
    if refusals and not tried and all(isinstance(error, ProviderRefusedError) for error in offered.failures):
        raise ProviderRefusedError("; ".join([*refusals.values(), *map(str, offered.failures)]))
    if not offered.fitting:
        tried.append(describe_closest(request.query, offered.others, "node.query.{}".format))
    tried += [*refusals.values(), *map(str, offered.failures)]
    wanted = " or ".join(request.query.gpu_types) or "GPU"
    machines = "no machine" if request.num_machines == 1 else f"no {request.num_machines} machines in the same region"
    raise NoMachineError(
        f"{machines} with {request.query.gpu_count}x {wanted} for {request.query.max_usd_per_gpu_hour:g} USD per GPU "
        f"and hour or less was available ({'; '.join(tried)}): try again later, or widen "
        "node.query"
    )


def _few(offers: Sequence[Offer], closed: Set[CloudName]) -> Iterator[Offer]:
    """Yield at most `MAX_OFFERS` offers. Skips providers that were added to `closed` in the meantime."""
    num_tried = 0
    for offer in offers:
        if offer.provider not in closed and num_tried < MAX_OFFERS:
            num_tried += 1
            yield offer


def _is_beside(offer: Offer, rental: Rental) -> bool:
    return (offer.provider, offer.region, offer.gpus) == (rental.provider, rental.region, rental.gpu)


def _is_short(offer: Offer, request: RentRequest) -> bool:
    """Return whether the provider takes the machine back before the run's hours or money are used up."""
    hours = min(request.max_hours, _hours(request.max_usd / request.num_machines, offer.usd_per_hour))
    return offer.ends_at is not None and offer.ends_at < time.time() + 3600 * hours


def _rent_at(offer: Offer, unit: Sequence[Rental], renting: Renting) -> list[Rental]:
    """Rent the missing machines by one offer. All machines are requested before the first wait.

    Raises:
        _OfferFailedError: one machine could not be rented, and the other machines of this call were released.
    """
    request, cloud = renting.request, renting.clouds[offer.provider]
    fresh: list[Rental] = []
    try:
        while len(unit) + len(fresh) < request.num_machines:
            host_key = make_host_key() if request.expects_host_key and cloud.gives_host_key else None
            rental = _intend(offer, renting, host_key=host_key, beside=[*unit, *fresh])
            renting.say(
                f"requested {rental.gpu} at {offer.provider} for {offer.usd_per_hour:.2f} USD/h as {rental.name}"
            )
            fresh.append(_create_once(rental, offer, renting, host_key=host_key))
        for number, created in enumerate(fresh):
            others = [*unit, *fresh[:number], *fresh[number + 1 :]]
            fresh[number] = _use_or_release(created, renting, beside=others)
        return fresh
    except _OfferFailedError:
        names = {rental.name for rental in fresh}
        others = [row for row in renting.own_rows() if row.name in names and is_in_use(row)]
        release_machines(others, renting.ledger, renting.clouds, pace=renting.pace)
        raise


def search_offers(query: GPUQuery, clouds: Mapping[CloudName, Cloud]) -> Offered:
    """Return the offers of all providers that answer.

    Raises:
        ProviderUnavailableError, ProviderRefusedError: every provider failed.
    """
    order = [name for name in query.providers if name in clouds]
    offers: list[Offer] = []
    failures: list[InfraError] = []
    for name in order:
        try:
            offers += clouds[name].search(query)
        except InfraError as error:
            logger.warning("continued without %s: %s", name, error)
            failures.append(error)
    if failures and len(failures) == len(order):
        are_refusals = all(isinstance(error, ProviderRefusedError) for error in failures)
        kind = ProviderRefusedError if are_refusals else ProviderUnavailableError
        raise kind("; ".join(map(str, failures))) from failures[0]
    fitting = [offer for offer in offers if query.admits(offer)]
    return Offered(
        fitting=sorted(fitting, key=lambda offer: (offer.usd_per_hour, order.index(offer.provider))),
        others=[offer for offer in offers if not query.admits(offer)],
        failures=failures,
    )


def _intend(offer: Offer, renting: Renting, *, host_key: HostKeyPair | None, beside: Sequence[Rental]) -> Rental:
    """Add the ledger's row for a machine that is about to be requested, and return the row.

    Args:
        beside: the other machines of the unit so far. The future cost of these machines is subtracted from the run's
            money.

    Raises:
        PermanentInfraError: the run's money is used up.
    """
    request, ledger, now = renting.request, renting.ledger, time.time()
    if usd_spent(ledger, request.run_id, now) >= request.max_usd:
        raise PermanentInfraError(f"the run has spent its {request.max_usd:g} USD for machines: raise node.max_usd")
    rental = Rental(
        name=machine_name(ledger, request.run_id),
        run_id=request.run_id,
        provider=offer.provider,
        purpose=request.purpose,
        credentials=request.credentials,
        gpu=offer.gpus,
        region=offer.region,
        usd_per_hour=offer.usd_per_hour,
        intended_at=now,
        expires_at=now,
        vram_gb=offer.vram_gb,
        host=offer.host,
        expected_key=fingerprint_of(host_key.public) if host_key else "",
        believed_by=HostKeyEvidence.INJECTED.value if host_key else HostKeyEvidence.FIRST_USE.value,
    )
    allowed_until = _allowed_until(rental, renting, now, beside=beside)
    limited = replace(rental, expires_at=min(allowed_until, offer.ends_at or math.inf))
    add_rental(ledger, limited)
    if limited.expires_at < allowed_until:
        renting.say(f"{limited.name} is used until {in_utc(limited.expires_at)}, when its provider takes it back")
    return limited


def _allowed_until(rental: Rental, renting: Renting, now: float, *, beside: Sequence[Rental]) -> float:
    """Return the time at which the machine's hours, counted from now, or its share of the run's money are used up.

    The machine's past cost, also from an earlier run, and the future cost of the machines in `beside` are subtracted
    from the run's money.
    """
    request = renting.request
    others = [each for each in rentals_of(renting.ledger, request.run_id) if each.name != rental.name]
    spent_usd = sum(each.usd(now) for each in (rental, *others))
    promised_usd = sum((each.expires_at - now) / 3600 * each.usd_per_hour for each in beside)
    share_usd = max(0.0, request.max_usd - spent_usd - promised_usd) / (request.num_machines - len(beside))
    return now + 3600 * min(request.max_hours, _hours(share_usd, rental.usd_per_hour))


def _hours(usd: float, usd_per_hour: float) -> float:
    return usd / usd_per_hour if usd_per_hour > 0 else math.inf


def _create_once(rental: Rental, offer: Offer, renting: Renting, *, host_key: HostKeyPair | None) -> Rental:
    """Send the creation request once, because a retry could create a second machine. Returns the machine's row.

    Raises:
        _OfferFailedError: no machine was created.
    """
    request, ledger, cloud = renting.request, renting.ledger, renting.clouds[offer.provider]
    spec = MachineSpec(
        name=rental.name,
        public_key=request.public_key,
        disk_gb=request.query.disk_gb,
        image=request.image,
        min_cuda=request.query.min_cuda,
        ends_at=rental.expires_at,
        host_key=host_key,
    )
    try:
        instance_id = cloud.create(offer, spec)
    except UnclearAnswerError as error:
        try:
            found = find_unconfirmed(rental, cloud, renting.pace)
        except InfraError as silence:
            _leave_unconfirmed(rental, renting, reason=str(error))
            raise _UnconfirmedError(f"{error}; {silence}") from error
        if found is None:
            _leave_unconfirmed(rental, renting, reason=str(error))
            raise _OfferFailedError(f"{error}; it did not appear") from error
        return _adopt_or_release(rental, found.instance_id, renting, note=FOUND_NOTE)
    except InfraError as error:
        change_rental(ledger, rental, state=RentalState.REFUSED, ended_at=time.time(), note=str(error))
        if isinstance(error, OfferGoneError | ProviderUnavailableError):
            raise _OfferFailedError(str(error)) from error
        if isinstance(error, ProviderRefusedError):
            raise _RefusedError(str(error)) from error
        raise
    return _adopt_or_release(rental, instance_id, renting)


def _leave_unconfirmed(rental: Rental, renting: Renting, *, reason: str = "its creation was not answered") -> None:
    """Mark a machine that has not appeared yet as expired. If the machine appears, the next check of the reaper ends
    it, even if the run is alive."""
    now = time.time()
    if rental.expires_at > now:  # an earlier call has already marked an expired row
        change_rental(renting.ledger, rental, expires_at=now, note=f"{reason}; it has not appeared yet")
        renting.say(f"{rental.name} has not appeared, and may be rented: `rollouts reap` ends it when it appears")


def _adopt_or_release(rental: Rental, instance_id: str, renting: Renting, *, note: str = "") -> Rental:
    """Record the machine's id in its row. If the row cannot be written, release the machine at once."""
    try:
        adopted = change_rental(
            renting.ledger,
            rental,
            state=RentalState.RENTED,
            instance_id=instance_id,
            rented_at=rental.rented_at or rental.intended_at,
            note=note,
        )
    except InfraError:
        renting.release(replace(rental, instance_id=instance_id))
        raise
    if adopted is None:
        raise TransientInfraError(f"another process changed {rental.name} at the same moment: try again")
    return adopted


# ── from rented to usable ──


def _use_or_release(rental: Rental, renting: Renting, *, beside: Sequence[Rental]) -> Rental:
    """Wait until the machine is usable, and limit its time by its actual price. Returns the machine's row.

    Raises:
        _OfferFailedError: the machine is unusable and was released.
        PermanentInfraError: a problem that other machines would have too, for example an unusable `root`.
    """
    problem, host_key, price = _wait_ready(rental, renting)
    if problem:
        renting.say(f"gives back {rental.name}: {problem}")
        is_fresh = (
            rental.state is RentalState.RENTED and time.time() < rental.expires_at
        )  # an expired machine had too little time to be judged
        renting.release(rental, note=problem, is_unfit=is_fresh)
        raise _OfferFailedError(problem)
    priced = replace(rental, usd_per_hour=price)
    expires_at = min(rental.expires_at, _allowed_until(priced, renting, time.time(), beside=beside))
    if price > rental.usd_per_hour * _PRICE_TOLERANCE:
        offered = f"{price:.2f} USD/h, but was offered for {rental.usd_per_hour:.2f}"
        renting.say(f"{rental.name} costs {offered}: it is ended by {in_utc(expires_at)}")
    changes = {"host_key": host_key, "usd_per_hour": price, "expires_at": expires_at}
    ready = change_rental(renting.ledger, rental, state=RentalState.READY, **changes)
    if ready is None:
        raise _OfferFailedError(f"another process ended {rental.name} at the same moment")
    return ready


def _wait_ready(rental: Rental, renting: Renting) -> tuple[str, str, float]:
    """Wait until a machine is usable. Returns the problem (empty if the machine is usable), the host key, and the price
    per hour."""
    request, cloud, pace = renting.request, renting.cloud_of(rental), renting.pace
    started = time.monotonic()
    reason, price = "its provider gave it no address", rental.usd_per_hour
    while True:
        try:
            instance = look_up(cloud, rental.instance_id, rental.name)
            may_be_unseen = rental.state is not RentalState.READY and time.monotonic() - started < _UNSEEN_S
            if instance is not None:
                price = max(price, instance.usd_per_hour or 0.0)
            if problem := _describe_unfit(rental, instance, price, request.query, may_be_unseen=may_be_unseen):
                return problem, "", price
            if instance is not None and instance.has_address:
                if request.expects_host_key:
                    rental = _with_expected_key(rental, renting.ledger, cloud)
                return "", renting.check(rental, instance), price
        except UnfitMachineError as error:
            return str(error), "", price
        except (TransientInfraError, LoginError, NameUnknownError) as error:  # a new machine may not be complete yet
            reason = str(error)
        if time.monotonic() - started + pace.poll_s > request.usable_within_s:
            return f"{rental.name} could not be used within {request.usable_within_s:g} s ({reason})", "", price
        if time.time() >= rental.expires_at:
            problem = f"{rental.name} could not be used before its hours or the run's money were used up ({reason})"
            return problem, "", price
        time.sleep(pace.poll_s)


def _describe_unfit(
    rental: Rental, instance: Instance | None, price: float, query: GPUQuery, *, may_be_unseen: bool
) -> str:
    """Return why a machine can never be used, or "" if the machine may become usable."""
    if instance is None:
        return "" if may_be_unseen else f"{rental.name} is gone: its provider took it away"
    if not instance.status.may_become_usable:
        return f"{rental.name} is {instance.status}"
    if price > query.max_usd_per_gpu_hour * query.gpu_count * _PRICE_TOLERANCE:
        return f"{rental.name} costs {price:.2f} USD/h, more than offered and allowed"
    if instance.region and not query.admits_region(instance.region):
        place = f"{shown_line(instance.region)} instead of {rental.region}"
        return f"{rental.name} is in {place}, which node.query.regions does not admit"
    return ""


def _with_expected_key(rental: Rental, ledger: Ledger, cloud: Cloud) -> Rental:
    """Store the host key that the provider reports, unless a host key is already known. Returns the machine's row."""
    if rental.host_key or rental.expected_key:
        return rental
    told = cloud.host_key(rental.instance_id)
    if not told:
        return rental
    return change_rental(ledger, rental, expected_key=told, believed_by=HostKeyEvidence.PROVIDER.value) or rental
