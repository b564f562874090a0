"""Pins that a store's failures are told apart, and that what was written is what lies there.

Without it a run trains for a day and finds out then that its results may not be written, or a passing outage ends it.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from botocore.exceptions import ClientError
from s3fs.errors import translate_boto_error  # type: ignore[import-untyped]

from rollouts.infra.errors import (
    InfraError,
    ObjectMissingError,
    PermanentInfraError,
    StoreRefusedError,
    StoreUnavailableError,
)
from rollouts.infra.stores import object_store
from rollouts.infra.stores.download import find_wanted
from rollouts.infra.stores.object_errors import sort_failure
from rollouts.infra.stores.object_store import PART_BYTES, ObjectStore, check_url
from rollouts.infra.stores.publication import PROBE, check_writable_store
from tests.infra.stores.s3_server import CuttablePort, S3Server, environment_of, use


@pytest.mark.slow
@pytest.mark.parametrize("num_bytes", [0, 5, 2 * PART_BYTES + 1])
def test_an_uploaded_file_is_compared_by_the_digest_that_the_server_keeps(
    bucket: str, s3_server: S3Server, tmp_path: Path, num_bytes: int
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(num_bytes))
    store = ObjectStore(f"s3://{bucket}/deep/folder")
    digest = store.digest(path)
    store.upload("model.safetensors", path, digest)
    assert s3_server.contents(bucket) == {"deep/folder/model.safetensors": path.read_bytes()}
    there = store.find("model.safetensors")
    assert there is not None and there.md5 == digest.md5 and there.size == num_bytes
    encrypted = replace(there, md5="0" * 32)  # what S3 says of what it encrypts with a key of KMS
    assert store.holds("model.safetensors", encrypted, digest)
    path.write_bytes(b"x" * num_bytes)
    assert num_bytes == 0 or not store.holds("model.safetensors", encrypted, store.digest(path))


def test_an_object_of_another_content_is_not_the_file(bucket: str, s3_server: S3Server, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    store = ObjectStore(f"s3://{bucket}")
    digest = store.digest(path)
    for other in (b"CONTENT", b"contents"):
        s3_server.client().put_object(Bucket=bucket, Key="file", Body=other)
        there = store.find("file")
        assert there is not None and not store.holds("file", there, digest)


def test_a_file_that_changes_while_it_is_sent_is_an_error_that_a_retry_mends(bucket: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    store = ObjectStore(f"s3://{bucket}")
    digest = store.digest(path)
    path.write_bytes(b"behind")
    with pytest.raises(StoreUnavailableError, match="publish it again"):
        store.upload("file", path, digest)


@pytest.mark.parametrize("kind", ["s3", "file"])
def test_a_file_that_is_removed_before_it_is_sent_is_not_taken_for_a_missing_bucket(
    bucket: str, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "step_000010"
    path.write_bytes(b"weights")
    store = ObjectStore(f"s3://{bucket}" if kind == "s3" else f"file://{tmp_path}/store")
    digest = store.digest(path)
    path.unlink()  # as a training removes an older checkpoint
    with pytest.raises(StoreUnavailableError, match="step_000010 was removed while it was sent"):
        store.upload("file", path, digest)


def test_a_folder_of_this_machine_is_a_store_that_keeps_no_digests(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    store = ObjectStore(f"file://{tmp_path}/store")
    check_writable_store(store)
    store.upload("folder/file", path, store.digest(path))
    assert list(store.list()) == ["folder/file"]
    assert store.read("folder/file", 1, 4) == b"ont"
    (tmp_path / "store/folder/file").write_bytes(b"CONTENT")
    there = store.find("folder/file")
    assert there is not None and not store.holds("folder/file", there, store.digest(path))
    assert store.find("nothing") is None and store.list("nothing") == {}


@pytest.mark.parametrize("kind", ["link that leads nowhere", "link to a folder", "pipe"])
def test_what_is_no_file_in_a_folder_of_this_machine_does_not_pass_for_an_empty_one(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    elsewhere = folder / "others"
    elsewhere.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (elsewhere / "weights").write_text("weights")
    (folder / "model.safetensors").symlink_to(elsewhere / "weights")
    store = ObjectStore(f"file://{folder}")
    assert set(store.list()) == {"config.json", "model.safetensors", "others/weights"}
    (folder / "model.safetensors").unlink()
    if kind == "pipe":
        os.mkfifo(folder / "model.safetensors")
    else:
        (folder / "model.safetensors").symlink_to(elsewhere if kind == "link to a folder" else elsewhere / "gone")
    with pytest.raises(PermanentInfraError, match=r"model/model\.safetensors is neither a file nor a link to a file"):
        store.list()


def test_the_probe_writes_reads_and_removes_one_object(bucket: str, s3_server: S3Server) -> None:
    check_writable_store(ObjectStore(f"s3://{bucket}/runs"))
    [(name, num_writes)] = s3_server.num_writes(bucket).items()
    assert name.startswith(f"runs/{PROBE}-") and num_writes == 1
    assert s3_server.contents(bucket) == {}


def test_a_bucket_of_very_many_objects_is_refused_without_asking_for_all_of_them(
    bucket: str, s3_server: S3Server, cuttable: CuttablePort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket of ten million is listed for an hour, a thousand at a time, when somebody forgets the folder."""
    client = s3_server.client()
    for name in "abcd":
        client.put_object(Bucket=bucket, Key=f"folder/{name}", Body=b"")
    monkeypatch.setattr(object_store, "MAX_OBJECTS", 3)
    with pytest.raises(StoreRefusedError, match="more than 3 objects: name a folder"):
        ObjectStore(f"s3://{bucket}").list()
    [head] = cuttable.request_heads  # eight are enough to see that there are more than three
    assert "list-type=2" in head and "max-keys=8" in head


