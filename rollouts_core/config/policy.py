"""`training.sft.policy` and `training.rl.policy`: how training computes the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field

from rollouts_core.config.record import PLACEMENT, Finite, Record


class LoRAConfig(Record):
    """Low-rank adapters.

    If `rank` is set, only the adapters are trained. Checkpoints contain the merged weights in float32, and a folder
    with the adapters for PEFT. Needs pip install 'rollouts[lora]'.
    """

    rank: int = Field(default=0, ge=0)
    """Rank of the adapters. 0: no adapters; all weights are trained."""
    alpha: Annotated[Finite, Field(gt=0)] = 32.0
    """The output of an adapter is multiplied by alpha / rank."""
    dropout: Annotated[Finite, Field(ge=0, lt=1)] = 0.0
    """Dropout of the adapters' inputs in training: probability that a value is set to 0."""
    target_modules: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Linear layers that get adapters, by their names or the ends of their names: q_proj, mlp.up_proj. Empty: all
    linear layers except the output head, the experts of a mixture-of-experts model, and layers whose weights Mamba's
    kernels read directly."""


class PolicyConfig(Record):
    """How training computes the model."""

    backend: Literal["pytorch", "jax"] = "pytorch"
    """The library that training uses. Both libraries give the same losses up to rounding. jax supports only models of
    the Llama, Qwen2 and Qwen3 families, and needs pip install 'rollouts[jax]'."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Number format of matrix products. Trained weights and optimizer state are always float32. With LoRA, the frozen
    weights also have this format."""
    attention: Literal["auto", "sdpa", "eager", "varlen", "flex", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention kernel. auto: on a GPU in bfloat16, a kernel without masks (varlen, part of torch, or an installed
    flash-attn); otherwise sdpa. sdpa and eager separate the samples of a packed row with a mask whose size is the row's
    length squared. Models that cap attention scores (Gemma 2) use eager in place of sdpa. flex uses a mask of blocks;
    it needs a GPU, bfloat16 and some minutes to compile, and has not been tested on a GPU yet."""
    activation_checkpointing: bool = Field(default=False, json_schema_extra=PLACEMENT)
    """Compute activations again in the backward pass instead of storing them. Recomputing needs less memory and about a
    third more time."""
    on_out_of_memory: Literal["use_less", "stop"] = Field(default="use_less", json_schema_extra=PLACEMENT)
    """Action if a training step runs out of GPU memory. use_less: restart from the last checkpoint with smaller
    micro-batches, or with activation_checkpointing if a micro-batch has only one row. stop: end the run with an
    error."""
    compile: bool = False
    """Compile the layers with torch.compile. The training starts more slowly, but its steps are faster on most GPUs."""
    lora: LoRAConfig = LoRAConfig()
    """Low-rank adapters (LoRA)."""

    @property
    def takes_masks(self) -> bool:
        """True if the attention kernel separates samples with a mask. "auto" counts as a kernel with a mask."""
        return self.takes_dense_masks or self.attention == "flex"

    @property
    def takes_dense_masks(self) -> bool:
        """True if the attention kernel takes a mask with one number for each pair of positions in a row."""
        return self.attention in ("auto", "sdpa", "eager")

    @property
    def needs_gpu(self) -> bool:
        """True if the attention kernel needs a GPU."""
        return self.attention not in ("auto", "sdpa", "eager")

    def without_places(self) -> Self:
        """Replace sdpa and varlen by "auto", because "auto" chooses between these kernels, and their results differ
        only by rounding.
        """
        return self.model_copy(update={"attention": "auto"}) if self.attention in ("sdpa", "varlen") else self

    def _broken_rules(self) -> Iterator[str]:
        if not self.takes_dense_masks and self.precision != "bfloat16":
            yield f'attention "{self.attention}" needs precision = "bfloat16"'
        wanted = {
            "lora": self.lora.rank > 0,
            "compile": self.compile,
            "attention": self.attention not in ("auto", "sdpa"),
        }
        for name in [name for name, is_set in wanted.items() if is_set and self.backend == "jax"]:
            yield f'backend "jax" has no {name} setting: remove it, or set backend = "pytorch"'


PLAIN_POLICY = PolicyConfig()
"""Trains all weights in float32."""
