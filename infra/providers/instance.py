"""A machine that the user has rented. A run asks the machine's provider for the address. The run neither ends the
machine nor counts the machine's cost.

    runpod:abc123 ── provider: address, price ── login ── Node ... sessions ask for the address again ... left running

The host key of the first login is accepted and stored. Later logins require the same key, even if the machine's address
has changed. If `host_key` is set, the first login requires that key.

Not here: machines that a run rents itself (rented.py), machines with a known address (ssh.py).
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from rollouts.infra.cloud import look_up
from rollouts.infra.errors import MachineGoneError, PermanentInfraError, TransientInfraError
from rollouts.infra.node import InstanceNode, Node
from rollouts.infra.offers import Instance, InstanceStatus
from rollouts.infra.providers.clouds import open_account
from rollouts.infra.providers.rented import access_now, access_to, known_hosts_of, open_ssh
from rollouts.infra.providers.ssh import expand_root, open_ssh_session
from rollouts.infra.session import Session
from rollouts.infra.ssh.host_keys import noted_fingerprint

STARTED_WITHIN_S = 900.0
POLL_S = 5.0

Say = Callable[[str], None]

logger = logging.getLogger(__name__)


def provision_instance(settings: InstanceNode, store: Path, say: Say) -> Node:
    """Return the node of the machine, after the provider has started the machine and one login has succeeded.

    Raises:
        MissingKeyError, ProviderRefusedError: the provider cannot be asked.
        MachineGoneError: the account has no such machine.
        PermanentInfraError: the machine is not running, its interpreter cannot be run, or `root` is not a usable path.
        HostKeyError, LoginError, NodeUnreachableError: the login failed.
    """
    instance = _wait_until_running(settings.instance, say)
    mirror = store.expanduser().absolute()
    known = known_hosts_of(store, settings.instance)
    access = replace(
        access_to(instance, settings),
        host_key=settings.host_key or noted_fingerprint(known),
        known_hosts=(str(known),),
        first_use_file=str(known),
    )
    with open_ssh(access, python=settings.python) as session:
        root = expand_root(session, settings.python, settings.root)
        believed_by = session.host_key_evidence.value
    price = "" if instance.usd_per_hour is None else f" and costs {instance.usd_per_hour:.2f} USD/h"
    say(f"{settings.instance} is yours{price}: it keeps running after this run")
    return Node(
        name=settings.instance,
        kind="instance",
        root=root,
        python=settings.python,
        mirror=str(mirror),
        is_of_user=True,
        access=replace(access, host_key=access.host_key or noted_fingerprint(known)),
        believed_by=believed_by,
    )


def _wait_until_running(name: str, say: Say) -> Instance:
    """Wait until the machine has an address.

    Raises:
        MachineGoneError, PermanentInfraError: the machine will never have an address.
        TransientInfraError: the machine had no address in time.
    """
    deadline = time.monotonic() + STARTED_WITHIN_S
    is_waiting = False
    while not (instance := find_instance(name)).has_address:
        if time.monotonic() > deadline:
            raise TransientInfraError(
                f"{name} is {instance.status} and had no address for {STARTED_WITHIN_S:.0f} s: see its provider's pages"
            )
        if not is_waiting:
            say(f"{name} is {instance.status}: waits for its address")
        is_waiting = True
        time.sleep(POLL_S)
    return instance


def find_instance(name: str) -> Instance:
    """Return the machine as its provider describes it now. The machine is running or starting.

    Raises:
        MachineGoneError: the account has no such machine.
        PermanentInfraError: the machine is neither running nor starting.
        InfraError: the provider does not answer.
    """
    provider, _, instance_id = name.partition(":")
    with open_account(provider) as cloud:
        instance = look_up(cloud, instance_id, name="")
    if instance is None or instance.status is InstanceStatus.GONE:
        raise MachineGoneError(
            f"{name} does not exist (any more) in the account of this key: look up its id on its provider's pages"
        )
    if not instance.status.may_become_usable:
        raise PermanentInfraError(f"{name} is {instance.status}: start it on its provider's pages")
    return instance


def release_instance(node: Node) -> None:
    logger.info("%s keeps running", node.name)


def open_instance_session(node: Node) -> Session:
    """Return a session on the machine. The session asks the provider for the address before every connection."""
    return open_ssh_session(node, find_access=partial(access_now, node, partial(find_instance, node.name)))
