"""Let a node transfer files from or to an object store directly, so that the content does not pass through this
machine.

    here      presigned URLs ──> standard input of node_transfer.py on the node <── pieces in parallel ──> the store
    download  into .<name>.incoming-<random>, compared with the files here, then renamed, as for copies (push.py)
    upload    uploads in parts are completed or aborted from here; the publication verifies the objects

The node gets no credentials. A presigned URL is valid for a single object and for an hour, and is a secret during this
hour.

Not here: the alternatives for nodes that cannot reach the store (tasks/upload_inputs.py, tasks/sync.py).
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rollouts.infra.errors import InfraError, StoreUnavailableError
from rollouts.infra.session import Session, read_answer
from rollouts.infra.stores import node_transfer
from rollouts.infra.stores.object_store import ObjectStore, part_bytes
from rollouts.infra.stores.publication import CHECKPOINT_FOLDER, MANIFEST, digest_folder, find_missing
from rollouts.infra.sync import receiver
from rollouts.infra.sync.push import list_files, publish_filled

# ── presigned URLs ──


_LIFETIME_S = 3600

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PresignedPiece:
    offset: int
    length: int
    url: str


def can_presign(store: ObjectStore) -> bool:
    """Return whether the store can sign URLs. Only S3 and stores with S3's API can sign URLs."""
    return store.protocol == "s3"


def presigned_get(store: ObjectStore, name: str) -> str:
    return store.sign("get_object", name, _LIFETIME_S)


class _PresignedUpload:
    """The upload of one object by another machine. The object exists once `complete` has returned.

    Leaving the block before `complete` aborts the upload, because S3 charges for the parts of incomplete uploads.
    """

    def __init__(self, store: ObjectStore, name: str, size: int) -> None:
        """Start the upload. A large object is split into the same parts as in ObjectStore.upload."""
        self._store = store
        self._name = name
        self._size = size
        self._part_size = part_bytes(size)
        self._upload_id = ""
        if size >= 2 * self._part_size:
            self._upload_id = str(store.call_s3("create_multipart_upload", name)["UploadId"])

    @property
    def pieces(self) -> list[PresignedPiece]:
        if not self._upload_id:
            url = self._store.sign("put_object", self._name, _LIFETIME_S)
            return [PresignedPiece(offset=0, length=self._size, url=url)]
        return [
            PresignedPiece(
                offset=index * self._part_size,
                length=min(self._part_size, self._size - index * self._part_size),
                url=self._store.sign(
                    "upload_part", self._name, _LIFETIME_S, UploadId=self._upload_id, PartNumber=index + 1
                ),
            )
            for index in range(math.ceil(self._size / self._part_size))
        ]

    def complete(self, etags: Sequence[str]) -> None:
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

    def __exit__(self, *_: object) -> None:
        if not self._upload_id:
            return
        try:
            self._store.call_s3("abort_multipart_upload", self._name, UploadId=self._upload_id)
        except InfraError as problem:
            logger.warning("parts of %s/%s were left behind: %s", self._store.url, self._name, problem)


PROBE_S = 5.0
"""Seconds within which the store must answer the node."""
ANSWER_MARGIN_S = 60.0


def fetch_on_node(
    session: Session, store: ObjectStore, keys: Mapping[str, str], files: Mapping[str, Path], destination: str
) -> int:
    """Create a folder on the node with files that the node downloads from the store. Returns the number of downloaded
    bytes.

    Args:
        keys: names of the objects in the store, by the files' names in the folder.
        files: the same files on this machine, to verify the downloaded content.

    Raises:
        StoreUnavailableError: the node cannot download the files. The incomplete folder on the node was removed.
        TransientInfraError: the downloaded content differs from the files on this machine. The folder was removed.
    """
    sizes = {name: path.stat().st_size for name, path in files.items()}

    def fetch(incoming: str) -> dict[str, list[Any]]:
        wanted = [{"path": name, "size": size, "url": presigned_get(store, keys[name])} for name, size in sizes.items()]
        _call(session, ["fetch", incoming], {"files": wanted})
        return {name: [size, receiver.hash_file(files[name])] for name, size in sizes.items()}

    publish_filled(session, destination, sum(sizes.values()), fetch)
    return sum(sizes.values())


def send_checkpoint_from_node(session: Session, store: ObjectStore, checkpoint: Path, source: str) -> int:
    """Let the node upload those files of a checkpoint that the store lacks. Returns the number of uploaded bytes.

    The objects get the same names as in `publish_run`. The manifest marks a checkpoint as complete, so a later
    `publish_run` uploads it.

    Args:
        checkpoint: folder of the checkpoint's copy on this machine.
        source: the files' directory on the node.

    Raises:
        StoreUnavailableError: the node cannot upload the files, or the store refuses the files.
    """
    files = {name: checkpoint / name for name in list_files(checkpoint)}
    place, digests = digest_folder(store, CHECKPOINT_FOLDER, files)
    sizes = {name: digests[name].size for name in find_missing(store, place, digests) if Path(name).name != MANIFEST}
    with ExitStack() as under_way:
        uploads = {
            name: under_way.enter_context(_PresignedUpload(store, f"{place}/{name}", size))
            for name, size in sizes.items()
        }
        pieces = {name: upload.pieces for name, upload in uploads.items()}
        wanted = [{"path": name, **asdict(piece)} for name, each in pieces.items() for piece in each]
        etags = iter(_call(session, ["send", source], {"pieces": wanted})["etags"] if wanted else [])
        for name, upload in uploads.items():
            upload.complete([next(etags) for _ in pieces[name]])
    return sum(sizes.values())


# Any: requests and answers are JSON objects.
def _call(session: Session, arguments: Sequence[str], request: Mapping[str, Any]) -> dict[str, Any]:
    limits = {"probe_s": PROBE_S, "limit_s": _LIFETIME_S}
    completed = session.run_program(
        Path(node_transfer.__file__),
        arguments,
        stdin=json.dumps({**limits, **request}).encode(),
        timeout_s=PROBE_S + _LIFETIME_S + ANSWER_MARGIN_S,
        check=False,
    )
    answer = read_answer(completed)
    if "error" in answer:
        raise StoreUnavailableError(answer["error"])
    return answer
