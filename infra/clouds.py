"""The providers of rented machines, by name: a row for each, and those that installed packages add.

A row names the class of an account (`infra/cloud.py` has its Protocol, `infra/providers/shadeform.py` is the file to
copy). The class says all that is known of the provider: title, key, API, and whether its machines share a network.
A package adds a provider by an entry point of the group `rollouts.providers`: `acme = "acme_cloud:Acme"`.

Not here: how accounts are opened (providers/clouds.py).
"""

from __future__ import annotations

import importlib
import logging
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

if TYPE_CHECKING:
    from rollouts.infra.cloud import CloudType

CloudName = str
"""The name of a provider: a key of `CLOUDS`, or the name of an entry point."""
PLUGIN_GROUP = "rollouts.providers"

CLOUDS: dict[CloudName, str] = {
    "runpod": "rollouts.infra.providers.runpod:RunPod",
    "lambda": "rollouts.infra.providers.lambda_cloud:Lambda",
    "prime": "rollouts.infra.providers.prime:Prime",
    "shadeform": "rollouts.infra.providers.shadeform:Shadeform",
    "vast": "rollouts.infra.providers.vast:Vast",
    "sky": "rollouts.infra.providers.sky:Sky",
}
"""Each provider's class, which is imported late."""

logger = logging.getLogger(__name__)


def cloud_names() -> tuple[CloudName, ...]:
    """All providers, those of installed packages last."""
    return (*CLOUDS, *_plugins())


def find_cloud(name: CloudName) -> CloudType:
    """The class of a provider's accounts."""
    if name not in CLOUDS:
        return _plugins()[name]
    module, _, attribute = CLOUDS[name].partition(":")
    found: CloudType = getattr(importlib.import_module(module), attribute)
    assert found.name == name, f"{CLOUDS[name]} calls itself {found.name}, its row {name}"
    return found


def networked_clouds() -> tuple[CloudName, ...]:
    """Providers whose machines reach each other by private addresses within a region."""
    return tuple(name for name in cloud_names() if find_cloud(name).is_networked)


def reached_through(given: object) -> CloudName:
    """The provider through which another company's machines are rented; "" if there is none."""
    return next((name for name in cloud_names() if given in find_cloud(name).reaches), "")


def explain_reached_through(given: object) -> str:
    """How the machines of such a company are rented; "" if `given` is not one."""
    name = reached_through(given)
    if not name:
        return ""
    endpoint = find_cloud(name).endpoint
    what = endpoint.key_is.rpartition(" ")[2]
    return (
        f"{given} is reached through {endpoint.title}: name the provider {name} instead, and its {what} in "
        f"{endpoint.key_variable}"
    )


@cache
def _plugins() -> dict[CloudName, CloudType]:
    """The providers of installed packages. A package that cannot be loaded is left out, with a warning."""
    found: dict[CloudName, CloudType] = {}
    for point in entry_points(group=PLUGIN_GROUP):
        package = point.dist.name if point.dist else point.value
        try:
            cloud = point.load()
            if point.name in (*CLOUDS, *found):
                raise ValueError("there is another provider of this name")
            if cloud.name != point.name or not cloud.endpoint.key_variable:
                raise ValueError(f"its class calls itself {cloud.name}, and its key {cloud.endpoint.key_variable!r}")
            found[point.name] = cloud
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a package that is broken must not break `status`
            logger.warning("the provider %s of the package %s is left out (%r)", point.name, package, error)
    return found


class _KeyOfClouds:
    """Marks a text as a provider's name. A form shows the names that there are."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:  # Any: a type
        serialization = core_schema.to_string_ser_schema()
        return core_schema.no_info_plain_validator_function(_check_name, serialization=serialization)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(cloud_names()), "type": "string"}


def _check_name(value: object) -> str:
    names = cloud_names()
    if not isinstance(value, str) or value not in names:
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(map(repr, names[:-1]))} or {names[-1]!r}"})
    return value


CloudChoice = Annotated[CloudName, _KeyOfClouds()]
"""A setting that names a provider."""
