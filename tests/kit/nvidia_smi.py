"""A program on PATH that answers as nvidia-smi does: for the use of GPUs and for their UUIDs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PROGRAM = """#!/bin/sh
ids=0,1
for argument; do case $argument in --id=*) ids=${argument#--id=};; esac; done
case $* in
    *--query-gpu=uuid*) cat "$0.uuids" ;;
    *--query-gpu=index,utilization.gpu,memory.used,memory.total*--format=csv,noheader,nounits*)
        for id in $(echo "$ids" | tr , ' '); do
            grep "^$id, " "$0.use" || { echo "No devices were found"; exit 6; }
        done ;;
    *) echo "Field is not a valid field to query." >&2; exit 2 ;;
esac
"""
UUIDS = ("GPU-b0a1", "GPU-a7c2")
USE = "0, 97, 62667, 81559\n1, [N/A], 1024, [Not Supported]\n"
"""The second is one of a card that is cut into instances, which has no use of its own to tell."""


def install_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, *, use: str = USE) -> None:
    """Put the program into a folder, and that at the head of PATH."""
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    (folder / "nvidia-smi.uuids").write_text("".join(f"{uuid}\n" for uuid in UUIDS))
    (folder / "nvidia-smi.use").write_text(use)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
