"""AWS, Google Cloud, Azure, Kubernetes and other clouds, through the command line of SkyPilot.

    search       sky check, sky gpus list       -> instance types with prices, of the clouds that SkyPilot may use
    create       sky launch NAME                   returns when the machine is running, or SkyPilot has given up
    get, list    sky status, and the ssh configuration that it writes
    terminate    sky down NAME

SkyPilot needs other versions of our dependencies, so users install it in a separate environment. ROLLOUTS_SKY is the
path of SkyPilot's program. In nearly all clouds, SkyPilot can end a machine automatically at a given time. Clouds for
which this package has a separate module are skipped.

For some machines, such as pods of Kubernetes, ssh needs a proxy command. For these machines, the ssh configuration that
SkyPilot writes is used:

    ssh -F ~/.sky/generated/ssh/NAME -W 127.0.0.1:22 ssh://NAME    the machine's own port, seen from inside it

A pod has no price unless SkyPilot's configuration sets one (kubernetes.pricing). A pod without a price is offered for 0
USD, which every price limit admits. Only the run's limit of hours then ends the pod. Pods are offered in SkyPilot's
current Kubernetes context; the context's name is the offer's region.
"""

import json
import logging
import math
import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Self, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from rollouts.infra.clouds import CloudName
from rollouts.infra.errors import (
    InfraError,
    MissingKeyError,
    OfferGoneError,
    ProviderRefusedError,
    ProviderUnavailableError,
    UnclearAnswerError,
)
from rollouts.infra.foreign_text import shown_line, shown_lines
from rollouts.infra.offers import MAKERS_WORDS, GPUQuery, Instance, InstanceStatus, MachineSpec, Offer
from rollouts.infra.providers.http import Endpoint, usable_host, usable_port, usable_user
from rollouts.infra.session import LOOPBACK

ANSWER_TIMEOUT_S = 300.0
LAUNCH_TIMEOUT_S = 1800.0
_SSH_FILES = Path("~/.sky/generated/ssh")
MAX_SHOWN_CHARACTERS = 300
_ELSEWHERE = {"ssh", "slurm", "runpod", "lambda", "vast", "primeintellect", "shadeform"}
_KUBERNETES = "kubernetes"
_NEVER_END_THEMSELVES = {"hyperbolic", "verda", "yotta"}
"""Clouds in which SkyPilot cannot end a machine automatically (no AUTODOWN). SkyPilot refuses to launch a machine with
an end time in these clouds."""
_STATUS = {
    "INIT": InstanceStatus.STARTING,
    "UP": InstanceStatus.RUNNING,
    "STOPPED": InstanceStatus.STOPPED,
    "AUTOSTOPPING": InstanceStatus.ENDING,
}
_MEMORY_GB = {
    **{"T4": 16, "V100": 16, "V100-32GB": 32, "P100": 16, "A10G": 24, "A10": 24, "L4": 24, "L40S": 48},
    **{"A100": 40, "A100-80GB": 80, "H100": 80, "H200": 141, "B200": 180},
}
"""Memory in GB by the name of the GPU, for catalogs that do not list the memory. Names like H100-80GB contain the
memory."""
_MEMORY_IN_NAME = re.compile(r"-(\d+)GB\b")
_DOWN_FAILED = "Cluster(s) failed."
"""Last line that `sky down` prints if it could not end a cluster. The preceding lines contain the reasons."""

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")


class _Kind(BaseModel):
    cloud: str
    instance_type: str | None = None
    accelerator_name: str
    accelerator_count: float
    device_memory: float | None = None
    price: float | None = None
    spot_price: float | None = None
    region: str


class _Cluster(BaseModel):
    name: str
    status: str
    init_kind: str | None = None
    init_status_reason: str | None = None
    cluster_ever_up: bool = False

    @property
    def runs_unwatched(self) -> bool:
        """Whether the cloud runs the machine, but SkyPilot's program on the machine does not answer, for example
        because its network is down."""
        return self.cluster_ever_up and "ray cluster is unhealthy" in (self.init_status_reason or "")


_KINDS = TypeAdapter(dict[str, list[_Kind]])
_CLUSTERS = TypeAdapter(list[_Cluster])
_WORKSPACES = TypeAdapter(dict[str, dict[str, list[str]]])


