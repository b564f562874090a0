"""Pins that a secret is refused if other users can read it or made it, and that new secrets are private.

Otherwise another user of the machine reads or chooses the password of a store's server, and starts any program.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from rollouts.flows.own_server.https import own_certificate
from rollouts.flows.own_server.password import own_password
from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.secret_file import own_folder, own_secret
from rollouts.tasks.unit_keys import own_unit_key

SECRETS: dict[str, Callable[[Path], object]] = {
    "password": own_password,
    "certificate.pem": own_certificate,
    "unit-key": own_unit_key,
}


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o604])
def test_a_secret_that_others_may_read_or_write_is_refused_with_the_command(
    name: str, mode: int, tmp_path: Path
) -> None:
    SECRETS[name](tmp_path)
    path = tmp_path / name
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(mode)
    with pytest.raises(PermanentInfraError, match=f"chmod 600 {path}"):
        SECRETS[name](tmp_path)


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_that_another_user_made_is_refused(
    name: str, tmp_path: Path, give_away: Callable[[Path], None]
) -> None:
    SECRETS[name](tmp_path)
    give_away(tmp_path / name)
    with pytest.raises(PermanentInfraError, match=f"{name} holds secrets and belongs to another user"):
        SECRETS[name](tmp_path)
    give_away(tmp_path)  # the store of another user, mounted into a container
    SECRETS[name](tmp_path)


@pytest.mark.parametrize("name", SECRETS)
def test_a_link_of_another_user_and_a_pipe_in_the_place_of_a_secret_are_refused(
    name: str, tmp_path: Path, give_away: Callable[[Path], None]
) -> None:
    chosen, path = tmp_path / "chosen", tmp_path / name
    chosen.write_text("rollouts:chosen")
    for target in (chosen, tmp_path / "nothing"):
        path.symlink_to(target)
        give_away(path)
        with pytest.raises(PermanentInfraError, match="belongs to another user"):
            SECRETS[name](tmp_path)
        path.unlink()
    path.symlink_to(chosen)
    with pytest.raises(PermanentInfraError, match="chmod 600"):
        SECRETS[name](tmp_path)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(PermanentInfraError, match="is not a file"):
        SECRETS[name](tmp_path)


def test_a_secret_is_not_written_through_a_link_that_was_there_before(tmp_path: Path) -> None:
    for name in (f"password.{os.getpid()}", f".password.{os.getpid()}", ".password"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    assert own_secret(tmp_path / "password", lambda: "new") == "new"
    assert not (tmp_path / "elsewhere").exists()


def test_the_folder_of_the_server_is_narrowed(tmp_path: Path) -> None:
    folder = tmp_path / "prefect"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    own_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for mode in (0o770, 0o702):
        folder.chmod(mode)
        with pytest.raises(PermanentInfraError, match=f"chmod 700 {folder}"):
            own_folder(folder)


def test_the_folder_of_another_user_is_refused(tmp_path: Path, give_away: Callable[[Path], None]) -> None:
    (tmp_path / "prefect").mkdir()
    give_away(tmp_path / "prefect")
    with pytest.raises(PermanentInfraError, match="prefect holds secrets and belongs to another user"):
        own_folder(tmp_path / "prefect")
    own_folder(tmp_path / "own")
    (tmp_path / "link").symlink_to(tmp_path / "own")
    give_away(tmp_path / "link")
    with pytest.raises(PermanentInfraError, match="link holds secrets and belongs to another user"):
        own_folder(tmp_path / "link")
