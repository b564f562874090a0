"""Vast.ai's API: containers on machines of data centers and of private owners.

An offer is a single machine and can be rented once. The container's first command installs the public login key, so the
key need not be registered in the account. The command cannot install a host key, because the SSH server starts before
the command, with a new key. Requests never contain the field `price`, because higher bids could interrupt a machine
requested with a price.

Not here: HTTP (http.py), creating and ending machines (infra/renting/provision.py, infra/renting/release.py).
"""

import json
import shlex
from collections.abc import Sequence
from typing import ClassVar

from pydantic import BaseModel, Field

from rollouts.infra.clouds import CloudName
from rollouts.infra.errors import ProviderUnavailableError
from rollouts.infra.offers import GPUQuery, Instance, InstanceStatus, MachineSpec, Offer, is_gpu_type
from rollouts.infra.providers.http import Account, Endpoint, Json, quoted, usable_host, usable_port

DEFAULT_IMAGE = "vastai/pytorch:@vastai-automatic-tag"
_PAGE, _MAX_PAGES = 25, 200
_OFFERS, _MAX_SEARCHES = 64, 8
"""_OFFERS is the largest number of offers that Vast.ai returns per search. _MAX_SEARCHES limits the searches, because
an account may see only a limited number of offers in a day."""
_LEAST_S = 3600
"""Seconds for which an offered machine must be available. Later, the machine's owner may take it back."""
_GPU_NAMES = (
    *("A10", "A10g", "A16", "A30", "A40", "A100 PCIE", "A100 SXM", "A100 SXM4", "A100X", "A800 PCIE", "B200", "B300"),
    *("B300 SXM", "GB10", "GH200 SXM", "H100 NVL", "H100 PCIE", "H100 SXM", "H200", "H200 NVL", "L4", "L40", "L40S"),
    *("Q RTX 6000", "Q RTX 8000", "Tesla P100", "Tesla T4", "Tesla V100", "Titan RTX", "Titan V", "RTX 2080 Ti"),
    *("RTX 3060", "RTX 3060 Ti", "RTX 3070", "RTX 3070 Ti", "RTX 3080", "RTX 3080 Ti", "RTX 3090", "RTX 3090 Ti"),
    *("RTX 4060", "RTX 4060 Ti", "RTX 4070", "RTX 4070 Ti", "RTX 4070S", "RTX 4070S Ti", "RTX 4080", "RTX 4080S"),
    *("RTX 4090", "RTX 4090D", "RTX 5060", "RTX 5060 Ti", "RTX 5070", "RTX 5070 Ti", "RTX 5080", "RTX 5090"),
    *("RTX 2000Ada", "RTX 4000Ada", "RTX 4500Ada", "RTX 5000Ada", "RTX 5880Ada", "RTX 6000Ada", "RTX A4000"),
    *("RTX A4500", "RTX A5000", "RTX A6000", "RTX PRO 4000", "RTX PRO 4500", "RTX PRO 5000", "RTX PRO 6000"),
    *("RTX PRO 6000 Max-Q", "RTX PRO 6000 S", "RTX PRO 6000 WS"),
)
"""Vast.ai's names of GPUs. If the query has a GPU type without a name in this list, all offers are searched."""
_LIST = "/api/v1/instances/"
_SOLD_GB = (8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 80, 94, 96, 141, 180, 288)
_LEAST_SHARE = 0.93
"""Share of a card's nominal memory that must be usable. Error correction takes a sixteenth on L4, A10, A40 and L40S."""
STATUS = {
    "created": InstanceStatus.STARTING,
    "loading": InstanceStatus.STARTING,
    "running": InstanceStatus.RUNNING,
    "exited": InstanceStatus.STOPPED,
    "stopped": InstanceStatus.STOPPED,
    # Vast.ai's documentation says that machines in these states "will never reach `running` -- destroy and retry".
    "offline": InstanceStatus.FAILED,
    "unknown": InstanceStatus.FAILED,
}


