"""Machines that are rented for a run, reached over SSH, and released: nodes of the kind `rented`.

    settings ── rent_machines ── first login: host key stored, set up ── Node ─┬─ release_machines
                                                                               └─ its run failed: kept for a while

A new machine's host key is known before the first login if it was installed at the machine's creation, or if the
provider reports it. If no host key is known, the host key of the first login is accepted. The ledger stores the key's
fingerprint. Later logins require the same key, even if the machine's address has changed.

Not here: renting (renting/provision.py), the providers' APIs (runpod.py and others), SSH (ssh/ssh_session.py).
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rollouts.infra.cloud import PATIENT, Cloud, Pace, look_up
from rollouts.infra.clouds import CloudName, find_cloud
from rollouts.infra.errors import (
    InfraError,
    MachineGoneError,
    PermanentInfraError,
    ProviderUnavailableError,
    TransientInfraError,
)
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.node import InstanceNode, Node, RentedNode, SSHAccess
from rollouts.infra.offers import Instance, Offer, describe_closest
from rollouts.infra.providers.clouds import account_of, credentials_in_use, open_clouds, require_keys
from rollouts.infra.providers.ssh import CALL_TIMEOUT_S, expand_root, open_ssh_session
from rollouts.infra.reach import own_address
from rollouts.infra.renting.acceptance import require_gpus, require_peers, require_speed
from rollouts.infra.renting.provision import released_on_failure, rent_machines, search_offers
from rollouts.infra.renting.reaper import ReapReport, reap
from rollouts.infra.renting.release import release_all, release_machines
from rollouts.infra.renting.rentals import Rental, RentalState, change_rental, find_rental, in_utc, rentals_of
from rollouts.infra.renting.request import Renting, RentRequest
from rollouts.infra.repeating import repeating
from rollouts.infra.session import Session
from rollouts.infra.ssh.host_keys import HostKeyPolicy

if TYPE_CHECKING:
    from rollouts.infra.ssh.ssh_session import SSHSession

_SETUP_PYTHON = "/usr/bin/python3"
"""Interpreter for the setup commands, which run before `python` may exist. All tested images have this file."""
_SETUP_TIMEOUT_S = 3600.0
_REAP_WITHIN_S = 60.0
"""Seconds that a new run waits at most until an old machine is gone."""
EXPIRY_LOOK_S = 5.0
_KEYS_DIR = "machine_keys"

Say = Callable[[str], None]

logger = logging.getLogger(__name__)


def provision_rented(settings: RentedNode, store: Path, run_id: str, say: Say) -> Node:
    """Return a rented machine that is set up, with the other nodes of its unit. Machines that the run already has are
    reused.

    Raises:
        NoMachineError, StillRentedError, MissingKeyError, ProviderRefusedError: no machine is available.
        InfraError: a machine does not match the settings. All machines were released.
    """
    assert run_id, "a machine is rented for a run"
    mirror = store.expanduser().absolute()
    request = _build_request(settings, run_id)
    names = require_keys(request.query.providers)
    with Ledger(mirror / LEDGER_FILE) as ledger, open_clouds(names) as clouds:
        report = _end_unwanted(ledger, clouds, say)
        renting = Renting(request, ledger, clouds, check=partial(log_in, settings, mirror, say), say=say)
        rentals = rent_machines(renting)
        with released_on_failure(renting):  # the caller does not know the machines yet
            nodes = [_node_now(rental, clouds[rental.provider], settings, mirror) for rental in rentals]
    for line in report.kept:
        if not any(rental.name in line for rental in rentals):
            say(f"also rented: {line}; `rollouts reap` ends machines that no run needs")
    first, several = rentals[0], f"{len(rentals)} times " if len(rentals) > 1 else ""
    usd_per_hour = sum(rental.usd_per_hour for rental in rentals)
    say(
        f"rented {several}{first.gpu} at {first.provider} for {usd_per_hour:.2f} USD/h, "
        f"for {settings.max_usd:g} USD at most"
    )
    return _unit_of(nodes, settings)


def is_left_for(rental: Rental, settings: RentedNode) -> bool:
    """Return whether a later run with these settings could take over the machine after the death of the machine's
    run."""
    is_same = (rental.purpose, rental.credentials) == (purpose_of(settings), credentials_in_use())
    return is_same and rental.state is RentalState.READY


def end_left_machines(settings: RentedNode, store: Path, say: Say) -> None:
    """End the store's machines that no run needs, and report these machines. Renting begins with the same cleanup.

    Raises:
        InfraError: the providers' API keys are missing.
    """
    with (
        Ledger(store.expanduser().absolute() / LEDGER_FILE) as ledger,
        open_clouds(require_keys(settings.query.providers)) as clouds,
    ):
        _end_unwanted(ledger, clouds, say)


def _end_unwanted(ledger: Ledger, clouds: Mapping[CloudName, Cloud], say: Say) -> ReapReport:
    report = reap(ledger, clouds, spare=True, credentials=credentials_in_use(), pace=Pace(gone_within_s=_REAP_WITHIN_S))
    for line in report.ended:
        say(f"ended {line}: its time was nearly over, or it was stopped or never used")
    for line in report.failures:
        say(line)
    return report


def find_rented(settings: RentedNode, store: Path, run_id: str) -> Node | None:
    """Return a run's machine with the other nodes of its unit, or None if the run has no usable machine. Rents nothing.

    Raises:
        InfraError: a machine cannot be reached.
    """
    mirror = store.expanduser().absolute()
    with Ledger(mirror / LEDGER_FILE) as ledger:
        usable = [rental for rental in rentals_of(ledger, run_id) if not rental.state.is_over and rental.host_key]
    nodes = []
    for rental in usable:
        with account_of(rental) as cloud:
            instance = look_up(cloud, rental.instance_id, rental.name)
        if instance is not None and instance.has_address and instance.status.may_become_usable:
            nodes.append(_node_of(rental, instance, settings, mirror))
    return _unit_of(nodes, settings) if nodes else None


def _unit_of(nodes: Sequence[Node], settings: RentedNode) -> Node:
    """Return the first node as the leader of the other nodes: first the trainers' nodes, then the engines' nodes."""
    leader, *further = nodes
    num_trainers = settings.num_trainer_nodes - 1
    trainer_nodes, engine_nodes = tuple(further[:num_trainers]), tuple(further[num_trainers:])
    return replace(leader, address="", trainer_nodes=trainer_nodes, engine_nodes=engine_nodes)


def _node_now(rental: Rental, cloud: Cloud, settings: RentedNode, mirror: Path) -> Node:
    instance = look_up(cloud, rental.instance_id, rental.name)
    if instance is None or not instance.has_address:
        raise TransientInfraError(f"{rental.name} is gone: its provider took it away just after it was ready")
    return _node_of(rental, instance, settings, mirror)


def _node_of(rental: Rental, instance: Instance, settings: RentedNode, mirror: Path) -> Node:
    known = str(known_hosts_of(mirror, rental.name))
    access = replace(access_to(instance, settings), host_key=rental.host_key, known_hosts=(known,), pinned_file=known)
    with open_ssh(access, python=settings.python) as session:
        root = expand_root(session, settings.python, settings.root)
        address = instance.private_address or (own_address(session) if settings.num_machines > 1 else "")
    return Node(
        name=rental.name,
        kind="rented",
        root=root,
        python=settings.python,
        mirror=str(mirror),
        access=access,
        is_rented=True,
        believed_by=rental.believed_by,
        address=address,
    )


def release_rented(node: Node) -> None:
    """Release the machine and the other machines of its unit. Returns when the provider no longer has any of these
    machines.

    Raises:
        StillRentedError: a machine may still be rented.
    """
    with ExitStack() as stack:
        found = [stack.enter_context(_rental_of(each)) for each in (node, *node.further_nodes)]
        clouds = {rental.provider: cloud for _, rental, cloud in found}
        release_machines([rental for _, rental, _ in found], found[0][0], clouds)


def keep_rented(node: Node, minutes: float) -> list[str]:
    """Keep the machines of a failed run for a while. Returns sentences for the user.

    Returns an empty list if a machine's hours or the run's money are used up, or if another process is ending a
    machine.

    Raises:
        InfraError: a login failed, so that a kept machine would be useless.
    """
    unit = (node, *node.further_nodes)
    for each in unit:
        with open_rented_session(each) as session:
            session.run(["true"], timeout_s=CALL_TIMEOUT_S, may_repeat=True)
    now = time.time()
    kept = []
    with Ledger(Path(node.mirror) / LEDGER_FILE) as ledger:
        for each in unit:
            rental = find_rental(ledger, each.name)
            if rental is None or rental.state is not RentalState.READY or rental.expires_at <= now:
                return []
            rental = change_rental(ledger, rental, kept_until=min(now + 60 * minutes, rental.expires_at))
            if rental is None:
                return []
            kept.append(rental)
    return [
        *(
            f"keeps {rental.name} until {in_utc(rental.ends_at)}, because the run failed, at "
            f"{rental.usd_per_hour:.2f} USD/h: `rollouts nodes ssh {rental.name}` logs in, Retry or the same command "
            f"resumes there, and `rollouts nodes release {rental.name}` ends it now"
            for rental in kept
        ),
        "`rollouts up`, `rollouts watch`, a later run or `rollouts reap` ends the machine then: without one of these "
        "commands, the machine keeps costing money",
    ]


def release_rentals(
    store: Path, run_id: str, *, since: float = 0.0, spared: Collection[str] = (), pace: Pace = PATIENT
) -> list[str]:
    """Release the machines that an ended run has rented or requested. Returns a sentence per released or remaining
    machine.

    Args:
        since: machines that were requested before this time are not released.
        spared: names of machines that are not released.

    Raises:
        PermanentInfraError: this process has no API key for any of the machines. If only some keys are missing, the
            machines of the other keys are released.
    """
    reached: list[Rental] = []
    failures: list[PermanentInfraError] = []
    clouds: dict[CloudName, Cloud] = {}
    with Ledger(store / LEDGER_FILE) as ledger, ExitStack() as stack:
        for rental in rentals_of(ledger, run_id):
            if rental.state.is_over or rental.intended_at < since or rental.name in spared:
                continue
            try:
                clouds[rental.provider] = stack.enter_context(account_of(rental))
                reached.append(rental)
            except PermanentInfraError as error:
                failures.append(type(error)(f"{rental.name} may be rented at {rental.provider} and was left: {error}"))
        if failures and not reached:
            raise failures[0]
        return [*release_all(reached, ledger, clouds, pace=pace), *map(str, failures)]


@contextmanager
def ended_when_expired(node: Node) -> Iterator[None]:
    """While the block runs, end the rented machines as soon as one machine's hours or the run's money are used up.

    The hours are measured in wall-clock time, which continues while this machine sleeps. If ending the machines fails,
    the next check retries it.
    """
    if not node.is_rented:
        yield
        return
    with Ledger(Path(node.mirror) / LEDGER_FILE) as ledger:
        expires_at = min(each.expires_at for each in rentals_of_unit(ledger, node))
    is_ended = threading.Event()

    def look() -> None:
        if time.time() >= expires_at and not is_ended.is_set() and _end_expired(node):
            is_ended.set()

    with repeating(look, interval_s=EXPIRY_LOOK_S, thread_name=f"hours of {node.name}"):
        yield


def rentals_of_unit(ledger: Ledger, node: Node) -> list[Rental]:
    found = [find_rental(ledger, each.name) for each in (node, *node.further_nodes)]
    return [rental for rental in found if rental is not None]


def _end_expired(node: Node) -> bool:
    logger.warning("%s has used up its hours or the run's money and is given back", node.name)
    try:
        release_rented(node)
    except InfraError as error:  # log the error, because an exception in this thread would be invisible
        logger.error("%s", error)
        return False
    return True


def open_rented_session(node: Node) -> Session:
    """Return a session on the machine. The session asks the provider for the address before every connection."""
    return open_ssh_session(node, find_access=partial(access_now, node, partial(find_machine, node)))


def find_rentable(settings: RentedNode) -> list[Offer]:
    """Return the machines that could be rented now, cheapest first. Rents nothing.

    Raises:
        PermanentInfraError: an API key is missing or refused, or no offer matches the settings.
    """
    request = _build_request(settings, "nobody")
    with open_clouds(require_keys(request.query.providers)) as clouds:
        offered = search_offers(request.query, clouds)
    if not offered.fitting:
        closest = describe_closest(request.query, offered.others, "node.query.{}".format)
        found = "; ".join([closest, *map(str, offered.failures)])
        raise PermanentInfraError(
            f"no provider offers a machine that matches node.query now ({found}): see `rollouts gpus`, or widen it"
        )
    return list(offered.fitting)


def describe_rentable(settings: RentedNode, offers: Sequence[Offer]) -> str:
    """Describe the cheapest offer in one sentence, with its price and its time limit."""
    cheapest = offers[0]
    several = f", {settings.num_machines} times," if settings.num_machines > 1 else ""
    found = f"node: {describe_offer(cheapest)}{several} is the cheapest of {len(offers)} offers"
    if cheapest.is_unpriced:
        return f"{found}; no price limits it, but node.max_hours ({settings.max_hours:g} h) does"
    hours = settings.max_usd / (cheapest.usd_per_hour * settings.num_machines)
    return f"{found}; {settings.max_usd:g} USD (node.max_usd) last {hours:.1f} h there"


def describe_offer(offer: Offer) -> str:
    price = "at an unknown price" if offer.is_unpriced else f"for {offer.usd_per_hour:.2f} USD/h"
    return f"{offer.gpus} {offer.where} {price}"


# ── details ──


def _build_request(settings: RentedNode, run_id: str) -> RentRequest:
    """Return the request for machines.

    Raises:
        PermanentInfraError: the SSH key for the login is unusable.
    """
    from rollouts.infra.ssh.login_keys import read_public_key, require_login_key  # this import loads paramiko

    query = settings.query
    if settings.num_machines > 1:
        networked = tuple(name for name in query.providers if find_cloud(name).is_networked)
        query = query.model_copy(update={"providers": networked})
    public_key = read_public_key(key_file=settings.key_file, key_variable=settings.key_variable)
    require_login_key(key_file=settings.key_file, key_variable=settings.key_variable)
    return RentRequest(
        run_id=run_id,
        query=query,
        num_machines=settings.num_machines,
        public_key=public_key,
        image=settings.image,
        purpose=purpose_of(settings),
        credentials=credentials_in_use(),
        max_usd=settings.max_usd,
        max_hours=settings.max_hours,
        usable_within_s=settings.usable_within_minutes * 60,
        expects_host_key=settings.host_keys == "expect",
    )


def purpose_of(settings: RentedNode) -> str:
    """Return a hash of the settings that must be equal for one machine to replace another."""
    demands = {"min_free_gb", "usable_within_minutes", "min_link_mbit_s", "min_disk_mb_s"}
    limits = {"max_usd", "max_hours", "keep_on_failure_minutes"}
    sameness = settings.model_dump_json(exclude=limits | demands)
    return hashlib.sha256(sameness.encode()).hexdigest()[:16]


def access_to(instance: Instance, settings: RentedNode | InstanceNode) -> SSHAccess:
    """Return the parameters for a login to the machine at its present address, without a host key."""
    return SSHAccess(
        host=instance.host,
        port=instance.port,
        user=instance.user,
        key_file=settings.key_file,
        key_variable=settings.key_variable,
        known_hosts=(),
        proxy_jump=instance.proxy_jump,
        ssh_config=instance.ssh_config,
    )


def log_in(settings: RentedNode, store: Path, say: Say, rental: Rental, instance: Instance) -> str:
    """Log in on a new machine, test it, and set it up. Returns the fingerprint of the machine's host key.

    Raises:
        UnfitMachineError: the machine's GPUs cannot compute or differ from the offer, or the machine is too slow.
    """
    known = known_hosts_of(store, rental.name)
    access = replace(access_to(instance, settings), known_hosts=(str(known),), pinned_file=str(known))
    if rental.host_key:
        access = replace(access, host_key=rental.host_key)
        fingerprint = rental.host_key
        with open_ssh(access, python=settings.python) as session:
            expand_root(session, settings.python, settings.root)
        return fingerprint
    if rental.expected_key:
        known.unlink(missing_ok=True)  # an earlier attempt may have stored another host key
    access = replace(access, host_key=rental.expected_key, first_use_file=str(known))
    with open_ssh(access, python=_SETUP_PYTHON if settings.setup else settings.python) as session:
        gpu_type = rental.gpu.partition("x ")[2]
        gpus = require_gpus(session, settings.query.gpu_count, gpu_type=gpu_type, vram_gb=rental.vram_gb)
        speed = require_speed(
            session,
            expand_root(session, session.python, settings.root),
            min_link_mbit_s=settings.min_link_mbit_s,
            min_disk_mb_s=settings.min_disk_mb_s,
        )
        say(f"tested {rental.name}: {gpus}; {speed}")
        set_up(session, settings, until=rental.expires_at)
        expand_root(session, settings.python, settings.root)
        if settings.query.gpu_count > 1:
            say(f"{rental.name}: {require_peers(session, settings.python, settings.query.gpu_count)}")
    policy = HostKeyPolicy(host=access.host, port=access.port, pinned="", known_hosts=(known,), first_use_file=None)
    return policy.known_keys()[-1].fingerprint


def known_hosts_of(store: Path, name: str) -> Path:
    """Return the path of the file that stores the host key of a machine's first login."""
    return store.expanduser().absolute() / _KEYS_DIR / name.replace(":", "-")


