"""What a person says about machines (settings), and what the pipeline knows about one that it has (`Node`).

Not here: how one is had (providers/), what it can do (bootstrap.py), how it is talked to (session.py).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.config import JsonDict

from rollouts.infra.clouds import cloud_names, networked_clouds
from rollouts.infra.offers import GPUQuery

HOST = re.compile(
    r"""(?P<user>[A-Za-z0-9_][\w.-]*) @
        (?: \[(?P<ipv6>[0-9a-fA-F:.]+)\] | (?P<host>[A-Za-z0-9][\w.-]*) )
        (?: :(?P<port>\d+) )?""",
    re.ASCII | re.VERBOSE,
)
"""user@host:port without anything that a shell, or a program that takes a host, could misread."""
HOST_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
"""A machine's name in OpenSSH's configuration."""
_HOP = r"([A-Za-z0-9_][\w.-]*@)?(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9][\w.-]*)(:\d{1,5})?"
PROXY_JUMP = re.compile(rf"({_HOP}(,{_HOP})*)?", re.ASCII)
"""Machines to go through, with as little to misread."""
FINGERPRINT = re.compile(r"(SHA256:[A-Za-z0-9+/]{43})?")
ROOT = re.compile(r"(/|~/)[^\x00-\x1f]+")
INTERPRETER = re.compile(r"/[\w./+ -]+")
"""An absolute path of characters that every login shell leaves alone inside quotes."""
INDEX = re.compile(
    r"(?!.*/(?=[^/]*[a-z])(?=[^/]*[A-Z])(?=[^/]*[0-9])[\w.~+=%-]{16,}(/|$))"  # a part that looks like a key
    r"(https?://[^\s@?#]+)?"
)
INSTANCE = re.compile(r"(?P<provider>[^:]+):[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
"""A provider's name and its own name for a machine."""
VARIABLE = r"^([A-Za-z_][A-Za-z0-9_]*)?$"
"""The name of an environment variable, or none."""
SSH_PORT = 22
NO_PROVIDER = "none"
"""The provider of what stands for a machine where none is needed."""
RUNS_PROGRAM: JsonDict = {"needs_trust": "program"}
"""Marks a field that names a program, commands, packages to install, or a machine that gets code, data and keys.
A run that is asked for through Prefect may set such a field only to a value that the operator trusts
(flows/trusted_code.py)."""
SYSTEM_PYTHON = "/usr/bin/python3"
"""The interpreter that a machine's own system brings."""


class LocalNode(BaseModel):
    """This machine: nothing is rented and nothing is released."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True, title="This machine")

    provider: Literal["local"] = "local"
    """Where the stages run: on the machine of the worker itself."""
    root: str = ""
    """Directory in which the run directories lie. Leave it empty to use the store of the pipeline."""
    python: str = Field("", json_schema_extra=RUNS_PROGRAM)
    """Python interpreter that runs the training, with torch installed. Leave it empty to use the worker's own."""
    min_free_gb: float = Field(default=10.0, ge=0, allow_inf_nan=False, strict=True)
    """Refuse to start when the disk has less free space than this, in GB (10^9 bytes)."""


class PackageSettings(BaseModel):
    """How a machine elsewhere gets the packages of this project."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    install: Literal["nothing", "pip", "uv"] = "nothing"
    """Install the packages of this project on the machine, into an environment of their own below `root`, once."""
    requirements: str = Field("", json_schema_extra=RUNS_PROGRAM)
    """File with the exact versions to install. Leave it empty to install those that are installed here."""
    package_index: str = Field("", json_schema_extra=RUNS_PROGRAM)
    """URL of the index to install from. Leave it empty for what the machine's own pip or uv is set to."""

    @field_validator("package_index")
    @classmethod
    def _check_index(cls, value: str, info: ValidationInfo) -> str:
        return check_form(value, info)


