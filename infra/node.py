"""What a person says about a machine (settings), and what the pipeline knows about one that it has (`Node`).

Not here: how one is had (providers/), what it can do (bootstrap.py), how it is talked to (session.py).
"""

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class LocalNode(BaseModel):
    """This machine: nothing is rented and nothing is released."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True, title="This machine")

    provider: Literal["local"] = "local"
    """Where the stages run: on the machine of the worker itself."""
    root: str = ""
    """Directory in which the run directories lie. Leave it empty to use the store of the pipeline."""
    python: str = ""
    """Python interpreter that runs the training, with torch installed. Leave it empty to use the worker's own."""
    min_free_gb: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    """Refuse to start when the disk has less free space than this, in GB (10^9 bytes)."""


NodeSettings = LocalNode
"""Any provider's settings; becomes a union discriminated by `provider` with the second provider."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SSHAccess:
    """How a machine is reached over SSH; names of files, never what is in them."""

    host: str
    port: int
    user: str
    key_file: str = ""
    """The private key; empty takes those of the agent and of ~/.ssh."""
    host_key: str = ""
    """The fingerprint that the host's key must have, SHA256:...; empty asks `known_hosts`."""
    known_hosts: tuple[str, ...] = ("~/.ssh/known_hosts",)
    """Files in OpenSSH's format in which the host's key is looked up."""
    first_use_file: str = ""
    """Where the key of a host is written that nobody knows and that is believed once; empty refuses such hosts."""

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
    """Absolute directory in which the run directories lie."""
    python: str
    """The interpreter that runs our programs and the training."""
