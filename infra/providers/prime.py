"""Prime Intellect's API: machines of many clouds behind one interface. Some machines are spot machines.

    availability ──> offer: cloud, GPU, socket, data center, image, disk ──> pod ──ACTIVE, installed──> address

An ACTIVE pod is usable once its installation is FINISHED. Offers with prepaid hours are skipped, because prepaid money
is not refunded when the machine ends. Offers whose price may change are skipped, except spot offers. The price of a
spot machine is read when it is rented, and the run's limit of money is applied to this price.

Not here: HTTP (http.py), creating and ending pods (infra/renting/provision.py, infra/renting/release.py).
"""

import re
from typing import ClassVar
from urllib.parse import quote, unquote

from pydantic import BaseModel, Field

from rollouts.infra.clouds import CloudName
from rollouts.infra.errors import ProviderUnavailableError
from rollouts.infra.offers import GPUQuery, Instance, InstanceStatus, MachineSpec, Offer
from rollouts.infra.providers.http import (
    Account,
    Endpoint,
    InstanceId,
    Json,
    key_blob,
    key_name,
    quoted,
    usable_host,
    usable_port,
    usable_user,
)

DEFAULT_IMAGE = "ubuntu_22_cuda_12"
_NO_GPU = "CPU_NODE"
"""Value of `gpuType` for machines without a GPU."""
_PAGE, _MAX_PAGES = 100, 100
_SSH_ADDRESS = re.compile(r"(?:ssh\s+)?(?P<user>[^@\s]+)@(?P<host>[^@\s]+)(?:\s+-p\s+(?P<port>\d+))?")
STATUS = {
    "PROVISIONING": InstanceStatus.STARTING,
    "PENDING": InstanceStatus.STARTING,
    "ACTIVE": InstanceStatus.RUNNING,
    "STOPPED": InstanceStatus.STOPPED,
    "ERROR": InstanceStatus.FAILED,
    "DELETING": InstanceStatus.ENDING,
    "UNKNOWN": InstanceStatus.UNKNOWN,
    "TERMINATED": InstanceStatus.GONE,
}
INSTALLATION = {
    "PENDING": InstanceStatus.STARTING,
    "ACTIVE": InstanceStatus.STARTING,
    "FINISHED": InstanceStatus.RUNNING,
    "ERROR": InstanceStatus.FAILED,
    "TERMINATED": InstanceStatus.FAILED,
}


class _Prices(BaseModel):
    onDemand: float | None = None
    communityPrice: float | None = None
    isVariable: bool | None = None
    currency: str


