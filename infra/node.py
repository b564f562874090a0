"""Settings of machines in the user's configuration, and `Node`, the record of a machine that a run uses.

Not here: provisioning a machine (providers/), probing it (bootstrap.py), sessions (session.py).
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
"""Pattern of user@host:port. The pattern allows only characters without a special meaning for shells and for programs
that get a host as an argument."""
_HOST_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_HOP = r"([A-Za-z0-9_][\w.-]*@)?(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9][\w.-]*)(:\d{1,5})?"
_PROXY_JUMP = re.compile(rf"({_HOP}(,{_HOP})*)?", re.ASCII)
"""Pattern of jump hosts, separated by commas. The same characters are allowed as in HOST."""
_FINGERPRINT = re.compile(r"(SHA256:[A-Za-z0-9+/]{43})?")
ROOT = re.compile(r"(/|~/)[^\x00-\x1f]+")
INTERPRETER = re.compile(r"/[\w./+ -]+")
"""Pattern of an absolute path. The pattern allows only characters that no login shell changes inside quotes."""
INDEX = re.compile(
    r"(?!.*/(?=[^/]*[a-z])(?=[^/]*[A-Z])(?=[^/]*[0-9])[\w.~+=%-]{16,}(/|$))"  # refuses parts that look like a key
    r"(https?://[^\s@?#]+)?"
)
_INSTANCE = re.compile(r"(?P<provider>[^:]+):[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
"""Pattern of a provider's name and the id that the provider gave to a machine."""
VARIABLE = r"^([A-Za-z_][A-Za-z0-9_]*)?$"
"""Pattern of an environment variable's name. The empty text also matches."""
SSH_PORT = 22
NO_NODE = "none"
"""Kind of the placeholder node of a run that needs no machine (see `no_machine`)."""
RUNS_PROGRAM: JsonDict = {"needs_trust": "program"}
"""Marks a setting that names a program, commands, packages to install, or a machine that gets code, data and keys. A
run that was started through Prefect may set this setting only to a value that the operator trusts
(flows/trusted_code.py)."""
SYSTEM_PYTHON = "/usr/bin/python3"


class LocalNode(BaseModel):
    """This machine: nothing is rented and nothing is released."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True, title="This machine")

    kind: Literal["local"] = "local"
    """`local`: the stages run on this machine, the machine of the worker."""
    root: str = ""
    """Directory for run directories. Leave `root` empty to use the pipeline's store."""
    python: str = Field("", json_schema_extra=RUNS_PROGRAM)
    """Python interpreter that runs the training, with torch installed. Leave `python` empty to use the worker's
    interpreter."""
    min_free_gb: float = Field(default=10.0, ge=0, allow_inf_nan=False, strict=True)
    """Refuse to start if the disk has less free space than this, in GB (10^9 bytes)."""


class PackageSettings(BaseModel):
    """Installation of this project's packages on another machine."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    install: Literal["nothing", "pip", "uv"] = "nothing"
    """Install the project's packages on the machine, once, into a separate environment below `root`."""
    requirements: str = Field("", json_schema_extra=RUNS_PROGRAM)
    """File with the exact versions to install. Leave `requirements` empty to install the versions that this machine
    has."""
    package_index: str = Field("", json_schema_extra=RUNS_PROGRAM)
    """URL of the package index. Leave `package_index` empty to use the setting of the machine's own pip or uv."""

    @field_validator("package_index")
    @classmethod
    def _check_index(cls, value: str, info: ValidationInfo) -> str:
        return check_form(value, info)