@pytest.mark.slow
def test_a_missing_bucket_is_said_with_its_name(bucket: str) -> None:
    with pytest.raises(StoreRefusedError, match=f"there is no bucket {bucket}-2 for s3://{bucket}-2/runs"):
        check_writable_store(ObjectStore(f"s3://{bucket}-2/runs"))
    with pytest.raises(StoreRefusedError, match="there is no bucket"):
        ObjectStore(f"s3://{bucket}-2/runs").list()


def test_a_bucket_that_may_not_be_written_is_said_with_the_variables_that_hold_the_credentials(
    bucket: str, s3_server: S3Server
) -> None:
    s3_server.deny(bucket, "s3:PutObject")
    with pytest.raises(StoreRefusedError, match=r"runs/.write-probe is refused .*AWS_ACCESS_KEY_ID") as refusal:
        check_writable_store(ObjectStore(f"s3://{bucket}/runs"))
    assert "CANARY" not in str(refusal.value)


@pytest.mark.slow
def test_without_credentials_the_variables_are_named(
    bucket: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = s3_server.environment
    del environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]
    use(monkeypatch, environment)
    with pytest.raises(StoreRefusedError, match=r"needs credentials, but none .*set AWS_ACCESS_KEY_ID"):
        check_writable_store(ObjectStore(f"s3://{bucket}/runs"))


def test_a_server_that_does_not_answer_may_answer_later(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, environment_of(1))
    with pytest.raises(StoreUnavailableError, match=r"does not answer .*AWS_ENDPOINT_URL"):
        check_writable_store(ObjectStore(f"s3://{bucket}/runs"))


@pytest.mark.slow
@pytest.mark.parametrize("num_bytes", [5, 3 * PART_BYTES])
def test_a_server_that_takes_a_connection_and_nothing_else_is_waited_for_with_an_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_bytes: int
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(num_bytes))
    monkeypatch.setattr(object_store, "ANSWER_S", 1.0)
    monkeypatch.setattr(object_store, "MIN_BYTES_PER_S", 1 << 30)
    with socket.create_server(("127.0.0.1", 0)) as server:  # as one whose disk hangs: the system there takes the rest
        use(monkeypatch, environment_of(server.getsockname()[1]))
        store = ObjectStore("s3://bucket/runs")
        for send in (
            lambda: store.write("publication.json", b"{}"),
            lambda: store.upload("model.safetensors", path, store.digest(path)),
        ):
            with pytest.raises(StoreUnavailableError, match=r"does not answer \(it accepted no data for 1 s\)"):
                send()