class SSHMachine(PackageSettings):
    """How a machine of yours is logged in to, and what is where on it."""

    host: str = Field(json_schema_extra=RUNS_PROGRAM)
    """The machine, as user@host or user@host:port; an IPv6 address in brackets. Or its name in ~/.ssh/config."""
    key_file: str = ""
    """Private key to log in with. Leave it empty to use those of the SSH agent and of ~/.ssh."""
    key_variable: str = Field("", pattern=VARIABLE)
    """Environment variable that holds the private key itself, in place of key_file: ROLLOUTS_SSH_KEY where the run's
    credentials have it."""
    host_key: str = ""
    """Fingerprint of the machine's key, as `ssh-keygen -l` prints it. Leave it empty to look it up in known_hosts."""
    known_hosts: str = "~/.ssh/known_hosts"
    """File in OpenSSH's format in which the machine's key is looked up."""
    proxy_jump: str = ""
    """Machines to go through, as `ssh -J` takes them: user@bastion:port, or a name in ~/.ssh/config; several with
    commas."""
    ssh_config: str = Field("", json_schema_extra=RUNS_PROGRAM)
    """Configuration of OpenSSH for names in `host` and `proxy_jump`. Leave it empty for ~/.ssh/config."""
    trust_first_use: bool = Field(default=False, strict=True)
    """Believe the key of a machine that nobody knows, remember it in the store, and refuse another one later."""
    root: str = "~/rollouts"
    """Directory on the machine for run directories, inputs and code; begins with / or ~/."""
    python: str = Field(json_schema_extra=RUNS_PROGRAM)
    """Python interpreter on the machine, with the packages of this project or, where `install` says so, without."""
    min_free_gb: float = Field(default=10.0, ge=0, allow_inf_nan=False, strict=True)
    """Refuse to start when the disk of `root` has less free space than this, in GB (10^9 bytes)."""

    @field_validator("host", "host_key", "proxy_jump", "root", "python")
    @classmethod
    def _check_form(cls, value: str, info: ValidationInfo) -> str:
        return check_form(value, info)

    @property
    def place(self) -> tuple[str, int]:
        """The host and port of the login; of a name in OpenSSH's configuration only that."""
        parts = HOST.fullmatch(self.host)
        if parts is None:
            return self.host, SSH_PORT
        return parts["host"] or parts["ipv6"], int(parts["port"] or SSH_PORT)


class FurtherNode(SSHMachine):
    """A further machine of a unit, beside the one that leads: they share a network and nothing else."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, title="A further machine")

    address: str = ""
    """The machine's IP address in the network that it shares with the others of the run: what runs on it listens there.
    Leave it empty where that is the address in `host`."""

    @property
    def reached_at(self) -> str:
        """The IP address at which what runs on it listens."""
        return self.address or self.place[0]

    @model_validator(mode="after")
    def _check_address(self) -> Self:
        if not is_ip_address(self.reached_at):
            raise ValueError(
                f"address: expected the IP address of {self.place[0]} in the network that it shares with the other "
                f"machines of the run, found {self.address!r}"
            )
        return self


class SSHNode(SSHMachine):
    """A machine of yours that is reached over SSH, or several that are one unit: nothing is rented or released."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True, title="A machine over SSH")

    provider: Literal["ssh"] = "ssh"
    """Where the stages run: on a machine that is reached over SSH."""
    trainer_nodes: tuple[FurtherNode, ...] = ()
    """Machines that train together with the one above, each with `deployment.trainer_gpu_ranks`, or with
    `deployment.trainer_processes` processes on the CPU. Leave it empty to train on the one above alone."""
    engine_nodes: tuple[FurtherNode, ...] = ()
    """Machines for the inference engines of RL, each with `deployment.num_engines` of them. Leave it empty to have the
    engines on the machine above."""

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        seen, broken = {self.place}, list[str]()
        for setting, nodes, several in (
            ("trainer_nodes", self.trainer_nodes, "processes on each give deployment.trainer_gpu_ranks"),
            ("engine_nodes", self.engine_nodes, "engines on each give deployment.num_engines"),
        ):
            for node in nodes:
                host, port = node.place
                if node.place in seen:
                    broken.append(
                        f"{setting}: {host}:{port} is named twice: each machine of a run is another one; for several "
                        f"{several}"
                    )
                seen.add(node.place)
        if broken:
            raise ValueError("\n".join(broken))
        return self


