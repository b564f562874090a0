"""What attacks share: a tiny model with its tokenizer, and files of another user."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from rollouts_core.config import ModelConfig
from rollouts_core.model.loading import load_tokenizer
from rollouts_core.quickstart import write_quickstart_files
from tests.kit.excuses import ExcusedSkip
from tests.rollouts_core.make import TINY_SIZE

NOBODY = 65534


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """An untrained tiny model with its tokenizer and chat template."""
    write_quickstart_files(tmp_path / "files", size=TINY_SIZE)
    return tmp_path / "files" / "base_model"


@pytest.fixture
def tokenizer(model_dir: Path) -> PreTrainedTokenizerBase:
    """One token per character and one per role."""
    return load_tokenizer(ModelConfig(path=str(model_dir)))


@pytest.fixture
def give_away() -> Callable[[Path], None]:
    """Makes another user the owner of a file, folder or link."""

    def give(path: Path) -> None:
        if os.geteuid() != 0:
            raise ExcusedSkip("only root gives files to another user")
        os.lchown(path, NOBODY, NOBODY)

    return give
