"""Pins that a fresh machine is measured in both directions, and that one that answers too slowly is not waited for.

Without it an hour of checkpoints over a slow link is paid for before anybody notices.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from infra import acceptance
from infra.acceptance import require_speed
from infra.errors import UnfitMachineError
from infra.session import LocalSession, Session


def test_what_is_fast_enough_is_measured_and_leaves_nothing(session: Session, tmp_path: Path) -> None:
    root = tmp_path / "root"
    speed = require_speed(session, str(root), min_link_mbit_s=0.1, min_disk_mb_s=0.1)
    assert min(speed.upload_mbit_s, speed.download_mbit_s) > 0.1 and speed.disk_mb_s > 0.1
    assert list(root.iterdir()) == []


@pytest.mark.parametrize(("link", "disk"), [(1e9, 0.1), (0.1, 1e9)])
def test_what_is_slower_is_refused_with_what_was_measured(link: float, disk: float, tmp_path: Path) -> None:
    with pytest.raises(
        UnfitMachineError, match=r"too slow \(\d+ Mbit/s to it and \d+ from it, its disk writes \d+ MB/s"
    ):
        require_speed(LocalSession(sys.executable), str(tmp_path), min_link_mbit_s=link, min_disk_mb_s=disk)


@pytest.mark.parametrize("slow", ["stdin", "urandom(int", "fsync"])
def test_one_that_is_slow_in_one_way_only_is_not_waited_for(
    slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *"{slow}"*) sleep 600 ;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(acceptance, "ALLOWANCE_S", 3.0)
    with pytest.raises(UnfitMachineError, match="too slow"):
        require_speed(LocalSession(str(python)), str(tmp_path / "root"), min_link_mbit_s=100.0, min_disk_mb_s=100.0)
