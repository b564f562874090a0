"""Secrets of a store: files and folders that only their owner can access. Every use of a secret checks the permissions.

A store belongs to one user. Like ssh with its keys, this module refuses files of another user, and files that other
users can read. The error's text names the command that solves the problem. Root may use another user's store, because
containers mount such stores.
"""

import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from rollouts.infra.errors import PermanentInfraError

OF_OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""Mode bits that give access to users other than the owner."""
_WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
OWN_FILE, OWN_FOLDER = 0o600, 0o700


def own_secret(path: Path, make: Callable[[], str]) -> str:
    """Return the secret in the file. If the file is missing, write the secret that `make` returns into the file.

    Raises:
        PermanentInfraError: other users can read the file, or another user created the file or the link.
    """
    if (known := _read_secret(path)) is not None:
        return known
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, OWN_FILE)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(make())
            file.flush()
            os.fsync(file.fileno())
        os.link(partial, path)  # link, because the first of two concurrent processes must win
    except FileExistsError:
        if _read_secret(path) is None:  # the existing file is empty, because the disk was full
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    made = _read_secret(path)
    assert made is not None, f"{path} was just written"
    return made


def _read_secret(path: Path) -> str | None:
    """Return the secret in the file, or None if the file is missing or empty. A link that this user created is
    followed.

    Raises:
        PermanentInfraError: other users can read the file, or another user created the file or the link.
    """
    try:
        _check_owner(path, path.lstat())
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, encoding="utf-8") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise PermanentInfraError(f"{path} holds a secret, but is not a file: remove it to have a new secret made")
        _check_owner(path, status)
        if status.st_mode & OF_OTHERS:
            raise PermanentInfraError(
                f"other users can read the secret in {path} (mode {stat.S_IMODE(status.st_mode):04o}): "
                f"chmod 600 {path}, or remove the file to have a new secret made"
            )
        return file.read().strip() or None


def own_folder(path: Path) -> None:
    """Create a folder with mode 0700, or give an existing folder this mode.

    Raises:
        PermanentInfraError: another user created the folder, or other users could write into it until now.
    """
    path.mkdir(mode=OWN_FOLDER, parents=True, exist_ok=True)
    _check_owner(path, path.lstat())
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        status = os.fstat(descriptor)
        _check_owner(path, status)
        if status.st_mode & _WRITTEN_BY_OTHERS:
            raise PermanentInfraError(
                f"other users can write into {path} (mode {stat.S_IMODE(status.st_mode):04o}), which holds secrets: "
                f"check that every file there is yours, then chmod 700 {path}"
            )
        if status.st_mode & OF_OTHERS:
            os.fchmod(descriptor, OWN_FOLDER)
    finally:
        os.close(descriptor)


def open_own_log(path: Path) -> BinaryIO:
    """Open a file with mode 0600 for appending."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, OWN_FILE), "ab")


def _check_owner(path: Path, status: os.stat_result) -> None:
    own = {0, os.geteuid()}
    if os.geteuid() == 0:
        with suppress(FileNotFoundError):
            own.add(path.parent.stat().st_uid)
    if status.st_uid not in own:
        raise PermanentInfraError(
            f"{path} holds secrets and belongs to another user (uid {status.st_uid}): remove it to have a new one "
            "made, or choose a store of your own"
        )
