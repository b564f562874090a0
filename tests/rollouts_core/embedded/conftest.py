"""Models and decoders that the tests of this folder share; saving and loading them costs more than using them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.scheduler import Scheduler
from tests.rollouts_core.embedded.scripted_model import NAME, STORY, served, write_scripted_model
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


@pytest.fixture(scope="module")
def story_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("story"), STORY)


@pytest.fixture(scope="module")
def story(story_dir: Path) -> Iterator[tuple[str, Scheduler]]:
    with served(story_dir, name=NAME) as (url, scheduler):
        yield url, scheduler


@pytest.fixture
def says(tmp_path: Path) -> Callable[..., Any]:
    def serve(script: list[str], template: str = "") -> Any:
        return served(write_scripted_model(tmp_path / "said", script, template=template), name=NAME)

    return serve
