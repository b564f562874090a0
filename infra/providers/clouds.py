"""How accounts at the providers of rented machines are opened.

Not here: which providers there are (infra/clouds.py), what each can do (infra/cloud.py). The keys are in environment
variables and nowhere else. If they come from a named set of credentials, a variable has its name.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import httpx

from rollouts.infra.cloud import Cloud
from rollouts.infra.clouds import CloudName, find_cloud
from rollouts.infra.errors import MissingKeyError, PermanentInfraError
from rollouts.infra.providers.http import Endpoint
from rollouts.infra.renting.rentals import Rental

CREDENTIALS_VARIABLE = "ROLLOUTS_CREDENTIALS"
"""Names the credentials from which the keys in the environment came."""
_SENDABLE = re.compile(r"[!-~]+")
"""What a header can carry of a key."""


def open_account(name: CloudName) -> Cloud:
    """The account whose key is in the environment.

    Raises:
        MissingKeyError: there is none, or something that cannot be one.
        PermanentInfraError: the environment names another address of the API, and that is none.
    """
    cloud = find_cloud(name)
    endpoint = cloud.endpoint
    key = _key_of(name)
    if not key:
        raise MissingKeyError(
            f"there is no {endpoint.key_is} for {endpoint.title}: put it into the variable {endpoint.key_variable}, "
            f"{_or_save(endpoint.key_variable)}"
        )
    if endpoint.url and not _SENDABLE.fullmatch(key):
        raise MissingKeyError(
            f"what {endpoint.key_variable} holds is no {endpoint.key_is} for {endpoint.title}: keys have neither "
            "spaces nor accents, nor the … of those that are shown shortened: copy it again"
        )
    return cloud(key, _other_address_of(endpoint) if endpoint.url else "")


@contextmanager
def account_of(rental: Rental) -> Iterator[Cloud]:
    """The account that a machine is in.

    Raises:
        MissingKeyError: this process has not the key of that account.
    """
    if rental.credentials != credentials_in_use():
        whose = f"the credentials {rental.credentials}" if rental.credentials else "keys of the environment"
        raise MissingKeyError(
            f"{rental.name} was rented with {whose}, and this process has others: name the same, as "
            "run.credentials or with --credentials"
        )
    with open_account(rental.provider) as cloud:
        yield cloud


def credentials_in_use() -> str:
    """The name of the credentials from which this process has its keys; empty where it was simply started with them."""
    return os.environ.get(CREDENTIALS_VARIABLE, "")


def clouds_with_keys(names: Sequence[CloudName]) -> tuple[list[CloudName], list[CloudName]]:
    """Those of the providers whose keys are in the environment, and the others."""
    known = [name for name in names if _key_of(name)]
    return known, [name for name in names if name not in known]


def require_keys(names: Sequence[CloudName]) -> list[CloudName]:
    """Those of the providers whose keys are in the environment.

    Raises:
        MissingKeyError: there is none; names the variables.
    """
    known, others = clouds_with_keys(names)
    if not known:
        variables = " or ".join(find_cloud(name).endpoint.key_variable for name in others)
        raise MissingKeyError(
            f"there is no key of a provider: put one into the variable {variables}, "
            f"{_or_save(find_cloud(others[0]).endpoint.key_variable)}"
        )
    return known


@contextmanager
def open_clouds(names: Sequence[CloudName]) -> Iterator[dict[CloudName, Cloud]]:
    """The accounts, by their providers' names.

    Raises:
        MissingKeyError: the key of one is in no variable.
    """
    with ExitStack() as stack:
        yield {name: stack.enter_context(open_account(name)) for name in names}


@contextmanager
def open_usable_clouds(names: Iterable[CloudName]) -> Iterator[tuple[dict[CloudName, Cloud], list[str]]]:
    """The accounts that can be opened, by their providers' names, and why the others cannot, a sentence each."""
    clouds, problems = dict[CloudName, Cloud](), list[str]()
    with ExitStack() as stack:
        for name in names:
            try:
                clouds[name] = stack.enter_context(open_account(name))
            except PermanentInfraError as error:  # a key that is missing, or none, hinders nobody at the others
                problems.append(str(error))
        yield clouds, problems


def _other_address_of(endpoint: Endpoint) -> str:
    """Where the environment says that the API is; empty where it says nothing."""
    url = os.environ.get(endpoint.url_variable, "").strip()
    try:
        parts = httpx.URL(url)
        is_address = parts.scheme in ("http", "https") and parts.host != ""
    except httpx.InvalidURL:
        is_address = False
    if url and not is_address:
        raise PermanentInfraError(
            f"{endpoint.url_variable} holds no address of {endpoint.title}'s API, like {endpoint.url}: correct it, or "
            "remove it, and that one is asked"
        )
    return url


def _or_save(variable: str) -> str:
    """How a key gets into the block of Prefect's from which a process has its keys, or could have them."""
    if name := credentials_in_use():
        return f"and `rollouts credentials {name} {variable}` saves it in the credentials {name}, which lack it"
    return (
        f"or save it in a block of Prefect's by `rollouts credentials NAME {variable}` and name that as "
        "run.credentials, for `rollouts gpus` as --credentials"
    )


def _key_of(name: CloudName) -> str:
    """The provider's key; empty if it is not set, or if no package here has the provider."""
    try:
        return os.environ.get(find_cloud(name).endpoint.key_variable, "").strip()
    except PermanentInfraError:
        return ""