class SSHMachine(PackageSettings):
    """Login to a machine of yours, and its directories."""

    host: str = Field(json_schema_extra=RUNS_PROGRAM)
    """The machine as user@host or user@host:port, with an IPv6 address in brackets; or its name in ~/.ssh/config."""
    key_file: str = ""
    """Private key for the login. Leave it empty to use the keys of the SSH agent and of ~/.ssh."""
    key_variable: str = Field("", pattern=VARIABLE)
    """Environment variable with the private key itself, instead of key_file. It is ROLLOUTS_SSH_KEY if the run's
    credentials contain the key."""
    host_key: str = Field("", json_schema_extra=RUNS_PROGRAM)
    """Fingerprint of the machine's host key, as `ssh-keygen -l` prints it. Leave `host_key` empty to look up the host
    key in known_hosts."""
    known_hosts: str = Field("~/.ssh/known_hosts", json_schema_extra=RUNS_PROGRAM)
    """File in OpenSSH's format for looking up the machine's host key."""
    proxy_jump: str = Field("", json_schema_extra=RUNS_PROGRAM)
    """Machines to jump through, as for `ssh -J`: user@bastion:port or a name in ~/.ssh/config, separated by commas."""
    ssh_config: str = Field("", json_schema_extra=RUNS_PROGRAM)
    """Configuration of OpenSSH for names in `host` and `proxy_jump`. Leave `ssh_config` empty for ~/.ssh/config."""
    trust_first_use: bool = Field(default=False, strict=True, json_schema_extra=RUNS_PROGRAM)
    """Accept and store the host key that an unknown machine shows at the first login, and refuse any other key
    later."""
    root: str = "~/rollouts"
    """Directory on the machine for run directories, inputs and code. It begins with / or ~/."""
    python: str = Field(json_schema_extra=RUNS_PROGRAM)
    """Python interpreter on the machine. It needs this project's packages unless `install` installs them."""
    min_free_gb: float = Field(default=10.0, ge=0, allow_inf_nan=False, strict=True)
    """Refuse to start if the disk of `root` has less free space than this, in GB (10^9 bytes)."""

    @field_validator("host", "host_key", "proxy_jump", "root", "python")
    @classmethod
    def _check_form(cls, value: str, info: ValidationInfo) -> str:
        return check_form(value, info)

    @property
    def place(self) -> tuple[str, int]:
        """Host and port for the login. For a name in OpenSSH's configuration: the name and port 22."""
        parts = HOST.fullmatch(self.host)
        if parts is None:
            return self.host, SSH_PORT
        return parts["host"] or parts["ipv6"], int(parts["port"] or SSH_PORT)


class FurtherNode(SSHMachine):
    """A further machine of a run, in the same network as the first machine, without a shared disk."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, title="A further machine")

    address: str = ""
    """The machine's IP address in the network of the run's machines, at which its processes listen. Leave `address`
    empty if `host` contains this address."""

    @property
    def reached_at(self) -> str:
        """The IP address at which processes on this machine listen."""
        return self.address or self.place[0]

    @model_validator(mode="after")
    def _check_address(self) -> Self:
        if not _is_ip_address(self.reached_at):
            raise ValueError(
                f"address: expected the IP address of {self.place[0]} in the shared network of the run's machines, "
                f"found {self.address!r}"
            )
        return self


class SSHNode(SSHMachine):
    """A machine of yours that is reached over SSH, optionally with further machines. Nothing is rented or released."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True, title="A machine over SSH")

    kind: Literal["ssh"] = "ssh"
    """`ssh`: the stages run on a machine that is reached over SSH."""
    trainer_nodes: tuple[FurtherNode, ...] = ()
    """Machines that train together with the machine in `host`. Each machine uses `deployment.trainer_gpu_ranks`, or
    `deployment.trainer_processes` processes on the CPU. Leave the list empty to train only on the machine in `host`."""
    engine_nodes: tuple[FurtherNode, ...] = ()
    """Machines for the inference engines of RL. Each machine runs `deployment.num_engines` engines. Leave the list
    empty to run the engines on the machine in `host`."""

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
                        f"{setting}: {host}:{port} is named twice: name each machine of a run once; for several "
                        f"{several}"
                    )
                seen.add(node.place)
        if broken:
            raise ValueError("\n".join(broken))
        return self


class InstanceNode(PackageSettings):
    """A machine that you rented yourself. The run asks its provider for the address, and does not end the machine."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", use_attribute_docstrings=True, title="A machine that you rented"
    )

    kind: Literal["instance"] = "instance"
    """`instance`: the stages run on a machine that you rented yourself. The worker needs the provider's API key in an
    environment variable, for example RUNPOD_API_KEY."""
    instance: str
    """The machine as PROVIDER:ID, for example runpod:abc123. `rollouts gpus` lists the providers."""
    key_file: str = ""
    """Private key for the login. Leave it empty to use the keys of the SSH agent and of ~/.ssh."""
    key_variable: str = Field("", pattern=VARIABLE)
    """Environment variable with the private key itself, instead of key_file. It is ROLLOUTS_SSH_KEY if the run's
    credentials contain the key."""
    host_key: str = Field("", json_schema_extra=RUNS_PROGRAM)
    """Fingerprint of the machine's host key, as `ssh-keygen -l` prints it. Leave `host_key` empty to accept the key of
    the first login and refuse any other key later."""
    root: str = "~/rollouts"
    """Directory on the machine for run directories, inputs and code. It begins with / or ~/."""
    install: Literal["nothing", "pip", "uv"] = "uv"
    """Install the project's packages on the machine, once, into a separate environment below `root`."""
    python: str = Field(SYSTEM_PYTHON, json_schema_extra=RUNS_PROGRAM)
    """Python interpreter on the machine, 3.11 or newer. If `install` is `nothing`, it needs the packages."""
    min_free_gb: float = Field(default=10.0, ge=0, allow_inf_nan=False, strict=True)
    """Refuse to start if the disk of `root` has less free space than this, in GB (10^9 bytes)."""

    @field_validator("instance", "host_key", "root", "python")
    @classmethod
    def _check_form(cls, value: str, info: ValidationInfo) -> str:
        return check_form(value, info)


