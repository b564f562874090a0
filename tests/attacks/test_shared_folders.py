"""Pins that `file://` URLs fetch nothing from outside of their folder, into which other users may write.

Otherwise another user puts a link to a private file there, and the file is fetched, sent to nodes, and published.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.session import LocalSession
from rollouts.infra.stores import shared_folder
from rollouts.infra.stores.download import digest_of, download, find_wanted
from rollouts.infra.stores.object_store import ObjectStore
from rollouts.infra.sync.push import publish_files
from rollouts.tasks.inputs import bring_input
from rollouts.tasks.upload_inputs import files_below


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A folder with a key that its owner alone may read."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "key").write_text("SECRET")
    (folder / "key").chmod(0o600)
    return folder


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that everybody may write."""
    folder = tmp_path / "shared" / "model"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    (folder / "config.json").write_text("{}")
    return folder


def fetch(folder: Path, tmp_path: Path, name: str = "fetched") -> Path:
    """What `rollouts pull` does."""
    store = ObjectStore(f"file://{folder}")
    download(store, find_wanted(store), tmp_path / name)
    return tmp_path / name


def _link(shared: Path, private: Path) -> None:
    (shared / "weights").symlink_to(private / "key")


def _chain(shared: Path, private: Path) -> None:
    (shared / "a").symlink_to("b")
    (shared / "b").symlink_to(f"../../{private.name}/key")


def _folder(shared: Path, private: Path) -> None:
    (shared / "sub").symlink_to(private)


def _link_at_the_place_itself(shared: Path, private: Path) -> None:
    (shared / "config.json").unlink()
    shared.rmdir()
    shared.symlink_to(private)


def _hard_link(shared: Path, private: Path) -> None:
    (shared / "weights").hardlink_to(private / "key")


def _blob_elsewhere(shared: Path, private: Path) -> None:
    blobs = shared.parent / "blobs"
    blobs.symlink_to(private)
    (shared / "weights").symlink_to("../blobs/key")


def _publication(shared: Path, private: Path) -> None:
    files = {"c/key": {"size": 6, "sha256": "0" * 64}}
    content = {"format": 1, "run_id": "a", "checkpoint": "c", "records": "r", "files": files, "published_at": 1.0}
    (shared / "publication.json").write_text(json.dumps(content))
    (shared / "c").symlink_to(private)


@pytest.mark.parametrize(
    "attack", [_link, _chain, _folder, _link_at_the_place_itself, _hard_link, _blob_elsewhere, _publication]
)
def test_a_link_out_of_a_shared_folder_hands_out_nothing(
    attack: Callable[[Path, Path], None], shared: Path, private: Path, tmp_path: Path
) -> None:
    attack(shared, private)
    with pytest.raises(PermanentInfraError):
        fetch(shared, tmp_path)
    with pytest.raises(PermanentInfraError):
        bring_input(f"file://{shared}", tmp_path / "store", lambda _: None)
    assert "SECRET" not in "".join(path.read_text() for path in tmp_path.rglob("fetched/**/*") if path.is_file())


def test_a_url_of_one_file_follows_no_link_out_of_its_folder(shared: Path, private: Path, tmp_path: Path) -> None:
    (shared / "rows.jsonl").symlink_to(private / "key")
    with pytest.raises(PermanentInfraError, match=r"rows\.jsonl is a link to .*, outside of its folder"):
        fetch(shared / "rows.jsonl", tmp_path)


def test_a_link_of_another_user_on_the_way_to_the_folder_is_not_followed(
    shared: Path, private: Path, tmp_path: Path, give_away: Callable[[Path], None]
) -> None:
    link = shared.parent / "team"
    link.symlink_to(private)
    assert fetch(link / "key", tmp_path, "own").read_text() == "SECRET"
    give_away(link)
    with pytest.raises(PermanentInfraError, match=r"team is a link to .*, outside of its folder"):
        fetch(link / "key", tmp_path)
    (shared.parent / "latest").symlink_to("model")
    give_away(shared.parent / "latest")
    assert fetch(shared.parent / "latest" / "config.json", tmp_path, "latest").read_text() == "{}"


