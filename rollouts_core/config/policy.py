"""`training.sft.policy` and `training.rl.policy`: how the model computes while it is trained.

Not here: which model it is (model.py), the policy itself (rollouts_core/model).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field

from rollouts_core.config.record import PLACEMENT, Finite, Record


class LoRAConfig(Record):
    """Low-rank adapters: only they are trained. Checkpoints hold the weights with the adapters merged in, in float32,
    and the adapters as a folder for PEFT. They need pip install 'rollouts[lora]'."""

    rank: int = Field(default=0, ge=0)
    """Rank of the adapters; 0 trains all weights instead."""
    alpha: Annotated[Finite, Field(gt=0)] = 32.0
    """Adapters are scaled by alpha / rank."""
    dropout: Annotated[Finite, Field(ge=0, lt=1)] = 0.0
    """Share of the adapters' inputs that is dropped while training."""
    target_modules: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of the linear layers that get an adapter, or ends of their names: q_proj, mlp.up_proj. Empty takes all but
    the output head, the experts of a mixture, and what Mamba's kernels read past an adapter."""


class PolicyConfig(Record):
    """How the model computes while it is trained."""

    backend: Literal["pytorch", "jax"] = "pytorch"
    """The library that trains. Both give the same losses up to rounding; jax knows the Llama, Qwen2 and Qwen3 families
    and needs pip install 'rollouts[jax]'."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Number format of the matrix products. Trained weights and optimizer state stay float32; with LoRA the frozen
    weights take this format too."""
    attention: Literal["auto", "sdpa", "eager", "varlen", "flex", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention kernel. auto takes a kernel without a mask on a GPU in bfloat16: varlen, which is torch's own, else an
    installed flash-attn; everywhere else it is sdpa. sdpa and eager hide the other samples of a packed row by a mask of
    its length squared; models that cap attention scores (Gemma 2) compute with eager instead of sdpa. flex hides them
    by a mask of blocks; it needs a GPU, bfloat16 and some minutes to compile, and no GPU has tried it yet."""
    activation_checkpointing: bool = Field(default=False, json_schema_extra=PLACEMENT)
    """Compute the layers' activations again in the backward pass: less memory, about a third more time."""
    compile: bool = False
    """Compile the layers with torch.compile: a slow start, then faster steps on most GPUs."""
    lora: LoRAConfig = LoRAConfig()
    """Low-rank adapters."""

    @property
    def takes_masks(self) -> bool:
        """Whether the attention kernel hides samples from each other by a mask; what "auto" stands for is not known."""
        return self.takes_dense_masks or self.attention == "flex"

    @property
    def takes_dense_masks(self) -> bool:
        """Whether that mask has a number for each pair of a row's positions."""
        return self.attention in ("auto", "sdpa", "eager")

    def without_places(self) -> Self:
        """Itself with "auto" instead of sdpa and varlen: it may stand for either, and they differ by rounding alone."""
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
            yield f'backend "jax" has no {name} setting: leave it out, or set backend = "pytorch"'


PLAIN_POLICY = PolicyConfig()
"""Full training in float32."""
