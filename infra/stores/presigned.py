"""Presigned URLs: each allows one download or upload of an object in S3 within an hour, without credentials.

Such a URL is a secret while it is valid.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rollouts.infra.errors import InfraError
from rollouts.infra.stores.object_store import ObjectStore, part_bytes

LIFETIME_S = 3600

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PresignedPiece:
    """A piece of a file, and the URL for its upload."""

    offset: int
    length: int
    url: str


def can_presign(store: ObjectStore) -> bool:
    """Return whether the store signs URLs: only S3 and stores with its API."""
    return store.protocol == "s3"


def presigned_get(store: ObjectStore, name: str) -> str:
    """Return a URL that downloads an object."""
    return store.sign("get_object", name, LIFETIME_S)


class PresignedUpload:
    """An object that another machine uploads. It exists when `complete` has returned.

    Leaving the block earlier aborts the upload, because S3 charges for parts of incomplete uploads.
    """

    def __init__(self, store: ObjectStore, name: str, size: int) -> None:
        """A large object is started as an upload in parts, with the same parts as in ObjectStore.upload."""
        self._store = store
        self._name = name
        self._size = size
        self._part_size = part_bytes(size)
        self._upload_id = ""
        if size >= 2 * self._part_size:
            self._upload_id = str(store.call_s3("create_multipart_upload", name)["UploadId"])

    @property
    def pieces(self) -> list[PresignedPiece]:
        """The pieces to upload, each with its URL."""
        if not self._upload_id:
            url = self._store.sign("put_object", self._name, LIFETIME_S)
            return [PresignedPiece(offset=0, length=self._size, url=url)]
        return [
            PresignedPiece(
                offset=index * self._part_size,
                length=min(self._part_size, self._size - index * self._part_size),
                url=self._store.sign(
                    "upload_part", self._name, LIFETIME_S, UploadId=self._upload_id, PartNumber=index + 1
                ),
            )
            for index in range(math.ceil(self._size / self._part_size))
        ]

    def complete(self, etags: Sequence[str]) -> None:
        """Complete the object from its pieces, given their entity tags."""
        if self._upload_id:
            parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
            self._store.call_s3(
                "complete_multipart_upload",
                self._name,
                UploadId=self._upload_id,
                MultipartUpload={"Parts": parts},
            )
        self._upload_id = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._upload_id:
            return
        try:
            self._store.call_s3("abort_multipart_upload", self._name, UploadId=self._upload_id)
        except InfraError as problem:
            logger.warning("parts of %s/%s were left behind: %s", self._store.url, self._name, problem)