def set_up(session: Session, settings: RentedNode, *, until: float) -> None:
    """Run the setup commands of the settings, unless they have already run on this machine.

    Args:
        until: time at which the machine expires, in seconds since 1970.

    Raises:
        CommandFailedError: a setup command failed.
        CommandTimeoutError: a setup command took too long.
    """
    if not settings.setup:
        return
    root = expand_root(session, session.python, settings.root)
    marker = f"{root}/.set-up-{hashlib.sha256(repr(settings.setup).encode()).hexdigest()[:16]}"
    if session.run(["test", "-e", marker], timeout_s=CALL_TIMEOUT_S, check=False, may_repeat=True).exit_code == 0:
        return
    for command in settings.setup:
        left_s = max(0.0, until - time.time())
        session.run(["/bin/sh", "-c", command], timeout_s=min(_SETUP_TIMEOUT_S, left_s))
    session.run(["mkdir", "-p", root], timeout_s=CALL_TIMEOUT_S, may_repeat=True)
    session.write_file(marker, b"")


def open_ssh(access: SSHAccess, *, python: str) -> "SSHSession":
    """Return a session on a machine that has no node yet."""
    from rollouts.infra.ssh.ssh_session import SSHSession  # this import loads paramiko

    return SSHSession(access, python=python, programs_dir="")


