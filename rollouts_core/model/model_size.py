"""How large a model is, from the headers of its files: those in a folder, or on the Hugging Face hub.

Not here: what its training takes (resource_needs.py). No weights are read or fetched, and torch is not imported: this
is asked before anything is rented or started.

    folder                                      headers of *.safetensors, config.json  ──> ModelSize
    hub, in a process of its own:  cache, or the first bytes of its files and config.json  ──> ModelSize
    anything else, or no answer in time                                  ModelSize without tensors, and why

The hub is asked in a process of its own, which is ended when its time is up: a name server that does not answer cannot
be interrupted otherwise. It goes by the variables of the hub's library: HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME.
"""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollouts_core.config import ModelConfig
from rollouts_core.config.files import HUB_ID
from rollouts_core.config.messages import first_line
from rollouts_core.system.regular_files import found_file

HUB_TIMEOUT_S = 15.0
"""How long the hub may take; loading its library takes a second or two of it."""
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What the files of a model say without its weights being read."""

    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The shape of each tensor by its name; empty where nobody knows."""
    num_file_bytes: int = 0
    """What the files of its weights take on a disk."""
    settings: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON
    """Its config.json; empty where there is none."""
    problem: str = ""
    """Why the tensors are not known; empty where they are."""

    @property
    def num_parameters(self) -> int:
        """The weights that are loaded; 0 where nobody knows. A head that is the embedding may lie there twice."""
        is_twice = self.settings.get("tie_word_embeddings") is True and len(self.tensors) > 1
        return sum(math.prod(shape) for name, shape in self.tensors.items() if not (is_twice and name == HEAD))

    def describe_problem(self, path: str) -> str:
        """A sentence for people where nobody knows the tensors."""
        return (
            f"model {path}: its size is not known ({self.problem}), so neither is what it takes of memory and disk: "
            "machines that are too small are not refused"
        )


def find_model_size(model: ModelConfig, *, timeout_s: float = HUB_TIMEOUT_S) -> ModelSize:
    """The size of a model in a folder or on the hub; without tensors, and why, where it cannot be known.

    Args:
        timeout_s: how long the hub may take.
    """
    folder = Path(model.path)
    if folder.is_dir():
        return read_folder(folder)
    if not HUB_ID.fullmatch(model.path):
        return ModelSize(problem="it is neither a folder nor a name on the hub")
    command = [sys.executable, "-P", "-m", __name__, model.path, model.revision]
    environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return ModelSize(problem=f"the hub did not answer within {timeout_s:g} s")
    if done.returncode != 0:
        last_line = done.stderr.strip().rpartition("\n")[2]
        return ModelSize(problem=f"the hub does not tell: {last_line.rstrip('.')}")
    told = json.loads(done.stdout)
    return ModelSize(
        tensors={name: tuple(shape) for name, shape in told["tensors"].items()},
        num_file_bytes=told["num_file_bytes"],
        settings=told["settings"],
    )


def read_folder(folder: Path) -> ModelSize:
    """The size of the model in a folder."""
    try:
        files = _weight_files(folder)
        tensors = {name: shape for path in files for name, shape in _shapes_in(path).items()}
        num_file_bytes = sum(path.stat().st_size for path in files)
        config = folder / "config.json"
        settings = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        return ModelSize(problem=f"its files cannot be read ({first_line(error)})")  # who loads it says more
    if not tensors:
        return ModelSize(problem="it has no weights as safetensors")
    return ModelSize(tensors=tensors, num_file_bytes=num_file_bytes, settings=settings)


def read_hub(name: str, revision: str | None) -> ModelSize:
    """The size of a model of the hub; of what this machine's cache holds of it, where that is all.

    Raises:
        SystemExit: one line of why it cannot be known.
    """
    from huggingface_hub import (
        HfApi,
        hf_hub_download,
        try_to_load_from_cache,
    )  # heavy, and only in a process of its own

    cached = try_to_load_from_cache(name, "config.json", revision=revision)
    if isinstance(cached, str) and (size := read_folder(Path(cached).parent)).tensors:
        return size
    try:
        HfApi().model_info(name, revision=revision)  # tells of one that is missing, and does not ask a dead hub again
        metadata = HfApi().get_safetensors_metadata(name, revision=revision)
        settings = json.loads(Path(hf_hub_download(name, "config.json", revision=revision)).read_text("utf-8"))
    except Exception as error:  # its own errors, and those of the HTTP library that its version has
        raise SystemExit(f"{type(error).__name__}: {first_line(error)}") from error
    tensors = [item for file in metadata.files_metadata.values() for item in file.tensors.items()]
    return ModelSize(
        tensors={name: tuple(tensor.shape) for name, tensor in tensors},
        num_file_bytes=sum(tensor.data_offsets[1] - tensor.data_offsets[0] for _, tensor in tensors),
        settings=settings,
    )


def _weight_files(folder: Path) -> list[Path]:
    """The files that a loader reads: a folder may hold the same weights in another form besides."""
    index, whole = folder / INDEX, folder / WHOLE
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [folder / name for name in sorted(set(weight_map.values()))]
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def _shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    with found_file(path) as found, open(found, "rb") as file:  # noqa: PTH123 - a Path would be normalised
        (num_header_bytes,) = struct.unpack("<Q", file.read(8))
        if num_header_bytes > path.stat().st_size:
            raise ValueError(f"{path} is no safetensors file")
        header = json.loads(file.read(num_header_bytes))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


if __name__ == "__main__":
    found = read_hub(sys.argv[1], sys.argv[2] or None)
    sys.stdout.write(
        json.dumps({"tensors": found.tensors, "num_file_bytes": found.num_file_bytes, "settings": found.settings})
    )
