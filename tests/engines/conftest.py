"""Models and servers that the tests of this folder share: one server of each kind, started once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollouts_core.quickstart import build_character_tokenizer
from tests.engines.servers import Server, serving
from tests.rollouts_core.embedded.tiny_models import make_model

torch.set_num_threads(1)


@dataclass(frozen=True)
class SavedModel:
    """A model in memory, as the oracle, and its directory."""

    model: PreTrainedModel
    directory: Path


def save(model: PreTrainedModel, directory: Path) -> SavedModel:
    """Write a checkpoint with a tokenizer, which vLLM wants."""
    model.save_pretrained(directory)
    build_character_tokenizer().save_pretrained(directory)
    return SavedModel(model, directory)


def make(seed: int, **overrides: Any) -> PreTrainedModel:
    """A tiny random Qwen3 with tied embeddings, the harder case, of sizes that vLLM and SGLang have on a CPU."""
    settings: dict[str, Any] = {  # Any: settings of every type
        "vocab_size": len(build_character_tokenizer()),
        "head_dim": 32,
        "intermediate_size": 64,
        "tie_word_embeddings": True,
    }
    return make_model(seed=seed, **{**settings, **overrides})


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    """What the servers are started with."""
    return save(make(0), tmp_path_factory.mktemp("models") / "start")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    """Other weights of the same shapes."""
    return save(make(1), tmp_path_factory.mktemp("models") / "trained")


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("embedded", marks=pytest.mark.slow),
        pytest.param("sglang", marks=pytest.mark.engine),
        pytest.param("vllm", marks=pytest.mark.engine),
    ],
)
def server(
    request: pytest.FixtureRequest, start: SavedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of each kind."""
    with serving(request.param, start.directory, tmp_path_factory.mktemp(request.param) / "run") as running:
        yield running