class InstanceNode(PackageSettings):
    """A machine that you rented yourself: its provider says where it is, and it runs on when the run has ended."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", use_attribute_docstrings=True, title="A machine that you rented"
    )

    provider: Literal["instance"] = "instance"
    """Where the stages run: on a machine that you rented yourself. Its provider's key is in an environment variable of
    the worker, for example RUNPOD_API_KEY."""
    instance: str
    """The machine, as PROVIDER:ID, for example runpod:abc123, of one of the providers of `rollouts gpus`."""
    key_file: str = ""
    """Private key to log in with. Leave it empty to use those of the SSH agent and of ~/.ssh."""
    key_variable: str = Field("", pattern=VARIABLE)
    """Environment variable that holds the private key itself, in place of key_file: ROLLOUTS_SSH_KEY where the run's
    credentials have it."""
    host_key: str = ""
    """Fingerprint of the machine's key, as `ssh-keygen -l` prints it. Leave it empty to believe the first one that it
    shows, and no other later."""
    root: str = "~/rollouts"
    """Directory on the machine for run directories, inputs and code; begins with / or ~/."""
    install: Literal["nothing", "pip", "uv"] = "uv"
    """Install the packages of this project on the machine, into an environment of their own below `root`, once."""
    python: str = Field(SYSTEM_PYTHON, json_schema_extra=RUNS_PROGRAM)
    """Python interpreter on the machine, 3.11 or newer; where `install` is `nothing`, with the packages."""
    min_free_gb: float = Field(default=10.0, ge=0, allow_inf_nan=False, strict=True)
    """Refuse to start when the disk of `root` has less free space than this, in GB (10^9 bytes)."""

    @field_validator("instance", "host_key", "root", "python")
    @classmethod
    def _check_form(cls, value: str, info: ValidationInfo) -> str:
        return check_form(value, info)


class RentedNode(PackageSettings):
    """A machine that is rented for the run, and given back when it ends."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True, title="A rented machine")

    provider: Literal["provision"] = "provision"
    """Where the stages run: on a machine that is rented for the run. The providers' keys are in environment variables
    of the worker, for example RUNPOD_API_KEY."""
    query: GPUQuery = GPUQuery()
    """Which machines come into question, and at what price; the cheapest of them is taken."""
    max_usd: float = Field(gt=0, allow_inf_nan=False, strict=True)
    """What the run may spend on machines, in US dollars. A machine is ended when the money is used up."""
    max_hours: float = Field(default=24.0, gt=0, le=720, strict=True)
    """No machine is kept longer than this, in hours."""
    image: str = Field("", json_schema_extra=RUNS_PROGRAM)
    """Container image (RunPod, Vast.ai), image (Lambda, Prime Intellect) or operating system (Shadeform). Leave it
    empty to use the provider's usual one."""
    key_file: str = "~/.ssh/id_ed25519"
    """Private key to log in with; its public half, the same name with .pub, is given to the machine."""
    key_variable: str = Field("", pattern=VARIABLE)
    """Environment variable that holds the private key itself, in place of key_file: ROLLOUTS_SSH_KEY where the run's
    credentials have it."""
    host_keys: Literal["expect", "first_use"] = "expect"
    """`expect`: the first connection to a machine is held against a host key that is known before, where its provider
    allows that (Lambda, RunPod). `first_use`: the key that it shows then is believed, for images that make their own
    whatever they were given."""
    setup: tuple[str, ...] = Field((), json_schema_extra=RUNS_PROGRAM)
    """Shell commands that are run once on a fresh machine, for example to install what the packages of this project
    need. They are shown in Prefect's pages: put no secret there."""
    num_trainer_nodes: int = Field(default=1, ge=1, le=64, strict=True)
    """Machines that train together, each with `deployment.trainer_gpu_ranks`. Several machines are of one kind, and in
    one region of one provider; max_usd is for all of them."""
    num_engine_nodes: int = Field(default=0, ge=0, le=64, strict=True)
    """Further machines for the inference engines of RL, each with `deployment.num_engines` of them. 0 has the engines
    on the first one."""
    usable_within_minutes: float = Field(default=20.0, gt=0, le=120, strict=True)
    """A machine that cannot be logged in to after this long is given back, and another one rented."""
    keep_on_failure_minutes: float = Field(default=0.0, ge=0, le=1440, strict=True)
    """When the run fails, its machine stays rented for so many minutes, and costs money: for you to log in and look, or
    to go on there by Retry. max_hours and max_usd hold all the same. What `rollouts up` or `rollouts watch` started, a
    later run or `rollouts reap` ends it then: where none of them runs, nobody does."""
    min_link_mbit_s: float = Field(default=8.0, gt=0, allow_inf_nan=False, strict=True)
    """A fresh machine to which or from which fewer megabits per second get through is given back, and another one
    rented."""
    min_disk_mb_s: float = Field(default=20.0, gt=0, allow_inf_nan=False, strict=True)
    """The same for one whose disk writes fewer megabytes per second."""
    root: str = "~/rollouts"
    """Directory on the machine for run directories, inputs and code; begins with / or ~/."""
    install: Literal["nothing", "pip", "uv"] = "uv"
    """Install the packages of this project on the machine, into an environment of their own below `root`, once."""
    python: str = Field(SYSTEM_PYTHON, json_schema_extra=RUNS_PROGRAM)
    """Python interpreter on the machine, 3.11 or newer; where `install` is `nothing`, with the packages."""
    min_free_gb: float = Field(default=10.0, ge=0, allow_inf_nan=False, strict=True)
    """Refuse to start when the disk of `root` has less free space than this, in GB (10^9 bytes)."""

    @field_validator("root", "python")
    @classmethod
    def _check_form(cls, value: str, info: ValidationInfo) -> str:
        return check_form(value, info)

    @model_validator(mode="after")
    def _check_unit(self) -> Self:
        if self.num_machines > 1 and not set(self.query.providers) & set(networked := networked_clouds()):
            raise ValueError(
                f"num_trainer_nodes, num_engine_nodes: several machines need a network that they share, and it is not "
                f"known that {', '.join(self.query.providers)} have one: add {' or '.join(networked)} to "
                "query.providers, or ask for one machine"
            )
        return self

    @property
    def num_machines(self) -> int:
        """All that the run has at once."""
        return self.num_trainer_nodes + self.num_engine_nodes


