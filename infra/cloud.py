"""The Protocols for providers of rented machines.

Not here: the providers (providers/), their registry (clouds.py), renting and releasing machines (renting/provision.py,
renting/release.py).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from rollouts.infra.clouds import CloudName
from rollouts.infra.offers import GPUQuery, Instance, InstanceStatus, MachineSpec, Offer

if TYPE_CHECKING:
    from rollouts.infra.providers.http import Endpoint


class CloudType(Protocol):
    """The class of a provider's accounts. All facts about a provider are attributes of this class."""

    @property
    def name(self) -> CloudName:
        """The provider's name in settings and in `clouds.py`."""
        ...

    @property
    def endpoint(self) -> "Endpoint":
        """The provider's name for messages, the URL of its API, and the environment variable with its API key."""
        ...

    @property
    def gives_host_key(self) -> bool:
        """Whether `Cloud.create` installs the given host key."""
        ...

    @property
    def is_networked(self) -> bool:
        """Whether the provider's machines in a region can reach each other by private addresses."""
        ...

    @property
    def reaches(self) -> tuple[str, ...]:
        """Names of other companies whose machines can be rented through this provider."""
        ...

    def __call__(self, key: str, url: str = "", /) -> "Cloud":
        """Open an account with this API key. `url` replaces the API's address."""
        ...


class Cloud(Protocol):
    """An account at a provider, for use in a `with` block.

    Every method raises ProviderUnavailableError if several attempts give no usable answer. Every method raises
    ProviderRefusedError if the provider refuses the API key or the request. An empty list means that the account has no
    matching offer or machine.
    """

    @property
    def name(self) -> CloudName: ...

    @property
    def gives_host_key(self) -> bool:
        """Whether `create` installs the spec's host key before the machine accepts connections."""
        ...

    def search(self, query: GPUQuery) -> list[Offer]:
        """Return current offers. The list may include offers that the query does not admit."""
        ...

    def create(self, offer: Offer, spec: MachineSpec) -> str:
        """Request a machine once. Returns the machine's id.

        Raises:
            OfferGoneError, ProviderUnavailableError: no machine was created. Another offer may work.
            UnclearAnswerError: a machine may or may not have been created. The caller has to look for a machine of this
                name.
        """
        ...

    def get(self, instance_id: str) -> Instance | None:
        """Return the machine as the provider describes it now, or None if the provider does not have the machine."""
        ...

    def host_key(self, instance_id: str) -> str:
        """Return the fingerprint of the machine's host key, or "" if the provider has not reported the key."""
        ...

    def list_named(self, prefix: str) -> list[Instance]:
        """Return all machines of the account whose names begin with the prefix."""
        ...

    def terminate(self, instance_id: str) -> None:
        """Request a machine's end. The request is harmless if the machine is gone. The caller has to look the machine
        up to learn when the machine is gone."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def look_up(cloud: Cloud, instance_id: str, name: str) -> Instance | None:
    """Return the machine as its provider describes it now, or None if neither `get` nor the list has the machine.

    The list is read because proxies in front of an API sometimes answer 404 for an existing machine.

    Args:
        name: the machine's name, or the start of the name.
    """
    instance = cloud.get(instance_id)
    if instance is not None and instance.status is not InstanceStatus.GONE:
        return instance
    listed = [each for each in cloud.list_named(name) if each.id == instance_id]
    return next((each for each in listed if each.status is not InstanceStatus.GONE), instance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Polling intervals and time limits for providers, in seconds."""

    poll_s: float = 5.0
    looks_s: tuple[float, ...] = (0.0, 5.0, 10.0, 20.0)
    """Pauses before each search for a machine whose creation request got no clear answer."""
    gone_within_s: float = 600.0
    """Seconds within which a machine must be gone after the request to end it."""
    refused_within_s: float = 60.0
    """Seconds after which StillRentedError is raised if the provider refuses to end a machine."""


PATIENT = Pace()
