"""`model`: the model that training starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, JsonValue, WithJsonSchema, field_validator

from rollouts_core.config.record import PLACEMENT, Record

RESERVED_NAMES = ("messages", "tools", "documents", "add_generation_prompt")
"""Names that chat templates use for the conversation itself, so settings must not use them."""


class ModelConfig(Record):
    """The model that training starts from."""

    path: str = Field(min_length=1, json_schema_extra=PLACEMENT)
    """Folder with a Hugging Face checkpoint (config.json, weights, tokenizer). Pipelines also accept the URL of such a
    folder or of a published run: s3://bucket/folder/run. A hub id is accepted in Python, and with `evaluation.metric =
    "loss"`, which needs no engine."""
    revision: str = ""
    """Commit or tag of a hub model. Empty: the newest commit of the default branch."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Turn this on only after reading that code."""
    allow_pickle: bool = False
    """Accept a model that has only pickled weights (pytorch_model.bin). Pickled weights are read without running code
    from the file. Checkpoints of a training are always safetensors. The embedded engine serves only safetensors."""
    chat_template_kwargs: Annotated[dict[str, JsonValue], WithJsonSchema({"type": "object"})] = Field(
        default_factory=dict
    )
    """Values for the model's chat template, as in `{ enable_thinking = false }`. SFT, RL and evaluation use them. The
    values are also written into the chat template of every checkpoint, so that a server renders the same prompts."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_names(cls, values: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for name in values:
            if not name.isidentifier() or name in RESERVED_NAMES:
                raise ValueError(
                    f"{name!r} cannot be set for a chat template: use a name such as enable_thinking, but not one "
                    f"of {', '.join(RESERVED_NAMES)}"
                )
        return values

    def at(self, path: str | Path) -> Self:
        """The settings of a checkpoint that was trained from this model."""
        kept = {name: getattr(self, name) for name in ("trust_remote_code", "chat_template_kwargs")}
        return type(self)(path=str(path), **kept)
