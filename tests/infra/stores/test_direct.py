"""Pins that a node fetches and sends objects by URLs alone: verified, all at once, and no secret stays anywhere.

Without it a model that was damaged on the way is trained from, parts that nobody needs are billed for ever, or a URL
that whoever reads it may use stands in a log. The node is this machine: programs run there as they do elsewhere.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollouts.infra.errors import StoreUnavailableError, TransientInfraError
from rollouts.infra.session import LocalSession
from rollouts.infra.stores import direct
from rollouts.infra.stores.direct import can_presign, fetch_on_node, presigned_get, send_checkpoint_from_node
from rollouts.infra.stores.object_store import PART_BYTES, ObjectStore
from rollouts.infra.stores.publication import publish_run
from tests.infra.stores.s3_server import CuttablePort, S3Server, environment_of, use, write_model

pytestmark = pytest.mark.slow

LARGE_BYTES = 2 * PART_BYTES + 12345
SMALL_BYTES = 1 << 20
SECRET = b"X-Amz-Signature"


@pytest.fixture
def session() -> LocalSession:
    return LocalSession(sys.executable)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "here/model", num_bytes=SMALL_BYTES)


@pytest.fixture
def large_model(tmp_path: Path) -> Path:
    """A model whose weights are sent in parts."""
    return write_model(tmp_path / "here/large", num_bytes=LARGE_BYTES)


@pytest.fixture
def store(bucket: str) -> ObjectStore:
    return ObjectStore(f"s3://{bucket}/team/small")


def files_of(folder: Path) -> dict[str, Path]:
    return {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}


def content_of(folder: Path) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in files_of(folder).items()}


def put(store: ObjectStore, model: Path) -> None:
    for name, path in files_of(model).items():
        store.upload(name, path, store.digest(path))


def fetch(session: LocalSession, store: ObjectStore, model: Path, target: Path) -> int:
    return fetch_on_node(session, store, {name: name for name in files_of(model)}, files_of(model), str(target))


def uploads_under_way(server: S3Server, bucket: str) -> list[object]:
    return list(server.client().list_multipart_uploads(Bucket=bucket).get("Uploads", []))


@contextmanager
def command_lines_seen() -> Iterator[list[bytes]]:
    """Everything that stood in the process list while the block ran."""
    seen: set[bytes] = set()
    lines: list[bytes] = []
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.005):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    seen.add(path.read_bytes() + path.with_name("environ").read_bytes())
                except OSError:
                    continue

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield lines
    finally:
        is_over.set()
        thread.join()
        lines += seen


def test_a_node_fetches_files_in_pieces_and_they_are_as_here(
    session: LocalSession, store: ObjectStore, large_model: Path, tmp_path: Path
) -> None:
    put(store, large_model)
    assert fetch(session, store, large_model, tmp_path / "node/model") == LARGE_BYTES + 4
    assert content_of(tmp_path / "node/model") == content_of(large_model)
    assert [path.name for path in (tmp_path / "node").iterdir()] == ["model"]


def test_what_differs_from_the_files_here_does_not_appear(
    session: LocalSession, store: ObjectStore, model: Path, tmp_path: Path
) -> None:
    put(store, model)
    store.write("trainer/state of it.json", b"[]")  # of the same size
    with pytest.raises(TransientInfraError, match=r"1 files arrived damaged, the first is 'trainer/state of it.json'"):
        fetch(session, store, model, tmp_path / "node/model")
    assert list((tmp_path / "node").iterdir()) == []


def test_an_object_of_another_size_is_not_fetched(
    session: LocalSession, store: ObjectStore, model: Path, tmp_path: Path
) -> None:
    put(store, model)
    store.write("trainer/state of it.json", b"{} ")
    with pytest.raises(StoreUnavailableError, match=r"does not have 2 bytes of state of it.json"):
        fetch(session, store, model, tmp_path / "node/model")
    assert list((tmp_path / "node").iterdir()) == []


def test_a_url_that_is_refused_is_a_sentence_without_it(
    session: LocalSession, store: ObjectStore, bucket: str, s3_server: S3Server, model: Path, tmp_path: Path
) -> None:
    put(store, model)
    s3_server.deny(bucket, "s3:GetObject")
    with pytest.raises(StoreUnavailableError, match=r"^127.0.0.1:\d+: status 403$"):
        fetch(session, store, model, tmp_path / "node/model")
    assert list((tmp_path / "node").iterdir()) == []


@pytest.mark.parametrize("server", ["nobody", "one that never answers"])
def test_a_store_out_of_reach_is_found_out_soon(
    session: LocalSession,
    store: ObjectStore,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: str,
) -> None:
    put(store, model)
    monkeypatch.setattr(direct, "PROBE_S", 0.5)
    silent = CuttablePort(1)  # listens, and nothing lies behind it
    use(monkeypatch, environment_of(1 if server == "nobody" else silent.port))
    with pytest.raises(StoreUnavailableError, match=r"^127.0.0.1:\d+ cannot be reached: "):
        fetch(session, ObjectStore(store.url), model, tmp_path / "node/model")
    silent.close()


def test_a_connection_that_breaks_is_made_again(
    session: LocalSession, store: ObjectStore, cuttable: CuttablePort, large_model: Path, tmp_path: Path
) -> None:
    put(store, large_model)
    with mended_when_cut(cuttable, after_bytes=LARGE_BYTES // 2):
        fetch(session, store, large_model, tmp_path / "node/model")
    assert content_of(tmp_path / "node/model") == content_of(large_model)


@contextmanager
def mended_when_cut(way: CuttablePort, *, after_bytes: int) -> Iterator[None]:
    """The way is cut after so many bytes, and mended a moment later."""
    mended = threading.Event()

    def mend() -> None:
        while not way.is_cut and not mended.wait(0.01):
            pass
        mended.wait(0.2)
        way.mend()

    way.cut_after(after_bytes)
    thread = threading.Thread(target=mend)
    thread.start()
    try:
        yield
        assert not thread.is_alive(), "the way was never cut"
    finally:
        mended.set()
        thread.join()


def test_what_a_node_sent_is_found_by_the_publication_and_not_sent_again(
    session: LocalSession, store: ObjectStore, bucket: str, s3_server: S3Server, large_model: Path
) -> None:
    node = large_model.rename(large_model.with_name("on the node"))
    here = node.with_name("here")
    here.mkdir()
    for name, path in files_of(node).items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_bytes(path.read_bytes())
    assert send_checkpoint_from_node(session, store, here, str(node)) == LARGE_BYTES + 2
    assert not [key for key in s3_server.contents(bucket) if key.endswith("manifest.json")], "it says all is there"
    assert publish_run(store, run_id="0123456789", checkpoint=here, records={}) == len("{}")
    published = s3_server.contents(bucket, "team/small/checkpoints/")
    assert {key.split("/", 4)[4]: content for key, content in published.items()} == content_of(here)
    assert set(s3_server.num_writes(bucket).values()) == {1}
    assert uploads_under_way(s3_server, bucket) == []
    assert send_checkpoint_from_node(session, store, here, str(node)) == 0


def test_what_the_node_has_differently_is_replaced_by_the_publication(
    session: LocalSession, store: ObjectStore, model: Path, bucket: str, s3_server: S3Server, tmp_path: Path
) -> None:
    node = tmp_path / "node"
    (node / "trainer").mkdir(parents=True)
    for name, path in files_of(model).items():
        (node / name).write_bytes(b"x" * path.stat().st_size)
    send_checkpoint_from_node(session, store, model, str(node))
    publish_run(store, run_id="0123456789", checkpoint=model, records={})
    published = s3_server.contents(bucket, "team/small/checkpoints/")
    assert {key.split("/", 4)[4]: content for key, content in published.items()} == content_of(model)


def lose_a_file(node: Path) -> None:
    (node / "trainer/state of it.json").unlink()


def shorten(node: Path) -> None:
    with (node / "model.safetensors").open("r+b") as file:
        file.truncate(PART_BYTES)


@pytest.mark.parametrize("damage", [lose_a_file, shorten])
def test_an_upload_that_fails_leaves_no_parts(
    session: LocalSession,
    store: ObjectStore,
    large_model: Path,
    bucket: str,
    s3_server: S3Server,
    tmp_path: Path,
    damage: Callable[[Path], None],
) -> None:
    node = tmp_path / "node"
    for name, path in files_of(large_model).items():
        (node / name).parent.mkdir(parents=True, exist_ok=True)
        (node / name).write_bytes(path.read_bytes())
    damage(node)
    with pytest.raises(StoreUnavailableError, match=r"state of it.json: No such file|has become shorter"):
        send_checkpoint_from_node(session, store, large_model, str(node))
    assert uploads_under_way(s3_server, bucket) == []
    assert not [key for key in s3_server.contents(bucket) if key.endswith("model.safetensors")]


def test_a_part_that_broke_off_is_sent_again(
    session: LocalSession, store: ObjectStore, cuttable: CuttablePort, large_model: Path
) -> None:
    with mended_when_cut(cuttable, after_bytes=LARGE_BYTES // 2):
        assert send_checkpoint_from_node(session, store, large_model, str(large_model)) == LARGE_BYTES + 2
    assert publish_run(store, run_id="0123456789", checkpoint=large_model, records={}) == len("{}")


def test_no_url_is_in_the_process_list_a_log_or_a_file(
    session: LocalSession,
    store: ObjectStore,
    large_model: Path,
    bucket: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="rollouts.infra")
    url = presigned_get(store, "model.safetensors")
    assert SECRET.decode() in url and bucket in url
    with command_lines_seen() as seen:
        send_checkpoint_from_node(session, store, large_model, str(large_model))
        put(store, large_model)
        fetch(session, store, large_model, tmp_path / "node/model")
    assert any(b"node_transfer.py\0fetch" in line for line in seen), "it was looked at meanwhile"
    assert not [line for line in seen if SECRET in line and bucket.encode() in line]  # other tests' names are there too
    assert SECRET.decode() not in caplog.text
    assert not [path for path in files_of(tmp_path).values() if SECRET in path.read_bytes()]


def test_only_s3_has_such_urls(store: ObjectStore, tmp_path: Path) -> None:
    assert can_presign(store) and not can_presign(ObjectStore(f"file://{tmp_path}"))