class _Ask(BaseModel):
    id: int
    gpu_name: str
    num_gpus: int
    gpu_ram: float
    """Memory of each GPU in MiB, as nvidia-smi shows it: 24,564 for an RTX 4090. Vast.ai calls the unit MB."""
    dph_total: float
    geolocation: str | None = None
    machine_id: int | None = None
    end_date: float | None = None
    """Time at which the owner takes the machine back, in seconds since 1970."""


class _Asks(BaseModel):
    offers: list[Json]


class _Contract(BaseModel):
    new_contract: int


class _Mapping(BaseModel):
    HostPort: str | None = None


class _Ports(BaseModel):
    """Port mappings in Docker's format. A port without a mapping is null."""

    ssh: list[_Mapping] | None = Field(default=None, alias="22/tcp")


class _Instance(BaseModel):
    id: int
    label: str | None = None
    actual_status: str | None = None
    public_ipaddr: str | None = None
    ports: _Ports | None = None
    dph_total: float | None = None


class _Page(BaseModel):
    instances: list[Json]
    next_token: str | None = None


class Vast(Account):
    name: ClassVar[CloudName] = "vast"
    endpoint = Endpoint(
        title="Vast.ai",
        url="https://console.vast.ai",
        key_variable="VAST_API_KEY",
        min_interval_s=1.0,
        create_interval_s=4.5,
        account_refusal=r"insufficient_credit|lacks credit|Invalid user key",  # with status 400, or 404 for a search
        offer_refusal=r"Offer \d+ is not",  # "... your own. Hosts can only rent their own machines."
    )

    def search(self, query: GPUQuery) -> list[Offer]:
        is_secure = query.security == "secure"
        body: Json = {
            "type": "ondemand",
            "verified": {"eq": True},
            "rentable": {"eq": True},
            "rented": {"eq": False},
            "num_gpus": {"eq": query.gpu_count},
            "duration": {"gte": _LEAST_S},
            "direct_port_count": {"gte": 1},  # without it, SSH works only through Vast.ai's proxy
            "gpu_ram": {"gte": int(query.min_vram_gb * _LEAST_SHARE * 1024)},
            "disk_space": {"gte": query.disk_gb},
            "allocated_storage": query.disk_gb,
            "order": [["dph_total", "asc"], ["id", "asc"]],
            "limit": _OFFERS,
        }
        if is_secure:
            body["datacenter"] = {"eq": True}
        if query.min_cuda:
            body["cuda_max_good"] = {"gte": float(query.min_cuda)}
        names = _names_of(query.gpu_types)
        named = self._search(body | {"gpu_name": {"in": names}}, query) if names else []
        return named or self._search(body, query)  # search all offers if none matches: Vast.ai may have renamed GPUs

    def create(self, offer: Offer, spec: MachineSpec) -> str:
        key = shlex.quote(spec.public_key)
        body: Json = {
            "image": spec.image or DEFAULT_IMAGE,
            "disk": spec.disk_gb,
            "label": spec.name,
            "runtype": "ssh_direct",
            "onstart": f"mkdir -p ~/.ssh; chmod 700 ~/.ssh; echo {key} >> ~/.ssh/authorized_keys",
            "cancel_unavail": True,
        }
        path = f"/api/v0/asks/{offer.id}/"
        return str(self._api.create(path, body, _Contract, method="PUT", is_machine=True).new_contract)

    def get(self, instance_id: str) -> Instance | None:
        if not (instance_id.isascii() and instance_id.isdigit()):  # Vast.ai's ids are numbers
            return None
        # Filter the list of instances, because the API for a single instance returns ports in an older format.
        params = {"limit": "1", "select_filters": json.dumps({"id": {"eq": int(instance_id)}})}
        instances = self._api.read(_LIST, _Page, params).instances
        mine = [each for each in instances if str(each.get("id")) == instance_id]
        return next(map(_read_instance, self._api.named(mine, "", _Instance)), None)

    def list_named(self, prefix: str) -> list[Instance]:
        instances: list[Json] = []
        params = {"limit": str(_PAGE), "order_by": json.dumps([{"col": "id", "dir": "asc"}])}
        for _ in range(_MAX_PAGES):
            page = self._api.read(_LIST, _Page, params)
            instances += page.instances
            if not page.next_token:
                return [_read_instance(each) for each in self._api.named(instances, prefix, _Instance, key="label")]
            params["after_token"] = page.next_token
        raise ProviderUnavailableError(
            f"{self.endpoint.title} lists more than {_MAX_PAGES * _PAGE} machines, which is not plausible"
        )

    def terminate(self, instance_id: str) -> None:
        self._api.change("DELETE", f"/api/v0/instances/{quoted(instance_id)}/")

    def _search(self, body: Json, query: GPUQuery) -> list[Offer]:
        """Return offers, cheapest first. The search stops when enough offers match the query or the next offers are too
        expensive."""
        found: dict[str, Offer] = {}
        floor: Json = {}
        for _ in range(_MAX_SEARCHES):
            answer = self._api.ask("/api/v0/bundles/", body | floor, _Asks).offers
            asks = self._api.readable(answer, _Ask)
            offers = {str(ask.id): _read_offer(ask, is_secure="datacenter" in body) for ask in asks}
            has_more = not offers.keys() <= found.keys()
            found |= offers
            price = max((ask.dph_total for ask in asks), default=0.0)
            num_fitting = sum(map(query.admits, found.values()))
            if len(answer) < _OFFERS or num_fitting >= _OFFERS or price > query.max_usd_per_gpu_hour * query.gpu_count:
                break
            floor = {"dph_total": {"gte" if has_more else "gt": price}}
        return list(found.values())


