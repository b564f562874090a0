"""Publish the newest checkpoint of a training regularly while it runs, and once more at its end.

<url>/step_000100/      the files of the run directory's checkpoint, its manifest.json last
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
    """Publish new checkpoints of the folder while the block runs. Failures are logged, and the next round tries again.

    Leaving the block waits until the newest checkpoint is published. Leaving it by an exception does not wait.
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
        except (InfraError, OSError) as error:  # OSError: the training deleted the checkpoint meanwhile
            logger.warning("%s was not published: %s", newest, error)

    with repeating(publish, interval_s=interval_s, thread_name=f"publication of {checkpoints}", once_more=True):
        yield


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """Return the last complete checkpoint of a folder; None without one."""
    whole = [path.parent for path in checkpoints.glob(f"step_*/{MANIFEST}")]
    return max(whole, key=lambda path: (len(path.name), path.name), default=None)
