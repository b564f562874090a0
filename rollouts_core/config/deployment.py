"""`deployment`: GPUs, processes and ports on the node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import Field

from rollouts_core.config.record import PLACEMENT, Finite, GpuRank, Record

MAX_PORT = 65535


class DeploymentConfig(Record):
    """GPUs, processes and ports on the node. These settings never change a result."""

    trainer_gpu_ranks: tuple[GpuRank, ...] = Field(default=(), json_schema_extra=PLACEMENT)
    """Numbers of the trainer's GPUs, for example [0, 1], with one process on each GPU. If several machines train
    together, each machine uses these GPU numbers. Empty: `trainer_processes` decides."""
    trainer_processes: int = Field(default=0, ge=0, json_schema_extra=PLACEMENT)
    """Used if `trainer_gpu_ranks` is empty. 0: one process on a GPU; a machine on which torch cannot use a GPU is
    refused. 1: one process, on the first GPU or else on the CPU. 2 or more: this number of CPU processes, even if there
    are GPUs (for testing). If several machines train together, each machine starts this number of processes."""
    engine_gpu_ranks: tuple[GpuRank, ...] = Field(default=(), json_schema_extra=PLACEMENT)
    """Numbers of the inference engines' GPUs, for example [2, 3]. Each engine gets an equal part of this list, and
    splits its model over its GPUs. If engines have their own nodes, each node uses these GPU numbers."""
    num_engines: int = Field(default=1, ge=1, json_schema_extra=PLACEMENT)
    """Number of inference engines for RL. If one engine fails, the others continue. If engines have their own nodes,
    each node runs this number of engines."""
    colocated: bool = Field(default=False, json_schema_extra=PLACEMENT)
    """Let engines and trainer share GPUs. The engines release their memory while the trainer trains, and load the new
    weights after each step. Only for SGLang and vLLM on GPUs, because the embedded engine uses no GPU."""
    engine_memory_share: Annotated[Finite, Field(ge=0, lt=1)] = Field(default=0.0, json_schema_extra=PLACEMENT)
    """Share of a GPU's memory that each engine of RL takes for weights and cache. 0: the engine's default. An argument
    in `rollout.engine.extra_args` has precedence."""
    trainer_threads: int = Field(default=0, ge=0, json_schema_extra=PLACEMENT)
    """CPU threads of each trainer process. 0: the available cores, divided by the number of processes."""
    engine_threads: int = Field(default=1, ge=1, json_schema_extra=PLACEMENT)
    """CPU threads of each inference engine."""
    engine_port: int = Field(default=0, ge=0, le=MAX_PORT, json_schema_extra=PLACEMENT)
    """Port of the first engine on its node. Further engines use the following ports. 0: any free ports. Engines listen
    on the loopback address, or on the node's address if they have their own nodes."""
    max_running_requests: int = Field(default=128, ge=1, json_schema_extra=PLACEMENT)
    """Number of completions that an engine generates at the same time."""
    stage_timeout_minutes: int = Field(default=24 * 60, ge=1, json_schema_extra=PLACEMENT)
    """Minutes after which a stage is stopped and counts as failed."""

    @property
    def num_trainer_processes(self) -> int:
        return self.trainer_processes or max(1, len(self.trainer_gpu_ranks))

    @property
    def shares_cpu(self) -> bool:
        """True if several trainer processes share the CPU."""
        return self.trainer_processes > 1 and not self.trainer_gpu_ranks

    @property
    def engine_ports(self) -> list[int]:
        """The port of each engine; 0 means any free port."""
        return [self.engine_port + index if self.engine_port else 0 for index in range(self.num_engines)]

    def of_engine(self, index: int) -> Self:
        """The deployment settings of one engine, with its share of the engines' GPUs."""
        num_ranks = len(self.engine_gpu_ranks) // self.num_engines
        ranks = self.engine_gpu_ranks[index * num_ranks : (index + 1) * num_ranks]
        return self.model_copy(update={"engine_gpu_ranks": ranks, "num_engines": 1})

    def with_engines_of_trainer(self) -> Self:
        """The deployment settings of engines that run on the trainer's GPUs.

        Each engine gets as many GPUs as it would have on a node of its own.
        """
        num_ranks = len(self.engine_gpu_ranks) // self.num_engines
        trainer = self.trainer_gpu_ranks
        num_engines = max(1, len(trainer) // num_ranks) if num_ranks else 1
        return self.model_copy(
            update={"engine_gpu_ranks": trainer[: num_engines * num_ranks], "num_engines": num_engines}
        )

    def _broken_rules(self) -> Iterator[str]:
        if len(self.engine_gpu_ranks) % self.num_engines:
            yield (
                f"engine_gpu_ranks names {len(self.engine_gpu_ranks)} GPUs for num_engines {self.num_engines}: give "
                "each engine the same number of GPUs, or remove engine_gpu_ranks"
            )
        if (last := self.engine_ports[-1]) > MAX_PORT:
            yield (
                f"engine_port {self.engine_port} with num_engines {self.num_engines} would give the last engine port "
                f"{last}, which does not exist: give {MAX_PORT + 1 - self.num_engines} or less, or 0 for free ports"
            )
        trainer, engines = set(self.trainer_gpu_ranks), set(self.engine_gpu_ranks)
        if self.colocated and trainer and engines and not trainer & engines:
            yield (
                f"colocated needs common GPUs, but trainer_gpu_ranks {sorted(trainer)} and engine_gpu_ranks "
                f"{sorted(engines)} have none: remove colocated, or name the same GPUs"
            )
        if 0 < len(self.trainer_gpu_ranks) < self.trainer_processes:
            yield (
                f"trainer_processes {self.trainer_processes} needs as many trainer_gpu_ranks, found "
                f"{len(self.trainer_gpu_ranks)}: each process has its own GPU"
            )