class RentedNode(PackageSettings):
    """A machine that is rented for the run and released at its end."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True, title="A rented machine")

    kind: Literal["rented"] = "rented"
    """`rented`: the stages run on a machine that is rented for the run. The worker needs the providers' API keys in
    environment variables, for example RUNPOD_API_KEY."""
    query: GPUQuery = GPUQuery()
    """Conditions on the machine and its price. The cheapest matching machine is rented."""
    max_usd: float = Field(gt=0, allow_inf_nan=False, strict=True)
    """Limit of the run's spending on machines, in US dollars. The machines are ended when this amount is used up."""
    max_hours: float = Field(default=24.0, gt=0, le=720, strict=True)
    """Limit of the time for which a machine is rented, in hours."""
    image: str = Field("", json_schema_extra=RUNS_PROGRAM)
    """Container image (RunPod, Vast.ai), image (Lambda, Prime Intellect) or operating system (Shadeform). Leave `image`
    empty to use the provider's default."""
    key_file: str = "~/.ssh/id_ed25519"
    """Private key for the login. The file of the same name with .pub must contain the public key, which the machine
    gets."""
    key_variable: str = Field("", pattern=VARIABLE)
    """Environment variable with the private key itself, instead of key_file. It is ROLLOUTS_SSH_KEY if the run's
    credentials contain the key."""
    host_keys: Literal["expect", "first_use"] = "expect"
    """`expect`: compare the host key of the first connection with a key that is known before, if the provider supports
    this (Lambda, RunPod). `first_use`: accept the key of the first connection, for images that always create their own
    key."""
    setup: tuple[str, ...] = Field((), json_schema_extra=RUNS_PROGRAM)
    """Shell commands that run once on a fresh machine, for example to install system packages. Prefect's pages show
    these commands, so do not put secrets into them."""
    num_trainer_nodes: int = Field(default=1, ge=1, le=64, strict=True)
    """Number of machines that train together, each with `deployment.trainer_gpu_ranks`. All machines of a run are of
    one kind, in one region of one provider. max_usd limits the cost of all machines together."""
    num_engine_nodes: int = Field(default=0, ge=0, le=64, strict=True)
    """Number of further machines for the inference engines of RL, each with `deployment.num_engines` engines. 0: run
    the engines on the first machine."""
    usable_within_minutes: float = Field(default=20.0, gt=0, le=120, strict=True)
    """Minutes within which a new machine must accept a login. A machine that takes longer is released, and the next
    offer is tried."""
    keep_on_failure_minutes: float = Field(default=0.0, ge=0, le=1440, strict=True)
    """Minutes for which the machine of a failed run stays rented, and costs money, so that you can log in or press
    Retry. max_hours and max_usd also end a kept machine. `rollouts up`, `rollouts watch`, a later run or `rollouts
    reap` ends the machine afterwards. If none of these commands runs, the machine stays rented."""
    min_link_mbit_s: float = Field(default=8.0, gt=0, allow_inf_nan=False, strict=True)
    """Release a fresh machine whose upload or download is slower than this, in megabits per second, and rent another
    one."""
    min_disk_mb_s: float = Field(default=20.0, gt=0, allow_inf_nan=False, strict=True)
    """Release a fresh machine whose disk writes slower than this, in megabytes per second, and rent another one."""
    root: str = "~/rollouts"
    """Directory on the machine for run directories, inputs and code. It begins with / or ~/."""
    install: Literal["nothing", "pip", "uv"] = "uv"
    """Install the project's packages on the machine, once, into a separate environment below `root`."""
    python: str = Field(SYSTEM_PYTHON, json_schema_extra=RUNS_PROGRAM)
    """Python interpreter on the machine, 3.11 or newer. If `install` is `nothing`, it needs the packages."""
    min_free_gb: float = Field(default=10.0, ge=0, allow_inf_nan=False, strict=True)
    """Refuse to start if the disk of `root` has less free space than this, in GB (10^9 bytes)."""

    @field_validator("root", "python")
    @classmethod
    def _check_form(cls, value: str, info: ValidationInfo) -> str:
        return check_form(value, info)

    @model_validator(mode="after")
    def _check_unit(self) -> Self:
        if self.num_machines > 1 and not set(self.query.providers) & set(networked := networked_clouds()):
            raise ValueError(
                f"num_trainer_nodes, num_engine_nodes: several machines need a shared network, and "
                f"{', '.join(self.query.providers)} may not have one: add {' or '.join(networked)} to "
                "query.providers, or ask for one machine"
            )
        return self

    @property
    def num_machines(self) -> int:
        return self.num_trainer_nodes + self.num_engine_nodes


