"""Pins which published directories stay: those that an engine may be reading, and no other.

Without it a version is gone as soon as it was published, or the weights of every step stay on the disk.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from rollouts_core.engines import vllm
from rollouts_core.engines.content import version_of_copy
from rollouts_core.engines.weight_sync import remove_old_versions


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
