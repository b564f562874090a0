"""Pins that models and data named by URLs are fetched once, anew when they change, and go by their content.

Without it a run trains on what lay at a URL last month, or does everything again because a path is another one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rollouts.infra.errors import ObjectMissingError, PermanentInfraError, StoreUnavailableError, TransientInfraError
from rollouts.infra.stores.object_store import ObjectStore
from rollouts.infra.stores.publication import publish_run
from rollouts.tasks import inputs
from rollouts.tasks.inputs import bring_inputs, find_origin, keys_at_origin, named_urls
from rollouts_core.checkpoint import new_checkpoint
from rollouts_core.config import Config, DatasetConfig, RolloutConfig, parse_config, resolve_paths
from rollouts_core.data.rows import digest_path
from rollouts_core.fingerprint import digest_checkpoint, digest_model
from rollouts_core.mistakes import Mistakes
from tests.infra.stores.s3_server import S3Server

ROWS = b'{"prompt": "1+1=?", "completion": ":2"}\n'


def put(server: S3Server, bucket: str, key: str, content: bytes = ROWS) -> str:
    server.client().put_object(Bucket=bucket, Key=key, Body=content)
    return f"s3://{bucket}/{key}"


def config_with(tmp_path: Path, **data: object) -> Config:
    settings = {
        "mode": "sft",
        "model": {"path": str(tmp_path)},
        "data": {"selection": "selection.jsonl", "heldout": "heldout.jsonl", **data},
    }
    return parse_config(Config, resolve_paths(settings, tmp_path), source="test")


def test_urls_stay_urls_when_paths_become_absolute(tmp_path: Path) -> None:
    config = config_with(tmp_path, sft="s3://bucket/sft.jsonl", sft_eval="rows.jsonl")
    assert (config.data.sft, config.data.sft_eval) == ("s3://bucket/sft.jsonl", str(tmp_path / "rows.jsonl"))
    assert named_urls(config) == {"data.sft": "s3://bucket/sft.jsonl"}


def test_a_url_of_a_model_that_grades_is_fetched_and_a_judges_name_is_none(tmp_path: Path) -> None:
    classifier = {"kind": "classifier", "model": "s3://bucket/grader"}
    judge = {"kind": "judge", "url": "http://127.0.0.1:1/v1", "model": "s3://no/folder"}
    rollout = RolloutConfig.model_validate({"rewards": [classifier, judge]})
    assert named_urls(config_with(tmp_path, sft="sft.jsonl").model_copy(update={"rollout": rollout})) == {
        "rollout.rewards.0": "s3://bucket/grader"
    }


@pytest.mark.slow
def test_every_url_becomes_a_path_with_the_content(bucket: str, s3_server: S3Server, tmp_path: Path) -> None:
    url = put(s3_server, bucket, "data/sft.jsonl")
    folder = put(s3_server, bucket, "folder/rows.jsonl").rpartition("/")[0]
    config = config_with(tmp_path, sft=[{"path": url, "repeat": 2.0}], selection=url, rollouts=folder)
    rewards = [{"kind": "classifier", "model": folder}, {"kind": "judge", "url": "http://a:1/v1", "model": "a"}]
    config = config.model_copy(update={"rollout": RolloutConfig.model_validate({"rewards": rewards})})
    said: list[str] = []
    brought = bring_inputs(config, tmp_path / "store", said.append)
    assert isinstance(brought.data.sft, tuple)
    [dataset] = brought.data.sft
    assert isinstance(dataset, DatasetConfig) and dataset.repeat == 2.0
    assert Path(dataset.path).read_bytes() == ROWS and dataset.path == brought.data.selection
    assert Path(dataset.path).name == "sft.jsonl"
    assert (Path(brought.data.rollouts) / "rows.jsonl").read_bytes() == ROWS
    assert [each.model for each in brought.rollout.rewards] == [brought.data.rollouts, "a"]
    assert brought.data.heldout == config.data.heldout
    assert len(said) == 2, "each URL was fetched once"
    bring_inputs(config, tmp_path / "store", said.append)
    assert len(said) == 2, "nothing is fetched again"


def test_what_changed_at_its_url_is_fetched_anew(bucket: str, s3_server: S3Server, tmp_path: Path) -> None:
    config = config_with(tmp_path, sft=put(s3_server, bucket, "sft.jsonl"))
    first = bring_inputs(config, tmp_path / "store", lambda sentence: None).data.sft
    put(s3_server, bucket, "sft.jsonl", ROWS * 2)
    second = bring_inputs(config, tmp_path / "store", lambda sentence: None).data.sft
    assert isinstance(first, str) and isinstance(second, str)
    assert Path(first).read_bytes() == ROWS and Path(second).read_bytes() == ROWS * 2
    put(s3_server, bucket, "sft.jsonl")
    third = bring_inputs(config, tmp_path / "store", lambda sentence: None).data.sft
    assert isinstance(third, str) and digest_path(third) == digest_path(first)


@pytest.mark.slow
def test_a_published_checkpoint_has_the_identity_of_the_one_that_was_published(
    bucket: str, s3_server: S3Server, tmp_path: Path
) -> None:
    with new_checkpoint(tmp_path / "made/step_000010", step=10) as partial:
        (partial / "model.safetensors").write_bytes(b"weights")
    config = config_with(tmp_path, sft="sft.jsonl")
    original = config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(tmp_path / "made/step_000010")})}
    )
    publish_run(ObjectStore(f"s3://{bucket}/small"), run_id="1", checkpoint=tmp_path / "made/step_000010", records={})
    by_url = config.model_copy(update={"model": config.model.model_copy(update={"path": f"s3://{bucket}/small"})})
    resumed = config.training.sft.model_copy(update={"resume_from": f"s3://{bucket}/small"})
    by_url = by_url.model_copy(update={"training": config.training.model_copy(update={"sft": resumed})})
    brought = bring_inputs(by_url, tmp_path / "store", lambda sentence: None)
    assert digest_model(brought.model) == digest_model(original.model)
    assert digest_checkpoint(brought.training.sft.resume_from) == digest_checkpoint(original.model.path)


@pytest.mark.slow
def test_where_an_input_came_from_is_known_of_all_that_lies_in_it(
    bucket: str, s3_server: S3Server, tmp_path: Path
) -> None:
    folder = put(s3_server, bucket, "folder/deep/rows.jsonl").rpartition("/deep")[0]
    store = tmp_path / "store"
    brought = Path(bring_inputs(config_with(tmp_path, prompts=folder, sft="a.jsonl"), store, print).data.prompts)
    rows = brought / "deep/rows.jsonl"
    assert [find_origin(path, store) for path in (brought, rows)] == [folder, folder]
    assert keys_at_origin(ObjectStore(folder), rows, store) == {rows: "deep/rows.jsonl"}
    assert find_origin(tmp_path / "a.jsonl", store) == "" == find_origin(store / "inputs/0123456789abcdef/x", store)


def test_a_url_without_anything_is_asked_for_once_and_each_of_its_settings_has_the_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def find_nothing(url: str, store: Path, say: object) -> Path:
        asked.append(url)
        raise ObjectMissingError(f"there is nothing at {url}")

    monkeypatch.setattr(inputs, "bring_input", find_nothing)
    config = config_with(tmp_path, sft="s3://a/rows", sft_eval="s3://a/rows", prompts="s3://a/other")
    mistakes = Mistakes(PermanentInfraError)
    assert bring_inputs(config, tmp_path / "store", print, mistakes) == config
    assert asked == ["s3://a/rows", "s3://a/other"]
    assert mistakes.describe().splitlines() == [f"there is nothing at {url}" for url in asked]
    assert all(mistakes.has(f"data.{name}") for name in ("sft", "sft_eval", "prompts"))


def test_a_store_that_does_not_answer_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def wait_in_vain(url: str, store: Path, say: object) -> Path:
        asked.append(url)
        raise StoreUnavailableError(f"{url} does not answer")

    monkeypatch.setattr(inputs, "bring_input", wait_in_vain)
    urls = {"sft": "s3://a/rows", "sft_eval": "s3://a/other", "prompts": "gs://a/rows"}
    folders = {"selection": "file:///one/rows", "heldout": "file:///two/rows"}
    mistakes = Mistakes(TransientInfraError)
    bring_inputs(config_with(tmp_path, **urls, **folders), tmp_path / "store", print, mistakes)
    assert asked == [url for url in (*urls.values(), *folders.values()) if url != "s3://a/other"]
    assert all(mistakes.has(f"data.{name}") for name in (*urls, *folders))


def test_nothing_at_a_url_is_one_sentence(bucket: str, tmp_path: Path) -> None:
    config = config_with(tmp_path, sft=f"s3://{bucket}/nothing.jsonl")
    with pytest.raises(ObjectMissingError, match=rf"there is nothing at s3://{bucket}/nothing.jsonl"):
        bring_inputs(config, tmp_path / "store", lambda sentence: None)
    assert not (tmp_path / "store").exists()
