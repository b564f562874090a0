"""`training.sft.policy` and `training.rl.policy`: how the model computes in training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field

from rollouts_core.config.record import PLACEMENT, Finite, Record


class LoRAConfig(Record):
    """Low-rank adapters, the only trained weights if `rank` is set. Checkpoints contain merged weights in float32, and
    the adapters as a folder for PEFT. Needs pip install 'rollouts[lora]'."""

    rank: int = Field(default=0, ge=0)
    """Rank of the adapters; 0 trains all weights instead."""
    alpha: Annotated[Finite, Field(gt=0)] = 32.0
    """Adapters are scaled by alpha / rank."""
    dropout: Annotated[Finite, Field(ge=0, lt=1)] = 0.0
    """Share of the adapters' inputs that is dropped in training."""
    target_modules: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of the linear layers to adapt, or ends of their names: q_proj, mlp.up_proj. Empty: all except the output
    head, the experts of a mixture, and layers that Mamba's kernels read directly."""


class PolicyConfig(Record):
    """How the model computes in training."""

    backend: Literal["pytorch", "jax"] = "pytorch"
    """The training library. Both libraries give the same losses up to rounding. jax supports the Llama, Qwen2 and Qwen3
    families and needs pip install 'rollouts[jax]'."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Number format of matrix products. Trained weights and optimizer state stay float32; with LoRA the frozen weights
    use this format too."""
    attention: Literal["auto", "sdpa", "eager", "varlen", "flex", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention kernel. auto: on a GPU in bfloat16 a kernel without masks (varlen, part of torch, or an installed
    flash-attn), else sdpa. sdpa and eager separate the samples of a packed row with a mask of its length squared;
    models that cap attention scores (Gemma 2) use eager instead of sdpa. flex uses a mask of blocks. It needs a GPU,
    bfloat16 and some minutes to compile, and has not been tested on a GPU yet."""
    activation_checkpointing: bool = Field(default=False, json_schema_extra=PLACEMENT)
    """Recompute activations in the backward pass: less memory, about a third more time."""
    on_out_of_memory: Literal["use_less", "stop"] = Field(default="use_less", json_schema_extra=PLACEMENT)
    """Action if a training step runs out of GPU memory. use_less: restart from the last checkpoint with smaller
    micro-batches or, at one row each, with activation_checkpointing. stop: end the run with an error."""
    compile: bool = False
    """Compile the layers with torch.compile: a slow start, then faster steps on most GPUs."""
    lora: LoRAConfig = LoRAConfig()
    """Low-rank adapters."""

    @property
    def takes_masks(self) -> bool:
        """True if the kernel separates samples with a mask; "auto" counts as such a kernel."""
        return self.takes_dense_masks or self.attention == "flex"

    @property
    def takes_dense_masks(self) -> bool:
        """True if the kernel takes a mask with a number for each pair of positions in a row."""
        return self.attention in ("auto", "sdpa", "eager")

    @property
    def needs_gpu(self) -> bool:
        """True if the kernel needs a GPU."""
        return self.attention not in ("auto", "sdpa", "eager")

    def without_places(self) -> Self:
        """Replace sdpa and varlen by "auto", which chooses between them: their results differ only by rounding."""
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
"""Training of all weights in float32."""
