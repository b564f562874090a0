"""Pins what counts as other data: without it a file that was put into a folder would never be trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollouts.infra.errors import ObjectMissingError
from rollouts.tasks.watch import can_change, digest_sources, watched_sources
from rollouts_core.config import Config
from rollouts_core.errors import DataError
from tests.infra.stores.s3_server import S3Server
from tests.tasks.test_inputs import put

COMMIT = "0123456789" * 4


def config(mode: str, **data: Any) -> Config:  # Any: settings of every type
    given = {"sft": "/data/sft.jsonl", "prompts": "/data/prompts.jsonl", "selection": "s", "heldout": "h", **data}
    return Config.model_validate({"mode": mode, "model": {"path": "base"}, "data": given})


@pytest.mark.parametrize(
    ("mode", "watched"),
    [
        ("sft", {"/data/sft.jsonl"}),
        ("rl", {"/data/prompts.jsonl"}),
        ("sft+rl", {"/data/sft.jsonl", "/data/prompts.jsonl"}),
    ],
)
def test_what_a_mode_trains_on_is_watched(mode: str, watched: set[str]) -> None:
    assert watched_sources(config(mode), ()).keys() == watched


def test_recorded_rollouts_are_watched_in_place_of_prompts_and_named_sources_in_place_of_all() -> None:
    offline = config("rl", prompts="", rollouts="/data/samples")
    assert watched_sources(offline, ()).keys() == {"/data/samples"}
    assert watched_sources(offline, ("/new",)).keys() == {"/new"}


def test_a_file_that_comes_to_a_folder_or_changes_is_new_and_a_touched_one_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "incoming/today"
    folder.mkdir(parents=True)
    watched = {str(tmp_path / "incoming"): ""}
    digests = []
    for content in ("a", "a", "b"):
        (folder / "first.jsonl").write_text(content)
        digests.append(digest_sources(watched))
    (folder / "second.jsonl").write_text("c")
    digests.append(digest_sources(watched))
    first, touched, changed, more = (each[str(tmp_path / "incoming")] for each in digests)
    assert first == touched
    assert len({first, changed, more}) == 3


def test_what_is_gone_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="which is watched for new data, does not exist"):
        digest_sources({str(tmp_path / "gone.jsonl"): ""})


@pytest.mark.parametrize(
    ("watched", "changes"),
    [
        ({"org/name": COMMIT}, False),
        ({"org/name": "main"}, True),
        ({"org/name": COMMIT, "/data/prompts.jsonl": ""}, True),
    ],
)
def test_only_datasets_at_a_commit_cannot_change(watched: dict[str, str], changes: bool) -> None:
    assert can_change(watched) is changes


@pytest.mark.slow
def test_a_prefix_of_a_bucket_is_new_when_an_object_in_it_is(bucket: str, s3_server: S3Server) -> None:
    put(s3_server, bucket, "data/a.jsonl")
    watched = watched_sources(config("sft"), (f"s3://{bucket}/data",))
    assert can_change(watched)
    before = digest_sources(watched)
    assert digest_sources(watched) == before
    put(s3_server, bucket, "elsewhere/a.jsonl")
    assert digest_sources(watched) == before
    put(s3_server, bucket, "data/b.jsonl")
    assert digest_sources(watched) != before
    with pytest.raises(ObjectMissingError):
        digest_sources(watched_sources(config("sft"), (f"s3://{bucket}/nothing",)))
