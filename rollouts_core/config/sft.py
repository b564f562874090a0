"""`training.sft`: supervised fine-tuning.

Not here: its demonstrations (data.py), optimizer (optim.py) and precision (policy.py).
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rollouts_core.config.optim import OptimConfig
from rollouts_core.config.policy import PLAIN_POLICY, PolicyConfig
from rollouts_core.config.record import PLACEMENT, SELECTION, Record


class SFTTrainingConfig(Record):
    """Supervised fine-tuning on demonstrations."""

    num_steps: int = Field(default=1000, ge=1, json_schema_extra=SELECTION)
    """Optimizer steps."""
    batch_size: int = Field(default=8, ge=1)
    """Rows per step; with packing a row holds as many demonstrations as fit into `max_length`."""
    micro_batch_size: int = Field(default=8, ge=1, json_schema_extra=PLACEMENT)
    """Rows per forward and backward pass of a device; smaller needs less memory and gives the same step."""
    max_length: int = Field(default=2048, ge=2)
    """Tokens per row."""
    on_overlong: Literal["cut", "cut_or_drop", "drop"] = "cut"
    """Demonstrations of more than `max_length` tokens: cut them, where cutting away all that is trained on is an
    error; cut them, and leave out those; or leave out all of them."""
    packing: bool = True
    """Fill rows with several demonstrations, which do not see each other."""
    train_on: Literal["last_assistant", "all_assistant", "everything"] = "all_assistant"
    """Which tokens enter the loss."""
    seed: int = Field(default=0, ge=0)
    """Order of the demonstrations, new adapters, and dropout."""
    eval_every: int = Field(default=100, ge=1, json_schema_extra=SELECTION)
    """Steps between two evaluations of the loss on `data.sft_eval`."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a loss or gradient that is no finite number does: end the run, or skip its update and count it."""
    max_skipped_updates: int = Field(default=10, ge=0, json_schema_extra=PLACEMENT)
    """How many updates in a row may be skipped for that before the run ends; 0 sets no limit."""
    log_every: int = Field(default=10, ge=1, json_schema_extra=PLACEMENT)
    """Steps between two lines of metrics."""
    checkpoint_every: int = Field(default=200, ge=1, json_schema_extra=SELECTION)
    """Steps between two checkpoints; selection chooses among them and the last one."""
    keep_checkpoints: int = Field(default=10, ge=1, json_schema_extra=SELECTION)
    """How many checkpoints stay on disk, the newest ones."""
    keep_best: int = Field(default=0, ge=0, json_schema_extra=SELECTION)
    """How many checkpoints stay besides those because they were the best: by their loss on `data.sft_eval`, or without
    such rows by the training loss since the checkpoint before. With `data.sft_eval`, `eval_every` must divide
    `checkpoint_every`."""
    resume_from: str = Field(default="", json_schema_extra=PLACEMENT)
    """Checkpoint of another run of the same settings to go on from, for instance with a larger num_steps: its
    folder, or that of its stage, which means the newest one there."""
    allow_changed: tuple[str, ...] = Field(default=(), json_schema_extra=PLACEMENT)
    """Settings in which a checkpoint that is gone on from may differ, by the names that its refusal lists."""
    policy: PolicyConfig = PLAIN_POLICY
    """Precision, adapters and memory savings."""
    optim: OptimConfig = OptimConfig()
    """Optimizer of this stage."""

    @model_validator(mode="after")
    def _check_micro_batch(self) -> Self:
        most = min(self.micro_batch_size, self.batch_size)
        if self.batch_size % most:
            fitting = max(size for size in range(1, most) if self.batch_size % size == 0)
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of micro_batch_size {self.micro_batch_size}: take "
                f"micro_batch_size {fitting}, which gives the same step, or another batch_size"
            )
        return self
