"""Which providers of rented machines there are, and how accounts at them are opened.

Not here: what each can do (cloud.py). The keys are in environment variables and nowhere else.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from infra.errors import MissingKeyError
from infra.offers import CloudName
from infra.providers import lambda_cloud, runpod, shadeform, vast
from infra.providers.cloud import Cloud


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudEntry:
    """How one provider's account is opened."""

    title: str
    key_variable: str
    """The environment variable with the key of the account."""
    url: str
    open: Callable[[str, str], Cloud]
    """From the key and the address of the API to the account."""

    @property
    def url_variable(self) -> str:
        """The environment variable with another address of the API, for example of a proxy of the company."""
        return self.key_variable.replace("_API_KEY", "_API_URL")

    def open_account(self) -> Cloud:
        """The account whose key is in the environment.

        Raises:
            MissingKeyError: there is none.
        """
        key = os.environ.get(self.key_variable, "").strip()
        if not key:
            raise MissingKeyError(f"there is no key for {self.title}: put it into the variable {self.key_variable}")
        return self.open(key, os.environ.get(self.url_variable, "") or self.url)


CLOUDS: Mapping[CloudName, CloudEntry] = {
    "runpod": CloudEntry(title=runpod.TITLE, key_variable=runpod.KEY_VARIABLE, url=runpod.URL, open=runpod.RunPod),
    "lambda": CloudEntry(
        title=lambda_cloud.TITLE, key_variable=lambda_cloud.KEY_VARIABLE, url=lambda_cloud.URL, open=lambda_cloud.Lambda
    ),
    "shadeform": CloudEntry(
        title=shadeform.TITLE, key_variable=shadeform.KEY_VARIABLE, url=shadeform.URL, open=shadeform.Shadeform
    ),
    "vast": CloudEntry(title=vast.TITLE, key_variable=vast.KEY_VARIABLE, url=vast.URL, open=vast.Vast),
}


def clouds_with_keys(names: Sequence[CloudName]) -> tuple[list[CloudName], list[CloudName]]:
    """Those of the providers whose keys are in the environment, and the others."""
    known = [name for name in names if os.environ.get(CLOUDS[name].key_variable, "").strip()]
    return known, [name for name in names if name not in known]


def require_keys(names: Sequence[CloudName]) -> list[CloudName]:
    """Those of the providers whose keys are in the environment.

    Raises:
        MissingKeyError: there is none; names the variables.
    """
    known, others = clouds_with_keys(names)
    if not known:
        variables = " or ".join(CLOUDS[name].key_variable for name in others)
        raise MissingKeyError(f"there is no key of a provider: put one into the variable {variables}")
    return known


@contextmanager
def open_clouds(names: Sequence[CloudName]) -> Iterator[dict[CloudName, Cloud]]:
    """The accounts, by their providers' names.

    Raises:
        MissingKeyError: the key of one is in no variable.
    """
    with ExitStack() as stack:
        yield {name: stack.enter_context(CLOUDS[name].open_account()) for name in names}
