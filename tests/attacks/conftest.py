"""What attacks on models and their text share."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from rollouts_core.config import ModelConfig
from rollouts_core.model.loading import load_tokenizer
from rollouts_core.quickstart import write_quickstart_files
from tests.rollouts_core.make import TINY_SIZE


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """An untrained tiny model with its tokenizer and chat template."""
    write_quickstart_files(tmp_path / "files", size=TINY_SIZE)
    return tmp_path / "files" / "base_model"


@pytest.fixture
def tokenizer(model_dir: Path) -> PreTrainedTokenizerBase:
    """One token per character and one per role."""
    return load_tokenizer(ModelConfig(path=str(model_dir)))