def _sold_gb(mib: float) -> float:
    """Return the nominal memory of a card in GB, as other providers report it, from the usable memory in MiB."""
    gib = mib / 1024
    return next((sold for sold in _SOLD_GB if _LEAST_SHARE * sold <= gib <= sold), round(gib, 1))


def _names_of(gpu_types: Sequence[str]) -> list[str]:
    """Return Vast.ai's names of these types, or an empty list if a type has no known name, or if `gpu_types` is
    empty."""
    names = {wanted: [name for name in _GPU_NAMES if is_gpu_type(name, wanted)] for wanted in gpu_types}
    if not all(names.values()):
        return []
    # Vast.ai's documentation writes RTX_4090; its guide and its offers write RTX 4090. Unknown names do no harm.
    return sorted({spelt for known in names.values() for name in known for spelt in (name, name.replace(" ", "_"))})


def _read_offer(ask: _Ask, *, is_secure: bool) -> Offer:
    return Offer(
        provider=Vast.name,
        id=str(ask.id),
        gpu_type=ask.gpu_name,
        gpu_count=ask.num_gpus,
        vram_gb=_sold_gb(ask.gpu_ram),
        usd_per_hour=ask.dph_total,
        region=(ask.geolocation or "").rpartition(",")[2].strip(),
        is_secure=is_secure,
        host="" if ask.machine_id is None else str(ask.machine_id),
        ends_at=ask.end_date,
    )


def _read_instance(instance: _Instance) -> Instance:
    mapped = (instance.ports and instance.ports.ssh) or []
    written = (mapped[0].HostPort if mapped else None) or ""
    port = written if written.isdecimal() else ""
    return Instance(
        provider=Vast.name,
        id=str(instance.id),
        name=instance.label or "",
        status=STATUS.get(instance.actual_status or "loading", InstanceStatus.UNKNOWN),
        host=usable_host((instance.public_ipaddr or "").strip()) if port else "",
        port=usable_port(port),
        usd_per_hour=instance.dph_total,
    )
