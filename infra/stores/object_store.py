"""List, read and write objects below a URL. Every upload is verified.

    s3://bucket/folder   gs://bucket/folder   file:///folder

Only this module uses fsspec, whose drivers are optional packages. The drivers find credentials in environment variables
and in the files of the providers' own tools. The code of this project never sees the credentials.

Not here: publications (publication.py), downloads (download.py), errors of drivers (object_errors.py), a folder of this
machine (shared_folder.py).
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
"""Objects of at least twice this size are uploaded to S3 in parts. Up to _PARTS_AT_ONCE parts are held in memory and
sent in parallel."""
_PARTS_AT_ONCE = 10
_MAX_PARTS = 10_000
"""S3's largest number of parts of an object."""
MAX_OBJECTS = 10_000
"""A folder with more objects is refused, because its URL is probably a mistake."""
_MAX_SMALL_BYTES = 16 << 20
ANSWER_S = 120.0
"""Seconds without progress of an upload until the store counts as unreachable, in addition to the time that
MIN_BYTES_PER_S allows. Without this limit, the drivers, whose own retries take 80 s, would wait forever for a server
that does not read."""
MIN_BYTES_PER_S = 100_000
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""Extras of this project that install the driver of a protocol."""
FOLDER = "file"
_PROTOCOLS = (*EXTRAS, FOLDER)
"""Supported protocols. Other protocols of fsspec are refused, for example the protocols for web pages."""

_URL = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]*)://(?P<place>/?[^\s/?#@:]+(?::\d+)?(?:/[^?#\x00-\x1f\x7f]*)?)")
_MD5 = re.compile(r"[0-9a-f]{32}(-\d+)?")
_HASH_BYTES = 4 << 20


def is_url(text: str) -> bool:
    """Return whether a text is the URL of an object store, and not a path or the name of a model on a hub."""
    return "://" in text


def check_url(url: str) -> str:
    """Return the URL of a folder or object, without a slash at its end.

    Raises:
        ValueError: the text is not a URL of a supported kind, or has parts such as a password or a query. The error's
            text omits the URL, because the URL may contain a password.
    """
    protocol, _, place = url.partition("://")
    if re.fullmatch(r"[a-z][a-z0-9+.-]*", protocol) and protocol not in _PROTOCOLS:
        raise ValueError(f"expected one of {', '.join(f'{each}://' for each in _PROTOCOLS)}, found {protocol}://")
    if protocol == FOLDER and not place.startswith("/"):
        raise ValueError("expected three slashes before a folder of this machine, as in file:///srv/models")
    leads_elsewhere = {".", ".."} & set(url.split("/"))
    if not _URL.fullmatch(url) or "::" in url or leads_elsewhere or url != url.strip():
        raise ValueError(
            "expected a URL like s3://bucket/folder, without user, password, query or parts like `..`: "
            "credentials belong in environment variables"
        )
    return url.rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    size: int
    identity: str
    """A value that changes when the content changes: an entity tag, a generation number, or a modification time."""
    md5: str
    """The content's MD5 in hex. After an upload in parts: the MD5 of the parts' MD5s, a dash, and the number of parts.
    The text is empty if the store has no MD5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    size: int
    sha256: str
    md5: str
    """The MD5 in the format of StoredObject.md5."""


class _Progress(fsspec.callbacks.Callback):  # type: ignore[misc]  # fsspec has no types
    """Records the time at which a store last accepted data."""

    def __init__(self) -> None:
        super().__init__()
        self.at = time.monotonic()

    def relative_update(self, inc: int = 1) -> None:
        self.at = time.monotonic()


