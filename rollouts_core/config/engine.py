"""`rollout.engine`: the inference server for RL and for comparing checkpoints."""

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
"""No user, password or key: they belong in the settings of pip or uv."""
MIN_ENGINE_CONTEXT = 26
"""Smallest context of an installed engine, tokens: needed for the completions that verify its weights
(`engines/canary.py`)."""
KEY_ARGUMENT = re.compile(r"--(admin[-_])?api[-_]k")
"""Matches key arguments: vLLM accepts underscores, both servers accept abbreviations, SGLang has a second key."""


class EngineConfig(Record):
    """The inference server that generates completions."""

    kind: EngineChoice = "embedded"
    """embedded: this project's own, for small models on a CPU. sglang and vllm have environments of their own. auto:
    sglang on a node with a free GPU, else embedded, also if sglang does not support the model."""
    install: Literal["auto", "uv", "pip", "never"] = Field(default="auto", json_schema_extra=PLACEMENT)
    """Program with which a run installs a missing SGLang or vLLM, if at all. auto: by the program that installs the
    node's packages, or else by pip."""
    requirements: str = Field(default="", json_schema_extra=PLACEMENT | RUNS_PROGRAM)
    """File with the exact versions to install. Empty takes the versions that this project was tested with."""
    package_index: str = Field(default="", pattern=INDEX_URL, json_schema_extra=PLACEMENT | RUNS_PROGRAM)
    """URL of a further package index, for instance one with torch for another CUDA. The node's own settings apply, too.
    """
    wheels: str = Field(default="", json_schema_extra=PLACEMENT | RUNS_PROGRAM)
    """Folder of this machine with the wheels of all packages. A node without a network installs from
    it."""
    python: str = Field(default="", json_schema_extra=PLACEMENT | RUNS_PROGRAM)
    """Python interpreter of the environment with SGLang or vLLM, as an absolute path on the node. Empty: the
    interpreter of the jobs, or an environment that the run installs."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the engine's weights. auto: the format in the model's configuration, but on a GPU bfloat16
    instead of float32, the format of checkpoints. The embedded engine always uses float32."""
    api_key_variable: str = Field(default="", json_schema_extra=PLACEMENT | SENDS_SECRET | {"sent_to": "router_url"})
    """Environment variable with a key that the engine requires from its clients, exported where the run is started.
    Empty: no key. The key is stored only in files that are deleted with the engine."""
    context_length: int = Field(default=0, ge=0)
    """Highest number of prompt and completion tokens of a request. 0: the sum of rollout.max_prompt_tokens and
    rollout.sampling.max_new_tokens, or more if the engine needs more."""
    extra_args: tuple[str, ...] = Field(default=(), json_schema_extra=RUNS_PROGRAM)
    """Further arguments for the server's command line, for example ["--mem-fraction-static", "0.7"]."""
    weight_transfer: WeightTransfer = Field(default="auto", json_schema_extra=PLACEMENT)
    """How new weights reach the engine. auto: through memory or files of the trainer. gloo: over the network. nccl, for
    sglang and vllm: over the network from GPU to GPU. tensors, for sglang: the engine maps the trainer's memory, on the
    shared GPU or, without GPUs, on the machine."""
    router_url: str = Field(default="", pattern=r"^(https?://[^/]+)?$", json_schema_extra=PLACEMENT)
    """Address of a running sglang-router that chooses among the engines, as the trainer reaches it. The engines are
    registered with the router. Empty: the trainer chooses. Not with vLLM."""
    router_python: str = Field(default="", json_schema_extra=PLACEMENT | RUNS_PROGRAM)
    """Python interpreter of an environment with sglang-router, as an absolute path on the trainer's machine. RL starts
    a router there and ends it. Not with vLLM, and not together with router_url."""
    start_timeout_s: Annotated[Finite, Field(gt=0)] = Field(default=300.0, json_schema_extra=PLACEMENT)
    """Seconds for the server to generate its first token, and to return after a crash. During its first requests it may
    also be silent for this long."""

    @property
    def spec(self) -> EngineSpec:
        """The record of the engine's kind."""
        return ENGINE_CHOICES[self.kind]

    def _broken_rules(self) -> Iterator[str]:
        spec = self.spec
        given = {"python": self.python, "extra_args": self.extra_args, "dtype": self.dtype.removeprefix("auto")}
        given |= {name: getattr(self, name) for name in ("requirements", "package_index", "wheels")}
        installed = " and ".join(f'"{name}"' for name, each in ENGINES.items() if not each.is_own)
        for name in [name for name, value in given.items() if value and spec.is_own]:
            yield f"engine.{name} is a setting for the kinds {installed}: remove it"
        if self.weight_transfer not in spec.transfers:
            others = [name for name, each in ENGINES.items() if self.weight_transfer in each.transfers]
            yield (
                f'engine.weight_transfer "{self.weight_transfer}" is not supported by engines of the kind {self.kind}: '
                f"use {' or '.join(spec.transfers)}, or the kind {' or '.join(others)}"
            )
        routers = {"router_url": self.router_url, "router_python": self.router_python}
        for name in [name for name, value in routers.items() if value and not spec.has_router]:
            yield f"engine.{name} is a setting of SGLang's router, but the engine is {self.kind}: remove it"
        if all(routers.values()):
            yield "engine.router_url names a running router, but engine.router_python starts one: remove one of them"
        if any(KEY_ARGUMENT.match(argument) for argument in self.extra_args):
            yield (
                "engine.extra_args contains a key, which all users of the machine could read in the list of processes: "
                "set engine.api_key_variable to the variable with the key"
            )
        if not spec.is_own and 0 < self.context_length < MIN_ENGINE_CONTEXT:
            yield (
                f"engine.context_length {self.context_length} is too short for the completions that verify the weights "
                f"of {self.kind}: set it to {MIN_ENGINE_CONTEXT} or more, or to 0"
            )
