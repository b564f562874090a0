"""Publish the newest checkpoint of a training again and again while it goes on, and once more at its end.

    <url>/step_000100/      as it lies in the run directory, its manifest.json after its other files

Not here: what a run publishes at its end (publication.py), who trains.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollouts.infra.errors import InfraError
from rollouts.infra.repeating import repeating
from rollouts.infra.stores.object_store import ObjectStore
from rollouts.infra.stores.publication import MANIFEST, send_folder
from rollouts.infra.sync.push import list_files

UPLOAD_INTERVAL_S = 30.0

logger = logging.getLogger(__name__)


@contextmanager
def checkpoints_published(checkpoints: Path, url: str, *, interval_s: float = UPLOAD_INTERVAL_S) -> Iterator[None]:
    """Publish what the folder gets, beside whatever the block does; failures are logged, and tried again.

    Leaving the block waits for the newest checkpoint to be there; an exception, an interrupt above all, does not.
    """
    published = ""

    def publish() -> None:
        nonlocal published
        newest = newest_checkpoint(checkpoints)
        if newest is None or newest.name == published:
            return
        try:
            send_folder(ObjectStore(url), newest.name, {name: newest / name for name in list_files(newest)})
            published = newest.name
        except (InfraError, OSError) as error:  # OSError: the training has just removed it
            logger.warning("%s was not published: %s", newest, error)

    with repeating(publish, interval_s=interval_s, thread_name=f"publication of {checkpoints}", once_more=True):
        yield


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """The last whole checkpoint of a folder; None where there is none."""
    whole = [path.parent for path in checkpoints.glob(f"step_*/{MANIFEST}")]
    return max(whole, key=lambda path: (len(path.name), path.name), default=None)
