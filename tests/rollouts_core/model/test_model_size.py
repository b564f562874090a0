"""Pins that the size of a model is known from a few bytes of its files, in a folder and on the hub, or said not to be.

Without it a run with a model of the hub would rent a machine that cannot hold it, or wait for a hub that is silent.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from rollouts_core.config import ModelConfig
from rollouts_core.model.model_size import ModelSize, find_model_size
from tests.rollouts_core.data.hub import Hub, serve_hub

REPO = "org/model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that processes started from now on ask, with an empty cache and no token."""
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGINGFACE_"))]:
        monkeypatch.delenv(name)
    with serve_hub() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield served


def files_of(model: ModelConfig, *names: str) -> dict[str, bytes]:
    return {name: (Path(model.path) / name).read_bytes() for name in names}


def in_two_shards(model: ModelConfig) -> dict[str, bytes]:
    tensors = load_file(Path(model.path) / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    index = {"metadata": {}, "weight_map": {name: shard for shard, held in shards.items() for name in held}}
    return {
        **files_of(model, "config.json"),
        "model.safetensors.index.json": json.dumps(index).encode(),
        **{shard: save({name: tensors[name] for name in held}) for shard, held in shards.items()},
    }


def size_on_hub(**settings: str) -> ModelSize:
    return find_model_size(ModelConfig(path=REPO, **settings), timeout_s=120)


@pytest.mark.slow
def test_a_model_of_the_hub_is_as_large_as_the_same_in_a_folder(base_model: ModelConfig, hub: Hub) -> None:
    hub.commit(REPO, files_of(base_model, "config.json", "model.safetensors"))
    here, there = find_model_size(base_model), size_on_hub()
    assert there.tensors == here.tensors
    assert (there.num_parameters, there.settings, there.problem) == (here.num_parameters, here.settings, "")
    assert there.num_parameters > 0 and 0.9 < there.num_file_bytes / here.num_file_bytes <= 1


@pytest.mark.slow
def test_no_weights_of_a_large_model_are_fetched(hub: Hub, base_model: ModelConfig) -> None:
    hub.commit(REPO, {**files_of(base_model, "config.json"), "model.safetensors": save({"w": torch.zeros(1 << 20)})})
    assert size_on_hub().num_parameters == 1 << 20
    assert hub.num_sent_bytes < 200_000


@pytest.mark.slow
def test_shards_are_added_up_at_the_commit_that_is_named(base_model: ModelConfig, hub: Hub) -> None:
    old = hub.commit(REPO, in_two_shards(base_model))
    hub.commit(REPO, {**files_of(base_model, "config.json"), "model.safetensors": save({"w": torch.zeros(3, 4)})})
    assert size_on_hub(revision=old).num_parameters == find_model_size(base_model).num_parameters
    assert size_on_hub().num_parameters == 12


@pytest.mark.slow
def test_what_is_gated_is_known_with_the_token(
    base_model: ModelConfig, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.commit(REPO, files_of(base_model, "config.json", "model.safetensors"))
    hub.gated.add(REPO)
    refused = size_on_hub()
    assert not refused.tensors and "GatedRepoError: 401" in refused.problem
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert size_on_hub().tensors


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["repository", "safetensors", "network"])
def test_what_the_hub_cannot_tell_is_a_sentence(
    base_model: ModelConfig, hub: Hub, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "safetensors":
        hub.commit(REPO, {**files_of(base_model, "config.json"), "pytorch_model.bin": b"pickled"})
    if missing == "network":
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    said = size_on_hub()
    assert not said.tensors and said.num_parameters == 0
    reason = {
        "repository": "RepositoryNotFoundError",
        "safetensors": "not a safetensors repo",
        "network": "the hub could not tell the size",
    }[missing]
    sentence = said.describe_problem(REPO)
    assert reason in sentence and "\n" not in sentence and sentence.startswith("model org/model: its size is unknown")


@pytest.mark.slow
def test_offline_only_the_cache_is_asked(
    base_model: ModelConfig, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.commit(REPO, files_of(base_model, "config.json", "model.safetensors"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert size_on_hub().problem and hub.requests == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    fetch = f"""from huggingface_hub import hf_hub_download
for name in ("config.json", "model.safetensors"):
    hf_hub_download({REPO!r}, name)"""
    subprocess.run([sys.executable, "-c", fetch], check=True, capture_output=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert size_on_hub().num_parameters == find_model_size(base_model).num_parameters


@pytest.mark.slow
def test_a_silent_hub_is_not_waited_for(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        said = find_model_size(ModelConfig(path=REPO), timeout_s=3)
    assert said.problem == "the hub did not answer within 3 s"


@pytest.mark.slow
def test_what_is_no_name_is_not_asked_for(hub: Hub, tmp_path: Path) -> None:
    for path in (str(tmp_path / "nothing"), "s3://bucket/model", "./model"):
        assert find_model_size(ModelConfig(path=path)).problem == "it is neither a folder nor a name on the hub"


def test_weights_that_lie_there_twice_count_once_and_damaged_files_not_at_all(
    base_model: ModelConfig, tmp_path: Path
) -> None:
    original = Path(base_model.path) / "model.safetensors"
    num_parameters = find_model_size(base_model).num_parameters
    for name in ("model-00001-of-00001.safetensors", "consolidated.safetensors"):
        (tmp_path / name).write_bytes(original.read_bytes())
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors", "b": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = ModelConfig(path=str(tmp_path))
    assert find_model_size(model).num_parameters == num_parameters
    for damage in (b"version https://git-lfs.github.com/spec/v1\n", b"", original.read_bytes()[:100]):
        (tmp_path / "model-00001-of-00001.safetensors").write_bytes(damage)
        assert find_model_size(model).problem.startswith("its files cannot be read")


def test_a_head_that_is_the_embedding_counts_once(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": torch.zeros(10, 4), "lm_head.weight": torch.zeros(10, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    for is_tied, num_parameters in ((True, 40), (False, 80)):
        (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": is_tied}))
        assert find_model_size(ModelConfig(path=str(tmp_path))).num_parameters == num_parameters