class ObjectStore:
    """A folder in an object store, or one object. Several threads may share one object of this class."""

    def __init__(self, url: str) -> None:
        """Open the driver. The store is not contacted.

        Raises:
            StoreRefusedError: the URL is invalid, or its driver is not installed.
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
        return self.url.rpartition("/")[2]

    def list(self, folder: str = "") -> dict[str, StoredObject]:
        """Return the objects below a folder by their names relative to this store's URL. The URL's own object is named
        "".

        Raises:
            StoreRefusedError: the store refuses the listing, or the folder has more than MAX_OBJECTS objects.
            PermanentInfraError: a folder of this machine contains something other than files, or a link to the outside.
        """
        root = self._key(folder)
        enough = {"max_items": MAX_OBJECTS + 1} if self.protocol == "s3" else {}  # other drivers have no such option
        with sorted_failures(self.url_of(folder)):
            found: Mapping[str, Any] = self._fs.find(root, detail=True, **enough)  # Any: differs between drivers
        if len(found) > MAX_OBJECTS:
            raise StoreRefusedError(f"{self.url_of(folder)} holds more than {MAX_OBJECTS} objects: name a folder in it")
        start = len(self._root) + 1
        return {key[start:]: _describe(info) for key, info in sorted(found.items()) if not key.endswith("/")}

    def find(self, name: str) -> StoredObject | None:
        try:
            with sorted_failures(self.url_of(name)):
                try:
                    info = self._fs.info(self._key(name))
                except OSError as error:
                    if self.protocol == "s3" and error.errno == errno.EINVAL:
                        self._fs.cat_file(self._key(name), start=0, end=1)  # GET raises the reason, unlike HEAD
                    raise
        except ObjectMissingError:
            return None
        return None if info["type"] == "directory" else _describe(info)

    def read(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes of an object from `start` up to but not including `end`.

        Raises:
            StoreUnavailableError: the transfer broke, or the object is shorter than `end`.
        """
        if start == end:
            return b""
        with sorted_failures(self.url_of(name)):
            content: bytes = self._fs.cat_file(self._key(name), start=start, end=end)
        if len(content) != end - start:
            raise StoreUnavailableError(f"{self.url_of(name)} ended after {start + len(content)} bytes: try again")
        return content

    def read_small(self, name: str) -> bytes | None:
        """Return the content of an object of at most _MAX_SMALL_BYTES, or None if the object does not exist."""
        there = self.find(name)
        if there is None:
            return None
        if there.size > _MAX_SMALL_BYTES:
            raise StoreRefusedError(f"{self.url_of(name)} has {there.size} bytes, too many for a file of this name")
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
        """Write or replace an object with a file's content, and verify the stored object.

        Raises:
            StoreUnavailableError: the object did not arrive completely, or the file changed or was removed meanwhile.
        """
        part_size, key = part_bytes(digest.size), self._key(name)
        options = {"chunksize": part_size, "max_concurrency": _PARTS_AT_ONCE} if self.protocol == "s3" else {}
        with self._failures_to_write(name):
            try:
                if self._fs.async_impl:
                    progress = _Progress()
                    sending = self._fs._put_file(str(path), key, callback=progress, **options)
                    self._send(sending, min(digest.size, _PARTS_AT_ONCE * part_size), progress)
                else:
                    self._fs.put_file(str(path), key)
            except FileNotFoundError as error:  # the file or the bucket does not exist
                if path.exists():
                    raise
                raise StoreUnavailableError(f"{path} was removed while it was sent to {self.url}") from error
        there = self.find(name)
        if there is None or not self.holds(name, there, digest):
            raise StoreUnavailableError(f"{self.url_of(name)} differs from {path}, which was sent: publish it again")

    def holds(self, name: str, there: StoredObject, digest: FileDigest) -> bool:
        """Return whether an object has the content with this digest. If the store's MD5 differs, downloads the object
        to compare its sha256."""
        if there.size != digest.size:
            return False
        if there.md5 == digest.md5:
            return True
        # An entity tag need not be an MD5. With encryption by KMS or customer keys, S3's entity tags only look like an
        # MD5.
        sha256 = hashlib.sha256()
        for start in range(0, there.size, PART_BYTES):
            sha256.update(self.read(name, start, min(start + PART_BYTES, there.size)))
        return sha256.hexdigest() == digest.sha256

    def copy_mode(self, name: str) -> int:
        """Return a downloaded copy's permissions before the umask. If the store is a folder of this machine, the copy
        gets the permissions of the original file."""
        if not isinstance(self._fs, SharedFolder):
            return READABLE
        with sorted_failures(self.url_of(name)):
            return self._fs.copy_mode(self._key(name))

    def remove(self, name: str) -> None:
        with sorted_failures(self.url_of(name)):
            self._fs.rm_file(self._key(name))

    def digest(self, path: Path) -> FileDigest:
        """Return the digests of a local file. The MD5 has the format of this store."""
        return _digest_file(path, in_parts=self.protocol == "s3")

    def call_s3(self, method: str, name: str, **parameters: Any) -> Mapping[str, Any]:  # Any: S3's API
        bucket, key, _ = self._fs.split_path(self._key(name))
        with sorted_failures(self.url_of(name)):
            answer: Mapping[str, Any] = self._fs.call_s3(method, Bucket=bucket, Key=key, **parameters)
        return answer

    def sign(self, method: str, name: str, lifetime_s: int, **parameters: Any) -> str:  # Any: S3's API
        """Return a secret URL for one method of S3's API on one object. The URL is valid for `lifetime_s` seconds."""
        with sorted_failures(self.url_of(name)):
            return str(self._signing_fs.url(self._key(name), expires=lifetime_s, client_method=method, **parameters))

    @cached_property
    def _signing_fs(self) -> Any:  # Any: fsspec has no types
        """A separate driver for signing URLs, because the default driver signs by an old method that most servers
        refuse."""
        return _open_driver(self.url, self.protocol, config_kwargs={"signature_version": "s3v4"})[0]

    def _send(self, sending: Coroutine[Any, Any, None], num_bytes_at_once: int, progress: "_Progress") -> None:
        """Wait for an upload as long as the upload makes progress.

        Raises:
            TimeoutError: the store accepts no data.
        """
        limit_s = ANSWER_S + num_bytes_at_once / MIN_BYTES_PER_S
        future = asyncio.run_coroutine_threadsafe(sending, self._fs.loop)
        try:
            while wait([future], timeout=1.0).not_done:
                if time.monotonic() > progress.at + limit_s:
                    raise TimeoutError(f"it accepted no data for {limit_s:.0f} s")
            future.result()
        finally:
            future.cancel()

    @contextmanager
    def _failures_to_write(self, name: str) -> Iterator[None]:
        """Convert errors of writing. If the driver reports a missing object, the bucket is missing."""
        url = self.url_of(name)
        try:
            with sorted_failures(url):
                yield
        except ObjectMissingError as error:
            raise missing_bucket(url) from error

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def url_of(self, name: str) -> str:
        """Return the URL of one object. The name "" gives the URL of the store itself."""
        return f"{self.url}/{name}" if name else self.url


