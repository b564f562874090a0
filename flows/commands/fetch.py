"""`rollouts pull`: download a run's published checkpoint, or any other model or data, from an object store.

    rollouts pull s3://bucket/runs/my-run best      the checkpoint that the run published, verified

Not here: the other commands (cli.py), the download itself (infra/stores/download.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollouts.flows.commands.terminal import AsJson, console, emit
from rollouts.infra.stores.download import download, find_wanted
from rollouts.infra.stores.object_store import ObjectStore, is_url
from rollouts_core.errors import InputError


def pull(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="URL in run.publish with the run's name, as in s3://bucket/team/my-run, or any folder or object.",
        ),
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create; must not exist yet.")],
    as_json: AsJson = False,
) -> None:
    """Download a published checkpoint, or another folder or object of an object store, to DIR.

    DIR appears after all files are verified. If the command is interrupted, run it again: it continues the download.
    """
    if not is_url(url):
        where = "is on this machine already" if Path(url).exists() else "is not a URL"
        raise InputError(f"{url} {where}: pull downloads from an object store, as s3://bucket/folder")
    source = ObjectStore(url)
    target = directory.resolve()
    try:
        if target.exists():
            raise InputError(f"{directory} exists: give the path of a new folder, or remove this one")
    except OSError as error:  # the name is too long
        raise InputError(f"{directory} cannot be written: {error.strerror}") from error
    wanted = find_wanted(source)
    download(source, wanted, target)
    num_bytes = sum(each.size for each in wanted)
    if as_json:
        emit([{"kind": "download", "path": str(target), "files": len(wanted), "bytes": num_bytes}])
    console.print(f"fetched        {len(wanted)} files, {num_bytes / 1e6:.1f} MB, all verified", markup=False)
    if (target / "config.json").is_file():
        console.print(f"try            rollouts serve {directory}", markup=False)
