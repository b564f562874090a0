"""Find the size of a model from the headers of its weight files, in a folder or on the Hugging Face hub.

    folder                                      headers of *.safetensors, config.json  ──> ModelSize
    hub, in a subprocess:  cache, or the first bytes of its files and config.json      ──> ModelSize
    anything else, or no answer in time                                  ModelSize without tensors, and the reason

The size is needed before any machine is rented or started, so weights are not read and torch is not imported. A
subprocess asks the hub, because only killing a process ends the wait for an unresponsive name server. The hub's library
reads the variables HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and HF_HOME.
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
"""Time limit for the hub's answer, seconds. The limit includes one or two seconds for importing the hub's library."""
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Shapes and file sizes of a model, found without reading its weights."""

    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shape of each tensor by name, or empty if unknown."""
    num_file_bytes: int = 0
    """Total size of the weight files, bytes."""
    settings: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON
    """Content of the model's config.json, or empty if there is no such file."""
    problem: str = ""
    """Reason why the tensors are unknown, or empty if they are known."""

    @property
    def num_parameters(self) -> int:
        """Number of weights after loading, or 0 if unknown.

        Files of a model with tied weights may store the embedding a second time as output head. The embedding is
        counted once.
        """
        is_twice = self.settings.get("tie_word_embeddings") is True and len(self.tensors) > 1
        return sum(math.prod(shape) for name, shape in self.tensors.items() if not (is_twice and name == HEAD))

    def describe_problem(self, path: str) -> str:
        """Sentence for a warning: the model's size is unknown, with the reason."""
        return (
            f"model {path}: its size is unknown ({self.problem}), so the memory and disk that it needs are not "
            "checked: machines that are too small are not refused"
        )


def find_model_size(model: ModelConfig, *, timeout_s: float = HUB_TIMEOUT_S) -> ModelSize:
    """Find the size of a model in a folder or on the hub. If the size is unknown, `problem` has the reason.

    Args:
        timeout_s: time limit for the hub, seconds.
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
        return ModelSize(problem=f"the hub could not tell the size: {last_line.rstrip('.')}")
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
        return ModelSize(problem=f"its files cannot be read ({first_line(error)})")  # loading reports the details
    if not tensors:
        return ModelSize(problem="it has no safetensors weights")
    return ModelSize(tensors=tensors, num_file_bytes=num_file_bytes, settings=settings)


def read_hub(name: str, revision: str | None) -> ModelSize:
    """The size of a model on the hub, from this machine's cache if the model is there.

    Raises:
        SystemExit: the size is unknown. The message is one line with the reason.
    """
    from huggingface_hub import (
        HfApi,
        hf_hub_download,
        try_to_load_from_cache,
    )  # slow to import, and only used in the subprocess

    cached = try_to_load_from_cache(name, "config.json", revision=revision)
    if isinstance(cached, str) and (size := read_folder(Path(cached).parent)).tensors:
        return size
    try:
        # raises an error early if the model is missing or the hub is unreachable
        HfApi().model_info(name, revision=revision)
        metadata = HfApi().get_safetensors_metadata(name, revision=revision)
        settings = json.loads(Path(hf_hub_download(name, "config.json", revision=revision)).read_text("utf-8"))
    except Exception as error:  # the hub's library raises its own errors and those of its HTTP client
        raise SystemExit(f"{type(error).__name__}: {first_line(error)}") from error
    tensors = [item for file in metadata.files_metadata.values() for item in file.tensors.items()]
    return ModelSize(
        tensors={name: tuple(tensor.shape) for name, tensor in tensors},
        num_file_bytes=sum(tensor.data_offsets[1] - tensor.data_offsets[0] for _, tensor in tensors),
        settings=settings,
    )


def _weight_files(folder: Path) -> list[Path]:
    """The weight files that a loader reads. Other files in the folder may contain the same weights again."""
    index, whole = folder / INDEX, folder / WHOLE
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [folder / name for name in sorted(set(weight_map.values()))]
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def _shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    with found_file(path) as found, open(found, "rb") as file:  # noqa: PTH123 - a Path would be normalised
        (num_header_bytes,) = struct.unpack("<Q", file.read(8))
        if num_header_bytes > path.stat().st_size:
            raise ValueError(f"{path} is not a safetensors file")
        header = json.loads(file.read(num_header_bytes))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


if __name__ == "__main__":
    found = read_hub(sys.argv[1], sys.argv[2] or None)
    sys.stdout.write(
        json.dumps({"tensors": found.tensors, "num_file_bytes": found.num_file_bytes, "settings": found.settings})
    )
