"""`model`: which checkpoint training starts from.

Not here: how it computes while it is trained (policy.py).
"""

from __future__ import annotations

from pydantic import Field

from rollouts_core.config.record import PLACEMENT, Record


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
