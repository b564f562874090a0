"""Records of rented machines: a user's query, a provider's offers, and a machine as its provider describes it.

    GPUQuery ──search──> Offer ──create──> Instance ──terminate──> gone

Not here: the requests to providers (providers/), renting and releasing machines (renting/).
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rollouts.infra.clouds import CLOUDS, CloudChoice, CloudName, cloud_names, explain_reached_through
from rollouts.infra.errors import InfraError

_MAX_USD_PER_HOUR = 1e6
"""Highest plausible price of a machine. Offers with a higher price are ignored as mistakes of the provider."""
CUDA_PATTERN = r"^(\d+\.\d+)?$"
_OF_OTHERS = {"amd", "radeon", "instinct", "mi", "rx", "gaudi", "tpu"}
"""Words in the names of GPUs that NVIDIA did not make: MI300X, RX 7900 XTX."""
MAKERS_WORDS = {"nvidia", "geforce", "tesla"}
"""Words in the names of NVIDIA's GPUs that some providers write and other providers omit."""
_MEMORY = re.compile(r"(\d+)gb")
_MEMORY_TOLERANCE = 0.1
"""Allowed relative difference between the memory in a GPU's name and its actual memory, for example 46,068 MiB for 48
GB."""
_SIZE = re.compile(r"(?<=\d) (?=gb(?![a-z0-9]))")
_LETTERS_AND_NUMBER = re.compile(r"(?<=[a-z]{2})(?=\d)|(?<=\d)(?!gb(?![a-z0-9]))(?=[a-z]{2})")
_MODEL = re.compile(r"(?<![a-z0-9])[a-z]?\d+")


