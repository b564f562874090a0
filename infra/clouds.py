"""The registry of the providers of rented machines: built-in providers, and providers that installed packages add.

Each row of `CLOUDS` names the class of a provider's accounts. The Protocol of this class is in `infra/cloud.py`. For a
new provider, copy `infra/providers/shadeform.py`. A package adds a provider by an entry point of the group
`rollouts.providers`: `acme = "acme_cloud:Acme"`.

Not here: opening accounts (providers/clouds.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.plugins import KeyOf, Registry

if TYPE_CHECKING:
    from rollouts.infra.cloud import CloudType

CloudName = str
"""A provider's name: a key of `CLOUDS`, or the name of an entry point."""

CLOUDS: dict[CloudName, str] = {
    "runpod": "rollouts.infra.providers.runpod:RunPod",
    "lambda": "rollouts.infra.providers.lambda_cloud:Lambda",
    "prime": "rollouts.infra.providers.prime:Prime",
    "shadeform": "rollouts.infra.providers.shadeform:Shadeform",
    "vast": "rollouts.infra.providers.vast:Vast",
    "sky": "rollouts.infra.providers.sky:Sky",
}
"""The class of each built-in provider. A class is imported on first use."""
_MEMBERS = ("name", "endpoint", "gives_host_key", "is_networked", "reaches")
"""Attributes that the Protocol `CloudType` requires of a provider's class."""


def _find_fault(name: CloudName, cloud: CloudType) -> str:
    lacking = [each for each in _MEMBERS if not hasattr(cloud, each)]
    if lacking:
        return f"its class has no {lacking[0]}"
    if cloud.name == name and cloud.endpoint.key_variable:
        return ""
    return f"its class calls itself {cloud.name}, and its key {cloud.endpoint.key_variable!r}"


ALL_CLOUDS: Registry[CloudType] = Registry("rollouts.providers", CLOUDS, _find_fault)
CloudChoice = Annotated[CloudName, KeyOf(ALL_CLOUDS)]


def cloud_names() -> tuple[CloudName, ...]:
    """Return the names of all providers. The providers of installed packages come last."""
    return tuple(ALL_CLOUDS)


def find_cloud(name: CloudName) -> CloudType:
    """Return the class of a provider's accounts.

    Raises:
        PermanentInfraError: the provider is not built in, and no installed package adds it.
    """
    try:
        return ALL_CLOUDS[name]
    except KeyError:
        raise PermanentInfraError(
            f"the provider {name} is unknown here: install the package that adds it; `rollouts plugins` lists the "
            "installed ones"
        ) from None


def networked_clouds() -> tuple[CloudName, ...]:
    """Return the providers whose machines in a region can reach each other by private addresses."""
    return tuple(name for name in cloud_names() if find_cloud(name).is_networked)


def reached_through(given: object) -> CloudName:
    """Return the provider through which the machines of a company (for example aws) can be rented, or "" for an unknown
    company."""
    return next((name for name in cloud_names() if given in find_cloud(name).reaches), "")


def explain_reached_through(given: object) -> str:
    """Return a sentence that says how to rent this company's machines, or "" if no provider reaches a company of the
    name `given`."""
    name = reached_through(given)
    if not name:
        return ""
    endpoint = find_cloud(name).endpoint
    what = endpoint.key_is.rpartition(" ")[2]
    return (
        f"{given} is reached through {endpoint.title}: name the provider {name} instead, and set its {what} in "
        f"{endpoint.key_variable}"
    )
