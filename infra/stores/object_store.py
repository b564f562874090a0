"""Objects below a URL: find, read and write them, each compared with what was meant to lie there.

    s3://bucket/folder   gs://bucket/folder   file:///folder

Not here: folders that are published (publication.py) or fetched (download.py), what a failure means (object_errors.py),
a folder of this machine (shared_folder.py).
Only this file knows fsspec, whose drivers are optional packages. They find credentials by themselves, in environment
variables and the files of the providers' own tools; nothing here sees one.
"""

import asyncio
import base64
import errno
import hashlib
import logging
import math
import re
import time
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import fsspec
import fsspec.callbacks
import fsspec.core

from rollouts.infra.errors import ObjectMissingError, StoreRefusedError, StoreUnavailableError
from rollouts.infra.stores.object_errors import missing_bucket, sorted_failures
from rollouts.infra.stores.shared_folder import READABLE, SharedFolder

PART_BYTES = 16 << 20
"""What is larger than two of these goes to S3 in parts, several at a time; so many of them are in memory then."""
PARTS_AT_ONCE = 10
MAX_PARTS = 10_000
"""S3 takes no more."""
MAX_OBJECTS = 10_000
"""A folder of more is taken for a mistake in its URL."""
MAX_SMALL_BYTES = 16 << 20
ANSWER_S = 120.0
"""A store that takes nothing of what is sent for so long, and the time that MIN_BYTES_PER_S needs, does not answer. The
drivers wait without end for a server that is there and does not read; what they do try again takes 80 s."""
MIN_BYTES_PER_S = 100_000
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""Extras of this project that install a driver, by protocol."""
FOLDER = "file"
PROTOCOLS = (*EXTRAS, FOLDER)
"""fsspec has drivers for more, which read local files by other names, web pages or the memory of this process."""

_URL = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]*)://(?P<place>/?[^\s/?#@:]+(?::\d+)?(?:/[^?#\x00-\x1f\x7f]*)?)")
_MD5 = re.compile(r"[0-9a-f]{32}(-\d+)?")
_HASH_BYTES = 4 << 20


def is_url(text: str) -> bool:
    """True for what names a place in an object store rather than a path or a hub's name."""
    return "://" in text


