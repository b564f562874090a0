"""`rollout.engine`: the inference server that samples, for RL and for comparing checkpoints.

Not here: its GPUs, ports and number (deployment.py), how it is started (engines/launch.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from rollouts_core.config.record import PLACEMENT, RUNS_PROGRAM, SENDS_SECRET, Finite, Record

EngineKind = Literal["embedded", "sglang", "vllm"]
WeightTransfer = Literal["auto", "gloo", "nccl", "tensors"]
TRANSFERS: Mapping[EngineKind, tuple[WeightTransfer, ...]] = {
    "embedded": ("auto", "gloo"),
    "sglang": ("auto", "gloo", "nccl", "tensors"),
    "vllm": ("auto", "gloo", "nccl"),
}
"""The ways in which weights can go to each kind of engine."""
ENGINE_MARGINS: Mapping[EngineKind, int] = {"embedded": 1, "sglang": 2, "vllm": 1}
"""Tokens for which each kind wants room besides those of a prompt and its completion: without it, the embedded engine
refuses the prompt, and SGLang ends the completion early."""
MIN_ENGINE_CONTEXT = 26
"""Tokens that an engine of another kind than the embedded one has to have room for: it is asked for a few, to prove its
weights (engines/canary.py)."""


MAX_VLLM_TEMPERATURE = 2.0
"""vLLM refuses requests with more."""

KEY_ARGUMENT = re.compile(r"--(admin[-_])?api[-_]k")
"""vLLM takes underscores for dashes, both take the beginning of a name for the whole, SGLang has a second key."""


class EngineConfig(Record):
    """The inference server that samples."""

    kind: EngineKind = "embedded"
    """embedded: this project's own, for small models on a CPU. sglang and vllm are installed by you, usually into an
    environment of their own."""
    python: str = Field(default="", json_schema_extra=PLACEMENT | RUNS_PROGRAM)
    """Python interpreter of the environment that SGLang or vLLM is installed in, as an absolute path on the node; empty
    takes that of the jobs."""
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

    def _broken_rules(self) -> Iterator[str]:
        given = {"python": self.python, "extra_args": self.extra_args, "dtype": self.dtype.removeprefix("auto")}
        for name in [name for name, value in given.items() if value and self.kind == "embedded"]:
            yield f'engine.{name} is a setting of the kinds "sglang" and "vllm": leave it out'
        if self.weight_transfer not in TRANSFERS[self.kind]:
            yield (
                f'engine.weight_transfer "{self.weight_transfer}" is no way to an engine of the kind {self.kind}: '
                f"choose {' or '.join(TRANSFERS[self.kind])}, or the kind sglang"
            )
        routers = {"router_url": self.router_url, "router_python": self.router_python}
        for name in [name for name, value in routers.items() if value and self.kind == "vllm"]:
            yield f"engine.{name} is a router of SGLang, the engine is vllm: leave it out"
        if all(routers.values()):
            yield "engine.router_url names a router that runs, router_python one to start: leave one out"
        if any(KEY_ARGUMENT.match(argument) for argument in self.extra_args):
            yield (
                "engine.extra_args has a key, which every user of the machine could read in the list of processes: "
                "name the variable that holds it as engine.api_key_variable"
            )
        if self.kind != "embedded" and 0 < self.context_length < MIN_ENGINE_CONTEXT:
            yield (
                f"engine.context_length {self.context_length} is too short for the completions by which {self.kind} "
                f"proves its weights: give {MIN_ENGINE_CONTEXT} or more, or 0"
            )
