"""Pins which published directories stay, and that the event loop reads no weights.

Without it a version is gone as soon as it was published, the weights of every step stay on the disk, or everything
stands still while a file is read.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollouts_core.algorithms.loss import create_cross_entropy_loss
from rollouts_core.backends.pytorch import create_pytorch_backend
from rollouts_core.config import ModelConfig, OptimConfig
from rollouts_core.engines import PublishTarget, publish_weights, vllm
from rollouts_core.engines.transfer import weight_sync
from rollouts_core.engines.transfer.checksums import version_of_copy
from rollouts_core.engines.transfer.weight_sync import EarlierVersion, remove_old_versions
from tests.rollouts_core.served_engine import served_engine


def make_folders(folder: Path, *names: str) -> None:
    """Folders each of which is a second younger than the one before."""
    for age, name in enumerate(names):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")
        os.utime(folder / name, (1_000_000 + age, 1_000_000 + age))


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_newest_versions_stay_and_no_copy_of_them_counts_as_one(tmp_path: Path) -> None:
    """Two engines are given p-2 while it is published: each reads a copy of it, which consists of links to it."""
    make_folders(tmp_path, "p-0", "p-1", "p-2", ".p-2-untied-a", ".p-2-untied-b")
    remove_old_versions(tmp_path, newest="p-2")
    assert names_in(tmp_path) == {"p-1", "p-2", ".p-2-untied-a", ".p-2-untied-b"}


def test_what_engines_serve_stays_after_the_clock_was_set_back(tmp_path: Path) -> None:
    """An engine that is started anew is given it again."""
    make_folders(tmp_path, "p-3", "p-1", "p-2")
    remove_old_versions(tmp_path, newest="p-3")
    assert names_in(tmp_path) == {"p-2", "p-3"}


def test_what_a_killed_trainer_left_goes(tmp_path: Path) -> None:
    make_folders(tmp_path, "p-1", ".p-1-untied-a", "p-2", "p-3", ".p-4.partial-a", ".p-2-untied-b")
    remove_old_versions(tmp_path, newest="p-3")
    assert names_in(tmp_path) == {"p-2", ".p-2-untied-b", "p-3"}


def test_a_copy_that_vllm_is_given_is_known_for_one_of_its_version(tmp_path: Path, quickstart_dir: Path) -> None:
    version = tmp_path / "p-2"
    version.mkdir()
    base = quickstart_dir / "base_model"
    (version / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes())
    config = json.loads((base / "config.json").read_text())
    (version / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))

    async def copy() -> str:
        async with vllm._untied(version) as copied:
            assert copied.parent == tmp_path
            return version_of_copy(copied)

    assert asyncio.run(copy()) == "p-2"
    assert version_of_copy(version) == ""


def test_the_weights_of_an_earlier_version_are_read_beside_the_event_loop(
    base_model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def load(file: Path) -> dict[str, Tensor]:
        threads.append(threading.current_thread())
        return load_file(file)

    monkeypatch.setattr(weight_sync, "load_file", load)
    loss_fn, config = create_cross_entropy_loss(), Path(base_model.path) / "config.json"
    backend = create_pytorch_backend(base_model, OptimConfig(), loss_fn, num_steps=1, device="cpu")
    earlier = EarlierVersion(number=3, file=tmp_path / "served.safetensors")
    save_file(asyncio.run(backend.get_weights().result()), earlier.file)
    target = PublishTarget(weights_dir=tmp_path / "weights", model_config=config, prefix="run")
    with served_engine(Path(base_model.path)) as (engine, _):
        assert asyncio.run(publish_weights(backend, [engine], target, earlier=earlier)) == "run-3"
    [thread] = threads
    assert thread is not threading.main_thread()
