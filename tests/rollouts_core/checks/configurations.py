"""Configurations and files of rows that the tests of checks share."""

import json
from pathlib import Path
from typing import Any

from rollouts_core.config import Config, RolloutConfig

SUM = {"prompt": "1+1=?", "completion": "2"}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """A JSONL file of these rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_config(sft: object, *, streaming: bool = False, **training: Any) -> Config:
    """A configuration that is about demonstrations."""
    return Config.model_validate(
        {
            "mode": "sft",
            "model": {"path": "m"},
            "data": {"sft": sft, "streaming": streaming, "selection": "s", "heldout": "h"},
            "training": {"sft": {"max_length": 20, "batch_size": 2, "micro_batch_size": 1, **training}},
        }
    )


def with_rollout(**rollout: Any) -> Config:
    """A configuration that is about grading."""
    return make_config("sft.jsonl").model_copy(update={"rollout": RolloutConfig(**rollout)})
