"""`training.sft`: supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from rollouts_core.config.optim import OptimConfig
from rollouts_core.config.policy import PLAIN_POLICY, PolicyConfig
from rollouts_core.config.record import PLACEMENT, SELECTION, Record
from rollouts_core.config.roll_back import roll_back_rules

StopRule = Literal["loss_risen", "gradient_spikes"]
"""Names of the rules of SFT in warning_rules.py."""


class SFTTrainingConfig(Record):
    """Supervised fine-tuning on demonstrations."""

    num_steps: int = Field(default=1000, ge=1, json_schema_extra=SELECTION)
    """Number of optimizer steps."""
    batch_size: int = Field(default=8, ge=1)
    """Number of rows per step. With packing, a row contains as many demonstrations as fit into `max_length`."""
    micro_batch_size: int = Field(default=8, ge=1, json_schema_extra=PLACEMENT)
    """Number of rows per forward and backward pass of a device. Smaller values need less memory and give the same
    step."""
    max_length: int = Field(default=2048, ge=2)
    """Largest number of tokens per row."""
    on_overlong: Literal["cut", "cut_or_drop", "drop"] = "cut"
    """Treatment of demonstrations of more than `max_length` tokens. cut: truncate them; if no trained token is left,
    this is an error. cut_or_drop: truncate them, and drop those in which no trained token is left. drop: drop them."""
    packing: bool = True
    """Fill each row with several demonstrations, without attention between them."""
    train_on: Literal["last_assistant", "all_assistant", "everything"] = "all_assistant"
    """Tokens that are trained on. last_assistant: tokens of the last assistant turn. all_assistant: tokens of all
    assistant turns. everything: all tokens of the conversation."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of demonstrations, of the initial adapters and of dropout."""
    eval_every: int = Field(default=100, ge=1, json_schema_extra=SELECTION)
    """Number of steps from one evaluation of the loss on `data.sft_eval` to the next."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Action if the loss or a gradient is NaN or infinite: end the run, or skip the update and count it."""
    max_skipped_updates: int = Field(default=10, ge=0, json_schema_extra=PLACEMENT)
    """Largest number of skipped updates in a row; after one more, the run ends. 0: no limit."""
    stop_on: tuple[StopRule, ...] = Field(default=(), json_schema_extra=PLACEMENT)
    """Names of warnings that end the run with a checkpoint. All other warnings are only shown. A resumed run forgets
    the measurements of earlier attempts."""
    roll_back_on: tuple[StopRule, ...] = Field(default=(), json_schema_extra=SELECTION)
    """Names of warnings that end the training and make its best checkpoint the only result. The run continues with this
    checkpoint. Needs `keep_best`, and a `checkpoint_every` below `num_steps`. A resumed run forgets the measurements of
    earlier attempts."""
    log_every: int = Field(default=10, ge=1, json_schema_extra=PLACEMENT)
    """Number of steps from one line of metrics to the next."""
    checkpoint_every: int = Field(default=200, ge=1, json_schema_extra=SELECTION)
    """Number of steps from one checkpoint to the next. Selection chooses among these checkpoints and the last one."""
    keep_checkpoints: int = Field(default=10, ge=1, json_schema_extra=SELECTION)
    """Number of newest checkpoints that are kept on disk."""
    keep_best: int = Field(default=0, ge=0, json_schema_extra=SELECTION)
    """Number of best checkpoints that are kept besides the newest ones. Checkpoints are ranked by their loss on
    `data.sft_eval`. Needs `data.sft_eval`, and an `eval_every` that divides `checkpoint_every`."""
    resume_from: str = Field(default="", json_schema_extra=PLACEMENT)
    """Checkpoint of another run with the same settings from which to resume, for example with a larger num_steps. The
    value is the checkpoint's folder, or the folder of its stage for the newest checkpoint."""
    allow_changed: tuple[str, ...] = Field(default=(), json_schema_extra=PLACEMENT)
    """Settings that may differ between this run and the checkpoint that it resumes from. Use the names in the error
    message."""
    policy: PolicyConfig = PLAIN_POLICY
    """Precision, adapters and settings that save memory."""
    optim: OptimConfig = OptimConfig()
    """Optimizer of SFT."""

    @property
    def num_optim_steps(self) -> int:
        """Number of optimizer updates of the whole stage."""
        return self.num_steps

    def _broken_rules(self) -> Iterator[str]:
        yield from roll_back_rules(self)
        most = min(self.micro_batch_size, self.batch_size)
        if self.batch_size % most:
            fitting = max(size for size in range(1, most) if self.batch_size % size == 0)
            yield (
                f"batch_size {self.batch_size} is not a multiple of micro_batch_size {self.micro_batch_size}: use "
                f"micro_batch_size {fitting}, which gives the same step, or another batch_size"
            )
