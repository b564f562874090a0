"""Let a node fetch files from an object store, or send some there, so that none of their bytes pass this machine.

    here    presigned URLs ──> standard input of node_transfer.py on the node <── pieces, some at a time ──> the store
    fetched   into .<name>.incoming-<random>, compared with the files here, renamed: as copies from here are (push.py)
    sent      parts are put together from here, or given up; what came of it the publication compares, as always

No credential is on the node, and its URLs are good for single objects and an hour. Not here: making them
(presigned.py), what is done where a node cannot (tasks/upload_inputs.py, tasks/sync.py).
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollouts.infra.errors import StoreUnavailableError
from rollouts.infra.session import Session, read_answer
from rollouts.infra.stores import node_transfer
from rollouts.infra.stores.object_store import ObjectStore
from rollouts.infra.stores.presigned import LIFETIME_S, PresignedUpload, presigned_get
from rollouts.infra.stores.publication import CHECKPOINT_FOLDER, MANIFEST, digest_folder, find_missing
from rollouts.infra.sync import receiver
from rollouts.infra.sync.push import list_files, publish_filled

PROBE_S = 5.0
"""A store that has not answered a node within this time is out of its reach."""
ANSWER_MARGIN_S = 60.0


def fetch_on_node(
    session: Session, store: ObjectStore, keys: Mapping[str, str], files: Mapping[str, Path], destination: str
) -> int:
    """Let a folder appear on the node, whose files it fetches from the store; returns how many bytes that were.

    Args:
        keys: what the files are called in the store, by their names below the folder.
        files: the same files here, with which they are compared.

    Raises:
        StoreUnavailableError: the node cannot fetch them; nothing is left of what it has.
        TransientInfraError: what it fetched is something else; nothing is left of it.
    """
    sizes = {name: path.stat().st_size for name, path in files.items()}

    def fetch(incoming: str) -> dict[str, list[Any]]:
        wanted = [{"path": name, "size": size, "url": presigned_get(store, keys[name])} for name, size in sizes.items()]
        _call(session, ["fetch", incoming], {"files": wanted})
        return {name: [size, receiver.hash_file(files[name])] for name, size in sizes.items()}

    publish_filled(session, destination, sum(sizes.values()), fetch)
    return sum(sizes.values())


def send_checkpoint_from_node(session: Session, store: ObjectStore, checkpoint: Path, source: str) -> int:
    """Let the node send the files of a checkpoint that the store lacks; returns how many bytes that were.

    They come to lie where `publish_run` puts them; the manifest, which says that they are whole, is left to it.

    Args:
        checkpoint: the same files here.
        source: where they lie on the node.

    Raises:
        StoreUnavailableError: the node cannot send them, or the store does not take them.
    """
    files = {name: checkpoint / name for name in list_files(checkpoint)}
    place, digests = digest_folder(store, CHECKPOINT_FOLDER, files)
    sizes = {name: digests[name].size for name in find_missing(store, place, digests) if Path(name).name != MANIFEST}
    with ExitStack() as under_way:
        uploads = {
            name: under_way.enter_context(PresignedUpload(store, f"{place}/{name}", size))
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
    limits = {"probe_s": PROBE_S, "limit_s": LIFETIME_S}
    completed = session.run_program(
        Path(node_transfer.__file__),
        arguments,
        stdin=json.dumps({**limits, **request}).encode(),
        timeout_s=PROBE_S + LIFETIME_S + ANSWER_MARGIN_S,
        check=False,
    )
    answer = read_answer(completed)
    if "error" in answer:
        raise StoreUnavailableError(answer["error"])
    return answer
