"""Shadeform's API: machines of many clouds behind one interface.

Shadeform can end a machine automatically at a given time. Among the other providers, only SkyPilot can do that.

Not here: HTTP (http.py), creating and ending machines (infra/renting/provision.py, infra/renting/release.py).
"""

import datetime
from typing import ClassVar

from pydantic import BaseModel

from rollouts.infra.clouds import CloudName
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

STATUS = {
    "creating": InstanceStatus.STARTING,
    "pending_provider": InstanceStatus.STARTING,
    "pending": InstanceStatus.STARTING,
    "active": InstanceStatus.RUNNING,
    "error": InstanceStatus.FAILED,
    "deleting": InstanceStatus.ENDING,
    "deleted": InstanceStatus.GONE,
}


class _Configuration(BaseModel):
    storage_in_gb: int | None = None
    num_gpus: int = 0
    gpu_type: str = ""
    vram_per_gpu_in_gb: float = 0.0


class _Availability(BaseModel):
    region: str = ""
    available: bool = False


class _Kind(BaseModel):
    cloud: str
    shade_instance_type: str
    configuration: _Configuration
    hourly_price: float
    availability: list[_Availability] = []


class _Kinds(BaseModel):
    instance_types: list[Json]


class _Created(BaseModel):
    id: InstanceId


class _Instance(BaseModel):
    id: InstanceId
    name: str | None = None
    ip: str | None = None
    ssh_user: str | None = None
    ssh_port: int | None = None
    status: str | None = None
    hourly_price: float | None = None


class _Instances(BaseModel):
    instances: list[Json]


class _Key(BaseModel):
    id: str
    public_key: str = ""


class _Keys(BaseModel):
    ssh_keys: list[_Key]


class Shadeform(Account):
    name: ClassVar[CloudName] = "shadeform"
    endpoint = Endpoint(
        title="Shadeform",
        url="https://api.shadeform.ai/v1",
        key_variable="SHADEFORM_API_KEY",
        key_header="X-API-KEY",
        key_prefix="",
    )

    def search(self, query: GPUQuery) -> list[Offer]:
        params = {"available": "true", "num_gpus": str(query.gpu_count), "sort": "price"}
        kinds = self._api.read("/instances/types", _Kinds, params).instance_types
        return [
            _read_offer(kind, place.region)
            for kind in self._api.readable(kinds, _Kind)
            for place in kind.availability
            if place.available and kind.configuration.num_gpus > 0
        ]

    def create(self, offer: Offer, spec: MachineSpec) -> str:
        cloud, _, kind = offer.id.partition(":")
        body: Json = {
            "cloud": cloud,
            "region": offer.region,
            "shade_instance_type": kind,
            "shade_cloud": True,
            "name": spec.name,
            "ssh_key_id": self._register_key(spec.public_key),
        }
        if spec.image:
            body["os"] = spec.image
        if spec.ends_at is not None:
            ends_at = datetime.datetime.fromtimestamp(spec.ends_at, datetime.UTC)
            body["auto_delete"] = {"delete_at": ends_at.strftime("%Y-%m-%dT%H:%M:%SZ")}
        return self._api.create("/instances/create", body, _Created, is_machine=True).id

    def get(self, instance_id: str) -> Instance | None:
        found = self._api.find(f"/instances/{quoted(instance_id)}/info", _Instance)
        return None if found is None else _read_instance(found)

    def list_named(self, prefix: str) -> list[Instance]:
        instances = self._api.read("/instances", _Instances).instances
        return [_read_instance(each) for each in self._api.named(instances, prefix, _Instance)]

    def terminate(self, instance_id: str) -> None:
        self._api.change("POST", f"/instances/{quoted(instance_id)}/delete")

    def _register_key(self, public_key: str) -> str:
        blob = key_blob(public_key)
        for known in self._api.read("/sshkeys", _Keys).ssh_keys:
            if blob in known.public_key.split():
                return known.id
        return self._api.create("/sshkeys/add", {"name": key_name(public_key), "public_key": public_key}, _Created).id


def _read_offer(kind: _Kind, region: str) -> Offer:
    return Offer(
        provider=Shadeform.name,
        id=f"{kind.cloud}:{kind.shade_instance_type}",
        gpu_type=kind.configuration.gpu_type or kind.shade_instance_type,
        gpu_count=kind.configuration.num_gpus,
        vram_gb=kind.configuration.vram_per_gpu_in_gb,
        usd_per_hour=kind.hourly_price / 100,
        region=region,
        disk_gb=kind.configuration.storage_in_gb,
    )


def _read_instance(instance: _Instance) -> Instance:
    return Instance(
        provider=Shadeform.name,
        id=instance.id,
        name=instance.name or "",
        status=STATUS.get(instance.status or "", InstanceStatus.UNKNOWN),
        host=usable_host(instance.ip),
        port=usable_port(instance.ssh_port),
        user=usable_user(instance.ssh_user, "shadeform"),
        usd_per_hour=instance.hourly_price / 100 if instance.hourly_price is not None else None,
    )
