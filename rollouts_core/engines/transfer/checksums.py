"""Compute which tensors a server must hold after loading weights, and compare them with its checksums.

Servers fuse projections and may use another number format than the files:

    model.safetensors (q_proj, k_proj, v_proj, float32) -> qkv_proj as bfloat16 -> sha256 == the server's checksum
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rollouts_core.config import ModelConfig
from rollouts_core.embedded.architecture import MAX_CONFIG_BYTES
from rollouts_core.embedded.weights import read_tensors, tensor_digest, tensor_sha256
from rollouts_core.engine_kinds import ENGINES
from rollouts_core.errors import CheckpointError, WeightSyncError
from rollouts_core.model.model_size import read_folder
from rollouts_core.system.regular_files import read_file

FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Projections that SGLang and vLLM store as one matrix, in the order of the matrix's rows."""
EMPTY_DIGEST = tensor_sha256(torch.empty(0))
"""The checksum of a tensor without bytes. vLLM on a CPU moves the bytes of packed weights out of the tensor."""
SHORT_DIGEST_LENGTH = 16
"""Number of hexadecimal digits in a checksum from SGLang, which reports only the first 8 of 32 bytes."""
VOCABULARY_PADDING = 64
"""SGLang and vLLM pad the rows of embedding and head with zeros to a multiple of this number."""
PIECE_LENGTH = 2**16
"""Number of compared elements per tensor, to detect a change. A training step changes some of so many elements."""
SHAPE_KEYS = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
BODY_FILE, HEAD_FILE = "model-body.safetensors", "model-head.safetensors"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
GPT2_EMBEDDING = "transformer.wte.weight"
GPT2_MATRIX = re.compile(r"\.c_(attn|proj|fc)\.weight$")
"""Matrices that GPT-2 stores transposed compared to other models. Servers transpose these matrices."""
HEADLESS = ("gemma2", "gemma3n", "gemma3n_text", "cohere", "cohere2", "cohere2_moe")
"""Models for which vLLM uses the embedding as head, so they have no separate head that could be outdated."""
COPY_MARK = "-untied-"
"""Part of the name of a temporary copy of a model with a separate head. The copy exists only during one load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensors:
    """A server's report about the tensors that it holds."""

    digests: Mapping[str, str]
    """Checksums by tensor name, or empty for servers with several ranks, because each rank holds parts of tensors."""
    dtype: torch.dtype | None
    """Number format of the tensors with checksums, or None if this process cannot compute the server's checksums."""
    kept_in: torch.dtype | None = None
    """Number format in which the server stores tensors, or None if it may change tensors by more than rounding to a
    format."""


