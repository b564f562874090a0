"""Models and decoders that the tests of this folder share; saving and loading them costs more than using them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rollouts_core.embedded.decoder import Decoder
from tests.rollouts_core.embedded.tiny_models import make_model, save_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return make_model(seed=0)


@pytest.fixture(scope="session")
def model_dir(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def other_model() -> PreTrainedModel:
    """The same shape with other weights."""
    return make_model(seed=1)


@pytest.fixture(scope="session")
def other_dir(other_model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(other_model, tmp_path_factory.mktemp("other"))


@pytest.fixture
def decoder(model_dir: Path) -> Decoder:
    return Decoder(model_dir, num_slots=8)
