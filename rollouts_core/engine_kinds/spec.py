"""`EngineSpec`: facts about a kind of inference server that configuration, checks, tasks and the trainer need.

Not here: the kinds themselves (the other modules of this folder).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from rollouts_core.job import ServeJob


AdapterForm = Literal["", "beside", "folder"]
"""How an engine takes adapters: "beside" as tensors in addition to the weights, "folder" as a folder that requests
name, "" only merged into the weights."""
LLAMA_LIKE = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures in which each block has linear layers only in attention and in one feed-forward part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPart:
    """Arguments and environment variables for a server's command line."""

    arguments: tuple[str, ...]
    env: Mapping[str, str]
    """Environment variables to add to the caller's environment."""


class RenderFn(Protocol):
    """Writes a server's command line."""

    def __call__(self, job: ServeJob, model_dir: Path, *, dtype: str, on_gpu: bool) -> LaunchPart:
        """Return the arguments of the interpreter, and the environment variables.

        Args:
            dtype: number format of the weights.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringAPI:
    """The requests for scores of a reward model on one kind of server."""

    path: str
    """Path of the scoring request below the server's URL."""
    render: Callable[[Sequence[Sequence[int]]], dict[str, Any]]
    """Makes the body of a request from conversations in token ids."""
    read: Callable[[Any], list[list[float]]]
    """Reads the scores of each conversation from the server's answer."""
    num_reserved: int
    """Number of tokens of the server's context that a conversation cannot use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBuild:
    """The build of an engine that a run installs, on machines with GPUs or without GPUs."""

    package: str
    """Name of the engine's package in its requirements."""
    requirements: str
    """The file below requirements/ with the exact version of every package."""
    disk_gb: float
    """Size of the environment on the disk, in GB (10^9 bytes)."""
    minutes: float
    """Approximate time of the installation over a link of 500 Mbit/s, minutes."""
    min_driver: tuple[int, ...] = ()
    """Oldest NVIDIA driver that supports the build's version of CUDA."""
    programs: tuple[str, ...] = ()
    """Programs that the machine must have."""

    @property
    def file(self) -> Path:
        """The file with the exact versions."""
        return Path(__file__).parent / "requirements" / self.requirements


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """A kind of inference server."""

    title: str
    """Name of the engine in logs and errors."""
    client: str
    """The engine's client as "module:class"."""
    probe: tuple[str, Mapping[str, object]]
    """Path and body of a request that samples one token."""
    resume_paths: tuple[str, ...]
    """Paths of the requests that end a pause and allocate released memory again."""
    transfers: tuple[str, ...]
    """Supported ways of sending weights: values of `rollout.engine.weight_transfer`."""
    reserved_tokens: int
    """Tokens of the context that prompt and completion must leave free. With fewer free tokens, the embedded engine
    refuses the prompt, and SGLang ends the completion early."""
    package: str = ""
    """The package that must be installed for the engine, or empty for the engine of this project."""
    cuda_build: EngineBuild | None = None
    """The build that a run installs on a machine with GPUs, or None if the run installs nothing there."""
    cpu_build: EngineBuild | None = None
    """The build that a run installs on a machine without GPUs, or None if the run installs nothing there."""
    list_architectures: str = ""
    """Program for the engine's interpreter that prints the supported model architectures, one per line."""
    render: RenderFn | None = None
    """Writes the arguments for the engine's interpreter, or None for the engine of this project."""
    render_key: Callable[[str, Path], LaunchPart] | None = None
    """(API key, private folder) -> a further part of the command, which makes the server require the API key."""
    max_temperature: float = math.inf
    """Highest temperature that the engine accepts in requests."""
    memory_argument: str = ""
    """Name of the command-line argument that sets the engine's share of a GPU's memory."""
    can_continue: bool = True
    """Whether the engine continues running requests after a weight update, and reports which weights sampled each
    token."""
    has_router: bool = True
    """Whether sglang-router can distribute requests among engines of this kind."""
    is_local_only: bool = False
    """Whether the engine must listen only on its own machine, because no API key protects its endpoints that run
    code."""
    needs_own_head: bool = False
    """Whether the engine can load new weights only if the model's head is not tied to its embedding."""
    nccl_variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that make NCCL in the trainer share memory in this engine's way."""
    scoring: ScoringAPI | None = None
    """The engine's API for reward models, or None if it serves no reward models."""
    adapter_form: AdapterForm = ""
    """The form in which the engine takes adapters, or empty if it takes only merged weights."""
    adapter_ranks: tuple[int, ...] = ()
    """Values to pass as the engine's highest adapter rank, or empty if the engine has no argument for this rank."""
    adapts_on_cpu: bool = True
    """Whether the engine takes adapters on a machine without a GPU, or gets merged weights on such a machine."""
    adapted_architectures: tuple[str, ...] = ()
    """Architectures whose adapters the engine is known to take for all layers, or empty for all architectures."""

    def rank_of_slots(self, rank: int) -> int:
        """The smallest of `adapter_ranks` that is at least `rank`, or 0 if `rank` is 0 or larger than all of them."""
        return min((each for each in self.adapter_ranks if each >= rank > 0), default=0)

    @property
    def is_own(self) -> bool:
        """Whether this is the engine of this project, which needs no installation and computes on the CPU."""
        return not self.package


def read_scores(value: Any) -> list[float]:  # Any: JSON
    """Read the scores of one conversation from JSON. If each token has scores, return the last token's scores."""
    if isinstance(value, list) and value and isinstance(value[-1], list):
        return read_scores(value[-1])
    scores = value if isinstance(value, list) else [value]
    if not scores or not all(isinstance(score, int | float) and not isinstance(score, bool) for score in scores):
        raise ValueError(f"{str(value)[:100]} are no scores")
    return scores


def num_gpus_per_engine(job: ServeJob) -> str:
    """Number of GPUs over which the model is split, as a command-line argument."""
    return str(max(1, len(job.deployment.engine_gpu_ranks)))


def memory_share(job: ServeJob, argument: str) -> list[str]:
    """The argument for the engine's share of a GPU's memory, or [] to use the engine's default."""
    share = job.deployment.engine_memory_share
    return [argument, f"{share:g}"] if share else []
