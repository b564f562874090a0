"""Rent machines, so that none is forgotten whatever breaks in between.

Not here: what providers say (providers/), the rows of the ledger (rentals.py), giving machines back (release.py), those
of dead runs (reaper.py).

    intent written ── one request to create ── id written ── waited until usable ── ready
         |                   | nobody knows: looked for by its name, and adopted
         |                   | refused, or never usable: ended, verified, next offer
    killed anywhere: the same run goes on from the row; else a run with the same settings, or the reaper, takes it
    its run failed, and keeps it: the same, and until then the reaper leaves it

Several are one unit, of one kind, in one region of one provider: where one of them cannot be had, or is lost and
nothing beside the others replaces it, all are given back.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from infra.cloud import PATIENT, Cloud, Pace
from infra.errors import (
    InfraError,
    LoginError,
    NoMachineError,
    OfferGoneError,
    PermanentInfraError,
    ProviderUnavailableError,
    TransientInfraError,
    UnclearAnswerError,
    UnfitMachineError,
)
from infra.host_keys import HostKeyEvidence, fingerprint_of, make_host_key
from infra.ledger import Ledger
from infra.offers import (
    CloudName,
    GPUQuery,
    HostKeyPair,
    Instance,
    InstanceStatus,
    MachineSpec,
    Offer,
    Offered,
    describe_closest,
)
from infra.release import release_machine, release_machines
from infra.rentals import (
    Rental,
    RentalState,
    add_rental,
    all_rentals,
    change_rental,
    find_rental,
    machine_name,
    unfit_hosts,
    usd_spent,
)

MAX_OFFERS = 6
UNSEEN_S = 60.0
"""A machine that was created this recently may not be shown yet by its provider."""
UNFIT_FOR_S = 24 * 3600.0
"""A machine that could not be used is not rented again for so long."""
PRICE_TOLERANCE = 1.001

Check = Callable[[Rental, Instance], str]
"""Log in on a machine and return the fingerprint of its host key, which is the expected one, where one is; an
InfraError says why it cannot be used (yet)."""
Say = Callable[[str], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RentRequest:
    """What a run wants."""

    run_id: str
    query: GPUQuery
    num_machines: int = 1
    """So many in one region of one provider, or none."""
    public_key: str
    image: str = ""
    purpose: str
    """Hash of everything that makes one machine as good as another."""
    credentials: str = ""
    """Name of those whose accounts are used."""
    max_usd: float
    """What all machines of the run may cost together."""
    max_hours: float
    """No machine is kept longer."""
    usable_within_s: float = 900.0
    expects_host_key: bool = True
    """The first connection is held against a key that is known before, where the provider allows that."""


def rent_machines(
    request: RentRequest,
    ledger: Ledger,
    clouds: Mapping[CloudName, Cloud],
    *,
    check: Check,
    say: Say = logger.info,
    pace: Pace = PATIENT,
) -> list[Rental]:
    """Machines that can be used: the run's own, those that an ended run with the same settings left, and new ones.

    Returns:
        As many as are wanted, oldest first.

    Raises:
        NoMachineError: no offer led to them, nothing is rented; says what was tried.
        StillRentedError: a machine that could not be used could not be ended either.
        PermanentInfraError: the money is used up, a key is refused, or the machines lack what the settings promise.
    """
    with ledger.renting(request.run_id), _all_or_none(ledger, clouds, pace) as unit:
        for rental in _inherited(request, ledger):
            cloud = clouds[rental.provider]
            if len(unit) < request.num_machines and _is_where(rental, unit):
                usable = _settle(rental, request, ledger, cloud, check, say, pace)
                if usable is not None:
                    say(f"goes on with {usable.name}, {usable.gpu} at {usable.provider}")
                    unit.append(usable)
            elif rental.instance_id:  # one whose creation was not answered, and another one took its place
                say(f"gives {rental.name} back: there are others in its place")
                release_machine(rental, ledger, cloud, pace=pace)
        if len(unit) < request.num_machines:
            _rent_new(unit, request, ledger, clouds, check, say, pace)
        return unit


def find_by_name(name: str, cloud: Cloud, pace: Pace) -> Instance | None:
    """The machine whose creation was not answered; None when it does not appear.

    Raises:
        ProviderUnavailableError: the provider cannot be asked.
    """
    for pause_s in pace.looks_s:
        time.sleep(pause_s)
        for instance in cloud.list_named(name):
            if instance.name == name and instance.status is not InstanceStatus.GONE:
                return instance
    return None


# ── what was there before ──


def _inherited(request: RentRequest, ledger: Ledger) -> list[Rental]:
    """The run's own machines that are not over, and those that dead or failed runs with the same settings left.

    None in other accounts: there nothing can be said about them. Of dead runs, those of one.
    """
    ours = [rental for rental in all_rentals(ledger) if rental.credentials == request.credentials]
    own = [rental for rental in ours if rental.run_id == request.run_id and not rental.state.is_over]
    if own:
        return sorted(own, key=lambda rental: rental.state is not RentalState.READY)  # these come before what appears
    mine: list[Rental] = []
    for rental in ours:
        is_fit = rental.state is RentalState.READY and rental.purpose == request.purpose
        is_beside = not mine or mine[0].note == _left_by(rental)
        if is_fit and is_beside and rental.ends_at > time.time() and ledger.has_died(rental.run_id):
            changes = {"run_id": request.run_id, "kept_until": None}
            taken = change_rental(ledger, rental, **changes, note=_left_by(rental))
            mine += [taken] if taken is not None else []
        if len(mine) == request.num_machines:
            break
    return mine


def _left_by(rental: Rental) -> str:
    return f"left by run {rental.run_id}"


def _is_where(rental: Rental, unit: Sequence[Rental]) -> bool:
    """Whether a machine is of the kind, and in the place, of the others."""
    return len({(each.provider, each.region, each.gpu) for each in (rental, *unit)}) == 1


def _settle(
    rental: Rental, request: RentRequest, ledger: Ledger, cloud: Cloud, check: Check, say: Say, pace: Pace
) -> Rental | None:
    """Bring a machine of an earlier process to an end or to use; None when it is of no use."""
    if rental.kept_until is not None:
        current = change_rental(ledger, rental, kept_until=None) or find_rental(ledger, rental.name)
        if current is None or current.run_id != request.run_id or current.state.is_over:
            return None  # another run took it over, or it was ended, since the ledger was read
        rental = current
    if rental.state is RentalState.INTENDED:
        instance = find_by_name(rental.name, cloud, pace)
        if instance is None:
            return None  # it may still appear: the row stays, and the reaper looks for it
        rental = _adopt_or_release(rental, instance.id, ledger, cloud, pace, note="found by its name")
    if rental.state is RentalState.RELEASING or rental.expires_at <= time.time():
        release_machine(rental, ledger, cloud, pace=pace)
        return None
    try:
        return _use_or_release(rental, request, ledger, cloud, check, say, pace)
    except _NotHadError:
        return None


# ── new machines ──


class _NotHadError(Exception):
    """An offer did not lead to a machine, and another one may."""


@contextmanager
def _all_or_none(ledger: Ledger, clouds: Mapping[CloudName, Cloud], pace: Pace) -> Iterator[list[Rental]]:
    """A list for machines, which are given back where the block fails."""
    rentals: list[Rental] = []
    try:
        yield rentals
    except BaseException:
        release_machines([rental for rental in rentals if _is_in_use(rental, ledger)], ledger, clouds, pace=pace)
        raise


def _is_in_use(rental: Rental, ledger: Ledger) -> bool:
    """Whether nobody has tried to end it so far; True also where the ledger cannot say."""
    try:
        current = find_rental(ledger, rental.name)
    except InfraError:
        return True
    return current is not None and current.state in (RentalState.RENTED, RentalState.READY)


def _rent_new(
    unit: list[Rental],
    request: RentRequest,
    ledger: Ledger,
    clouds: Mapping[CloudName, Cloud],
    check: Check,
    say: Say,
    pace: Pace,
) -> None:
    """Complete the unit, beside the machines that it has or with all of them elsewhere."""
    tried: list[str] = []
    offered = search_offers(request.query, clouds)
    unfit = unfit_hosts(ledger, time.time() - UNFIT_FOR_S)
    offers = [offer for offer in offered.fitting if (offer.provider, offer.host) not in unfit]
    if num_unfit := len(offered.fitting) - len(offers):
        tried.append(f"{num_unfit} offered machines could not be used within the last day")
    offers.sort(key=lambda offer: bool(unit) and not _is_beside(offer, unit[0]))  # otherwise in their order
    for offer in offers[:MAX_OFFERS]:
        if unit and not _is_beside(offer, unit[0]):
            say(f"gives {', '.join(rental.name for rental in unit)} back: no machine is to be had beside")
            release_machines(unit, ledger, clouds, pace=pace)
            unit.clear()
        try:
            unit += _rent_at(offer, unit, request, ledger, clouds, check, say, pace)
        except _NotHadError as error:
            tried.append(str(error))
        else:
            return
    if not offered.fitting:
        tried.append(describe_closest(request.query, offered.others, "node.query.{}".format))
    wanted = " or ".join(request.query.gpu_types) or "GPU"
    machines = "no machine" if request.num_machines == 1 else f"no {request.num_machines} machines of one region"
    raise NoMachineError(
        f"{machines} with {request.query.gpu_count}x {wanted} for {request.query.max_usd_per_gpu_hour:g} USD per GPU "
        f"and hour or less could be had ({'; '.join(tried)}): try again later, or widen "
        "node.query"
    )


def _is_beside(offer: Offer, rental: Rental) -> bool:
    """Whether the offer is for a machine of the same kind in the same place."""
    return (offer.provider, offer.region, offer.gpus) == (rental.provider, rental.region, rental.gpu)


def _rent_at(
    offer: Offer,
    unit: Sequence[Rental],
    request: RentRequest,
    ledger: Ledger,
    clouds: Mapping[CloudName, Cloud],
    check: Check,
    say: Say,
    pace: Pace,
) -> list[Rental]:
    """What the unit lacks, by one offer; all are asked for before any is waited for.

    Raises:
        _NotHadError: one of them could not be had, so the others are given back.
    """
    cloud = clouds[offer.provider]
    with _all_or_none(ledger, clouds, pace) as fresh:
        while len(unit) + len(fresh) < request.num_machines:
            host_key = make_host_key() if request.expects_host_key and cloud.gives_host_key else None
            rental = _intend(request, offer, ledger, host_key=host_key, beside=[*unit, *fresh])
            say(f"asked {offer.provider} for {rental.gpu} at {offer.usd_per_hour:.2f} USD/h as {rental.name}")
            fresh.append(_create_once(rental, offer, request, ledger, cloud, pace, host_key=host_key))
        return [_use_or_release(created, request, ledger, cloud, check, say, pace) for created in fresh]


def search_offers(query: GPUQuery, clouds: Mapping[CloudName, Cloud]) -> Offered:
    """What all providers that answer have.

    Raises:
        ProviderUnavailableError, ProviderRefusedError: none of them answers.
    """
    order = [name for name in query.providers if name in clouds]
    offers: list[Offer] = []
    failures: list[InfraError] = []
    for name in order:
        try:
            offers += clouds[name].search(query)
        except InfraError as error:
            logger.warning("went on without %s: %s", name, error)
            failures.append(error)
    if failures and len(failures) == len(order):
        raise failures[0]
    fitting = [offer for offer in offers if query.admits(offer)]
    return Offered(
        fitting=sorted(fitting, key=lambda offer: (offer.usd_per_hour, order.index(offer.provider))),
        others=[offer for offer in offers if not query.admits(offer)],
    )


def _intend(
    request: RentRequest, offer: Offer, ledger: Ledger, *, host_key: HostKeyPair | None, beside: Sequence[Rental]
) -> Rental:
    """Write down that the machine will be asked for.

    Args:
        host_key: what it will be given.
        beside: the machines of the unit so far; what they cost until they expire is left to them.

    Raises:
        PermanentInfraError: the run's money is used up.
    """
    now = time.time()
    left_usd = request.max_usd - usd_spent(ledger, request.run_id, now)
    if left_usd <= 0:
        raise PermanentInfraError(
            f"the run has spent the {request.max_usd:g} USD that it may spend on machines: raise node.max_usd"
        )
    promised_usd = sum((rental.expires_at - now) / 3600 * rental.usd_per_hour for rental in beside)
    own_usd = max(0.0, left_usd - promised_usd) / (request.num_machines - len(beside))
    paid_hours = own_usd / offer.usd_per_hour if offer.usd_per_hour > 0 else math.inf
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
        expires_at=now + 3600 * min(request.max_hours, paid_hours),
        vram_gb=offer.vram_gb,
        host=offer.host,
        expected_key=fingerprint_of(host_key.public) if host_key else "",
        believed_by=HostKeyEvidence.INJECTED.value if host_key else HostKeyEvidence.FIRST_USE.value,
    )
    add_rental(ledger, rental)
    return rental


def _create_once(
    rental: Rental,
    offer: Offer,
    request: RentRequest,
    ledger: Ledger,
    cloud: Cloud,
    pace: Pace,
    *,
    host_key: HostKeyPair | None,
) -> Rental:
    """The machine that one request created.

    Raises:
        _NotHadError: there is none.
    """
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
        instance = find_by_name(rental.name, cloud, pace)
        if instance is None:
            change_rental(ledger, rental, note=f"{error}; it did not appear so far")
            raise _NotHadError(f"{error}; it did not appear") from error
        instance_id = instance.id
    except InfraError as error:
        change_rental(ledger, rental, state=RentalState.REFUSED, ended_at=time.time(), note=str(error))
        if isinstance(error, OfferGoneError | ProviderUnavailableError):
            raise _NotHadError(str(error)) from error
        raise
    return _adopt_or_release(rental, instance_id, ledger, cloud, pace)


def _adopt_or_release(
    rental: Rental, instance_id: str, ledger: Ledger, cloud: Cloud, pace: Pace, *, note: str = ""
) -> Rental:
    """Write down which machine the row is about; one about which that cannot be written is given back at once."""
    try:
        adopted = change_rental(
            ledger,
            rental,
            state=RentalState.RENTED,
            instance_id=instance_id,
            rented_at=rental.rented_at or rental.intended_at,
            note=note,
        )
    except InfraError:
        release_machine(replace(rental, instance_id=instance_id), ledger, cloud, pace=pace)
        raise
    if adopted is None:
        raise TransientInfraError(f"somebody else changed {rental.name} at the same moment: try again")
    return adopted


# ── from rented to usable ──


def _use_or_release(
    rental: Rental, request: RentRequest, ledger: Ledger, cloud: Cloud, check: Check, say: Say, pace: Pace
) -> Rental:
    """The machine when it can be used; otherwise it is given back.

    Raises:
        _NotHadError: it cannot be used.
        PermanentInfraError: no machine could be used; this one is given back.
    """
    try:
        problem, host_key, price = _wait_until_usable(rental, request, ledger, cloud, check, pace)
        ready = (
            None
            if problem
            else change_rental(ledger, rental, state=RentalState.READY, host_key=host_key, usd_per_hour=price)
        )
    except (Exception, KeyboardInterrupt) as error:
        release_machine(rental, ledger, cloud, note=f"given back: {error}", pace=pace)
        raise
    if problem:
        say(f"gives {rental.name} back: {problem}")
        is_unfit = rental.state is RentalState.RENTED
        release_machine(rental, ledger, cloud, note=problem, is_unfit=is_unfit, pace=pace)
        raise _NotHadError(problem)
    if ready is None:
        raise _NotHadError(f"somebody else ended {rental.name} at the same moment")
    return ready


def _wait_until_usable(
    rental: Rental, request: RentRequest, ledger: Ledger, cloud: Cloud, check: Check, pace: Pace
) -> tuple[str, str, float]:
    """Why the machine will not do, or nothing; its host key; its price per hour."""
    max_usd_per_hour = request.query.max_usd_per_gpu_hour * request.query.gpu_count * PRICE_TOLERANCE
    started = time.monotonic()
    reason, price = "its provider gave it no address", rental.usd_per_hour
    while True:
        try:
            instance = cloud.get(rental.instance_id)
            is_unseen = rental.state is not RentalState.READY and time.monotonic() - started < UNSEEN_S
            if instance is None and not is_unseen:
                return f"{rental.name} is gone: its provider took it away", "", price
            if instance is not None and not instance.status.may_become_usable:
                return f"{rental.name} is {instance.status}", "", price
            if instance is not None:
                price = max(price, instance.usd_per_hour or 0.0)
            if price > max_usd_per_hour:
                return f"{rental.name} costs {price:.2f} USD/h, more than was offered and allowed", "", price
            if instance is not None and instance.has_address:
                if request.expects_host_key:
                    rental = _with_expected_key(rental, ledger, cloud)
                return "", check(rental, instance), price
        except UnfitMachineError as error:
            return str(error), "", price
        except (TransientInfraError, LoginError) as error:  # keys arrive late on fresh machines
            reason = str(error)
        if time.monotonic() - started + pace.poll_s > request.usable_within_s:
            return f"{rental.name} could not be used within {request.usable_within_s:g} s ({reason})", "", price
        time.sleep(pace.poll_s)


def _with_expected_key(rental: Rental, ledger: Ledger, cloud: Cloud) -> Rental:
    """The row with what its provider tells about its host key, where nothing is known about that yet."""
    if rental.host_key or rental.expected_key:
        return rental
    told = cloud.host_key(rental.instance_id)
    if not told:
        return rental
    return change_rental(ledger, rental, expected_key=told, believed_by=HostKeyEvidence.PROVIDER.value) or rental