def test_a_file_that_is_swapped_for_a_link_after_the_check_is_not_followed(
    shared: Path, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, find_path = ObjectStore(f"file://{shared}"), shared_folder.SharedFolder._real
    (shared / "sub").mkdir()
    (shared / "sub" / "key").write_text("public")

    def swap(folder: shared_folder.SharedFolder, key: str) -> Path:
        found = find_path(folder, key)
        if key.endswith("sub/key"):
            (shared / "sub").rename(shared / "aside")
            (shared / "sub").symlink_to(private)
        return found

    monkeypatch.setattr(shared_folder.SharedFolder, "_real", swap)
    with pytest.raises(PermanentInfraError):
        store.read("sub/key", 0, 6)


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFSOCK])
def test_what_is_no_file_is_refused_at_once(kind: int, shared: Path, tmp_path: Path) -> None:
    os.mknod(shared / "weights", kind | 0o644)
    with pytest.raises(PermanentInfraError, match="weights is neither a file"):
        fetch(shared, tmp_path)
    with pytest.raises(PermanentInfraError, match="weights is neither a file"):
        ObjectStore(f"file://{shared}").read("weights", 0, 6)


def test_links_of_a_hub_s_cache_are_followed_to_its_blobs_alone(private: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--org--name" / "snapshots" / "abc", tmp_path / "models--org--name" / "blobs"
    for each in (snapshot, blobs):
        each.mkdir(parents=True)
    (blobs / "0123").write_text("weights")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert (fetch(snapshot, tmp_path, "one") / "model.safetensors").read_text() == "weights"
    assert fetch(snapshot / "model.safetensors", tmp_path, "two").read_text() == "weights"
    (blobs / "4567").symlink_to(private / "key")
    (snapshot / "config.json").symlink_to("../../blobs/4567")
    with pytest.raises(PermanentInfraError, match="outside of its folder"):
        fetch(snapshot, tmp_path, "three")


def test_what_is_fetched_and_what_goes_to_a_node_is_read_by_no_more_users(shared: Path, tmp_path: Path) -> None:
    (shared / "config.json").chmod(0o600)
    brought = bring_input(f"file://{shared}", tmp_path / "store", lambda _: None)
    assert stat.S_IMODE((brought / "config.json").stat().st_mode) == 0o600
    session = LocalSession(sys.executable)
    publish_files(session, {"config.json": brought / "config.json"}, str(tmp_path / "node"))
    assert stat.S_IMODE((tmp_path / "node" / "config.json").stat().st_mode) == 0o600
    store = ObjectStore(f"file://{tmp_path}/published")
    store.upload("config.json", brought / "config.json", store.digest(brought / "config.json"))
    assert stat.S_IMODE((tmp_path / "published" / "config.json").stat().st_mode) == 0o600


@pytest.mark.parametrize(("folder_mode", "mode"), [(0o700, 0o600), (0o750, 0o640), (0o755, 0o644)])
def test_a_file_in_a_folder_that_others_cannot_enter_is_fetched_for_nobody_else(
    folder_mode: int, mode: int, shared: Path, tmp_path: Path
) -> None:
    (shared / "config.json").chmod(0o644)
    shared.chmod(folder_mode)
    assert stat.S_IMODE((fetch(shared, tmp_path) / "config.json").stat().st_mode) == mode
    assert stat.S_IMODE(fetch(shared / "config.json", tmp_path, "one").stat().st_mode) == mode


def test_publishing_writes_through_no_link(shared: Path, private: Path, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_text("weights")
    (shared / "checkpoints").symlink_to(private)
    (shared / "weights").symlink_to(private / "key")
    store = ObjectStore(f"file://{shared}")
    for name in ("weights", "checkpoints/key", "checkpoints/new/weights"):
        with pytest.raises(PermanentInfraError, match="outside of its folder"):
            store.upload(name, path, store.digest(path))
    assert (private / "key").read_text() == "SECRET" and [path.name for path in private.iterdir()] == ["key"]


def test_a_fetch_does_not_go_on_with_what_another_user_put_there(
    shared: Path, tmp_path: Path, give_away: Callable[[Path], None]
) -> None:
    wanted = find_wanted(ObjectStore(f"file://{shared}"))
    planted = tmp_path / f".fetched.incoming-{digest_of(wanted)[:16]}"
    planted.mkdir()
    (planted / "config.json").write_text('{"planted": true}')
    give_away(planted)
    with pytest.raises(PermanentInfraError, match="was made by another user"):
        fetch(shared, tmp_path)


def test_no_link_of_another_user_leads_out_of_a_folder_that_goes_to_a_node(
    shared: Path, private: Path, give_away: Callable[[Path], None]
) -> None:
    link = shared / "weights"
    link.symlink_to(private / "key")
    assert files_below(shared, "model")["model/weights"] == private / "key", "a folder of links of one's own"
    give_away(link)
    with pytest.raises(PermanentInfraError, match=r"weights is a link to .*, outside of its folder"):
        files_below(shared, "model")
    link.unlink()
    link.symlink_to("config.json")
    give_away(link)
    assert files_below(shared, "model")["model/weights"] == shared / "config.json"