def part_bytes(size: int) -> int:
    """Return the size of the parts in which an object of this size is uploaded to S3."""
    return max(PART_BYTES, math.ceil(size / _MAX_PARTS))


def _digest_file(path: Path, *, in_parts: bool) -> FileDigest:
    """Return the digests of a file. The file is read once.

    Args:
        in_parts: whether a large file is uploaded in parts, each with its own digest.
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
    """Return the driver of a protocol, and the URL's path in the driver's format.

    Raises:
        StoreRefusedError: the driver is not installed.
    """
    if protocol == FOLDER:
        root = url.partition("://")[2]
        return SharedFolder(root), root
    if protocol in ("gs", "gcs"):  # the driver warns on every request if it may not read the bucket's type
        logging.getLogger("gcsfs").setLevel(logging.ERROR)
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        how = f"pip install 'rollouts[{EXTRAS[protocol]}]'"
        raise StoreRefusedError(f"{url} needs a package that is not installed: {how}") from error
    with sorted_failures(url):
        driver, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **more_options)
    return driver, str(root).rstrip("/")


def _describe(info: Mapping[str, Any]) -> StoredObject:  # Any: differs between drivers
    """Convert a driver's description of an object. The field names differ between drivers."""
    known = ("ETag", "etag", "generation", "md5Hash", "mtime", "LastModified")
    identity = next((f"{key} {info[key]}" for key in known if info.get(key)), "")
    md5 = str(info.get("ETag") or "").strip('"')
    if encoded := info.get("md5Hash"):
        md5 = base64.b64decode(encoded).hex()
    return StoredObject(size=int(info["size"]), identity=identity, md5=md5 if _MD5.fullmatch(md5) else "")
