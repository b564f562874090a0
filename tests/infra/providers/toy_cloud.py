"""A provider that does not exist: all that a new one needs, but for its row in `infra/clouds.py` or an entry point."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel

from rollouts.infra.offers import GPUQuery, Instance, InstanceStatus, MachineSpec, Offer
from rollouts.infra.providers.http import Account, Endpoint, InstanceId, Json, quoted, usable_host, usable_port

STATUS = {"starting": InstanceStatus.STARTING, "up": InstanceStatus.RUNNING}


class _Kind(BaseModel):
    id: str
    gpu: str
    gb: float
    usd: float


class _Kinds(BaseModel):
    kinds: list[Json]


class _Machine(BaseModel):
    id: InstanceId
    name: str = ""
    status: str = ""
    ip: str | None = None
    port: int | None = None


class _Machines(BaseModel):
    machines: list[Json]


class Toy(Account):
    """An account at the toy provider."""

    name: ClassVar[str] = "toy"
    endpoint = Endpoint(title="Toy Cloud", url="https://toy.invalid", key_variable="TOY_API_KEY")
    is_networked: ClassVar[bool] = True
    reaches: ClassVar[tuple[str, ...]] = ("toytown",)

    def search(self, query: GPUQuery) -> list[Offer]:
        kinds = self._api.readable(self._api.read("/kinds", _Kinds).kinds, _Kind)
        return [
            Offer(
                provider=self.name,
                id=kind.id,
                gpu_type=kind.gpu,
                gpu_count=1,
                vram_gb=kind.gb,
                usd_per_hour=kind.usd,
                region="toy-1",
            )
            for kind in kinds
        ]

    def create(self, offer: Offer, spec: MachineSpec) -> str:
        body: Json = {"name": spec.name, "kind": offer.id, "key": spec.public_key}
        return self._api.create("/machines", body, _Machine, is_machine=True).id

    def get(self, instance_id: str) -> Instance | None:
        found = self._api.find(f"/machines/{quoted(instance_id)}", _Machine)
        return None if found is None else self._read(found)

    def list_named(self, prefix: str) -> list[Instance]:
        machines = self._api.read("/machines", _Machines).machines
        return [self._read(each) for each in self._api.named(machines, prefix, _Machine)]

    def terminate(self, instance_id: str) -> None:
        self._api.change("DELETE", f"/machines/{quoted(instance_id)}")

    def _read(self, machine: _Machine) -> Instance:
        return Instance(
            provider=self.name,
            id=machine.id,
            name=machine.name,
            status=STATUS.get(machine.status, InstanceStatus.UNKNOWN),
            host=usable_host(machine.ip),
            port=usable_port(machine.port),
        )
