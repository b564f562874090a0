"""`training.sft`: supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from rollouts_core.config.optim import OptimConfig
from rollouts_core.config.policy import PLAIN_POLICY, PolicyConfig
from rollouts_core.config.record import PLACEMENT, SELECTION, Record


class SFTTrainingConfig(Record):
    """Supervised fine-tuning on demonstrations."""

    num_steps: int = Field(default=1000, ge=1, json_schema_extra=SELECTION)
    """Optimizer steps."""
    batch_size: int = Field(default=8, ge=1)
    """Rows per step. With packing, a row holds as many demonstrations as fit into `max_length`."""
    micro_batch_size: int = Field(default=8, ge=1, json_schema_extra=PLACEMENT)
    """Rows per forward and backward pass of a device. Smaller values need less memory and give the same step."""
    max_length: int = Field(default=2048, ge=2)
    """Tokens per row."""
    on_overlong: Literal["cut", "cut_or_drop", "drop"] = "cut"
    """For demonstrations of more than `max_length` tokens. cut: truncate, with an error if no trained token is left.
    cut_or_drop: truncate, and drop demonstrations without a trained token. drop: drop all demonstrations of this
    length."""
    packing: bool = True
    """Fill each row with several demonstrations, without attention between them."""
    train_on: Literal["last_assistant", "all_assistant", "everything"] = "all_assistant"
    """Tokens that enter the loss: of the last assistant turn, of all assistant turns, or of the whole conversation."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of demonstrations, of new adapters and of dropout."""
    eval_every: int = Field(default=100, ge=1, json_schema_extra=SELECTION)
    """Steps between two evaluations of the loss on `data.sft_eval`."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Action if the loss or a gradient is NaN or infinite: end the run, or skip the update and count it."""
    max_skipped_updates: int = Field(default=10, ge=0, json_schema_extra=PLACEMENT)
    """Most skipped updates in a row before the run ends. 0: no limit."""
    log_every: int = Field(default=10, ge=1, json_schema_extra=PLACEMENT)
    """Steps between two lines of metrics."""
    checkpoint_every: int = Field(default=200, ge=1, json_schema_extra=SELECTION)
    """Steps between two checkpoints. Selection chooses among these and the last checkpoint."""
    keep_checkpoints: int = Field(default=10, ge=1, json_schema_extra=SELECTION)
    """Number of newest checkpoints to keep on disk."""
    keep_best: int = Field(default=0, ge=0, json_schema_extra=SELECTION)
    """Number of best checkpoints to keep besides the newest: by their loss on `data.sft_eval`, or without such rows by
    the training loss since the previous checkpoint. With `data.sft_eval`, `eval_every` must divide
    `checkpoint_every`."""
    resume_from: str = Field(default="", json_schema_extra=PLACEMENT)
    """Checkpoint of another run with the same settings to resume from, for example with a larger num_steps. Name its
    folder, or its stage's folder for the newest one."""
    allow_changed: tuple[str, ...] = Field(default=(), json_schema_extra=PLACEMENT)
    """Settings in which `resume_from` may differ from this run, with the names from the error message."""
    policy: PolicyConfig = PLAIN_POLICY
    """Precision, adapters and memory savings."""
    optim: OptimConfig = OptimConfig()
    """Optimizer of this stage."""

    @property
    def num_optim_steps(self) -> int:
        """Optimizer updates of the whole stage."""
        return self.num_steps

    def _broken_rules(self) -> Iterator[str]:
        most = min(self.micro_batch_size, self.batch_size)
        if self.batch_size % most:
            fitting = max(size for size in range(1, most) if self.batch_size % size == 0)
            yield (
                f"batch_size {self.batch_size} is not a multiple of micro_batch_size {self.micro_batch_size}: use "
                f"micro_batch_size {fitting}, which gives the same step, or another batch_size"
            )
