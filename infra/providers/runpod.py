"""RunPod's API v2: pods, which are containers with GPUs.

RunPod maps a public port to port 22 of a pod. The public port changes when the pod is reset. RunPod's images start an
SSH server if PUBLIC_KEY is set in their environment. RunPod's images write the fingerprints of their host keys to the
pod's log, which RunPod shows over HTTPS. RunPod has no spot pods.

Not here: HTTP (http.py), creating and ending pods (infra/renting/provision.py, infra/renting/release.py).
"""

import json
import re
from collections.abc import Iterator
from typing import ClassVar

from pydantic import BaseModel

from rollouts.infra.clouds import CloudName
from rollouts.infra.offers import GPUQuery, Instance, InstanceStatus, MachineSpec, Offer
from rollouts.infra.providers.http import (
    Account,
    Endpoint,
    InstanceId,
    Json,
    quoted,
    usable_host,
    usable_port,
    usable_user,
)

DEFAULT_IMAGE = "runpod/pytorch:2.8.0-py3.11-cuda12.8.1-cudnn-devel-ubuntu22.04"
LOG_WITHIN_S = 10.0
"""Seconds for which a pod's log is read to find the pod's host keys."""
_KEY_FILE = re.compile(r"Key: /etc/ssh/ssh_host_(ed25519|ecdsa|rsa)_key\.pub")
_FINGERPRINT = re.compile(r"\d+ (SHA256:[A-Za-z0-9+/]{43}) .*")
STATUS = {
    "PROVISIONING": InstanceStatus.STARTING,
    "STARTING": InstanceStatus.STARTING,
    "RUNNING": InstanceStatus.RUNNING,
    "EXITED": InstanceStatus.STOPPED,
    "ERROR": InstanceStatus.FAILED,
    "TERMINATED": InstanceStatus.GONE,
}


class _Direct(BaseModel):
    host: str | None = None
    port: int | None = None
    username: str | None = None


class _SSH(BaseModel):
    direct: _Direct | None = None


class _Pod(BaseModel):
    id: InstanceId
    name: str | None = None
    status: str | None = None
    cost: float | None = None
    dataCenterId: str | None = None
    ssh: _SSH | None = None


class _Pods(BaseModel):
    pods: list[Json]


class _PerCloud(BaseModel):
    secure: float = 0.0
    community: float = 0.0


class _DataCenter(BaseModel):
    id: str
    availability: str = "NONE"


class _GPU(BaseModel):
    id: str
    name: str
    memory: float
    price: _PerCloud
    maxCount: _PerCloud
    availability: str = "NONE"
    dataCenters: list[_DataCenter] = []


class _GPUs(BaseModel):
    gpus: list[Json]


