"""Which providers of rented machines there are, and how accounts at them are opened.

Not here: what each can do (cloud.py). The keys are in environment variables and nowhere else.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from infra.errors import MissingKeyError
from infra.offers import CloudName
from infra.providers.cloud import Cloud
from infra.providers.http import Endpoint
from infra.providers.lambda_cloud import Lambda
from infra.providers.prime import Prime
from infra.providers.runpod import RunPod
from infra.providers.shadeform import Shadeform
from infra.providers.vast import Vast

_ACCOUNTS = {account.name: account for account in (RunPod, Lambda, Prime, Shadeform, Vast)}
ENDPOINTS: Mapping[CloudName, Endpoint] = {name: account.endpoint for name, account in _ACCOUNTS.items()}


def open_account(name: CloudName) -> Cloud:
    """The account whose key is in the environment.

    Raises:
        MissingKeyError: there is none.
    """
    endpoint = ENDPOINTS[name]
    key = _key_of(name)
    if not key:
        raise MissingKeyError(f"there is no key for {endpoint.title}: put it into the variable {endpoint.key_variable}")
    return _ACCOUNTS[name](key, os.environ.get(endpoint.url_variable, ""))


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
        variables = " or ".join(ENDPOINTS[name].key_variable for name in others)
        raise MissingKeyError(f"there is no key of a provider: put one into the variable {variables}")
    return known


@contextmanager
def open_clouds(names: Sequence[CloudName]) -> Iterator[dict[CloudName, Cloud]]:
    """The accounts, by their providers' names.

    Raises:
        MissingKeyError: the key of one is in no variable.
    """
    with ExitStack() as stack:
        yield {name: stack.enter_context(open_account(name)) for name in names}


def _key_of(name: CloudName) -> str:
    return os.environ.get(ENDPOINTS[name].key_variable, "").strip()