class GPUQuery(BaseModel):
    """Conditions on the machine to rent."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    gpu_types: tuple[str, ...] = ()
    """Names of GPUs, for example H100 or RTX 4090. A machine with any of these GPUs matches. Leave the list empty for
    all GPUs of NVIDIA."""
    gpu_count: int = Field(default=1, ge=1, le=64, strict=True)
    """Number of GPUs of the machine."""
    min_vram_gb: float = Field(default=0.0, ge=0, allow_inf_nan=False, strict=True)
    """Minimum memory of each GPU, in GB."""
    max_usd_per_gpu_hour: float = Field(default=4.0, gt=0, allow_inf_nan=False, strict=True)
    """Highest price of one GPU for an hour, in US dollars. More expensive machines are never rented."""
    disk_gb: int = Field(default=100, ge=1, strict=True)
    """Disk of the machine, in GB. A machine with a disk of fixed size matches if its disk is at least this large."""
    regions: tuple[str, ...] = ()
    """Beginnings of names of regions or data centers, for example us or EU-RO. Leave the list empty for all regions."""
    security: Literal["secure", "any"] = "secure"
    """`secure`: only machines in data centers. `any`: also machines of private owners, although the owners can read all
    data on their machines."""
    spot: bool = Field(default=False, strict=True)
    """Rent only interruptible machines, which the provider may end at any time. Prime Intellect has some."""
    min_cuda: Annotated[str, Field(pattern=CUDA_PATTERN)] = ""
    """Lowest CUDA version of the machine's driver, for example 12.8. Providers that cannot filter by CUDA version
    ignore this setting."""
    providers: tuple[CloudChoice, ...] = Field(default=tuple(CLOUDS), min_length=1)
    """Providers to search. At the same price, the provider that comes first in this list wins. Providers of installed
    packages are searched only if this list names them."""

    @field_validator("providers", mode="before")
    @classmethod
    def _lead_to_the_way(cls, value: object) -> object:
        for name in value if isinstance(value, list | tuple) else ():
            if name not in cloud_names() and (explained := explain_reached_through(name)):
                raise ValueError(explained)
        return value

    @field_validator("gpu_types", "regions")
    @classmethod
    def _check_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not _words(name):  # an empty word list would match every region and every GPU
                raise ValueError(f"expected names with letters or digits, found {name!r}: leave the list empty for all")
        return value

    def admits(self, offer: "Offer") -> bool:
        """Return whether the offer is plausible and meets all conditions."""
        return offer.is_sane and not self.misses(offer)

    def admits_region(self, region: str) -> bool:
        return not self.regions or any(_is_within(region, name) for name in self.regions)

    def misses(self, offer: "Offer") -> list[str]:
        """Return the names of the conditions that the offer does not meet."""
        types = self.gpu_types
        answers = {
            "gpu_types": any(is_gpu_type(offer.gpu_type, wanted, offer.vram_gb) for wanted in types)
            if types
            else _is_of_nvidia(offer.gpu_type),
            "gpu_count": offer.gpu_count == self.gpu_count,
            "min_vram_gb": offer.vram_gb >= self.min_vram_gb,
            "max_usd_per_gpu_hour": offer.usd_per_gpu_hour <= self.max_usd_per_gpu_hour,
            "disk_gb": offer.disk_gb is None or offer.disk_gb >= self.disk_gb,
            "regions": self.admits_region(offer.region),
            "security": offer.is_secure or self.security == "any",
            "spot": offer.is_spot == self.spot,
        }
        return [field for field, is_met in answers.items() if not is_met]


class InstanceStatus(StrEnum):
    """The status of a machine, in one vocabulary for all providers."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPED = "stopped"
    """The machine is stopped, but the provider may charge for it."""
    FAILED = "failed"
    """The machine will never run, but the provider may charge for it."""
    ENDING = "ending"
    GONE = "gone"
    """The provider no longer has the machine, and it costs nothing."""
    UNKNOWN = "unknown"
    """The provider reports a status that this version does not know. The machine counts as neither running nor gone."""

    @property
    def may_become_usable(self) -> bool:
        """Whether waiting may make the machine usable."""
        return self in (InstanceStatus.STARTING, InstanceStatus.RUNNING, InstanceStatus.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A kind of machine at a price. The offer may be gone when the machine is requested."""

    provider: CloudName
    id: str
    """The offer's identifier, in a format that only the code of its provider reads."""
    gpu_type: str
    gpu_count: int
    vram_gb: float
    """Memory of each GPU in GB."""
    usd_per_hour: float
    """Price of the whole machine per hour, in US dollars."""
    region: str
    """Empty if the provider chooses the region."""
    is_secure: bool = True
    """Whether the machine is in a data center."""
    is_spot: bool = False
    disk_gb: int | None = None
    """Disk size in GB if the offer has a fixed disk, or None if the request for the machine chooses the disk size."""
    host: str = ""
    """The provider's name of the physical machine, or "" if the provider does not name a physical machine in the
    offer."""
    ends_at: float | None = None
    """Time at which the provider takes the machine back, in seconds since 1970, or None if unknown."""
    is_unpriced: bool = False
    """Whether the price is unknown, as in a user's own cluster. The price then counts as 0, so a limit in USD never
    ends the machine."""

    @property
    def gpus(self) -> str:
        """The number and type of the GPUs, for example `1x NVIDIA H100`."""
        return f"{self.gpu_count}x {self.gpu_type}"

    @property
    def usd_per_gpu_hour(self) -> float:
        return self.usd_per_hour / self.gpu_count

    @property
    def is_sane(self) -> bool:
        has_price = self.is_unpriced or 0 < self.usd_per_hour <= _MAX_USD_PER_HOUR
        return self.gpu_count > 0 and has_price and (self.gpu_type + self.region).isprintable()

    @property
    def where(self) -> str:
        """The provider and the region in words, for example `at runpod in EU-RO-1`."""
        return f"at {self.provider} in {self.region}" if self.region else f"at {self.provider}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """The providers' answers to a query."""

    fitting: list[Offer]
    """Offers that meet all conditions of the query, cheapest first."""
    others: list[Offer]
    failures: list[InfraError] = field(default_factory=list)
    """Errors of the providers that could not be asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostKeyPair:
    """An SSH host key that is created before its machine. The private half is never written to this machine's disk."""

    private: str = field(repr=False)
    """Private key in OpenSSH's format, including the newline at its end."""
    public: str
    """Public key as a line of authorized_keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpec:
    """Parameters for creating a machine, in addition to the offer."""

    name: str
    """The machine's unique name. If the answer to the machine's creation was lost, the machine is found by this
    name."""
    public_key: str
    """Public SSH key for the login, as a line of authorized_keys."""
    disk_gb: int
    image: str = ""
    """Container image or operating system, as the provider names it. Without `image`, the provider's default is
    used."""
    min_cuda: str = ""
    ends_at: float | None = None
    """Time at which the provider should end the machine, in seconds since 1970, if the provider supports this. None
    means never."""
    host_key: HostKeyPair | None = None
    """Host key for the machine's SSH server, if the provider can install one. None lets the machine create its own
    key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A machine as its provider describes it now."""

    provider: CloudName
    id: str
    name: str
    status: InstanceStatus
    host: str = ""
    """Address of the machine's SSH server, or "" while unknown. The address may change while the machine runs."""
    port: int = 22
    user: str = "root"
    proxy_jump: str = ""
    """Name of the jump host in `ssh_config`, or "" for a direct connection."""
    ssh_config: str = ""
    private_address: str = ""
    """The machine's IP address in the network of its region, or "" if unknown."""
    region: str = ""
    """The machine's actual region, which may differ from the requested one, or "" if unknown."""
    usd_per_hour: float | None = None
    """The provider's price for the machine, or None if unknown."""

    @property
    def has_address(self) -> bool:
        """Whether a login can be tried."""
        return self.status is InstanceStatus.RUNNING and self.host != ""


def describe_closest(query: GPUQuery, offers: Sequence[Offer], named: Callable[[str], str]) -> str:
    """Describe the nearest offer to a query that no offer matches.

    If some offers fail only the price condition, the cheapest of them is described. Otherwise, the offer that fails the
    fewest conditions is described.

    Args:
        named: returns the name by which the user knows a field of the query.
    """
    sane = [offer for offer in offers if offer.is_sane]
    if not sane:
        return "the searched providers have no similar machine"
    price = ["max_usd_per_gpu_hour"]
    missed = {offer: query.misses(offer) for offer in sane}
    closest = min(sane, key=lambda each: (missed[each] != price, len(missed[each]), each.usd_per_gpu_hour))
    what = f"{closest.gpus} {closest.where}"
    usd = math.ceil(round(100 * closest.usd_per_gpu_hour, 6)) / 100  # rounded up, so that this limit admits the offer
    if missed[closest] == price:
        return f"the cheapest is {what} for {usd:.2f} USD per GPU and hour: raise {named(price[0])} to that"
    fields = " and ".join(named(field) for field in missed[closest])
    price_said = "at an unknown price" if closest.is_unpriced else f"for {usd:.2f} USD per GPU and hour"
    return f"the closest is {what} {price_said}, which does not match {fields}"


def is_gpu_type(name: str, wanted: str, vram_gb: float | None = None) -> bool:
    """Return whether `name` contains every word of `wanted`.

    RTX4090 matches "NVIDIA RTX 4090", but L4 does not match "NVIDIA L40". Providers write words and numbers together or
    apart: RTX 6000 Ada is also "RTX6000Ada_48GB". Providers may omit words like NVIDIA and the memory: "NVIDIA A100
    80GB" matches an "A100 SXM" with 80 GB.

    Args:
        vram_gb: memory of the GPU, compared with `wanted` if `name` contains no memory. None matches any memory.
    """
    words, asked = _words(name), _words(wanted)
    if not (words & asked) - MAKERS_WORDS:
        return asked <= words
    lacking = asked - words - MAKERS_WORDS
    says_memory = any(map(_MEMORY.fullmatch, words))
    return all(not says_memory and _is_memory(word, vram_gb) for word in lacking)


def _is_memory(word: str, vram_gb: float | None) -> bool:
    match = _MEMORY.fullmatch(word)
    if match is None:
        return False
    return vram_gb is None or math.isclose(float(match[1]), vram_gb, rel_tol=_MEMORY_TOLERANCE)


def _is_within(region: str, wanted: str) -> bool:
    """Return whether a region's name, or a part of the name, begins with `wanted`. RO/EU-RO-1 has the parts RO and
    EU-RO-1."""
    return any(place.lower().startswith(wanted.lower()) for place in (region, *region.split("/")))


def _is_of_nvidia(name: str) -> bool:
    """Return whether the GPU is NVIDIA's. GPUs of other makers need other builds of torch and of the engines."""
    return not _words(name) & _OF_OTHERS


def is_same_model(offered: str, found: str) -> bool:
    """Return whether the GPU name that the driver reports fits the GPU name that the provider offered.

    Only the model's number and the letter before it are compared, for example A100 or 4090. Each driver and provider
    writes the rest of the name differently. An offered name without a number always fits.
    """
    model = _MODEL.search(_apart(offered))
    return model is None or re.search(rf"(?<![a-z0-9]){model[0]}(?!\d)", _apart(found)) is not None


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", _apart(name)))


def _apart(name: str) -> str:
    """Return the name in lower case, with a space between a series and its number, and without the space in a memory
    size.

    "RTX6000 Ada 48 GB" becomes "rtx 6000 ada 48gb"; "h100" and "4090d" stay as they are.
    """
    return _LETTERS_AND_NUMBER.sub(" ", _SIZE.sub("", name.lower()))
