"""Pins that Google Cloud Storage is written, compared, read and explained as S3 is, by its own driver.

Without it half of what docs/stores.md promises would be words: digests, names of versions and errors are others there.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollouts.infra.errors import ObjectMissingError, StoreRefusedError, StoreUnavailableError
from rollouts.infra.stores.download import download, find_wanted
from rollouts.infra.stores.object_store import PART_BYTES, ObjectStore
from rollouts.infra.stores.publication import PUBLICATION, check_writable_store, publish_run
from tests.infra.stores.gcs_server import GCSServer, running_gcs_server, use
from tests.infra.stores.s3_server import write_model


@pytest.fixture(scope="module")
def gcs_server() -> Iterator[GCSServer]:
    with running_gcs_server() as server:
        yield server


@pytest.fixture
def gcs_bucket(gcs_server: GCSServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of the test's own, with the variables set that lead to it."""
    name = f"bucket-{secrets.token_hex(8)}"
    use(monkeypatch, gcs_server.environment)
    gcs_server.make_bucket(name)
    return name


@pytest.mark.parametrize("num_bytes", [0, 5, PART_BYTES + 1])
def test_an_uploaded_file_is_compared_by_the_digest_that_google_keeps(
    gcs_bucket: str, gcs_server: GCSServer, tmp_path: Path, num_bytes: int
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(num_bytes))
    store = ObjectStore(f"gs://{gcs_bucket}/deep/folder")
    digest = store.digest(path)
    store.upload("model.safetensors", path, digest)
    assert gcs_server.contents(gcs_bucket) == {"deep/folder/model.safetensors": path.read_bytes()}
    there = store.find("model.safetensors")
    assert there is not None and (there.md5, there.size) == (digest.md5, num_bytes)
    assert store.list() == {"model.safetensors": there}
    assert store.read("model.safetensors", num_bytes // 2, num_bytes) == path.read_bytes()[num_bytes // 2 :]
    store.remove("model.safetensors")
    assert store.find("model.safetensors") is None and store.list() == {}


def test_an_object_of_another_content_is_not_the_file(gcs_bucket: str, gcs_server: GCSServer, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    store = ObjectStore(f"gs://{gcs_bucket}")
    digest, seen = store.digest(path), set[str]()
    for other in (b"CONTENT", b"contents"):
        gcs_server.write(gcs_bucket, "file", other)
        there = store.find("file")
        assert there is not None and not store.holds("file", there, digest)
        seen.add(there.identity)
    assert len(seen) == 2, "another version is told by its identity"


def test_a_run_that_is_published_comes_back_as_it_was(gcs_bucket: str, gcs_server: GCSServer, tmp_path: Path) -> None:
    checkpoint, report = write_model(tmp_path / "made/checkpoint", num_bytes=1_000_000), tmp_path / "report.html"
    report.write_text("<p>first</p>")
    store = ObjectStore(f"gs://{gcs_bucket}/runs/small")
    for text, expected in (("<p>first</p>", 1_000_000), ("<p>second</p>", 0)):
        report.write_text(text)
        sent = publish_run(store, run_id=text[3:8], checkpoint=checkpoint, records={"report.html": report})
        assert expected <= sent < expected + 100
    assert f"runs/small/{PUBLICATION}" in gcs_server.contents(gcs_bucket)
    download(store, find_wanted(store), tmp_path / "pulled")
    assert content_of(tmp_path / "pulled") == content_of(checkpoint)


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_missing_is_told_apart(gcs_bucket: str) -> None:
    store = ObjectStore(f"gs://{gcs_bucket}")
    check_writable_store(store)
    assert store.find("nothing") is None and store.list("nothing") == {}
    with pytest.raises(ObjectMissingError, match=f"there is nothing at gs://{gcs_bucket}/nothing"):
        store.read("nothing", 0, 1)
    with pytest.raises(StoreRefusedError, match=f"there is no bucket {gcs_bucket}-2 for gs://{gcs_bucket}-2/runs"):
        check_writable_store(ObjectStore(f"gs://{gcs_bucket}-2/runs"))


@pytest.mark.slow
def test_a_server_that_does_not_answer_may_answer_later(gcs_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:1"})
    monkeypatch.setattr("gcsfs.retry.asyncio.sleep", _without_pause)
    with pytest.raises(StoreUnavailableError, match="does not answer"):
        check_writable_store(ObjectStore(f"gs://{gcs_bucket}/runs"))


async def _without_pause(_: float) -> None:
    """The driver tries six times, after growing pauses."""