def check_form(value: str, info: ValidationInfo) -> str:
    """The value of a field as it is, where it has the form that `_FORMS` wants.

    Raises:
        ValueError: it has another.
    """
    assert info.field_name is not None
    pattern, expected = _FORMS[info.field_name]
    match = pattern.fullmatch(value)
    if match is None and info.field_name == "host" and HOST_NAME.fullmatch(value):
        return value
    if match is not None and match.groupdict().get("provider", cloud_names()[0]) not in cloud_names():
        match = None
    is_port = match is None or int(match.groupdict().get("port") or SSH_PORT) in range(1, 65536)
    if match is None or not is_port:
        found = "" if "://" in value else f", found {value!r}"  # it may hold a password
        raise ValueError(f"expected {expected.format(clouds=', '.join(cloud_names()))}{found}")
    return value


def is_ip_address(text: str) -> bool:
    """Whether it is an address, not a name."""
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


_FORMS = {
    "host": (HOST, "user@host, user@host:port or a name in ~/.ssh/config"),
    "instance": (INSTANCE, "PROVIDER:ID, for example runpod:abc123, of one of {clouds}"),
    "host_key": (FINGERPRINT, "a fingerprint as `ssh-keygen -l` prints it, SHA256:..."),
    "proxy_jump": (PROXY_JUMP, "user@host:port or a name in ~/.ssh/config, several with commas and no spaces"),
    "root": (ROOT, "a path on the machine that begins with / or ~/"),
    "python": (INTERPRETER, "the absolute path of a Python interpreter on the machine"),
    "package_index": (
        INDEX,
        "an http(s) URL without user, password, query and key: keys belong into the machine's own settings",
    ),
}


NodeSettings = Annotated[LocalNode | SSHNode | InstanceNode | RentedNode, Field(discriminator="provider")]
"""Any provider's settings."""


def without_further_nodes(settings: NodeSettings) -> NodeSettings:
    """The settings of the machine that leads alone, for work that needs no other."""
    if isinstance(settings, SSHNode):
        return settings.model_copy(update={"trainer_nodes": (), "engine_nodes": ()})
    if isinstance(settings, RentedNode):
        return settings.model_copy(update={"num_trainer_nodes": 1, "num_engine_nodes": 0})
    return settings


def settings_of_trainers(settings: NodeSettings) -> Sequence[FurtherNode | RentedNode]:
    """Those of the machines that train together with the one that leads; rented ones all have the same."""
    if isinstance(settings, RentedNode):
        return [settings] * (settings.num_trainer_nodes - 1)
    return settings.trainer_nodes if isinstance(settings, SSHNode) else ()


def settings_of_engines(settings: NodeSettings) -> Sequence[FurtherNode | RentedNode]:
    """The same of the machines that engines have of their own."""
    if isinstance(settings, RentedNode):
        return [settings] * settings.num_engine_nodes
    return settings.engine_nodes if isinstance(settings, SSHNode) else ()