class Expired(BaseHTTPRequestHandler):
    """Answers as Amazon does where the session token is an old one: without a reason to HEAD, which has no body."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        said = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
        self.send_response(400)
        self.send_header("Content-Length", str(0 if self.command == "HEAD" else len(said)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else said)


def test_credentials_that_have_expired_are_said_to_have(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Expired) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        use(monkeypatch, environment_of(server.server_port))
        with pytest.raises(StoreRefusedError, match=r"is refused \(ExpiredToken\): check AWS_ACCESS_KEY_ID"):
            find_wanted(ObjectStore("s3://bucket/model"))
        server.shutdown()


@pytest.mark.parametrize(
    ("code", "status", "kind", "sentence"),
    [
        ("SlowDown", 503, StoreUnavailableError, "then try again"),
        ("Throttling", 400, StoreUnavailableError, "then try again"),
        ("RequestLimitExceeded", 400, StoreUnavailableError, "then try again"),
        ("InvalidObjectState", 403, StoreRefusedError, "is archived and .*: restore it"),
        ("QuotaExceeded", 403, StoreRefusedError, "has no room left"),
        ("XMinioStorageFull", 507, StoreRefusedError, "has no room left"),
        ("XMinioAdminBucketQuotaExceeded", 400, StoreRefusedError, "has no room left"),
    ],
)
def test_what_a_store_says_of_itself_is_not_taken_for_wrong_credentials_or_a_mistake(
    code: str, status: int, kind: type[InfraError], sentence: str
) -> None:
    answer = {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = translate_boto_error(ClientError(answer, "GetObject"))
    sorted_error = sort_failure(error, "s3://bucket/x")
    assert type(sorted_error) is kind and re.search(sentence, str(sorted_error))


def test_a_wrong_clock_is_not_taken_for_wrong_credentials() -> None:
    said = "The difference between the request time and the current time is too large."
    error = {"Error": {"Code": "RequestTimeTooSkewed", "Message": said}, "ResponseMetadata": {"HTTPStatusCode": 403}}
    refused = sort_failure(ClientError(error, "PutObject"), "s3://bucket/x")
    assert isinstance(refused, StoreRefusedError) and "the clock of this machine is wrong" in str(refused)
    assert "AWS_ACCESS_KEY_ID" not in str(refused)


def test_nothing_at_a_url_is_another_error_than_a_refusal(bucket: str) -> None:
    store = ObjectStore(f"s3://{bucket}")
    assert store.find("nothing") is None and store.list("nothing") == {}
    with pytest.raises(ObjectMissingError, match=f"there is nothing at s3://{bucket}/nothing"):
        store.read("nothing", 0, 1)


def test_an_object_that_became_shorter_meanwhile_is_an_error_that_a_retry_mends(
    bucket: str, s3_server: S3Server
) -> None:
    store = ObjectStore(f"s3://{bucket}")
    for content in (b"content", b""):
        s3_server.client().put_object(Bucket=bucket, Key="rows.jsonl", Body=content)
        with pytest.raises(StoreUnavailableError, match="try again"):
            store.read("rows.jsonl", len(content), 100)


@pytest.mark.parametrize(
    "url",
    [
        *("s3://key:PASSWORD@bucket/x", "s3://bucket/x?sign=PASSWORD", "bucket/x", "s3://", "a::s3://PASSWORD/x"),
        *("s3://bucket/x ", "s3://my bucket/x", "s3://bucket/x\ny"),
    ],
)
def test_a_url_with_more_than_a_place_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="expected a URL like s3://bucket/folder") as refusal:
        check_url(url)
    assert "PASSWORD" not in str(refusal.value)
    with pytest.raises(StoreRefusedError):
        ObjectStore(url)


def test_names_may_hold_spaces_and_what_else_stores_allow(bucket: str, s3_server: S3Server) -> None:
    for name in ("my rows/of may 2.jsonl", "100%/a+b=c&d.jsonl", "ünï/[x]*'\"~.jsonl"):
        s3_server.client().put_object(Bucket=bucket, Key=name, Body=name.encode())
        store = ObjectStore(f"s3://{bucket}/{name}")
        assert store.read("", 0, store.list()[""].size) == name.encode()
        assert list(ObjectStore(f"s3://{bucket}/{name.partition('/')[0]}").list()) == [name.partition("/")[2]]


def test_a_protocol_without_a_driver_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # as where it is not installed
    loaded = sys.modules["fsspec.registry"].__dict__["_registry"]
    monkeypatch.delitem(loaded, "gs", raising=False)  # another test may have used it
    with pytest.raises(StoreRefusedError, match=r"pip install 'rollouts\[gcs\]'"):
        ObjectStore("gs://bucket/x")


@pytest.mark.parametrize("url", ["s4://bucket/x", "http://host/x", "memory://x", "hf://datasets/x", "local://x"])
def test_schemes_that_the_docs_do_not_name_are_refused(url: str) -> None:
    with pytest.raises(StoreRefusedError, match="expected one of s3://, s3a://, gs://, gcs://, file://"):
        ObjectStore(url)