def check_url(url: str) -> str:
    """The URL of a folder or object as it is, without a slash at its end.

    Raises:
        ValueError: it is none, or it holds more than a place; it is not repeated, because that may be a password.
    """
    protocol, _, place = url.partition("://")
    if re.fullmatch(r"[a-z][a-z0-9+.-]*", protocol) and protocol not in PROTOCOLS:
        raise ValueError(f"expected one of {', '.join(f'{each}://' for each in PROTOCOLS)}, found {protocol}://")
    if protocol == FOLDER and not place.startswith("/"):
        raise ValueError("expected three slashes before a folder of this machine, as in file:///srv/models")
    leads_elsewhere = {".", ".."} & set(url.split("/"))
    if not _URL.fullmatch(url) or "::" in url or leads_elsewhere or url != url.strip():
        raise ValueError(
            "expected a URL like s3://bucket/folder, without user, password, query or parts like `..`: "
            "credentials belong into environment variables"
        )
    return url.rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """What a store says about one object."""

    size: int
    """Bytes."""
    identity: str
    """Another one after every change of the content: an entity tag, a generation, or a time."""
    md5: str
    """The digest of the content, hex; of an object sent in parts that of their digests, a dash and their number. Empty
    where the store keeps none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """What a local file holds."""

    size: int
    sha256: str
    md5: str
    """As a store with entity tags of MD5 would give it; see StoredObject."""


class _Progress(fsspec.callbacks.Callback):  # type: ignore[misc]  # fsspec has no types
    """When a store has last taken something."""

    def __init__(self) -> None:
        super().__init__()
        self.at = time.monotonic()

    def relative_update(self, inc: int = 1) -> None:
        self.at = time.monotonic()


class ObjectStore:
    """A folder in an object store, or one object; may be used by several threads."""

    def __init__(self, url: str) -> None:
        """Nothing is asked of the store yet.

        Raises:
            StoreRefusedError: the URL is none, or its driver is not installed.
        """
        try:
            self.url = check_url(url)
        except ValueError as error:
            raise StoreRefusedError(f"the URL of an object store cannot be used: {error}") from error
        named = self.url.partition("://")[0]
        self.protocol = "s3" if named == "s3a" else named
        self._fs, self._root = _open_driver(self.url, self.protocol)

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    def list(self, folder: str = "") -> dict[str, StoredObject]:
        """The objects below a folder, by their names in this store; the store itself, under "", if it is one object.

        Raises:
            StoreRefusedError: it may not be listed, or holds more than MAX_OBJECTS.
            PermanentInfraError: a folder of this machine holds something that is no file, or a link that leaves it.
        """
        root = self._key(folder)
        enough = {"max_items": MAX_OBJECTS + 1} if self.protocol == "s3" else {}  # others list all, however many
        with sorted_failures(self.url_of(folder)):
            found: Mapping[str, Any] = self._fs.find(root, detail=True, **enough)  # Any: drivers say what they like
        if len(found) > MAX_OBJECTS:
            raise StoreRefusedError(f"{self.url_of(folder)} holds more than {MAX_OBJECTS} objects: name a folder in it")
        start = len(self._root) + 1
        return {key[start:]: _describe(info) for key, info in sorted(found.items()) if not key.endswith("/")}

    def find(self, name: str) -> StoredObject | None:
        """One object; None where there is none."""
        try:
            with sorted_failures(self.url_of(name)):
                try:
                    info = self._fs.info(self._key(name))
                except OSError as error:
                    if self.protocol == "s3" and error.errno == errno.EINVAL:
                        self._fs.cat_file(self._key(name), start=0, end=1)  # says why, which an answer to HEAD cannot
                    raise
        except ObjectMissingError:
            return None
        return None if info["type"] == "directory" else _describe(info)

    def read(self, name: str, start: int, end: int) -> bytes:
        """The bytes of an object from `start` up to `end`.

        Raises:
            StoreUnavailableError: the transfer broke, or there are fewer.
        """
        if start == end:
            return b""
        with sorted_failures(self.url_of(name)):
            content: bytes = self._fs.cat_file(self._key(name), start=start, end=end)
        if len(content) != end - start:
            raise StoreUnavailableError(f"{self.url_of(name)} ended after {start + len(content)} bytes: try again")
        return content

    def read_small(self, name: str) -> bytes | None:
        """The content of an object of at most MAX_SMALL_BYTES; None where there is none."""
        there = self.find(name)
        if there is None:
            return None
        if there.size > MAX_SMALL_BYTES:
            raise StoreRefusedError(f"{self.url_of(name)} is not what it is called: it has {there.size} bytes")
        return self.read(name, 0, there.size)

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a small object in one step."""
        key = self._key(name)
        with self._failures_to_write(name):
            if self._fs.async_impl:
                self._send(self._fs._pipe_file(key, content), len(content), _Progress())
            else:
                self._fs.pipe_file(key, content)

    def upload(self, name: str, path: Path, digest: FileDigest) -> None:
        """Write or replace an object by a file, and compare what lies there then with the digest.

        Raises:
            StoreUnavailableError: it did not arrive whole, or the file changed meanwhile, or is gone.
        """
        part_size, key = part_bytes(digest.size), self._key(name)
        options = {"chunksize": part_size, "max_concurrency": PARTS_AT_ONCE} if self.protocol == "s3" else {}
        with self._failures_to_write(name):
            try:
                if self._fs.async_impl:
                    progress = _Progress()
                    sending = self._fs._put_file(str(path), key, callback=progress, **options)
                    self._send(sending, min(digest.size, PARTS_AT_ONCE * part_size), progress)
                else:
                    self._fs.put_file(str(path), key)
            except FileNotFoundError as error:  # of the file, or of the bucket
                if path.exists():
                    raise
                raise StoreUnavailableError(f"{path} was removed while it was sent to {self.url}") from error
        there = self.find(name)
        if there is None or not self.holds(name, there, digest):
            raise StoreUnavailableError(f"{self.url_of(name)} is not {path}, which was sent there: publish it again")

    def holds(self, name: str, there: StoredObject, digest: FileDigest) -> bool:
        """True when an object is the file with this digest; reads it where the store's own digest does not say so."""
        if there.size != digest.size:
            return False
        if there.md5 == digest.md5:
            return True
        # An entity tag need not be an MD5: of what S3 encrypts with keys of KMS or of a customer it looks like one.
        sha256 = hashlib.sha256()
        for start in range(0, there.size, PART_BYTES):
            sha256.update(self.read(name, start, min(start + PART_BYTES, there.size)))
        return sha256.hexdigest() == digest.sha256

    def copy_mode(self, name: str) -> int:
        """Permissions of a copy before the umask: those of the file, if the store is a folder of this machine."""
        if not isinstance(self._fs, SharedFolder):
            return READABLE
        with sorted_failures(self.url_of(name)):
            return self._fs.copy_mode(self._key(name))

    def remove(self, name: str) -> None:
        """Delete one object."""
        with sorted_failures(self.url_of(name)):
            self._fs.rm_file(self._key(name))

    def digest(self, path: Path) -> FileDigest:
        """The digests of a local file, with an MD5 as this store would give it."""
        return digest_file(path, in_parts=self.protocol == "s3")

    def call_s3(self, method: str, name: str, **parameters: Any) -> Mapping[str, Any]:  # Any: S3's API
        """What S3 answers to a method of its API, which is called on one object."""
        bucket, key, _ = self._fs.split_path(self._key(name))
        with sorted_failures(self.url_of(name)):
            answer: Mapping[str, Any] = self._fs.call_s3(method, Bucket=bucket, Key=key, **parameters)
        return answer

    def sign(self, method: str, name: str, lifetime_s: int, **parameters: Any) -> str:  # Any: S3's API
        """A URL by which whoever has it may call a method of S3's API on one object, for so long: a secret."""
        with sorted_failures(self.url_of(name)):
            return str(self._signing_fs.url(self._key(name), expires=lifetime_s, client_method=method, **parameters))

    @cached_property
    def _signing_fs(self) -> Any:  # Any: fsspec has no types
        """A driver of its own: the usual one signs URLs in the old way, which most servers do not take any more."""
        return _open_driver(self.url, self.protocol, config_kwargs={"signature_version": "s3v4"})[0]

    def _send(self, sending: Coroutine[Any, Any, None], num_bytes_at_once: int, progress: "_Progress") -> None:
        """Wait for a driver that sends something, as long as it gets on.

        Raises:
            TimeoutError: the store takes nothing.
        """
        limit_s = ANSWER_S + num_bytes_at_once / MIN_BYTES_PER_S
        future = asyncio.run_coroutine_threadsafe(sending, self._fs.loop)
        try:
            while wait([future], timeout=1.0).not_done:
                if time.monotonic() > progress.at + limit_s:
                    raise TimeoutError(f"it took nothing for {limit_s:.0f} s")
            future.result()
        finally:
            future.cancel()

    @contextmanager
    def _failures_to_write(self, name: str) -> Iterator[None]:
        """`sorted_failures`, where what is missing is the bucket; not every driver says so."""
        url = self.url_of(name)
        try:
            with sorted_failures(url):
                yield
        except ObjectMissingError as error:
            raise missing_bucket(url) from error

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def url_of(self, name: str) -> str:
        """The URL of one object; of the store itself for ""."""
        return f"{self.url}/{name}" if name else self.url


