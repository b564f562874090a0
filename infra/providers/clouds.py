"""Open accounts at the providers of rented machines.

API keys come only from environment variables. If the API keys belong to a named set of credentials, the variable
ROLLOUTS_CREDENTIALS contains the name of the set. Not here: the registry of providers (infra/clouds.py), their Protocol
(infra/cloud.py).
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
"""Environment variable that names the set of credentials to which the API keys in the environment belong."""
_SENDABLE = re.compile(r"[!-~]+")
"""Pattern of API keys that an HTTP header can carry."""


def open_account(name: CloudName) -> Cloud:
    """Open the provider's account with the API key in the environment.

    Raises:
        MissingKeyError: the API key is missing, or contains characters that are not allowed in keys.
        PermanentInfraError: the environment variable with the API's address is invalid.
    """
    cloud = find_cloud(name)
    endpoint = cloud.endpoint
    key = _key_of(name)
    if not key:
        raise MissingKeyError(
            f"the {endpoint.key_is} for {endpoint.title} is missing: put it into the variable {endpoint.key_variable}, "
            f"{_or_save(endpoint.key_variable)}"
        )
    if endpoint.url and not _SENDABLE.fullmatch(key):
        raise MissingKeyError(
            f"the value of {endpoint.key_variable} is not a {endpoint.key_is} for {endpoint.title}: keys have neither "
            "spaces nor accents, nor the … of shortened keys: copy it again"
        )
    return cloud(key, _other_address_of(endpoint) if endpoint.url else "")


@contextmanager
def account_of(rental: Rental) -> Iterator[Cloud]:
    """Open the account in which a machine was rented.

    Raises:
        MissingKeyError: the machine was rented with credentials that this process does not use.
    """
    if rental.credentials != credentials_in_use():
        whose = f"the credentials {rental.credentials}" if rental.credentials else "keys of the environment"
        raise MissingKeyError(
            f"{rental.name} was rented with {whose}, but this process has others: name the same credentials, as "
            "run.credentials or with --credentials"
        )
    with open_account(rental.provider) as cloud:
        yield cloud


def credentials_in_use() -> str:
    """Return the name of this process's credentials, or "" if the API keys come from plain environment variables."""
    return os.environ.get(CREDENTIALS_VARIABLE, "")


def clouds_with_keys(names: Sequence[CloudName]) -> tuple[list[CloudName], list[CloudName]]:
    known = [name for name in names if _key_of(name)]
    return known, [name for name in names if name not in known]


def require_keys(names: Sequence[CloudName]) -> list[CloudName]:
    """Return the named providers whose API keys are in the environment.

    Raises:
        MissingKeyError: the environment has no API key of these providers. The error's text names the variables.
    """
    known, others = clouds_with_keys(names)
    if not known:
        variables = " or ".join(find_cloud(name).endpoint.key_variable for name in others)
        raise MissingKeyError(
            f"no provider has a key here: put one into the variable {variables}, "
            f"{_or_save(find_cloud(others[0]).endpoint.key_variable)}"
        )
    return known


@contextmanager
def open_clouds(names: Sequence[CloudName]) -> Iterator[dict[CloudName, Cloud]]:
    """Open the accounts at the named providers. Yields a dict from the provider's name to the account.

    Raises:
        MissingKeyError: an API key is missing.
    """
    with ExitStack() as stack:
        yield {name: stack.enter_context(open_account(name)) for name in names}


@contextmanager
def open_usable_clouds(names: Iterable[CloudName]) -> Iterator[tuple[dict[CloudName, Cloud], list[str]]]:
    """Yield the accounts that can be opened, by provider, and one sentence about each failure."""
    clouds, problems = dict[CloudName, Cloud](), list[str]()
    with ExitStack() as stack:
        for name in names:
            try:
                clouds[name] = stack.enter_context(open_account(name))
            except PermanentInfraError as error:  # a missing or invalid API key must not affect other providers
                problems.append(str(error))
        yield clouds, problems


def _other_address_of(endpoint: Endpoint) -> str:
    """Return the API address from the endpoint's environment variable, or "" if the variable is not set."""
    url = os.environ.get(endpoint.url_variable, "").strip()
    try:
        parts = httpx.URL(url)
        is_address = parts.scheme in ("http", "https") and parts.host != ""
    except httpx.InvalidURL:
        is_address = False
    if url and not is_address:
        raise PermanentInfraError(
            f"{endpoint.url_variable} is not an address of {endpoint.title}'s API, like {endpoint.url}: correct it, or "
            "remove it to use that address"
        )
    return url


def _or_save(variable: str) -> str:
    """Return a phrase that says how to save a key in this process's credentials (a Prefect block), or in new
    credentials."""
    if name := credentials_in_use():
        return f"or save it in the credentials {name}, which lack it, by `rollouts credentials {name} {variable}`"
    return (
        f"or save it in a block of Prefect's by `rollouts credentials NAME {variable}` and name that as "
        "run.credentials, for `rollouts gpus` as --credentials"
    )


def _key_of(name: CloudName) -> str:
    """Return the provider's API key, or "" if the key is not set, or if no installed package adds the provider."""
    try:
        return os.environ.get(find_cloud(name).endpoint.key_variable, "").strip()
    except PermanentInfraError:
        return ""