def access_now(node: Node, find: Callable[[], Instance]) -> SSHAccess:
    """Return the parameters for a login to the machine at its present address, which the provider may have changed.

    Args:
        find: asks the provider for the machine. Raises a PermanentInfraError if the machine is unusable.
    """
    assert node.access is not None
    try:
        instance = find()
    except ProviderUnavailableError as error:
        logger.info("the address of %s may be old: %s", node.name, error)
        return node.access
    if not instance.has_address:
        return node.access
    return replace(
        node.access,
        host=instance.host,
        port=instance.port,
        user=instance.user,
        proxy_jump=instance.proxy_jump,
        ssh_config=instance.ssh_config,
    )


def find_machine(node: Node) -> Instance:
    """Return the node's machine as its provider describes it now.

    Raises:
        MachineGoneError: the machine is gone.
    """
    with _rental_of(node) as (_, rental, cloud):
        instance = look_up(cloud, rental.instance_id, rental.name)
    if instance is None or not instance.status.may_become_usable:
        how = "gone" if instance is None else instance.status.value
        raise MachineGoneError(
            f"{node.name} is {how}: its provider took it away, or it expired. The same command resumes from the last "
            "checkpoint on another machine"
        )
    return instance


@contextmanager
def _rental_of(node: Node) -> Iterator[tuple[Ledger, Rental, Cloud]]:
    with Ledger(Path(node.mirror) / LEDGER_FILE) as ledger:
        rental = find_rental(ledger, node.name)
        if rental is None:
            raise PermanentInfraError(f"the ledger of {node.mirror} has no machine {node.name}: was it replaced?")
        with account_of(rental) as cloud:
            yield ledger, rental, cloud