def part_bytes(size: int) -> int:
    """How large the parts are in which an object of this size goes to S3."""
    return max(PART_BYTES, math.ceil(size / MAX_PARTS))


def digest_file(path: Path, *, in_parts: bool) -> FileDigest:
    """The digests of a file, read once.

    Args:
        in_parts: whether a large file is sent in parts, each with a digest of its own.
    """
    size = path.stat().st_size
    part_size = part_bytes(size) if in_parts and size >= 2 * part_bytes(size) else max(size, 1)
    sha256 = hashlib.sha256()
    parts: list[bytes] = []
    with path.open("rb") as file:
        for start in range(0, size, part_size):
            md5, missing = hashlib.md5(usedforsecurity=False), min(part_size, size - start)
            while missing and (chunk := file.read(min(_HASH_BYTES, missing))):
                sha256.update(chunk)
                md5.update(chunk)
                missing -= len(chunk)
            parts.append(md5.digest())
    if len(parts) < 2:
        md5_hex = parts[0].hex() if parts else hashlib.md5(usedforsecurity=False).hexdigest()
    else:
        md5_hex = f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"
    return FileDigest(size=size, sha256=sha256.hexdigest(), md5=md5_hex)


def _open_driver(url: str, protocol: str, **more_options: Any) -> tuple[Any, str]:  # Any: fsspec has no types
    """The driver of a protocol, and what it calls the place.

    Raises:
        StoreRefusedError: it is not installed, or there is none.
    """
    if protocol == FOLDER:
        root = url.partition("://")[2]
        return SharedFolder(root), root
    if protocol in ("gs", "gcs"):  # it warns with every request where it may not ask for the kind of a bucket
        logging.getLogger("gcsfs").setLevel(logging.ERROR)
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        how = f"pip install 'rollouts[{EXTRAS[protocol]}]'"
        raise StoreRefusedError(f"{url} needs a package that is not installed: {how}") from error
    with sorted_failures(url):
        driver, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **more_options)
    return driver, str(root).rstrip("/")


def _describe(info: Mapping[str, Any]) -> StoredObject:  # Any: drivers say what they like
    """What the drivers say, which is worded differently by each."""
    known = ("ETag", "etag", "generation", "md5Hash", "mtime", "LastModified")
    identity = next((f"{key} {info[key]}" for key in known if info.get(key)), "")
    md5 = str(info.get("ETag") or "").strip('"')
    if encoded := info.get("md5Hash"):
        md5 = base64.b64decode(encoded).hex()
    return StoredObject(size=int(info["size"]), identity=identity, md5=md5 if _MD5.fullmatch(md5) else "")