def check_form(value: str, info: ValidationInfo) -> str:
    """Return the value of a setting if it matches the setting's pattern in `_FORMS`.

    Raises:
        ValueError: the value does not match.
    """
    assert info.field_name is not None
    pattern, expected = _FORMS[info.field_name]
    match = pattern.fullmatch(value)
    if match is None and info.field_name == "host" and _HOST_NAME.fullmatch(value):
        return value
    if match is not None and match.groupdict().get("provider", cloud_names()[0]) not in cloud_names():
        match = None
    is_port = match is None or int(match.groupdict().get("port") or SSH_PORT) in range(1, 65536)
    if match is None or not is_port:
        found = "" if "://" in value else f", found {value!r}"  # a URL may contain a password
        raise ValueError(f"expected {expected.format(clouds=', '.join(cloud_names()))}{found}")
    return value


def _is_ip_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


_FORMS = {
    "host": (HOST, "user@host, user@host:port or a name in ~/.ssh/config"),
    "instance": (_INSTANCE, "PROVIDER:ID, for example runpod:abc123, of one of {clouds}"),
    "host_key": (_FINGERPRINT, "a fingerprint as `ssh-keygen -l` prints it, SHA256:..."),
    "proxy_jump": (_PROXY_JUMP, "user@host:port or a name in ~/.ssh/config, several with commas and no spaces"),
    "root": (ROOT, "a path on the machine that begins with / or ~/"),
    "python": (INTERPRETER, "the absolute path of a Python interpreter on the machine"),
    "package_index": (
        INDEX,
        "an http(s) URL without user, password, query and key: keys belong in the machine's own settings",
    ),
}


NodeSettings = Annotated[LocalNode | SSHNode | InstanceNode | RentedNode, Field(discriminator="kind")]


def without_further_nodes(settings: NodeSettings) -> NodeSettings:
    """Return the settings without further machines, for work that only the leader does."""
    if isinstance(settings, SSHNode):
        return settings.model_copy(update={"trainer_nodes": (), "engine_nodes": ()})
    if isinstance(settings, RentedNode):
        return settings.model_copy(update={"num_trainer_nodes": 1, "num_engine_nodes": 0})
    return settings


def settings_of_trainers(settings: NodeSettings) -> Sequence[FurtherNode | RentedNode]:
    """Return the settings of the machines that train together with the leader."""
    if isinstance(settings, RentedNode):
        return [settings] * (settings.num_trainer_nodes - 1)
    return settings.trainer_nodes if isinstance(settings, SSHNode) else ()


def settings_of_engines(settings: NodeSettings) -> Sequence[FurtherNode | RentedNode]:
    """Return the settings of the machines that run only engines."""
    if isinstance(settings, RentedNode):
        return [settings] * settings.num_engine_nodes
    return settings.engine_nodes if isinstance(settings, SSHNode) else ()


NODE_TYPES: Mapping[str, type[LocalNode] | type[SSHNode] | type[InstanceNode] | type[RentedNode]] = {
    "local": LocalNode,
    "ssh": SSHNode,
    "instance": InstanceNode,
    "rented": RentedNode,
}


