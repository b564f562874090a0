"""Vast.ai's API: containers on machines of data centers and of private people.

Not here: HTTP (http.py), when a machine is created and ended (infra/provision.py).

An offer is one machine and can be taken once. The key that may log in is written by the container's first command: so
no key has to be registered with the account. `price` is not sent: with it the machine would be one that can be outbid.
"""

import json
import shlex
from typing import ClassVar

from pydantic import BaseModel, Field

from infra.errors import ProviderUnavailableError
from infra.offers import CloudName, GPUQuery, Instance, InstanceStatus, MachineSpec, Offer
from infra.providers.addresses import quoted, usable_host, usable_port
from infra.providers.http import Account, Endpoint, Json

DEFAULT_IMAGE = "vastai/pytorch:@vastai-automatic-tag"
_MAX_OFFERS, _PAGE, _MAX_PAGES = 100, 25, 200
_LIST = "/api/v1/instances/"
STATUS = {
    "created": InstanceStatus.STARTING,
    "loading": InstanceStatus.STARTING,
    "running": InstanceStatus.RUNNING,
    "exited": InstanceStatus.STOPPED,
    "stopped": InstanceStatus.STOPPED,
    # Its document: these "will never reach `running` -- destroy and retry".
    "offline": InstanceStatus.FAILED,
    "unknown": InstanceStatus.FAILED,
}


class _Ask(BaseModel):
    id: int
    gpu_name: str
    num_gpus: int
    gpu_ram: float
    """MB of each GPU."""
    dph_total: float
    geolocation: str | None = None
    machine_id: int | None = None


class _Asks(BaseModel):
    offers: list[_Ask]


class _Contract(BaseModel):
    new_contract: int


class _Mapping(BaseModel):
    HostPort: str | None = None


class _Ports(BaseModel):
    """As Docker maps them; a port that is not mapped is null."""

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
    """An account at Vast.ai."""

    name: ClassVar[CloudName] = "vast"
    endpoint = Endpoint(
        title="Vast.ai",
        url="https://console.vast.ai",
        key_variable="VAST_API_KEY",
        min_interval_s=1.0,
        create_interval_s=4.5,
    )

    def search(self, query: GPUQuery) -> list[Offer]:
        is_secure = query.security == "secure"
        body: Json = {
            "type": "ondemand",
            "verified": {"eq": True},
            "rentable": {"eq": True},
            "rented": {"eq": False},
            "num_gpus": {"eq": query.gpu_count},
            "gpu_ram": {"gte": int(query.min_vram_gb * 1000)},
            "disk_space": {"gte": query.disk_gb},
            "allocated_storage": query.disk_gb,
            "order": [["dph_total", "asc"], ["id", "asc"]],
            "limit": _MAX_OFFERS,
        }
        if is_secure:
            body["datacenter"] = {"eq": True}
        if query.min_cuda:
            body["cuda_max_good"] = {"gte": float(query.min_cuda)}
        asks = self._api.ask("/api/v0/bundles/", body, _Asks).offers
        return [_read_offer(ask, is_secure=is_secure) for ask in asks]

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
        # The address of a single instance shows its ports in another form than the list, which is the newer one.
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
            f"{self.endpoint.title} lists more than {_MAX_PAGES * _PAGE} machines: that cannot be all ours"
        )

    def terminate(self, instance_id: str) -> None:
        self._api.change("DELETE", f"/api/v0/instances/{quoted(instance_id)}/")


def _read_offer(ask: _Ask, *, is_secure: bool) -> Offer:
    return Offer(
        provider="vast",
        id=str(ask.id),
        gpu_type=ask.gpu_name,
        gpu_count=ask.num_gpus,
        vram_gb=round(ask.gpu_ram / 1000, 1),
        usd_per_hour=ask.dph_total,
        region=(ask.geolocation or "").rpartition(",")[2].strip(),
        is_secure=is_secure,
        host="" if ask.machine_id is None else str(ask.machine_id),
    )


def _read_instance(instance: _Instance) -> Instance:
    mapped = (instance.ports and instance.ports.ssh) or []
    written = (mapped[0].HostPort if mapped else None) or ""
    port = written if written.isdecimal() else ""
    return Instance(
        provider="vast",
        id=str(instance.id),
        name=instance.label or "",
        status=STATUS.get(instance.actual_status or "loading", InstanceStatus.UNKNOWN),
        host=usable_host((instance.public_ipaddr or "").strip()) if port else "",
        port=usable_port(port),
        usd_per_hour=instance.dph_total,
    )
