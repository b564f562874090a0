"""Pins what a training says of its machine. Without it a report could name the commit of another branch, or none."""

import subprocess
from pathlib import Path

import pytest

from rollouts_core.system.provenance import describe_process, find_commit, list_gpus


def git(*arguments: str | Path) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(["git", *author, *map(str, arguments)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_is_that_of_the_checkout_also_of_a_second_one_and_of_packed_refs(tmp_path: Path) -> None:
    assert find_commit(tmp_path) == ""
    first, second = tmp_path / "first", tmp_path / "second"
    git("init", "-q", first)
    git("-C", first, "commit", "-q", "--allow-empty", "-m", "one")
    git("-C", first, "worktree", "add", "-q", second)
    git("-C", second, "commit", "-q", "--allow-empty", "-m", "two")
    heads = [git("-C", folder, "rev-parse", "HEAD") for folder in (first, second)]
    assert [find_commit(folder) for folder in (first, second)] == heads and heads[0] != heads[1]
    git("-C", first, "pack-refs", "--all")
    assert [find_commit(folder) for folder in (first, second)] == heads
    git("-C", first, "checkout", "-q", "--detach")
    assert find_commit(first) == heads[0]


def test_a_process_names_its_machine_and_versions() -> None:
    facts = describe_process()
    assert {"host", "system", "processors", "versions"} <= facts.keys()
    assert {"python", "torch", "rollouts"} <= facts["versions"].keys()


def test_gpus_are_listed_where_there_are_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list_gpus() == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho NVIDIA H200\necho NVIDIA H200\n")
    program.chmod(0o755)
    assert list_gpus() == ["NVIDIA H200"] * 2
    program.write_text("#!/bin/sh\nexit 9\n")
    assert list_gpus() == []
