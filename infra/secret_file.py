"""Secrets of a store: files and folders of their owner alone, checked whenever they are used.

A store belongs to one user. A file that others may read, or that another user made, is refused with the command that
mends it, as ssh refuses a key. Root may use a store of another user, as in a container into which it is mounted.

Not here: what a secret opens.
"""

import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from infra.errors import PermanentInfraError

OF_OTHERS = stat.S_IRWXG | stat.S_IRWXO
WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
OWN_FILE, OWN_FOLDER = 0o600, 0o700


def own_secret(path: Path, make: Callable[[], str]) -> str:
    """Return what the file holds, after writing what `make` returns if there is none.

    Raises:
        PermanentInfraError: others may read the file, or another user made it, or the link to it.
    """
    if (known := read_secret(path)) is not None:
        return known
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, OWN_FILE)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(make())
            file.flush()
            os.fsync(file.fileno())
        os.link(partial, path)  # of two processes that make one at once, the first one counts
    except FileExistsError:
        if read_secret(path) is None:  # it is empty: written when the disk was full
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    made = read_secret(path)
    assert made is not None, f"{path} was just written"
    return made


def read_secret(path: Path) -> str | None:
    """Return what the file holds; None if there is none, or nothing in it. A link of this user's own is followed.

    Raises:
        PermanentInfraError: others may read the file, or another user made it, or the link to it.
    """
    try:
        _check_owner(path, path.lstat())
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, encoding="utf-8") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise PermanentInfraError(f"{path} is no file, and holds a secret: remove it, and a new one is made")
        _check_owner(path, status)
        if status.st_mode & OF_OTHERS:
            raise PermanentInfraError(
                f"others may read {path} (mode {stat.S_IMODE(status.st_mode):04o}), which holds a secret: "
                f"chmod 600 {path}, or remove it if others have read it, and a new one is made"
            )
        return file.read().strip() or None


def own_folder(path: Path) -> None:
    """Make a folder that nobody but its owner may look into, or make it so.

    Raises:
        PermanentInfraError: another user made it, or others may write into it and may have done so.
    """
    path.mkdir(mode=OWN_FOLDER, parents=True, exist_ok=True)
    _check_owner(path, path.lstat())
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        status = os.fstat(descriptor)
        _check_owner(path, status)
        if status.st_mode & WRITTEN_BY_OTHERS:
            raise PermanentInfraError(
                f"others may write into {path} (mode {stat.S_IMODE(status.st_mode):04o}), which holds secrets: look "
                f"whether all that lies there is yours, then chmod 700 {path}"
            )
        if status.st_mode & OF_OTHERS:
            os.fchmod(descriptor, OWN_FOLDER)
    finally:
        os.close(descriptor)


def open_own_log(path: Path) -> BinaryIO:
    """A file to which lines are appended, which nobody but its owner may read."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, OWN_FILE), "ab")


def _check_owner(path: Path, status: os.stat_result) -> None:
    own = {0, os.geteuid()}
    if os.geteuid() == 0:
        with suppress(FileNotFoundError):
            own.add(path.parent.stat().st_uid)
    if status.st_uid not in own:
        raise PermanentInfraError(
            f"{path} belongs to another user (uid {status.st_uid}), and holds secrets: remove it, and a new one is "
            "made, or choose a store of your own"
        )
