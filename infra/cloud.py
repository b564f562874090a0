"""What a provider of rented machines can do for us, one Protocol for all.

Not here: the providers (providers/runpod.py and its like), which of them there are (clouds.py), and the way by which
machines are rented and given back without losing one (provision.py, release.py).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from rollouts.infra.clouds import CloudName
from rollouts.infra.offers import GPUQuery, Instance, InstanceStatus, MachineSpec, Offer

if TYPE_CHECKING:
    from rollouts.infra.providers.http import Endpoint


class CloudType(Protocol):
    """The class of a provider's accounts: the one record of all that is known of a provider."""

    @property
    def name(self) -> CloudName:
        """Its name in settings, and its row in `clouds.py`."""
        ...

    @property
    def endpoint(self) -> "Endpoint":
        """Its title, the variable with its key, and its API."""
        ...

    @property
    def gives_host_key(self) -> bool:
        """See `Cloud`."""
        ...

    @property
    def is_networked(self) -> bool:
        """Whether its machines reach each other by private addresses within a region."""
        ...

    @property
    def reaches(self) -> tuple[str, ...]:
        """Names of others whose machines are rented through it."""
        ...

    def __call__(self, key: str, url: str = "", /) -> "Cloud":
        """An account with this key; `url` takes the place of the address of the API."""
        ...


class Cloud(Protocol):
    """An account at a provider; to be used in a `with` block.

    Every method raises ProviderUnavailableError when there is no usable answer after several attempts, and
    ProviderRefusedError when the key or the request is refused. An empty list means that there is nothing.
    """

    @property
    def name(self) -> CloudName: ...

    @property
    def gives_host_key(self) -> bool:
        """Whether `create` gives a machine the host key of its spec, before anybody can connect to it."""
        ...

    def search(self, query: GPUQuery) -> list[Offer]:
        """What the provider has now that the query may admit."""
        ...

    def create(self, offer: Offer, spec: MachineSpec) -> str:
        """Ask once for a machine and return its id.

        Raises:
            OfferGoneError, ProviderUnavailableError: nothing was created, another offer may work.
            UnclearAnswerError: a machine may have been created; also where that could not be found out afterwards.
        """
        ...

    def get(self, instance_id: str) -> Instance | None:
        """The machine; None when the provider does not have it any more."""
        ...

    def host_key(self, instance_id: str) -> str:
        """Fingerprint of the machine's host key as its provider tells it; empty where it does not, or not yet."""
        ...

    def list_named(self, prefix: str) -> list[Instance]:
        """All machines of the account whose names begin so."""
        ...

    def terminate(self, instance_id: str) -> None:
        """Ask for the machine's end; harmless when it is gone. It is gone when `get` says so, not before."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def look_up(cloud: Cloud, instance_id: str, name: str) -> Instance | None:
    """The machine as its provider describes it now; None where neither its id nor the list knows of it.

    What stands in front of an API answers 404 as well, now and then.

    Args:
        name: or the beginning of it.
    """
    instance = cloud.get(instance_id)
    if instance is not None and instance.status is not InstanceStatus.GONE:
        return instance
    listed = [each for each in cloud.list_named(name) if each.id == instance_id]
    return next((each for each in listed if each.status is not InstanceStatus.GONE), instance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How patient we are with providers, in seconds."""

    poll_s: float = 5.0
    looks_s: tuple[float, ...] = (0.0, 5.0, 10.0, 20.0)
    """Pauses before each look for a machine whose creation was not answered."""
    gone_within_s: float = 600.0
    """A machine that is still there this long after its end was asked for is reported."""
    refused_within_s: float = 60.0
    """One whose end is still refused after this time, and that is not ending."""


PATIENT = Pace()
