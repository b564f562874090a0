"""Pins that a publication is found whole, verified, or as the one before, whatever breaks on the way.

Without it somebody serves half a checkpoint, or the results of a week are overwritten by an upload that broke off.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from rollouts.infra.errors import (
    ObjectDamagedError,
    ObjectMissingError,
    PermanentInfraError,
    StoreUnavailableError,
    TransientInfraError,
)
from rollouts.infra.locks import locked
from rollouts.infra.stores import download as downloads
from rollouts.infra.stores.download import download, find_wanted
from rollouts.infra.stores.object_store import PART_BYTES, ObjectStore
from rollouts.infra.stores.publication import PUBLICATION, publish_run, read_publication
from tests.infra.stores.s3_server import CuttablePort, S3Server, write_model
from tests.kit.threads import join_threads

LARGE_BYTES = 2 * PART_BYTES + 12345


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_model(tmp_path / "made/checkpoint", num_bytes=LARGE_BYTES)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    path.write_text("<p>first</p>")
    return path


def publish(url: str, checkpoint: Path, report: Path, run_id: str = "0123456789") -> int:
    return publish_run(ObjectStore(url), run_id=run_id, checkpoint=checkpoint, records={"report.html": report})


def pull(url: str, target: Path) -> None:
    store = ObjectStore(url)
    download(store, find_wanted(store), target)


def content_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3", "file"])
def test_what_was_published_comes_back_as_it_was(
    bucket: str, checkpoint: Path, report: Path, tmp_path: Path, kind: str
) -> None:
    url = f"s3://{bucket}/runs/small" if kind == "s3" else f"file://{tmp_path}/runs/small"
    sent = publish(url, checkpoint, report)
    assert sent == LARGE_BYTES + 2 + 2 + len("<p>first</p>")
    pull(url, tmp_path / "pulled")
    assert content_of(tmp_path / "pulled") == content_of(checkpoint)
    assert sorted(path.name for path in tmp_path.glob(".*")) == []
    publication = read_publication(ObjectStore(url))
    assert publication is not None and f"{publication.records}/report.html" in publication.files


@pytest.mark.slow
def test_a_second_publication_sends_only_what_changed(
    bucket: str, s3_server: S3Server, checkpoint: Path, report: Path
) -> None:
    publish(f"s3://{bucket}/small", checkpoint, report)
    first = s3_server.num_writes(bucket)
    report.write_text("<p>second</p>")
    assert publish(f"s3://{bucket}/small", checkpoint, report, run_id="another run") == len("<p>second</p>")
    second = s3_server.num_writes(bucket)
    assert {name for name in second if second[name] != first.get(name)} == {
        f"small/{PUBLICATION}",
        *(name for name in second if name.startswith("small/runs/another")),
    }


@pytest.mark.slow
def test_an_upload_that_breaks_off_leaves_the_publication_before_and_goes_on_later(
    bucket: str, s3_server: S3Server, cuttable: CuttablePort, checkpoint: Path, report: Path, tmp_path: Path
) -> None:
    url = f"s3://{bucket}/small"
    publish(url, checkpoint, report)
    before = content_of(checkpoint)
    (checkpoint / "model.safetensors").write_bytes(os.urandom(LARGE_BYTES))
    (checkpoint / "first.bin").write_bytes(b"sent before the large file")
    cuttable.cut_after(LARGE_BYTES // 2)
    with pytest.raises(StoreUnavailableError, match="does not answer"):
        publish(url, checkpoint, report, run_id="second")
    assert cuttable.is_cut
    cuttable.mend()
    pull(url, tmp_path / "old")
    assert content_of(tmp_path / "old") == before
    publish(url, checkpoint, report, run_id="second")
    pull(url, tmp_path / "new")
    assert content_of(tmp_path / "new") == content_of(checkpoint)
    writes = s3_server.num_writes(bucket)
    assert [count for name, count in writes.items() if name.endswith("first.bin")] == [1], "it was sent only once"


@pytest.mark.slow
def test_a_pull_that_breaks_off_goes_on_where_it_was(
    bucket: str,
    cuttable: CuttablePort,
    checkpoint: Path,
    report: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(downloads, "PIECE_BYTES", 1 << 20)
    url = f"s3://{bucket}/small"
    publish(url, checkpoint, report)
    cuttable.cut_after(LARGE_BYTES - (8 << 20))
    with pytest.raises(StoreUnavailableError):
        pull(url, tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()
    [part] = [path for path in tmp_path.glob(".pulled.incoming-*/.parts/*") if path.stat().st_size]
    kept = part.stat().st_size
    assert 0 < kept < LARGE_BYTES
    join_threads("download")  # the first pull's, which try again and would share what may pass now
    cuttable.mend()
    cuttable.cut_after(LARGE_BYTES - kept + (6 << 20))  # less than everything
    pull(url, tmp_path / "pulled")
    assert content_of(tmp_path / "pulled") == content_of(checkpoint)
    assert list(tmp_path.glob(".pulled*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("damage", [b"flipped", b""])
def test_a_damaged_object_is_found_when_it_is_pulled(
    bucket: str, s3_server: S3Server, checkpoint: Path, report: Path, tmp_path: Path, damage: bytes
) -> None:
    url = f"s3://{bucket}/small"
    publish(url, checkpoint, report)
    [key] = [name for name in s3_server.contents(bucket) if name.endswith("model.safetensors")]
    content = s3_server.contents(bucket, key)[key]
    other = damage + content[len(damage) :] if damage else content[:-1]
    s3_server.client().put_object(Bucket=bucket, Key=key, Body=other)
    expected = ObjectDamagedError if damage else StoreUnavailableError  # a short one may be a transfer that ended
    with pytest.raises(expected, match=r"model.safetensors"):
        pull(url, tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()
    publish(url, checkpoint, report)
    pull(url, tmp_path / "pulled")
    assert content_of(tmp_path / "pulled") == content_of(checkpoint)


def test_a_checkpoint_by_its_own_url_is_verified_by_its_manifest(
    bucket: str, s3_server: S3Server, tmp_path: Path
) -> None:
    client = s3_server.client()
    for name, body in {
        "config.json": b"{}",
        "extra.py": b"evil()",
        "manifest.json": b'{"files": {"config.json": {"size": 2, "sha256": "%s"}}}' % (b"0" * 64),
    }.items():
        client.put_object(Bucket=bucket, Key=f"step_000010/{name}", Body=body)
    with pytest.raises(ObjectDamagedError, match=r"step_000010/config.json is not the file"):
        pull(f"s3://{bucket}/step_000010", tmp_path / "pulled")
    wanted = find_wanted(ObjectStore(f"s3://{bucket}/step_000010"))
    assert [each.name for each in wanted] == ["config.json", "manifest.json"], "what it does not list is left there"


def test_a_folder_of_somebody_else_and_a_single_object_come_as_they_are(
    bucket: str, s3_server: S3Server, tmp_path: Path
) -> None:
    rows = b'{"text": "a"}\n' * 1000
    for key in ("data/sft.jsonl", "data/more/rows.jsonl"):
        s3_server.client().put_object(Bucket=bucket, Key=key, Body=rows)
    pull(f"s3://{bucket}/data/", tmp_path / "data")
    assert content_of(tmp_path / "data") == {"sft.jsonl": rows, "more/rows.jsonl": rows}
    pull(f"s3://{bucket}/data/sft.jsonl", tmp_path / "sft.jsonl")
    assert (tmp_path / "sft.jsonl").read_bytes() == rows
    with pytest.raises(ObjectMissingError, match="there is nothing at"):
        pull(f"s3://{bucket}/other", tmp_path / "other")


def put(s3_server: S3Server, bucket: str, **objects: bytes) -> None:
    for key, content in objects.items():
        s3_server.client().put_object(Bucket=bucket, Key=key, Body=content)


def test_what_is_an_object_and_a_folder_is_one_sentence(bucket: str, s3_server: S3Server, tmp_path: Path) -> None:
    put(s3_server, bucket, **{"run": b"an object", "run/a": b"x", "deep/b": b"1", "deep/b/c/d": b"2"})
    for name, both, within in (("run", "run", "a"), ("deep", "deep/b", "b/c/d"), ("", "deep/b", "deep/b/c/d")):
        with pytest.raises(PermanentInfraError) as raised:
            pull(f"s3://{bucket}/{name}".rstrip("/"), tmp_path / "target")
        assert f"s3://{bucket}/{both} is an object, and also a folder with {within}, " in str(raised.value)
        assert not (tmp_path / "target").exists()
    pull(f"s3://{bucket}/deep/b/c", tmp_path / "inner")
    assert content_of(tmp_path / "inner") == {"d": b"2"}


def test_an_object_of_no_bytes_that_marks_a_folder_is_left_out(
    bucket: str, s3_server: S3Server, tmp_path: Path
) -> None:
    put(s3_server, bucket, **{"run": b"", "run/": b"", "run/a": b"x", "run/b": b"", "run/b/c": b"y", "run/empty": b""})
    pull(f"s3://{bucket}/run", tmp_path / "run")
    assert content_of(tmp_path / "run") == {"a": b"x", "b/c": b"y", "empty": b""}


@pytest.mark.parametrize("state", ["as it was", "changed", "without an MD5"])
def test_what_an_earlier_try_left_is_compared_by_the_digest_that_the_store_keeps(
    bucket: str, s3_server: S3Server, tmp_path: Path, state: str
) -> None:
    content = os.urandom(downloads.PIECE_BYTES + 5)
    s3_server.client().put_object(Bucket=bucket, Key="rows.jsonl", Body=content)
    store, target = ObjectStore(f"s3://{bucket}/rows.jsonl"), tmp_path / "rows.jsonl"
    [wanted] = find_wanted(store)
    assert not wanted.sha256
    if state == "without an MD5":  # what S3 says of what it encrypts with a key of KMS only looks like one
        wanted = replace(wanted, md5="0" * 32)
    else:
        parts = tmp_path / f".{target.name}.incoming-{downloads.digest_of([wanted])[:16]}" / ".parts"
        parts.mkdir(parents=True)
        (parts / hashlib.sha256(wanted.name.encode()).hexdigest()).write_bytes(bytes(downloads.PIECE_BYTES))
    if state == "changed":
        s3_server.client().put_object(Bucket=bucket, Key="rows.jsonl", Body=content[::-1])
        with pytest.raises(StoreUnavailableError, match="changed while it was fetched"):
            download(store, [wanted], target)
        assert not target.exists()
        return
    download(store, [wanted], target)
    assert target.read_bytes() == content


def test_that_objects_are_still_the_same_is_asked_of_all_at_once(
    bucket: str, s3_server: S3Server, cuttable: CuttablePort, tmp_path: Path
) -> None:
    """Of ten thousand one after the other it takes a quarter of an hour, when all of them are here."""
    for name in "abcd":
        s3_server.client().put_object(Bucket=bucket, Key=f"data/{name}", Body=name.encode())
    store = ObjectStore(f"s3://{bucket}/data")
    wanted = find_wanted(store)
    cuttable.request_heads.clear()
    download(store, wanted, tmp_path / "data")
    asked = [head for head in cuttable.request_heads if "range:" not in head.lower()]
    assert len(cuttable.request_heads) - len(asked) == len(wanted) == 4
    assert len(asked) == 1 and "list-type=2" in asked[0]


def test_names_that_could_leave_their_folder_are_refused(bucket: str, s3_server: S3Server, tmp_path: Path) -> None:
    s3_server.client().put_object(Bucket=bucket, Key="data/..\\x", Body=b"x")
    with pytest.raises(PermanentInfraError, match="is refused: it leaves its directory or is not printable"):
        pull(f"s3://{bucket}/data", tmp_path / "data")


@pytest.mark.slow
def test_of_two_that_fetch_the_same_at_once_both_find_it(
    bucket: str, checkpoint: Path, report: Path, tmp_path: Path
) -> None:
    url = f"s3://{bucket}/small"
    publish(url, checkpoint, report)
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(pull, url, tmp_path / "pulled") for _ in range(2)]:
            each.result()
    assert content_of(tmp_path / "pulled") == content_of(checkpoint)
    assert list(tmp_path.glob(".pulled*")) == []


@pytest.mark.slow
def test_what_broke_off_of_an_earlier_publication_does_not_stay(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("rows of today")
    [today] = find_wanted(ObjectStore(f"file://{source}"))
    yesterday, elsewhere, under_way = (
        tmp_path / f".{name}.incoming-{downloads.digest_of([replace(today, size=size)])[:16]}"
        for name, size in (("pulled", 1), ("pulled-too", 1), ("pulled", 2))
    )
    for incoming in (yesterday, elsewhere, under_way):
        (incoming / ".parts").mkdir(parents=True)
        incoming.with_name(f"{incoming.name}.lock").touch()
    with locked(under_way.with_name(f"{under_way.name}.lock")):
        pull(f"file://{source}", tmp_path / "pulled")
    assert (tmp_path / "pulled").read_text() == "rows of today"
    assert {path.name for path in tmp_path.glob(".pulled*")} == {
        name for path in (elsewhere, under_way) for name in (path.name, f"{path.name}.lock")
    }


def test_a_manifest_that_is_none_is_an_error_of_its_own(bucket: str, s3_server: S3Server, tmp_path: Path) -> None:
    for content in (b"no JSON", b'{"format": 2}', b'{"format": 1, "files": {"../x": {"size": 1, "sha256": ""}}}'):
        s3_server.client().put_object(Bucket=bucket, Key=f"small/{PUBLICATION}", Body=content)
        with pytest.raises(ObjectDamagedError, match=PUBLICATION):
            pull(f"s3://{bucket}/small", tmp_path / "pulled")


def test_a_file_that_vanishes_meanwhile_is_no_end(bucket: str, report: Path, tmp_path: Path) -> None:
    with pytest.raises(TransientInfraError, match="was removed while it was published"):
        publish_run(
            ObjectStore(f"s3://{bucket}/small"),
            run_id="1",
            checkpoint=report.parent,
            records={"report.html": tmp_path / "gone"},
        )
