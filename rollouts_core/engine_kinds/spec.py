"""The record of a kind of inference server: what configuration, checks, tasks and the trainer ask about it.

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
"""How an engine takes adapters: beside the weights, or as a folder that requests name. Empty: merged weights alone."""
LLAMA_LIKE = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose linear layers are those of attention and of one feed-forward part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPart:
    """A part of a server's command line."""

    arguments: tuple[str, ...]
    env: Mapping[str, str]
    """Variables besides those of the caller."""


class RenderFn(Protocol):
    """Writes a server's command line."""

    def __call__(self, job: ServeJob, model_dir: Path, *, dtype: str, on_gpu: bool) -> LaunchPart:
        """The arguments of the interpreter, and the variables.

        Args:
            dtype: the number format of the weights.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringAPI:
    """How servers of one kind are asked for the scores of a reward model."""

    path: str
    """Below the server's URL."""
    render: Callable[[Sequence[Sequence[int]]], dict[str, Any]]
    """The body for some conversations in token ids."""
    read: Callable[[Any], list[list[float]]]
    """The scores of each in an answer."""
    num_reserved: int
    """Tokens of the server's context that a conversation cannot have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBuild:
    """An engine as a run installs it, for machines with GPUs or without."""

    package: str
    """The package that is the engine, as its requirements name it."""
    requirements: str
    """The file below requirements/ with the exact version of every package."""
    disk_gb: float
    """Size of the environment on the disk, in GB (10^9 bytes)."""
    minutes: float
    """How long the installation takes about, with a link of 500 Mbit/s."""
    min_driver: tuple[int, ...] = ()
    """The oldest driver of NVIDIA's that its build of CUDA runs on."""
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
    """Name in messages."""
    client: str
    """Its client, "module:class"."""
    probe: tuple[str, Mapping[str, object]]
    """Path and body of a request for one token."""
    resume_paths: tuple[str, ...]
    """Paths of the requests that end a pause and take the memory back."""
    transfers: tuple[str, ...]
    """Ways to send it weights: values of `rollout.engine.weight_transfer`."""
    reserved_tokens: int
    """Tokens of the context that prompt and completion must leave free. Otherwise the embedded engine refuses the
    prompt, and SGLang ends the completion early."""
    package: str = ""
    """The package that must be installed; empty for the engine of this project."""
    cuda_build: EngineBuild | None = None
    """The build that a run installs on a machine with GPUs; None if it installs nothing there."""
    cpu_build: EngineBuild | None = None
    """The same on a machine without GPUs."""
    list_architectures: str = ""
    """A program for its interpreter that prints the architectures of models that it serves, a line each."""
    render: RenderFn | None = None
    """Writes the arguments of its interpreter; None for the engine of this project."""
    render_key: Callable[[str, Path], LaunchPart] | None = None
    """(key, private folder) -> a further part of the command, which makes the server ask for the key."""
    max_temperature: float = math.inf
    """Highest temperature of requests."""
    memory_argument: str = ""
    """The argument of its command line that sets its share of a GPU's memory."""
    can_continue: bool = True
    """Whether it goes on with requests after an update, and says of each token which weights sampled it."""
    has_router: bool = True
    """Whether sglang-router can choose among such engines."""
    is_local_only: bool = False
    """Whether it listens on its own machine alone, because no key covers endpoints that run code."""
    needs_own_head: bool = False
    """Whether it takes new weights only for a model whose head is not tied to its embedding."""
    nccl_variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that NCCL must have in the trainer to hand memory over as this engine does."""
    scoring: ScoringAPI | None = None
    """How it serves reward models; None if it serves none."""
    adapter_form: AdapterForm = ""
    """How it takes adapters."""
    adapter_ranks: tuple[int, ...] = ()
    """Values of its argument for the highest rank of adapters; empty if it takes adapters without an argument."""
    adapts_on_cpu: bool = True
    """Whether it takes adapters on a machine without a GPU; else it gets merged weights there."""
    adapted_architectures: tuple[str, ...] = ()
    """Architectures of models of which it is known to take adapters of all layers; empty if of all that it serves."""

    def rank_of_slots(self, rank: int) -> int:
        """The smallest of `adapter_ranks` that adapters of a rank fit; 0 without adapters, or if none fits."""
        return min((each for each in self.adapter_ranks if each >= rank > 0), default=0)

    @property
    def is_own(self) -> bool:
        """Whether it is the engine of this project, which needs no installation and computes on the CPU."""
        return not self.package


def read_scores(value: Any) -> list[float]:  # Any: JSON
    """The scores of one conversation: if there are scores for each of its tokens, those of the last."""
    if isinstance(value, list) and value and isinstance(value[-1], list):
        return read_scores(value[-1])
    scores = value if isinstance(value, list) else [value]
    if not scores or not all(isinstance(score, int | float) and not isinstance(score, bool) for score in scores):
        raise ValueError(f"{str(value)[:100]} are no scores")
    return scores


def num_gpus_per_engine(job: ServeJob) -> str:
    """Over how many GPUs the model is split, as an argument."""
    return str(max(1, len(job.deployment.engine_gpu_ranks)))
