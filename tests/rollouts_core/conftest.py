"""What the tests of the training core share: one torch thread, no network, and tiny quickstart files made once."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rollouts_core.config import ModelConfig
from rollouts_core.model.loading import load_hf_model, load_tokenizer
from rollouts_core.quickstart import write_quickstart_files
from tests.rollouts_core.make import TINY_SIZE
from tests.rollouts_core.scripted_service import Answer, Service

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def quickstart_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sft.jsonl, prompts.jsonl, selection.jsonl, heldout.jsonl and base_model/ of the tiny size; read only."""
    directory = tmp_path_factory.mktemp("quickstart") / "files"
    write_quickstart_files(directory, size=TINY_SIZE)
    return directory


@pytest.fixture(scope="session")
def base_model(quickstart_dir: Path) -> ModelConfig:
    """The untrained tiny Qwen3 as a model to start from."""
    return ModelConfig(path=str(quickstart_dir / "base_model"))


@pytest.fixture(scope="session")
def tokenizer(base_model: ModelConfig) -> PreTrainedTokenizerBase:
    """One token per character and one per role; read only."""
    return load_tokenizer(base_model)


@pytest.fixture
def tiny_model(base_model: ModelConfig) -> PreTrainedModel:
    """A fresh copy of the untrained tiny Qwen3."""
    return load_hf_model(base_model)


@pytest.fixture
def byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token per byte, so that any text can be written; a test gives it a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


@pytest.fixture
def serve() -> Iterator[Callable[..., Service]]:
    """Starts a service for each function that it is called with, with pages for GET; they end with the test."""
    services: list[Service] = []

    def start(answer: Callable[[dict[str, Any]], Answer], pages: dict[str, Any] | None = None) -> Service:
        services.append(Service(answer, pages))
        threading.Thread(target=services[-1].server.serve_forever, args=(0.01,), daemon=True).start()
        return services[-1]

    yield start
    for service in services:
        service.server.shutdown()
        service.server.server_close()
