"""Let a node transfer files from or to an object store directly, so that their bytes do not pass this machine.

    here    presigned URLs ──> standard input of node_transfer.py on the node <── several pieces at a time ──> the store
    fetched   into .<name>.incoming-<random>, compared with the files here, then renamed, as for copies (push.py)
    sent      uploads in parts are completed or aborted from here; the publication checks the result, as always

The node gets no credentials. Each URL is valid for one object and one hour. Not here: the alternatives for nodes
without access to the store (tasks/placement.py, tasks/stores.py).
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
"""A store that did not answer the node within this time counts as unreachable from there."""
ANSWER_MARGIN_S = 60.0


def fetch_on_node(
    session: Session, store: ObjectStore, keys: Mapping[str, str], files: Mapping[str, Path], destination: str
) -> int:
    """Create a folder on the node with files that the node downloads from the store; returns the number of bytes.

    Args:
        keys: names of the objects in the store, by the names of the files in the folder.
        files: the same files here, for comparison.

    Raises:
        StoreUnavailableError: the node cannot download them; its incomplete folder was removed.
        TransientInfraError: the downloaded content differs; the folder was removed.
    """
    sizes = {name: path.stat().st_size for name, path in files.items()}

    def fetch(incoming: str) -> dict[str, list[Any]]:
        wanted = [{"path": name, "size": size, "url": presigned_get(store, keys[name])} for name, size in sizes.items()]
        _call(session, ["fetch", incoming], {"files": wanted})
        return {name: [size, receiver.hash_file(files[name])] for name, size in sizes.items()}

    publish_filled(session, destination, sum(sizes.values()), fetch)
    return sum(sizes.values())


def send_checkpoint_from_node(session: Session, store: ObjectStore, checkpoint: Path, source: str) -> int:
    """Let the node upload the files of a checkpoint that the store lacks; returns the number of bytes.

    They get the same names as in `publish_run`. The manifest, which marks them as complete, is left to that function.

    Args:
        checkpoint: the same files here.
        source: their directory on the node.

    Raises:
        StoreUnavailableError: the node cannot send them, or the store refuses them.
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