NODE_TYPES: Mapping[str, type[LocalNode] | type[SSHNode] | type[InstanceNode] | type[RentedNode]] = {
    "local": LocalNode,
    "ssh": SSHNode,
    "instance": InstanceNode,
    "provision": RentedNode,
}
"""The settings of each provider, by its name."""


NO_AGENT = "none"
"""In place of the socket of an SSH agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SSHAccess:
    """How a machine is reached over SSH; names of files, never what is in them."""

    host: str
    port: int
    user: str
    key_file: str = ""
    """The private key; empty takes those of the agent and of ~/.ssh."""
    further_key_files: tuple[str, ...] = ()
    """Others that are offered after it."""
    key_variable: str = ""
    """The environment variable with the private key, in place of `key_file`."""
    host_key: str = ""
    """The fingerprint that the host's key must have, SHA256:...; empty asks `known_hosts`."""
    known_hosts: tuple[str, ...] = ("~/.ssh/known_hosts",)
    """Files in OpenSSH's format in which the host's key is looked up."""
    host_key_alias: str = ""
    """The name under which they have it; empty takes the address."""
    first_use_file: str = ""
    """Where the key of a host is written that nobody knows and that is believed once; empty refuses such hosts."""
    pinned_file: str = ""
    """Where the key with the fingerprint `host_key` is written, which tells its type; empty takes `first_use_file`."""
    proxy_jump: str = ""
    """Machines on the way there, with commas between them; empty connects from here (proxy_jump.py)."""
    ssh_config: str = ""
    """OpenSSH's configuration for those; empty takes the user's."""
    agent: str = ""
    """The socket of the SSH agent, or NO_AGENT; empty takes that of SSH_AUTH_SOCK."""

    @property
    def address(self) -> str:
        """For messages: user@host:port."""
        return f"{self.user}@{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine that we may use; plain values only, so that it can be kept as JSON."""

    name: str
    """Unique among the nodes of a run; the ledger knows the node by it."""
    provider: str
    root: str
    """Absolute directory on the node in which the run directories lie."""
    python: str
    """The interpreter that runs our programs and the training."""
    mirror: str = ""
    """Absolute directory on this machine that holds the same as `root`; empty where `root` is on this machine."""
    access: SSHAccess | None = None
    """How it is reached; None for this machine."""
    is_rented: bool = False
    """True when it costs money until it is given back."""
    is_of_user: bool = False
    """True when it costs money that is not ours to count or to end."""
    believed_by: str = ""
    """Why its host key was believed (host_keys.py says which reasons there are); empty for this machine."""
    engine_kind: str = ""
    """The kind of engine that was chosen on it, for settings that leave this open."""
    engine_python: str = ""
    """The interpreter of the engine that a run has installed or found on it; empty takes what the settings say."""
    address: str = ""
    """Where what runs on it listens for the node that leads its unit; empty for that one itself."""
    trainer_nodes: tuple["Node", ...] = ()
    """The nodes that train together with this one: all of them are one unit."""
    engine_nodes: tuple["Node", ...] = ()
    """The nodes of the engines, where they have some of their own: they belong to the unit, too."""

    @property
    def is_remote(self) -> bool:
        """True when its files are not ours: inputs have to be brought there, and results fetched."""
        return self.mirror != ""

    @property
    def local_root(self) -> str:
        """Where this machine keeps what lies below `root` on the node."""
        return self.mirror or self.root

    @property
    def further_nodes(self) -> tuple["Node", ...]:
        """The other nodes of its unit."""
        return (*self.trainer_nodes, *self.engine_nodes)

    def node_of_engine(self, index: int, *, num_per_node: int) -> "Node":
        """The node of one of the engines, which fill one node after the other."""
        return self.engine_nodes[index // num_per_node] if self.engine_nodes else self

    def named(self, name: str) -> "Node":
        """The further node of that name; this one for any other name."""
        return next((each for each in self.further_nodes if each.name == name), self)

    def path_on_node(self, path: str) -> str:
        """Where a path below `local_root` lies on the node.

        Raises:
            ValueError: it lies elsewhere.
        """
        relative = PurePosixPath(path).relative_to(self.local_root)
        return str(PurePosixPath(self.root) / relative)


def no_machine(store: str) -> Node:
    """What stands for a machine where all results are in the store already: no job can be run there."""
    return Node(name="no machine", provider=NO_PROVIDER, root=store, python="")
