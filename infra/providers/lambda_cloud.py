"""Lambda's cloud API: virtual machines with GPUs, of fixed instance types.

    public key ──registered under a unique name──> launch(kind, region, name) ──> instance, user ubuntu, port 22
    host key   ──as user data, which Lambda never shows again──┘

Lambda has no spot machines and no community machines. Lambda may refuse an instance type a second after listing the
type as available.

Not here: HTTP (http.py), launching and ending machines (infra/renting/provision.py, infra/renting/release.py).
"""

import json
import re
from typing import ClassVar

from pydantic import BaseModel, Field

from rollouts.infra.clouds import CloudName
from rollouts.infra.errors import OfferGoneError
from rollouts.infra.offers import GPUQuery, HostKeyPair, Instance, InstanceStatus, MachineSpec, Offer
from rollouts.infra.providers.http import Account, Endpoint, InstanceId, Json, key_blob, key_name, quoted, usable_host

USER = "ubuntu"
STATUS = {
    "booting": InstanceStatus.STARTING,
    "active": InstanceStatus.RUNNING,
    "unhealthy": InstanceStatus.FAILED,
    "terminating": InstanceStatus.ENDING,
    "terminated": InstanceStatus.GONE,
    "preempted": InstanceStatus.GONE,
}
_VRAM = re.compile(r"(\d+)\s*GB", re.IGNORECASE)


class _Region(BaseModel):
    name: str


class _Specs(BaseModel):
    gpus: int
    storage_gib: int


class _Kind(BaseModel):
    name: str
    gpu_description: str = ""
    price_cents_per_hour: int
    specs: _Specs | None = None


class _KindAndRegions(BaseModel):
    instance_type: _Kind
    regions_with_capacity_available: list[_Region] = []


class _Kinds(BaseModel):
    data: dict[str, Json]


class _Launched(BaseModel):
    instance_ids: list[InstanceId] = Field(min_length=1)


class _Launch(BaseModel):
    data: _Launched


class _Instance(BaseModel):
    id: InstanceId
    name: str | None = None
    ip: str | None = None
    private_ip: str | None = None
    status: str | None = None
    instance_type: _Kind | None = None


class _OneInstance(BaseModel):
    data: _Instance


class _Instances(BaseModel):
    data: list[Json]


class _Key(BaseModel):
    name: str
    public_key: str = ""


class _OneKey(BaseModel):
    data: _Key


class _Keys(BaseModel):
    data: list[_Key]


class Lambda(Account):
    name: ClassVar[CloudName] = "lambda"
    gives_host_key: ClassVar[bool] = True
    is_networked: ClassVar[bool] = True
    endpoint = Endpoint(
        title="Lambda",
        url="https://cloud.lambda.ai",
        key_variable="LAMBDA_API_KEY",
        min_interval_s=1.0,
        create_interval_s=12.0,
        account_refusal=r'"code"\s*:\s*"global/(quota-exceeded|account-inactive|invalid-address)"',
    )

    def search(self, query: GPUQuery) -> list[Offer]:
        kinds = self._api.read("/api/v1/instance-types", _Kinds).data
        return [
            _read_offer(each.instance_type, each.instance_type.specs, region.name)
            for each in self._api.readable(list(kinds.values()), _KindAndRegions)
            for region in each.regions_with_capacity_available
            if each.instance_type.specs is not None and each.instance_type.specs.gpus > 0
        ]

    def create(self, offer: Offer, spec: MachineSpec) -> str:
        body: Json = {
            "region_name": offer.region,
            "instance_type_name": offer.id,
            "ssh_key_names": [self._register_key(spec.public_key)],
            "name": spec.name,
        }
        if spec.image:
            body["image"] = {"family": spec.image}
        if spec.host_key:
            self._api.conceal(spec.host_key.private)
            body["user_data"] = _render_cloud_config(spec.host_key)
        launch = self._api.create("/api/v1/instance-operations/launch", body, _Launch, is_machine=True)
        return launch.data.instance_ids[0]

    def get(self, instance_id: str) -> Instance | None:
        found = self._api.find(f"/api/v1/instances/{quoted(instance_id)}", _OneInstance)
        return None if found is None else _read_instance(found.data)

    def list_named(self, prefix: str) -> list[Instance]:
        instances = self._api.read("/api/v1/instances", _Instances).data
        return [_read_instance(each) for each in self._api.named(instances, prefix, _Instance)]

    def terminate(self, instance_id: str) -> None:
        self._api.change("POST", "/api/v1/instance-operations/terminate", {"instance_ids": [instance_id]})

    def _register_key(self, public_key: str) -> str:
        blob = key_blob(public_key)
        for known in self._keys():
            if blob in known.public_key.split():
                return known.name
        name = key_name(public_key)
        try:
            self._api.create("/api/v1/ssh-keys", {"name": name, "public_key": public_key}, _OneKey)
        except OfferGoneError:
            if name not in [known.name for known in self._keys()]:  # another run may have registered it just now
                raise
        return name

    def _keys(self) -> list[_Key]:
        return self._api.read("/api/v1/ssh-keys", _Keys).data


def _render_cloud_config(host_key: HostKeyPair) -> str:
    """Return user data for cloud-init, which then installs only this host key before the SSH server starts."""
    keys = {"ed25519_private": host_key.private, "ed25519_public": host_key.public}
    return "#cloud-config\n" + json.dumps({"ssh_deletekeys": True, "ssh_keys": keys}) + "\n"  # JSON is YAML


def _read_offer(kind: _Kind, specs: _Specs | None, region: str) -> Offer:
    assert specs is not None
    vram = _VRAM.search(kind.gpu_description)
    return Offer(
        provider=Lambda.name,
        id=kind.name,
        gpu_type=kind.gpu_description or kind.name,
        gpu_count=specs.gpus,
        vram_gb=float(vram[1]) if vram else 0.0,
        usd_per_hour=kind.price_cents_per_hour / 100,
        region=region,
        disk_gb=int(specs.storage_gib * 1.073741824),
    )


def _read_instance(instance: _Instance) -> Instance:
    kind = instance.instance_type
    return Instance(
        provider=Lambda.name,
        id=instance.id,
        name=instance.name or "",
        status=STATUS.get(instance.status or "", InstanceStatus.UNKNOWN),
        host=usable_host(instance.ip),
        user=USER,
        private_address=usable_host(instance.private_ip),
        usd_per_hour=kind.price_cents_per_hour / 100 if kind else None,
    )