class _Part(BaseModel):
    """Allowed sizes of a machine's disk or memory in GB, or allowed numbers of CPUs. `pricePerUnit` is the price of one
    GB or CPU per hour.

    If the size is fixed, all fields are None.
    """

    minCount: int | None = None
    defaultCount: int | None = None
    maxCount: int | None = None
    step: int | None = None
    pricePerUnit: float | None = None
    defaultIncludedInPrice: bool | None = None

    def size_for(self, wanted_gb: int) -> int | None:
        """Return the smallest allowed size of at least `wanted_gb`, or None if the size is fixed, or no size is large
        enough."""
        if self.maxCount is None:
            return None
        least = max(self.minCount or 1, 1)
        step = max(self.step or 1, 1)
        size = least + -(-max(0, wanted_gb - least) // step) * step
        return size if size <= self.maxCount else None

    @property
    def usual(self) -> int:
        return self.defaultCount or self.minCount or 0

    def usd_per_hour(self, size: int) -> float:
        """Return the extra price per hour for this size."""
        included = (self.defaultCount or 0) if self.defaultIncludedInPrice else 0
        return max(0, size - included) * (self.pricePerUnit or 0.0)


class _Configuration(BaseModel):
    cloudId: str
    gpuType: str
    socket: str
    provider: str
    region: str | None = None
    country: str | None = None
    dataCenter: str | None = None
    gpuCount: int
    gpuMemory: float
    disk: _Part = _Part()
    vcpu: _Part = _Part()
    memory: _Part = _Part()
    stockStatus: str = "Available"
    security: str
    prices: _Prices
    images: list[str]
    isSpot: bool | None = None
    prepaidTime: float | None = None

    @property
    def is_secure(self) -> bool:
        return self.security == "secure_cloud"

    @property
    def has_changing_price(self) -> bool:
        """Whether the price may change while the machine runs. False for spot offers, which are allowed to change."""
        return bool(self.prices.isVariable) and not self.isSpot

    @property
    def usd_per_hour(self) -> float | None:
        return self.prices.onDemand if self.is_secure else self.prices.communityPrice


class _Configurations(BaseModel):
    items: list[Json]
    totalCount: int


class _Pod(BaseModel):
    id: InstanceId
    name: str | None = None
    status: str | None = None
    installationStatus: str | None = None
    priceHr: float | None = None
    sshConnection: str | list[str | None] | None = None


class _Pods(BaseModel):
    data: list[Json]
    total_count: int = 0


class _Key(BaseModel):
    id: str = Field(min_length=1)
    publicKey: str = ""


class _Keys(BaseModel):
    data: list[_Key]
    total_count: int = 0


class Prime(Account):
    name: ClassVar[CloudName] = "prime"
    endpoint = Endpoint(title="Prime Intellect", url="https://api.primeintellect.ai", key_variable="PRIME_API_KEY")

    def search(self, query: GPUQuery) -> list[Offer]:
        params = {"gpu_count": str(query.gpu_count), "page_size": str(_PAGE)}
        if query.security == "secure":
            params["security"] = "secure_cloud"
        found: list[Json] = []
        for number in range(1, _MAX_PAGES + 1):
            page = self._api.read("/api/v1/availability/gpus", _Configurations, params | {"page": str(number)})
            found += page.items
            if not page.items or len(found) >= page.totalCount:
                break
        configurations = self._api.readable(found, _Configuration)
        return [offer for each in configurations if (offer := _read_offer(each, query.disk_gb)) is not None]

    def create(self, offer: Offer, spec: MachineSpec) -> str:
        provider, socket, image, disk_gb, data_center, cloud_id = map(unquote, offer.id.split(":"))
        pod: Json = {
            "name": spec.name,
            "cloudId": cloud_id,
            "gpuType": offer.gpu_type,
            "socket": socket,
            "gpuCount": offer.gpu_count,
            "image": spec.image or image,
            "security": "secure_cloud" if offer.is_secure else "community_cloud",
            "maxPrice": offer.usd_per_hour,
            "sshKeyId": self._register_key(spec.public_key),
            "autoRestart": False,
        }
        if disk_gb:
            pod["diskSize"] = int(disk_gb)
        if data_center:
            pod["dataCenterId"] = data_center
        return self._api.create("/api/v1/pods/", {"pod": pod, "provider": {"type": provider}}, _Pod, is_machine=True).id

    def get(self, instance_id: str) -> Instance | None:
        pod = self._api.find(f"/api/v1/pods/{quoted(instance_id)}", _Pod)
        return None if pod is None else _read_pod(pod)

    def list_named(self, prefix: str) -> list[Instance]:
        pods: list[Json] = []
        for _ in range(_MAX_PAGES):
            page = self._api.read("/api/v1/pods/", _Pods, {"offset": str(len(pods)), "limit": str(_PAGE)})
            pods += page.data
            if not page.data and len(pods) < page.total_count:
                raise ProviderUnavailableError(
                    f"{self.endpoint.title} lists {len(pods)} of {page.total_count} pods: its list is incomplete"
                )
            if not page.data or 0 < page.total_count <= len(pods):
                return [_read_pod(pod) for pod in self._api.named(pods, prefix, _Pod)]
        raise ProviderUnavailableError(
            f"{self.endpoint.title} lists more than {_MAX_PAGES * _PAGE} pods, which is not plausible"
        )

    def terminate(self, instance_id: str) -> None:
        self._api.change("DELETE", f"/api/v1/pods/{quoted(instance_id)}")

    def _register_key(self, public_key: str) -> str:
        blob, offset = key_blob(public_key), 0
        for _ in range(_MAX_PAGES):
            page = self._api.read("/api/v1/ssh_keys/", _Keys, {"offset": str(offset), "limit": str(_PAGE)})
            for known in page.data:
                if blob in known.publicKey.split():
                    return known.id
            offset += len(page.data)
            if not page.data or 0 < page.total_count <= offset:
                break
        return self._api.create("/api/v1/ssh_keys/", {"name": key_name(public_key), "publicKey": public_key}, _Key).id


def _read_offer(found: _Configuration, wanted_disk_gb: int) -> Offer | None:
    """Convert a configuration to an offer with a disk of the wanted size, or to None if it has no stock, no GPU, or no
    fixed hourly price in USD."""
    disk_gb = found.disk.size_for(wanted_disk_gb)
    price = found.usd_per_hour
    is_to_be_had = found.stockStatus != "Unavailable" and found.images and found.gpuCount >= 1
    has_gpu = found.gpuType != _NO_GPU
    is_by_the_hour = found.prepaidTime is None and not found.has_changing_price and found.prices.currency == "USD"
    if price is None or price <= 0 or not is_to_be_had or not has_gpu or not is_by_the_hour:
        return None
    of_parts = sum(part.usd_per_hour(part.usual) for part in (found.vcpu, found.memory))
    places = [place for place in (found.region, found.country, found.dataCenter) if place]
    choice = (
        found.provider,
        found.socket,
        _image_of(found.images),
        disk_gb or "",
        found.dataCenter or "",
        found.cloudId,
    )
    return Offer(
        provider=Prime.name,
        id=":".join(quote(str(part), safe="") for part in choice),
        gpu_type=found.gpuType,
        gpu_count=found.gpuCount,
        vram_gb=found.gpuMemory,
        usd_per_hour=price + found.disk.usd_per_hour(disk_gb or found.disk.usual) + of_parts,
        region="/".join(places),
        is_secure=found.is_secure,
        is_spot=bool(found.isSpot),
        disk_gb=disk_gb or found.disk.usual or None,  # the default size is used if no allowed size is large enough
    )


def _image_of(images: list[str]) -> str:
    """Return the image with the least software: the default image, or else an image of Ubuntu or CUDA, or else any
    image."""
    plain = [image for image in images if image.startswith(("ubuntu", "cuda"))]
    return DEFAULT_IMAGE if DEFAULT_IMAGE in images else [*plain, *images][0]


def _read_pod(pod: _Pod) -> Instance:
    connections = pod.sshConnection if isinstance(pod.sshConnection, list) else [pod.sshConnection]
    address = _SSH_ADDRESS.fullmatch((connections[0] if connections else None) or "")
    status = STATUS.get(pod.status or "PROVISIONING", InstanceStatus.UNKNOWN)
    if status is InstanceStatus.RUNNING:
        status = INSTALLATION.get(pod.installationStatus or "PENDING", InstanceStatus.STARTING)
    return Instance(
        provider=Prime.name,
        id=pod.id,
        name=pod.name or "",
        status=status,
        host=usable_host(address["host"]) if address else "",
        port=usable_port(address["port"] if address else None),
        user=usable_user(address["user"] if address else None, "root"),
        usd_per_hour=pod.priceHr,
    )