NO_AGENT = "none"
"""Value of `SSHAccess.agent` for logins that must not use an SSH agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SSHAccess:
    """Parameters of an SSH login. The parameters contain names of files, never the files' content."""

    host: str
    port: int
    user: str
    key_file: str = ""
    """File of the private key. Without `key_file`, the keys of the agent and of ~/.ssh are used."""
    further_key_files: tuple[str, ...] = ()
    """Files of further private keys, which are tried after `key_file`."""
    key_variable: str = ""
    """Environment variable with the private key itself, in place of `key_file`."""
    host_key: str = ""
    """Expected fingerprint of the host key, SHA256:... Without `host_key`, the host key is looked up in
    `known_hosts`."""
    known_hosts: tuple[str, ...] = ("~/.ssh/known_hosts",)
    """Files in OpenSSH's format with known host keys."""
    host_key_alias: str = ""
    """The host's name in known_hosts files. Without `host_key_alias`, the host's address is used."""
    first_use_file: str = ""
    """File that stores host keys accepted at the first login. Without `first_use_file`, unknown hosts are refused."""
    pinned_file: str = ""
    """File that stores a key after a match with `host_key`, so that later logins know the key's type. Without
    `pinned_file`, `first_use_file` is used."""
    proxy_jump: str = ""
    """Jump hosts, separated by commas. Without `proxy_jump`, the connection is direct (ssh/proxy_jump.py)."""
    ssh_config: str = ""
    """OpenSSH's configuration file for `proxy_jump`. Without `ssh_config`, the user's configuration is used."""
    agent: str = ""
    """Socket of the SSH agent, or NO_AGENT. Without `agent`, SSH_AUTH_SOCK is used."""

    @property
    def address(self) -> str:
        """user@host:port, for messages."""
        return f"{self.user}@{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine that a run uses. All fields are plain values, so that the record can be stored as JSON."""

    name: str
    """Name that is unique among the nodes of a run. The ledger identifies the node by its name."""
    kind: str
    """One of NODE_TYPES, or NO_NODE."""
    root: str
    """Absolute path of the directory on the node that contains the run directories."""
    python: str
    """Path of the interpreter for the project's programs and the training."""
    mirror: str = ""
    """Absolute path of the directory on this machine with copies of the files in `root`, or "" if `root` is on this
    machine."""
    access: SSHAccess | None = None
    """Parameters of the SSH login, or None if the node is this machine."""
    is_rented: bool = False
    """Whether the run rented the machine and pays for it until it is released."""
    is_of_user: bool = False
    """Whether the user rented the machine. If `is_of_user` is true, the run neither counts the machine's cost nor ends
    the machine."""
    believed_by: str = ""
    """The evidence for accepting the machine's host key (see ssh/host_keys.py), or "" if the node is this machine."""
    engine_kind: str = ""
    """The kind of engine that was chosen for this machine, if the settings say `kind = "auto"`."""
    placement: str = ""
    """The settings of `deployment` that were planned for the machine's GPUs, as JSON, or "" without a plan."""
    engine_python: str = ""
    """The interpreter of the engine that a run installed or found on the machine. Without `engine_python`, the
    interpreter in the settings is used."""
    address: str = ""
    """The address at which the machine's processes listen for the leader of its unit, or "" for the leader itself."""
    trainer_nodes: tuple["Node", ...] = ()
    """Other nodes that train together with this node. This node, the trainer nodes and the engine nodes form one
    unit."""
    engine_nodes: tuple["Node", ...] = ()
    """Nodes of the unit that run only engines, or an empty tuple if the engines run on this node."""

    @property
    def is_remote(self) -> bool:
        """Whether the node's files are on another machine, so that inputs are uploaded and results are downloaded."""
        return self.mirror != ""

    @property
    def local_root(self) -> str:
        """The directory on this machine that corresponds to `root` on the node."""
        return self.mirror or self.root

    @property
    def further_nodes(self) -> tuple["Node", ...]:
        return (*self.trainer_nodes, *self.engine_nodes)

    def node_of_engine(self, index: int, *, num_per_node: int) -> "Node":
        """Return the node on which the engine with this index runs. Engines fill one engine node after another."""
        return self.engine_nodes[index // num_per_node] if self.engine_nodes else self

    def named(self, name: str) -> "Node":
        """Return the further node with this name. For any other name, return this node."""
        return next((each for each in self.further_nodes if each.name == name), self)

    def path_on_node(self, path: str) -> str:
        """Convert a path below `local_root` to the path of the same file on the node.

        Raises:
            ValueError: the path is not below `local_root`.
        """
        relative = PurePosixPath(path).relative_to(self.local_root)
        return str(PurePosixPath(self.root) / relative)


def no_machine(store: str) -> Node:
    """Return a placeholder node for a run whose results are all in the store. No job can run on this node."""
    return Node(name="no machine", kind=NO_NODE, root=store, python="")
