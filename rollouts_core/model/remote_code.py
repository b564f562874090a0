"""Check that a checkpoint contains no other Python code than the model from which its training started.

With `model.trust_remote_code`, the code in a model's folder runs when the model is loaded. The user trusts the code of
the start model. A checkpoint may come from another machine, which must not be able to run code on this machine. This
file must not import torch.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from rollouts_core.errors import CheckpointError

SETTINGS = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
"""Files whose `auto_map` names the classes to run. An entry `REPOSITORY--module.Class` names code on the hub."""


def check_code_of_start(checkpoint: Path, start: Path) -> None:
    """Check that loading a checkpoint runs only code that its start model also has.

    Args:
        start: folder of the start model. If the start model is a name on the hub, nothing is checked, because its code
            is not on this machine.

    Raises:
        CheckpointError: a Python file of the checkpoint, or a class in its `auto_map`, is missing in the start model.
    """
    if not start.is_dir():
        return
    trusted = {_digest(path) for path in _code_below(start)}
    for path in _code_below(checkpoint):
        if _digest(path) not in trusted:
            raise CheckpointError(
                f"{path} differs from the code of the start model at {start}, so loading the checkpoint would run "
                "code that you have not read (model.trust_remote_code): delete the stage, and train it again on "
                "another machine"
            )
    if other := sorted(name for name in _classes_of(checkpoint) - _classes_of(start) if "--" in name):
        raise CheckpointError(
            f"{checkpoint} names {other[0]} in auto_map, but the start model at {start} does not name this code "
            "(model.trust_remote_code): delete the stage, and train it again on another machine"
        )


def _code_below(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*.py")) if path.is_file()]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _classes_of(folder: Path) -> set[str]:
    """All entries in the `auto_map` of a folder's settings files."""
    found: set[str] = set()
    for name in SETTINGS:
        try:
            named = json.loads((folder / name).read_text(encoding="utf-8")).get("auto_map", {})
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
        entries = named.values() if isinstance(named, dict) else ()
        for entry in entries:
            found.update(str(each) for each in (entry if isinstance(entry, list | tuple) else [entry]) if each)
    return found
