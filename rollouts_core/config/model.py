"""`model`: which checkpoint training starts from.

Not here: how it computes while it is trained (policy.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, JsonValue, WithJsonSchema, field_validator

from rollouts_core.config.record import PLACEMENT, Record

RESERVED_NAMES = ("messages", "tools", "documents", "add_generation_prompt")
"""Names by which chat templates read what is written, not how."""


class ModelConfig(Record):
    """The model that training starts from."""

    path: str = Field(min_length=1, json_schema_extra=PLACEMENT)
    """Folder with a Hugging Face checkpoint (config.json, weights, tokenizer); with `evaluation.metric = "loss"`, where
    no engine serves it, or in Python, also a hub id. In a pipeline also the URL of such a folder, or of what a run
    published: s3://bucket/folder/run."""
    revision: str = ""
    """Commit or tag of a hub model; empty takes the default branch."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Leave off unless you have read that code."""
    allow_pickle: bool = False
    """Start from weights that lie in pickled files alone (pytorch_model.bin), read without running what they hold.
    Checkpoints of the training are safetensors; the embedded engine serves nothing else."""
    chat_template_kwargs: Annotated[dict[str, JsonValue], WithJsonSchema({"type": "object"})] = Field(
        default_factory=dict
    )
    """Values for the model's chat template, as in `{ enable_thinking = false }`. They count in SFT, RL and evaluation,
    and are written into the chat template of every checkpoint, so that whoever serves it renders the same prompts."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_names(cls, values: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for name in values:
            if not name.isidentifier() or name in RESERVED_NAMES:
                raise ValueError(
                    f"{name!r} is no value that a chat template takes: expected a name such as enable_thinking, and "
                    f"none of {', '.join(RESERVED_NAMES)}"
                )
        return values

    def at(self, path: str | Path) -> Self:
        """The settings of this model for a checkpoint that was trained from it."""
        kept = {name: getattr(self, name) for name in ("trust_remote_code", "chat_template_kwargs")}
        return type(self)(path=str(path), **kept)