class RunPod(Account):
    name: ClassVar[CloudName] = "runpod"
    endpoint = Endpoint(
        title="RunPod",
        url="https://api.runpod.io",
        key_variable="RUNPOD_API_KEY",
        patience_s=90.0,  # RunPod's shortest rate limit window is a minute
        offer_refusal=".",  # RunPod documents it: "Your account cannot access the requested pool. Skip this candidate"
    )

    def search(self, query: GPUQuery) -> list[Offer]:
        if query.spot:
            return []
        tiers = ("SECURE", "COMMUNITY") if query.security == "any" else ("SECURE",)
        return [offer for tier in tiers for offer in self._search_tier(query, tier)]

    def create(self, offer: Offer, spec: MachineSpec) -> str:
        tier, _, gpu_id = offer.id.partition(":")
        gpu: Json = {"id": gpu_id, "count": offer.gpu_count}
        if spec.min_cuda:
            gpu["minCudaVersion"] = spec.min_cuda
        body: Json = {
            "name": spec.name,
            "image": spec.image or DEFAULT_IMAGE,
            "cloud": tier,
            "gpu": gpu,
            "disk": spec.disk_gb,
            "ports": ["22/tcp"],
            # With this variable, only this SSH key may log in. `startSsh` would admit all keys of the account.
            "env": {"PUBLIC_KEY": spec.public_key},
        }
        if offer.region:
            body["dataCenterIds"] = [offer.region]  # a preference only: `get` returns the region that RunPod chose
        return self._api.create("/v2/pods", body, _Pod, is_machine=True).id

    def get(self, instance_id: str) -> Instance | None:
        pod = self._api.find(f"/v2/pods/{quoted(instance_id)}", _Pod)
        return None if pod is None else _read_pod(pod)

    def host_key(self, instance_id: str) -> str:
        params = {"source": "container", "tail": "1000"}
        lines = self._api.follow(f"/v2/pods/{quoted(instance_id)}/logs", params, within_s=LOG_WITHIN_S)
        found = dict[str, str]()
        for key_type, fingerprint in _host_keys_in(lines):
            found[key_type] = fingerprint
            if key_type == "ed25519":
                break  # SSH requests this type first
        return next((found[key_type] for key_type in ("ed25519", "ecdsa", "rsa") if key_type in found), "")

    def list_named(self, prefix: str) -> list[Instance]:
        pods = self._api.read("/v2/pods", _Pods).pods
        return [_read_pod(pod) for pod in self._api.named(pods, prefix, _Pod)]

    def terminate(self, instance_id: str) -> None:
        self._api.change("DELETE", f"/v2/pods/{quoted(instance_id)}")

    def _search_tier(self, query: GPUQuery, tier: str) -> list[Offer]:
        params = {"include": "AVAILABILITY", "product": "POD", "count": str(query.gpu_count), "cloud": tier}
        if query.min_cuda:
            params["minCudaVersion"] = query.min_cuda
        is_secure = tier == "SECURE"
        offers = []
        for gpu in self._api.readable(self._api.read("/v2/catalog/gpus", _GPUs, params).gpus, _GPU):
            price = gpu.price.secure if is_secure else gpu.price.community
            max_count = gpu.maxCount.secure if is_secure else gpu.maxCount.community
            if gpu.availability == "NONE" or price <= 0 or max_count < query.gpu_count:
                continue
            regions = [center.id for center in gpu.dataCenters if center.availability != "NONE"]
            for region in regions if query.regions else [""]:  # without a wanted region, RunPod chooses
                offers.append(
                    Offer(
                        provider=RunPod.name,
                        id=f"{tier}:{gpu.id}",
                        gpu_type=gpu.name,
                        gpu_count=query.gpu_count,
                        vram_gb=gpu.memory,
                        usd_per_hour=price * query.gpu_count,
                        region=region,
                        is_secure=is_secure,
                    )
                )
        return offers


def _host_keys_in(events: Iterator[str]) -> Iterator[tuple[str, str]]:
    """Yield the type and fingerprint of each host key in the log of RunPod's images. `events` are server-sent
    events."""
    key_type = ""
    for event in events:
        if not event.startswith("data:"):
            continue
        try:
            line = str(json.loads(event.removeprefix("data:"))["line"]).strip()
        except (ValueError, KeyError, TypeError):
            continue
        if key_type and (match := _FINGERPRINT.fullmatch(line)):
            yield key_type, match[1]
        named = _KEY_FILE.fullmatch(line)
        key_type = named[1] if named else ""


def _read_pod(pod: _Pod) -> Instance:
    direct = pod.ssh.direct if pod.ssh else None
    return Instance(
        provider=RunPod.name,
        id=pod.id,
        name=pod.name or "",
        status=STATUS.get(pod.status or "", InstanceStatus.UNKNOWN),
        host=usable_host(direct.host) if direct and direct.port else "",
        port=usable_port(direct.port) if direct else 22,
        user=usable_user(direct.username if direct else None, "root"),
        region=pod.dataCenterId or "",
        usd_per_hour=pod.cost,
    )