def read_config(directory: Path) -> dict[str, Any]:  # Any: JSON
    """The config.json of a model directory.

    Raises:
        CheckpointError: the file is missing, or is not a JSON object.
    """
    try:
        config = json.loads(read_file(directory / "config.json", max_bytes=MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{directory}/config.json cannot be read ({error}): publish the weights again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{directory}/config.json is not a JSON object: publish the weights again")
    return config


def vocabulary_size(directory: Path) -> int:
    """Number of token ids of the model in a directory."""
    return int(_of_language_model(read_config(directory))["vocab_size"])


def _of_language_model(config: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
    """A model's settings. For a model of several parts, the result is its language model's settings with the whole
    model's type."""
    text = config.get("text_config") or {}
    return {**config, **{name: text[name] for name in text if name != "model_type"}}


def is_tied(directory: Path) -> bool:
    """Whether vLLM uses the token embedding as the model's output head. False for a model without a head."""
    from rollouts_core.model.loading import find_settings  # imports transformers

    said = read_config(directory)
    if said.get("model_type") in HEADLESS:
        return False
    # A config.json may lack this setting, for example Gemma's on the hub. The model's class then has the default.
    settings = find_settings(ModelConfig(path=str(directory)))
    return bool(said.get("tie_word_embeddings") if settings is None else settings.tie_word_embeddings)


def can_be_untied(directory: Path) -> bool:
    """Whether a separate head can be written for a model: its embedding must be called `EMBEDDING`."""
    names = read_folder(directory).tensors
    return not names or HEAD in names or EMBEDDING in names  # a later load reports unreadable files


def check_can_be_untied(directory: Path) -> None:
    """Raise CheckpointError if a model cannot be given a separate head."""
    if not can_be_untied(directory):
        others = [f'"{name}"' for name, each in ENGINES.items() if not each.needs_own_head and not each.is_own]
        raise CheckpointError(
            f"{directory} has no {EMBEDDING}, so no separate head can be made from it, and without such a head the "
            f"engine takes no new weights: choose rollout.engine.kind {' or '.join(others)}"
        )


def check_same_model(name: str, served_dir: Path, published_dir: Path) -> None:
    """Raise WeightSyncError if a server's model has other shapes than the published model, because vLLM would crash.

    A served directory that this machine cannot read, for example a directory of another machine, is not compared.
    """
    try:
        served = _of_language_model(read_config(served_dir))
    except CheckpointError:
        return
    published = _of_language_model(read_config(published_dir))
    for key in (*SHAPE_KEYS, "vocab_size"):
        if key in served and key in published and served[key] != published[key]:
            raise WeightSyncError(
                f"{name} serves a model with {key} {served[key]}, but the published model has {published[key]}: "
                "start the engine with the model that is trained"
            )


def find_unproven(name: str, published: Mapping[str, Tensor], version: str, held: HeldTensors) -> list[str]:
    """The published tensors that a server's checksums do not cover.

    Raises:
        WeightSyncError: a checksum differs from that of the published tensor.
    """
    known = {tensor: digest for tensor, digest in held.digests.items() if digest != EMPTY_DIGEST}
    if held.dtype is None:
        return sorted(published)
    expected = expected_digests(published, held.dtype, known)
    compared = expected.keys() & known.keys()
    if stale := sorted(tensor for tensor in compared if not _is_same(expected[tensor], known[tensor])):
        raise WeightSyncError(
            f"{name} says it serves {version}, but {len(stale)} tensors differ, {stale[0]} first: its update left "
            "them unchanged, restart it"
        )
    return sorted(expected.keys() - compared)


def sample_content(published: Mapping[str, Tensor], held: HeldTensors) -> dict[str, tuple[str, ...]]:
    """A digest of a piece of each published tensor, after a conversion to the server's number format. The keys are the
    server's tensors that contain the pieces.

    Tensors without a usable checksum, or with an unknown number format, are left out. If a piece differs between two
    versions, the tensor differs too. If the piece is equal, the tensor may still differ.
    """
    if held.kept_in is None:
        return {}
    content: dict[str, tuple[str, ...]] = {}
    for name, digest in held.digests.items():
        sources = _sources_of(name, published)
        if digest != EMPTY_DIGEST and sources:
            content[name] = tuple(tensor_digest(_piece_of(published[each]).to(held.kept_in)) for each in sources)
    return content


def find_left_behind(
    before: tuple[Mapping[str, tuple[str, ...]], Mapping[str, str]],
    now: tuple[Mapping[str, tuple[str, ...]], Mapping[str, str]],
) -> list[str]:
    """The tensors whose published content changed since an earlier version although the server's checksum is the same.

    Args:
        before: results of `sample_content` and the server's checksums for the earlier version.
    """
    (content_before, digests_before), (content, digests) = before, now
    changed = [name for name in content if name in content_before and content[name] != content_before[name]]
    return sorted(name for name in changed if digests.get(name) == digests_before.get(name))


def check_digests(name: str, version: str, served: Mapping[str, str], published: Mapping[str, str]) -> None:
    """Raise WeightSyncError unless all tensors of a server equal the published tensors."""
    if wrong := sorted(tensor for tensor, digest in published.items() if served.get(tensor) != digest):
        raise WeightSyncError(
            f"{name} says it serves {version}, but {len(wrong)} of {len(published)} tensors differ, {wrong[0]} first: "
            "its update left them unchanged, restart it"
        )


def expected_digests(
    published: Mapping[str, Tensor], dtype: torch.dtype, served: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """The possible sha256 digests of every tensor on a server that stores weights in `dtype`.

    Args:
        served: the server's tensor names. If a fused projection is among them, its parts are joined.
    """
    tensors = {name: tensor.to(dtype) for name, tensor in published.items()}
    if HEAD in served and HEAD not in tensors:
        tensors[HEAD] = tensors[EMBEDDING]
    digests: dict[str, tuple[str, ...]] = {
        name: (tensor_sha256(tensor),) for name, tensor in _fuse(tensors, served).items()
    }
    for name in (EMBEDDING, GPT2_EMBEDDING, HEAD):
        if name in tensors and len(tensors[name]) % VOCABULARY_PADDING:
            digests[name] += (tensor_sha256(_pad_rows(tensors[name])),)
    for name in filter(GPT2_MATRIX.search, digests):
        digests[name] += (tensor_sha256(tensors[name].T.contiguous()),)
    return digests


def prefix_of_copies(directory: Path) -> str:
    """Prefix of the names of a model directory's temporary copies, which have the same parent directory."""
    return f".{directory.name}{COPY_MARK}"


def version_of_copy(path: Path) -> str:
    """The name of the directory of which `path` is a temporary copy, or empty if `path` is not a copy."""
    return path.name[1:].rpartition(COPY_MARK)[0] if path.name.startswith(".") else ""


def write_untied(directory: Path, target: Path) -> None:
    """Make `target` a copy of a model directory with a separate output head. All files but the head are links.

    Raises:
        CheckpointError: the directory's weights cannot be read, or have no embedding under the known name.
    """
    check_can_be_untied(directory)
    target.mkdir(parents=True, exist_ok=True)
    tensors = read_tensors(directory)
    written = {"config.json", SINGLE_FILE, INDEX}
    for file in directory.iterdir():
        if file.is_file() and file.name not in written:
            _link(target / file.name, file)
    if (directory / SINGLE_FILE).exists():
        # The link gets another name than `SINGLE_FILE`, because readers ignore the index if `SINGLE_FILE` exists.
        weight_map = dict.fromkeys(tensors, BODY_FILE)
        _link(target / BODY_FILE, directory / SINGLE_FILE)
    else:
        weight_map = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
    if HEAD not in tensors:
        save_file({HEAD: tensors[EMBEDDING]}, target / HEAD_FILE, metadata={"format": "pt"})
        weight_map = {**weight_map, HEAD: HEAD_FILE}
    (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    config = {**read_config(directory), "tie_word_embeddings": False}
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _link(link: Path, file: Path) -> None:
    """Make `link` a link to a file. An old link is replaced, because its file may be deleted."""
    link.unlink(missing_ok=True)
    link.symlink_to(file.resolve())


def _fuse(tensors: Mapping[str, Tensor], served: Collection[str]) -> dict[str, Tensor]:
    """Join the parts of each projection in `FUSED` that the server stores as one matrix, and return all tensors."""
    joined = dict(tensors)
    for name in served:
        for whole, parts in FUSED.items():
            stem, found, kind = name.partition(whole)
            names = [f"{stem}{part}{kind}" for part in parts]
            if found and all(part in joined for part in names):
                joined[name] = torch.cat([joined.pop(part) for part in names])
    return joined


def _sources_of(name: str, published: Collection[str]) -> list[str]:
    """The published tensors of which a server's tensor consists, or empty if unknown."""
    if name in published:
        return [name]
    if name == HEAD and EMBEDDING in published:
        return [EMBEDDING]
    for whole, parts in FUSED.items():
        stem, found, kind = name.partition(whole)
        sources = [f"{stem}{part}{kind}" for part in parts]
        if found and all(source in published for source in sources):
            return sources
    return []


def _piece_of(tensor: Tensor) -> Tensor:
    """The middle of a tensor. Reading whole tensors for every version and engine would take too long."""
    flat = tensor.reshape(-1)
    begin = max(0, (len(flat) - PIECE_LENGTH) // 2)
    return flat[begin : begin + PIECE_LENGTH]


def _pad_rows(tensor: Tensor) -> Tensor:
    num_rows = -len(tensor) % VOCABULARY_PADDING
    return torch.cat([tensor, tensor.new_zeros(num_rows, *tensor.shape[1:])])


def _is_same(expected: Collection[str], served: str) -> bool:
    if len(served) == SHORT_DIGEST_LENGTH:
        return any(digest.startswith(served) for digest in expected)
    return served in expected
