"""Pins the whole way of a dataset of the hub: its commit, its rows, its samples, a training, over real HTTP.

Without it a run could train on rows of another commit than its record names, or fail hours later without a name.
"""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerBase

from rollouts_core.config import DeploymentConfig, ModelConfig, SFTTrainingConfig
from rollouts_core.data.dataset import load_sft_dataset
from rollouts_core.data.rows import digest_path
from rollouts_core.fingerprint import digest_model
from rollouts_core.job import InputDataset, InputModel, SFTJob
from tests.rollouts_core.data.hub import Hub, serve_hub

REPOSITORY = Path(__file__).parents[3]
OLD = [{"prompt": f"{i}+1=?", "completion": f"{i + 1}"} for i in range(6)]
NEW = [{"prompt": f"{i}+2=?", "completion": f"{i + 2}"} for i in range(5)]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as served:
        yield served


def as_jsonl(rows: list[dict[str, str]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_parquet(rows: list[dict[str, str]]) -> bytes:
    buffer = io.BytesIO()
    datasets.Dataset.from_list(rows).to_parquet(buffer)
    return buffer.getvalue()


WRITERS = {"train.jsonl": as_jsonl, "data/train-00000-of-00001.parquet": as_parquet}
"""What a repository may hold, and how it is written."""


def run_python(hub: Hub, cache: Path, *arguments: str, offline: bool = False) -> subprocess.CompletedProcess[str]:
    """A process of its own, because the libraries read the address of the hub when they are imported."""
    modes = {"HF_HUB_OFFLINE": str(int(offline)), "HF_DATASETS_OFFLINE": str(int(offline))}
    environment = {**os.environ, **modes, "HF_ENDPOINT": hub.url, "HF_HOME": str(cache)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120
    )


READ = """
import json, sys
from rollouts_core.config import DatasetConfig, ModelConfig
from rollouts_core.data.dataset import SampleRules, SFTDataset, open_datasets
from rollouts_core.data.rows import resolve_revision
from rollouts_core.errors import DataError
from rollouts_core.model.loading import load_tokenizer

tokenizer = load_tokenizer(ModelConfig(path=sys.argv[1]))

def read(given):
    pinned = given.model_copy(update={"revision": resolve_revision(given.path, given.revision)})
    tables = open_datasets([pinned])
    samples = SFTDataset([pinned], tables, tokenizer, SampleRules(64))
    found = {sample.metadata["row"]: sample.tokens for [sample] in samples.iterate_epoch(0, seed=0)}
    return [pinned.revision, tables[0].digest, [found[row] for row in sorted(found)]]

for dataset in json.loads(sys.argv[2]):
    try:
        print(json.dumps(read(DatasetConfig(**dataset))))
    except DataError as error:
        print(json.dumps([str(error)]))
"""


def read_all(
    hub: Hub, cache: Path, model: ModelConfig, datasets: list[dict[str, str]], *, offline: bool = False
) -> list[list[Any]]:  # Any: JSON
    """Per dataset of the hub its commit, its digest, and the tokens of each row; or the sentence of its error."""
    done = run_python(hub, cache, "-c", READ, model.path, json.dumps(datasets), offline=offline)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def tokens_of(rows: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[list[int]]:
    """The tokens of the same rows in a local file."""
    (folder / "local.jsonl").write_bytes(as_jsonl(rows))
    return [sample.tokens for sample in load_sft_dataset(folder / "local.jsonl", tokenizer, max_length=64)]


@pytest.mark.slow
def test_datasets_of_the_hub_give_the_samples_of_their_rows_at_their_commits(
    hub: Hub, base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    commits = {}
    for repo, (path, write) in zip(("org/lines", "org/table"), WRITERS.items(), strict=True):
        commits[repo] = [hub.commit(repo, {path: write(rows)}) for rows in (OLD, NEW)]
    asked = [{"path": repo, "revision": revision} for repo in commits for revision in (commits[repo][0], "")]
    found = read_all(hub, tmp_path / "cache", base_model, asked)
    for repo, of_old, of_new in zip(commits, found[::2], found[1::2], strict=True):
        old, new = commits[repo]
        assert of_old == [old, digest_path(repo, revision=old), tokens_of(OLD, tokenizer, tmp_path)]
        assert of_new == [new, digest_path(repo, revision=new), tokens_of(NEW, tokenizer, tmp_path)]
        assert any(request.startswith(f"GET /datasets/{repo}/resolve/{old}/") for request in hub.requests)


@pytest.mark.slow
def test_split_subset_and_tag_choose_the_rows(
    hub: Hub, base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    card = (
        "---\nconfigs:\n"
        "- config_name: sums\n  data_files:\n  - split: train\n    path: sums/train.jsonl\n"
        "  - split: test\n    path: sums/test.jsonl\n"
        "- config_name: other\n  data_files: other/*.jsonl\n"
        "- config_name: below\n  data_files: below.json\n  field: rows\n---\n"
    )
    below = json.dumps({"version": 1, "rows": OLD[:3]}).encode()
    files = {
        "below.json": below,
        "README.md": card.encode(),
        "other/train.jsonl": as_jsonl(NEW[:1]),
        "sums/test.jsonl": as_jsonl(OLD[:2]),
    }
    hub.commit("org/name", {**files, "sums/train.jsonl": as_jsonl(OLD)}, ref="v1.0")
    hub.commit("org/name", {**files, "sums/train.jsonl": as_jsonl(NEW)})
    expected = [
        ({"subset": "sums", "revision": "v1.0"}, OLD),
        ({"subset": "sums"}, NEW),
        ({"subset": "sums", "split": "test"}, OLD[:2]),
        ({"subset": "other"}, NEW[:1]),
        ({"subset": "below"}, OLD[:3]),
    ]
    asked = [{"path": "org/name", **dataset} for dataset, _ in expected]
    found = read_all(hub, tmp_path / "cache", base_model, asked)
    assert [tokens for _, _, tokens in found] == [tokens_of(rows, tokenizer, tmp_path) for _, rows in expected]


@pytest.mark.slow
def test_datasets_that_the_hub_does_not_have_are_one_sentence_each(
    hub: Hub, base_model: ModelConfig, tmp_path: Path
) -> None:
    hub.commit("org/name", {"train.jsonl": as_jsonl(OLD)})
    hub.commit("org/empty", {"README.md": b"nothing yet"})
    no_commit = "is not a file or folder, and its commit on the hub is unknown ("
    no_rows = "is not a file or folder, and cannot be read from the hub ("
    expected = [
        ({"path": "org/other"}, no_commit),
        ({"path": "org/name", "revision": "v2"}, no_commit),
        ({"path": "org/name", "revision": "0" * 40}, no_rows + "Revision '0000000"),
        ({"path": "org/name", "split": "test"}, no_rows + 'Unknown split "test"'),
        ({"path": "org/name", "subset": "sums"}, no_rows + "BuilderConfig 'sums' not found"),
        ({"path": "org/empty"}, no_rows),
    ]
    found = read_all(hub, tmp_path / "cache", base_model, [dataset for dataset, _ in expected])
    for (dataset, words), answer in zip(expected, found, strict=True):
        assert answer[0].startswith(f"{dataset['path']} {words}")
        assert len(answer) == 1
        assert "\n" not in answer[0]


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_one_sentence(hub: Hub, base_model: ModelConfig, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        nowhere = replace(hub, url=f"http://127.0.0.1:{taken.getsockname()[1]}")
        [[sentence]] = read_all(nowhere, tmp_path / "cache", base_model, [{"path": "org/name"}])
    assert sentence.startswith("org/name is not a file or folder, and its commit on the hub is unknown (")
    assert sentence.endswith("or start again when the hub is reachable") and "\n" not in sentence


@pytest.mark.matrix
@pytest.mark.slow
def test_a_cached_copy_of_another_commit_does_not_stand_in_for_the_one_that_is_asked_for(
    hub: Hub, base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    old, new = (hub.commit("org/name", {"train.jsonl": as_jsonl(rows)}) for rows in (OLD, NEW))
    asked = [{"path": "org/name", "revision": commit} for commit in (old, new)]
    read_all(hub, tmp_path / "cache", base_model, asked[:1])
    of_old, of_new = read_all(hub, tmp_path / "cache", base_model, asked, offline=True)
    assert of_old[2] == tokens_of(OLD, tokenizer, tmp_path)
    assert of_new[0].startswith("org/name is not a file or folder, and cannot be read from the hub")


def write_job(folder: Path, hub: Hub, model: ModelConfig, **dataset: Any) -> Path:
    """An SFT job on the newest commit of a dataset of the hub, as a plan makes it."""
    revision = hub.refs["org/name"]["main"]
    data = InputDataset(
        path="org/name", revision=revision, digest=digest_path("org/name", revision=revision), **dataset
    )
    job = SFTJob(
        model=InputModel(name="base", model=model, digest=digest_model(model)),
        data=(data,),
        training=SFTTrainingConfig(num_steps=2, batch_size=2, micro_batch_size=2, max_length=64),
        deployment=DeploymentConfig(trainer_threads=1),
    )
    folder.mkdir()
    (folder / "job.json").write_text(job.model_dump_json())
    return folder / "job.json"


@pytest.mark.slow
def test_a_training_reads_the_commit_that_it_was_planned_for(hub: Hub, base_model: ModelConfig, tmp_path: Path) -> None:
    hub.commit("org/name", {"train.jsonl": as_jsonl(OLD)})
    job = write_job(tmp_path / "sft-1", hub, base_model, max_samples=5)
    hub.commit("org/name", {"train.jsonl": as_jsonl(NEW[:1])})
    done = run_python(hub, tmp_path / "cache", "-m", "rollouts_core", "sft", str(job))
    assert done.returncode == 0, done.stderr
    assert json.loads((job.parent / "result.json").read_text())["num_samples"] == 5


@pytest.mark.slow
def test_a_training_without_its_hub_ends_with_one_sentence(hub: Hub, base_model: ModelConfig, tmp_path: Path) -> None:
    hub.commit("org/name", {"train.jsonl": as_jsonl(OLD)})
    job = write_job(tmp_path / "sft-1", hub, base_model)
    done = run_python(hub, tmp_path / "cache", "-m", "rollouts_core", "sft", str(job), offline=True)
    assert done.returncode == 2
    assert "org/name is not a file or folder, and cannot be read from the hub" in done.stderr
    assert "Traceback" not in done.stderr
