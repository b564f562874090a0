"""`rollout.engine`: the inference server that samples, for RL and for comparing checkpoints.

Not here: its GPUs, ports and number (deployment.py), how it is started (engines/launch.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rollouts_core.config.record import PLACEMENT, RUNS_PROGRAM, SENDS_SECRET, Finite, Record
from rollouts_core.engine_kinds import ENGINE_CHOICES, ENGINES, EngineSpec
from rollouts_core.plugins import KeyOf

EngineKind = Annotated[str, KeyOf(ENGINES)]
EngineChoice = Annotated[str, KeyOf(ENGINE_CHOICES)]
WeightTransfer = Literal["auto", "gloo", "nccl", "tensors"]
INDEX_URL = r"^(https?://[^\s@?#]+|file:///[^\s]+)?$"
"""No user, password or key: these belong into the settings of pip or uv."""
MIN_ENGINE_CONTEXT = 26
"""Tokens that an installed engine must have room for: a few completions prove its weights (engines/canary.py)."""
KEY_ARGUMENT = re.compile(r"--(admin[-_])?api[-_]k")
"""vLLM takes underscores for dashes, both take the beginning of a name for the whole, SGLang has a second key."""


class EngineConfig(Record):
    """The inference server that samples."""

    kind: EngineChoice = "embedded"
    """embedded: this project's own, for small models on a CPU. sglang and vllm have environments of their own. auto:
    sglang on a node with a free GPU, and embedded elsewhere, or if sglang does not know the model."""
    install: Literal["auto", "uv", "pip", "never"] = Field(default="auto", json_schema_extra=PLACEMENT)
    """Whether a run installs SGLang or vLLM if it is missing, and by which program. auto: by the program that
    installs the node's packages, or else by pip."""
    requirements: str = Field(default="", json_schema_extra=PLACEMENT | RUNS_PROGRAM)
    """File with the exact versions to install. Empty takes the versions that this project was tested with."""
    package_index: str = Field(default="", pattern=INDEX_URL, json_schema_extra=PLACEMENT | RUNS_PROGRAM)
    """URL of a further package index, for instance one with torch for another CUDA. The node's own settings apply, too.
    """
    wheels: str = Field(default="", json_schema_extra=PLACEMENT | RUNS_PROGRAM)
    """Folder of this machine with the wheels of all packages. A node without a network gets them from here."""
    python: str = Field(default="", json_schema_extra=PLACEMENT | RUNS_PROGRAM)
    """Python interpreter of the environment that SGLang or vLLM is installed in, as an absolute path on the node. Empty
    takes that of the jobs, or one that the run installs."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the engine's weights; auto takes that of the model's configuration, on a GPU bfloat16 in place
    of float32, in which checkpoints are saved. The embedded engine always takes float32."""
    api_key_variable: str = Field(default="", json_schema_extra=PLACEMENT | SENDS_SECRET | {"sent_to": "router_url"})
    """Environment variable that holds the key without which the engine answers nobody, exported where the run is
    started; empty asks for none. The key itself is in no file that outlives the engine."""
    context_length: int = Field(default=0, ge=0)
    """Prompt and completion tokens of a request at most; 0 takes what rollout.max_prompt_tokens and
    rollout.sampling.max_new_tokens need."""
    extra_args: tuple[str, ...] = Field(default=(), json_schema_extra=RUNS_PROGRAM)
    """Further arguments of the server's command line, for instance ["--mem-fraction-static", "0.7"]."""
    weight_transfer: WeightTransfer = Field(default="auto", json_schema_extra=PLACEMENT)
    """How new weights reach the engine. auto: by memory or files of the trainer that it reads. gloo: over the network.
    nccl, to sglang and vllm: over the network, from GPU to GPU. tensors, for sglang: it maps memory of the trainer, of
    the GPU that both share or, without GPUs, of the machine."""
    router_url: str = Field(default="", pattern=r"^(https?://[^/]+)?$", json_schema_extra=PLACEMENT)
    """Where a router of sglang-router listens that chooses among the engines, as the trainer reaches it; empty lets the
    trainer choose. Its engines are told to it. Not with vLLM."""
    router_python: str = Field(default="", json_schema_extra=PLACEMENT | RUNS_PROGRAM)
    """Python interpreter of an environment with sglang-router, as an absolute path on the machine that trains: RL
    starts a router there that chooses among the engines, and ends it. Not with vLLM, and not beside router_url."""
    start_timeout_s: Annotated[Finite, Field(gt=0)] = Field(default=300.0, json_schema_extra=PLACEMENT)
    """How long the server may take until it has generated its first token, and to be back after it died. So long it may
    be silent amid its first requests, too."""

    @property
    def spec(self) -> EngineSpec:
        """What is known of the kind."""
        return ENGINE_CHOICES[self.kind]

    def _broken_rules(self) -> Iterator[str]:
        spec = self.spec
        given = {"python": self.python, "extra_args": self.extra_args, "dtype": self.dtype.removeprefix("auto")}
        given |= {name: getattr(self, name) for name in ("requirements", "package_index", "wheels")}
        installed = " and ".join(f'"{name}"' for name, each in ENGINES.items() if not each.is_own)
        for name in [name for name, value in given.items() if value and spec.is_own]:
            yield f"engine.{name} is a setting of the kinds {installed}: leave it out"
        if self.weight_transfer not in spec.transfers:
            others = [name for name, each in ENGINES.items() if self.weight_transfer in each.transfers]
            yield (
                f'engine.weight_transfer "{self.weight_transfer}" does not reach engines of the kind {self.kind}: '
                f"choose {' or '.join(spec.transfers)}, or the kind {' or '.join(others)}"
            )
        routers = {"router_url": self.router_url, "router_python": self.router_python}
        for name in [name for name, value in routers.items() if value and not spec.has_router]:
            yield f"engine.{name} is a router of SGLang, the engine is {self.kind}: leave it out"
        if all(routers.values()):
            yield "engine.router_url names a router that runs, router_python one to start: leave one out"
        if any(KEY_ARGUMENT.match(argument) for argument in self.extra_args):
            yield (
                "engine.extra_args has a key, which every user of the machine could read in the list of processes: "
                "name the variable that holds it as engine.api_key_variable"
            )
        if not spec.is_own and 0 < self.context_length < MIN_ENGINE_CONTEXT:
            yield (
                f"engine.context_length {self.context_length} is too short for the completions by which {self.kind} "
                f"proves its weights: give {MIN_ENGINE_CONTEXT} or more, or 0"
            )
