"""`rollout.engine`: the inference server for RL and for comparing checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rollouts_core.config.record import ALIKE, PLACEMENT, RUNS_PROGRAM, SENDS_SECRET, Finite, Record
from rollouts_core.engine_kinds import ENGINE_CHOICES, ENGINES, EngineSpec
from rollouts_core.engine_kinds.auto import CHOSEN_ON_NODE, WITHOUT_GPUS
from rollouts_core.plugins import KeyOf

EngineKind = Annotated[str, KeyOf(ENGINES)]
EngineChoice = Annotated[str, KeyOf(ENGINE_CHOICES)]
WeightTransfer = Literal["auto", "gloo", "nccl", "tensors"]
INDEX_URL = r"^(https?://[^\s@?#]+|file:///[^\s]+)?$"
"""Matches addresses without user, password and key. Users, passwords and keys belong in the settings of pip or uv."""
MIN_ENGINE_CONTEXT = 26
"""Smallest context length of an installed engine, tokens. The completions that verify the engine's weights
(`engines/transfer/canary.py`) need this many tokens."""
KEY_ARGUMENT = re.compile(r"--(admin[-_])?api[-_]k")
"""Matches command-line arguments with a key. vLLM accepts underscores in them, both servers accept abbreviations, and
SGLang has a second key argument."""

OWN_ARGUMENT = re.compile(r"--(ho|hos|host|po|por|port|model|model[-_]path|served[-_]model[-_]name)(=|$)")
"""Matches arguments, and their abbreviations, for the address and the model, which the launch sets. If `extra_args`
changed the address, the run would not find the engine, or other machines could reach the engine without a key."""


class EngineConfig(Record):
    """The inference server that generates completions."""

    kind: EngineChoice = Field(default=CHOSEN_ON_NODE, json_schema_extra={ALIKE: WITHOUT_GPUS})
    """auto: sglang on a node with a free GPU if sglang supports the model; otherwise embedded. Outside of pipelines,
    auto means embedded. embedded: this project's own engine, for small models on a CPU. sglang, vllm: these servers,
    each in its own Python environment."""
    install: Literal["auto", "uv", "pip", "never"] = Field(default="auto", json_schema_extra=PLACEMENT)
    """Program that installs SGLang or vLLM if it is missing. auto: the program that installs the node's packages, or
    else pip. never: a missing engine is an error."""
    requirements: str = Field(default="", json_schema_extra=PLACEMENT | RUNS_PROGRAM)
    """File with the exact versions to install. Empty: the versions that this project was tested with."""
    package_index: str = Field(default="", pattern=INDEX_URL, json_schema_extra=PLACEMENT | RUNS_PROGRAM)
    """URL of an additional package index, for example one that has torch for another CUDA version. The node's own
    settings of pip or uv also apply.
    """
    wheels: str = Field(default="", json_schema_extra=PLACEMENT | RUNS_PROGRAM)
    """Folder on this machine with the wheels of all packages, for nodes without internet access."""
    python: str = Field(default="", json_schema_extra=PLACEMENT | RUNS_PROGRAM)
    """Python interpreter of an environment with SGLang or vLLM, as an absolute path on the node. Empty: the interpreter
    of the jobs if it has the engine, or an environment that the run installs."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the engine's weights. auto: the format in the model's configuration; on a GPU, bfloat16 if that
    format is float32, as in checkpoints of this project. The embedded engine always uses float32."""
    api_key_variable: str = Field(default="", json_schema_extra=PLACEMENT | SENDS_SECRET | {"sent_to": "router_url"})
    """Environment variable with a key that the engine requires from its clients. Export the variable where the run is
    started. Empty: no key. The key is stored only in files that are deleted with the engine."""
    context_length: int = Field(default=0, ge=0)
    """Largest number of tokens of a request, prompt and completion together. 0: the sum of rollout.max_prompt_tokens
    and rollout.sampling.max_new_tokens, or more if the engine needs more."""
    extra_args: tuple[str, ...] = Field(default=(), json_schema_extra=RUNS_PROGRAM)
    """Additional arguments for the server's command line, for example ["--mem-fraction-static", "0.7"]."""
    weight_transfer: WeightTransfer = Field(default="auto", json_schema_extra=PLACEMENT)
    """How the engine gets new weights. auto: from the trainer's memory or files. gloo: over the network. nccl (sglang,
    vllm): over the network from GPU to GPU. tensors (sglang): the engine maps the trainer's memory, on the GPU that
    they share, or in the machine's memory if there are no GPUs."""
    router_url: str = Field(default="", pattern=r"^(https?://[^/]+)?$", json_schema_extra=PLACEMENT)
    """Address, as seen from the trainer, of a running sglang-router that distributes requests among the engines. The
    run registers the engines with the router. Empty: the trainer distributes the requests. vLLM does not support this
    setting."""
    router_python: str = Field(default="", json_schema_extra=PLACEMENT | RUNS_PROGRAM)
    """Python interpreter of an environment with sglang-router, as an absolute path on the trainer's machine. RL starts
    a router there and stops it at the end. vLLM does not support this setting. Set either `router_python` or
    `router_url`, not both."""
    start_timeout_s: Annotated[Finite, Field(gt=0)] = Field(default=300.0, json_schema_extra=PLACEMENT)
    """Seconds in which the server must generate its first token after a start, and become available again after a
    crash. During its first requests, the server may also be silent for this long."""

    @property
    def spec(self) -> EngineSpec:
        """The registry entry of the engine's kind."""
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
        for argument in filter(OWN_ARGUMENT.match, self.extra_args):
            yield f"engine.extra_args contains {argument}, which is set already: remove it"
        if not spec.is_own and 0 < self.context_length < MIN_ENGINE_CONTEXT:
            yield (
                f"engine.context_length {self.context_length} is too short for the completions that verify the weights "
                f"of {self.kind}: set it to {MIN_ENGINE_CONTEXT} or more, or to 0"
            )