class Sky:
    """All cloud accounts that SkyPilot uses, as one account."""

    name: ClassVar[CloudName] = "sky"
    endpoint: ClassVar[Endpoint] = Endpoint(
        title="SkyPilot", url="", key_variable="ROLLOUTS_SKY", key_is="path of its program"
    )
    gives_host_key: ClassVar[bool] = False
    is_networked: ClassVar[bool] = True
    reaches: ClassVar[tuple[str, ...]] = ("aws", "gcp", "google", "azure", "kubernetes")

    def __init__(self, program: str, url: str = "") -> None:
        """Store the path of `sky` as `program`. No account is opened yet. `url` must be empty."""
        assert not url, "SkyPilot finds its server by itself"
        self._program = program

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def search(self, query: GPUQuery) -> list[Offer]:
        if not query.gpu_types:
            raise ProviderRefusedError(
                "SkyPilot finds GPUs by their names: name some as node.query.gpu_types, or with --gpu"
            )
        clouds = sorted(self._usable_clouds())
        offers: list[Offer] = []
        failures: list[ProviderUnavailableError] = []
        for cloud in clouds:
            try:
                kinds = [
                    kind
                    for first_word in sorted({_first_word(wanted) for wanted in query.gpu_types})
                    for kind in self._kinds(first_word, query.gpu_count, cloud)
                ]
            except ProviderUnavailableError as error:  # an unreachable Kubernetes cluster must not hide other clouds
                logger.warning("continued without %s: %s", cloud, error)
                failures.append(error)
                continue
            offers += [offer for kind in kinds if (offer := _read_offer(kind, is_spot=query.spot)) is not None]
        if failures and len(failures) == len(clouds):
            raise failures[0]
        return offers

    def create(self, offer: Offer, spec: MachineSpec) -> str:
        cloud, _, kind = offer.id.partition(":")
        instance_type, _, accelerator = kind.rpartition(":")  # some instance types contain colons: H100_80GB::8
        resources = {
            "infra": f"{cloud}/{offer.region}",
            "accelerators": f"{accelerator}:{offer.gpu_count}",
            "disk_size": spec.disk_gb,
            "use_spot": offer.is_spot,
            **({} if offer.is_unpriced else {"max_hourly_cost": math.ceil(100 * offer.usd_per_hour) / 100}),  # in cents
            **({"instance_type": instance_type} if instance_type else {}),
            **({"image_id": spec.image} if spec.image else {}),
        }
        task = {"resources": resources, "setup": _let_in(spec.public_key)}
        end = [] if cloud in _NEVER_END_THEMSELVES else _ends_itself(spec.ends_at)
        words = ["launch", "--yes", "--detach-run", "--cluster", spec.name, *end]
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="rollouts-sky-", suffix=".yaml") as file:
            file.write(json.dumps(task))  # JSON is YAML
            file.flush()
            # A machine that starts after its end time is useless, and may exceed the run's limit of money.
            left_s = math.inf if spec.ends_at is None else max(0.0, spec.ends_at - time.time())
            timeout_s = min(LAUNCH_TIMEOUT_S, left_s)
            try:
                done = self._run([*words, file.name], timeout_s=timeout_s)
            except subprocess.TimeoutExpired as error:
                raise UnclearAnswerError(f"sky launch took longer than {timeout_s:.0f} s") from error
        if done.returncode == 0:
            return spec.name
        problem = f"sky launch ended with {done.returncode}: {_last_words(done)}"
        try:
            is_there = self.get(spec.name) is not None  # SkyPilot may keep an incomplete machine
        except InfraError as error:
            raise UnclearAnswerError(f"{problem}; and {error}") from error
        raise UnclearAnswerError(problem) if is_there else OfferGoneError(problem)

    def get(self, instance_id: str) -> Instance | None:
        words = ["status", "--refresh", "--output", "json", instance_id]
        return next((_read(each) for each in self._ask(words, _CLUSTERS) if each.name == instance_id), None)

    def host_key(self, instance_id: str) -> str:
        """Return "", because SkyPilot itself logs in first and does not check the host key."""
        return ""

    def list_named(self, prefix: str) -> list[Instance]:
        clusters = self._ask(["status", "--refresh", "--output", "json"], _CLUSTERS)
        return [_read(each) for each in clusters if each.name.startswith(prefix)]

    def terminate(self, instance_id: str) -> None:
        done = self._run_in_time(["down", "--yes", instance_id])
        problem = _problem_of_down(done)
        if problem and self.get(instance_id) is not None:
            raise ProviderUnavailableError(problem)

    def _usable_clouds(self) -> set[str]:
        """Return the names, in lower case, of the clouds for which SkyPilot has credentials."""
        workspaces = self._ask(["check", "--output", "json"], _WORKSPACES)
        found = {cloud.lower() for clouds in workspaces.values() for cloud, can in clouds.items() if "compute" in can}
        return found - _ELSEWHERE

    def _kinds(self, gpu: str, count: int, cloud: str) -> list[_Kind]:
        words = ["gpus", "list", f"{re.escape(gpu)}:{count}", "--infra", cloud, "--all-regions", "--output", "json"]
        return [kind for kinds in self._ask(words, _KINDS).values() for kind in kinds]

    def _ask(self, words: Sequence[str], shape: TypeAdapter[AnswerT]) -> AnswerT:
        done = self._run_in_time(words)
        what = f"sky {words[0]}"
        if done.returncode != 0:
            raise ProviderUnavailableError(f"{what} ended with {done.returncode}: {_last_words(done)}")
        try:
            return shape.validate_json(_json_in(done.stdout))
        except ValidationError as error:
            reason = error.errors(include_url=False, include_input=False)[0]["msg"]
            raise ProviderUnavailableError(f"{what} printed unreadable output ({reason})") from error

    def _run_in_time(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        try:
            return self._run(words, timeout_s=ANSWER_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise ProviderUnavailableError(f"sky {words[0]} took longer than {ANSWER_TIMEOUT_S:.0f} s") from error

    def _run(self, words: Sequence[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
        # Python's variables in this process's environment would break SkyPilot's environment.
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        try:
            return subprocess.run(
                [Path(self._program).expanduser(), *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                env=env,
            )
        except OSError as error:
            raise MissingKeyError(
                f"{self.endpoint.key_variable} is {self._program}, which cannot be run ({error.strerror}): set it to "
                "the path of SkyPilot's program, for example ~/.sky-env/bin/sky"
            ) from error


def _first_word(gpu_type: str) -> str:
    """Return the first word of a GPU's name that is not in MAKERS_WORDS, because SkyPilot's catalogs omit the words of
    that set."""
    words = gpu_type.split()
    return next((word for word in words if word.lower() not in MAKERS_WORDS), words[0])


def _read_offer(kind: _Kind, *, is_spot: bool) -> Offer | None:
    """Convert an instance type to an offer, or to None if the GPU memory is unknown, if a cloud machine has no price,
    or for a spot pod."""
    is_pod = kind.cloud.lower() == _KUBERNETES
    price = (kind.spot_price if is_spot else kind.price) or 0.0
    said = _MEMORY_IN_NAME.search(kind.accelerator_name)
    known_gb = float(said[1]) if said else _MEMORY_GB.get(kind.accelerator_name, 0.0)
    memory_gb = float(kind.device_memory or known_gb)
    if (is_spot if is_pod else price <= 0) or memory_gb <= 0:
        return None
    return Offer(
        provider=Sky.name,
        id=f"{kind.cloud.lower()}:{kind.instance_type or ''}:{kind.accelerator_name}",
        gpu_type=kind.accelerator_name,
        gpu_count=int(kind.accelerator_count),
        vram_gb=memory_gb,
        usd_per_hour=price,
        region=kind.region,
        is_spot=is_spot,
        is_unpriced=is_pod and price <= 0,
    )


def _read(cluster: _Cluster) -> Instance:
    status = _STATUS.get(cluster.status, InstanceStatus.UNKNOWN)
    if cluster.init_kind == "unhealthy":
        status = InstanceStatus.UNKNOWN if cluster.runs_unwatched else InstanceStatus.FAILED
    address = dict(_read_address(cluster.name)) if status is InstanceStatus.RUNNING else {}
    is_behind = "proxycommand" in address
    name = usable_host(cluster.name) if is_behind else ""
    return Instance(
        provider=Sky.name,
        id=cluster.name,
        name=cluster.name,
        status=status,
        host=(name and LOOPBACK) if is_behind else usable_host(address.get("hostname")),
        port=usable_port(address.get("port")),
        user=usable_user(address.get("user"), "ubuntu"),
        proxy_jump=name,
        ssh_config=str(_SSH_FILES.expanduser() / name) if name else "",
    )


def _read_address(name: str) -> Iterator[tuple[str, str]]:
    """Yield the ssh settings that SkyPilot wrote for the machine's first node, with names in lower case."""
    path = _SSH_FILES.expanduser() / name
    try:
        text = path.read_text()
    except OSError:
        return
    num_hosts = 0
    for line in text.splitlines():
        word, _, value = line.strip().partition(" ")
        num_hosts += word.lower() == "host"
        if num_hosts == 1:
            yield word.lower(), value.strip()


def _let_in(public_key: str) -> str:
    """Return shell commands that SkyPilot runs on a new machine to admit this key."""
    line = shlex.quote(public_key)
    return f"umask 077; mkdir -p ~/.ssh && printf '%s\\n' {line} >> ~/.ssh/authorized_keys\n"


def _ends_itself(ends_at: float | None) -> list[str]:
    """Return the options that end the machine automatically at this time, even while programs run on the machine."""
    if ends_at is None:
        return []
    minutes = max(1, math.ceil((ends_at - time.time()) / 60))
    return ["--idle-minutes-to-autostop", str(minutes), "--wait-for", "none", "--down"]


def _json_in(output: str) -> str:
    """Return the output from the first line that begins a JSON object or list. SkyPilot may print other lines before
    this line."""
    lines = output.splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith(("{", "["))), len(lines))
    return "\n".join(lines[first:])


def _problem_of_down(done: subprocess.CompletedProcess[str]) -> str:
    """Return why `sky down` did not end the cluster, or "" if the cluster was ended. The exit code may be 0 in both
    cases."""
    said, failed, _ = done.stdout.partition(_DOWN_FAILED)
    if failed:
        lines = said.rpartition("Reason: ")[2].strip().splitlines()
        return f"sky down failed: {_shown(lines[0] if lines else 'no explanation')}"
    return "" if done.returncode == 0 else f"sky down ended with {done.returncode}: {_last_words(done)}"


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of SkyPilot's output, without colors and control characters."""
    said = shown_lines(f"{done.stdout}\n{done.stderr}").strip().splitlines()
    return _shown(said[-1] if said else "no explanation")


def _shown(said: str) -> str:
    return shown_line(said)[:MAX_SHOWN_CHARACTERS]
