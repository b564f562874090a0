"""Publish the newest checkpoint of a training again and again while it goes on, and once more at its end.

    <url>/step_000100/      as it lies in the run directory, its manifest.json after its other files

Not here: what a run publishes at its end (publication.py), who trains.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.errors import InfraError
from infra.object_store import ObjectStore
from infra.publication import MANIFEST, send_folder
from infra.sync import list_files

UPLOAD_INTERVAL_S = 30.0

logger = logging.getLogger(__name__)


@contextmanager
def checkpoints_published(checkpoints: Path, url: str, *, interval_s: float = UPLOAD_INTERVAL_S) -> Iterator[None]:
    """Publish what the folder gets, beside whatever the block does; failures are logged, and tried again.

    Leaving the block waits for the newest checkpoint to be there; an exception, an interrupt above all, does not.
    """
    is_over, is_broken = threading.Event(), threading.Event()

    def publish_until_over() -> None:
        published = ""
        is_last = False
        while not is_last:
            is_last = is_over.wait(interval_s)
            if is_broken.is_set():
                return
            newest = newest_checkpoint(checkpoints)
            if newest is None or newest.name == published:
                continue
            try:
                send_folder(ObjectStore(url), newest.name, {name: newest / name for name in list_files(newest)})
                published = newest.name
            except (InfraError, OSError) as error:  # OSError: the training has just removed it
                logger.warning("%s was not published: %s", newest, error)

    thread = threading.Thread(target=publish_until_over, name=f"publication of {checkpoints}", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        is_broken.set()
        raise
    finally:
        is_over.set()
    thread.join()


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """The last whole checkpoint of a folder; None where there is none."""
    whole = [path.parent for path in checkpoints.glob(f"step_*/{MANIFEST}")]
    return max(whole, key=lambda path: (len(path.name), path.name), default=None)
