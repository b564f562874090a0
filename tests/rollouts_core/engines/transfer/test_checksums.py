"""Pins what counts as the same tensor in a file and in a server, and that a copy without tied embeddings is the model.

Without it an update that a server did not take would pass, or one that it took would be refused.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from rollouts_core.embedded.weights import read_tensors, tensor_sha256
from rollouts_core.engines.endpoint import Endpoint, create_engine
from rollouts_core.engines.transfer.checksums import (
    EMBEDDING,
    EMPTY_DIGEST,
    GPT2_MATRIX,
    HEAD,
    HeldTensors,
    check_same_model,
    find_left_behind,
    find_unproven,
    is_tied,
    sample_content,
    vocabulary_size,
    write_untied,
)
from rollouts_core.errors import CheckpointError, WeightSyncError
from tests.rollouts_core.embedded.tiny_models import make_model

LAYER = "model.layers.0"
QKV = f"{LAYER}.self_attn.qkv_proj.weight"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model(tie_word_embeddings=True)


@pytest.fixture
def tied_dir(model: PreTrainedModel, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "tied")
    return tmp_path / "tied"


def held_by_a_fusing_server(directory: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of a server that joins projections, pads the vocabulary, and has a head of its own."""
    tensors = {name: tensor.to(dtype) for name, tensor in read_tensors(directory).items()}
    for layer in (0, 1):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        parts = [tensors.pop(f"{attention}.{part}_proj.weight") for part in "qkv"]
        tensors[f"{attention}.qkv_proj.weight"] = torch.cat(parts)
        parts = [tensors.pop(f"{mlp}.{part}_proj.weight") for part in ("gate", "up")]
        tensors[f"{mlp}.gate_up_proj.weight"] = torch.cat(parts)
    embedding = tensors[EMBEDDING]
    padded = torch.cat([embedding, torch.zeros(-len(embedding) % 64, embedding.shape[1], dtype=dtype)])
    return {**tensors, EMBEDDING: padded, HEAD: padded}


def left_behind(
    directory: Path,
    changed: str,
    *,
    by: float = 1.0,
    digests: dict[str, str] | None = None,
    kept_in: torch.dtype | None = torch.bfloat16,
) -> list[str]:
    """What a server that fuses and has a head of its own left as it was, when `changed` of the published changed."""
    before = read_tensors(directory)
    served = digests or dict.fromkeys(held_by_a_fusing_server(directory, torch.bfloat16), "0" * 16)
    held = HeldTensors(digests=served, dtype=None, kept_in=kept_in)
    after = {**before, changed: before[changed] + by}
    return find_left_behind((sample_content(before, held), served), (sample_content(after, held), served))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (f"{LAYER}.self_attn.v_proj.weight", [QKV]),
        (f"{LAYER}.mlp.gate_proj.weight", [f"{LAYER}.mlp.gate_up_proj.weight"]),
        (f"{LAYER}.mlp.down_proj.weight", [f"{LAYER}.mlp.down_proj.weight"]),
        (EMBEDDING, [HEAD, EMBEDDING]),
    ],
)
def test_a_tensor_that_changed_in_any_part_must_have_another_checksum(
    tied_dir: Path, changed: str, expected: list[str]
) -> None:
    assert left_behind(tied_dir, changed) == expected


def test_a_change_that_the_servers_number_format_does_not_show_is_not_demanded(tied_dir: Path) -> None:
    norm = "model.norm.weight"
    assert left_behind(tied_dir, norm, by=1e-7) == []
    assert left_behind(tied_dir, norm, kept_in=None) == []


def test_of_tensors_without_a_usable_checksum_nothing_is_demanded(tied_dir: Path) -> None:
    norm = "model.norm.weight"
    assert left_behind(tied_dir, norm, digests={norm: EMPTY_DIGEST}) == []
    assert left_behind(tied_dir, norm, digests={QKV: "0" * 16}) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_digits", [64, 16])
def test_fused_padded_and_rounded_tensors_are_recognised(tied_dir: Path, dtype: torch.dtype, num_digits: int) -> None:
    served = held_by_a_fusing_server(tied_dir, dtype)
    digests = {name: tensor_sha256(tensor)[:num_digits] for name, tensor in served.items()}
    assert find_unproven("http://e", read_tensors(tied_dir), "v1", HeldTensors(digests=digests, dtype=dtype)) == []


@pytest.mark.parametrize("stale", ["", "transformer.h.0.attn.c_proj.weight", "transformer.wte.weight"])
def test_matrices_of_gpt2_are_recognised_transposed_and_its_embedding_padded(stale: str) -> None:
    published = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=30, n_positions=4)).state_dict()
    published.pop("lm_head.weight")
    served = {name: tensor.T.contiguous() if GPT2_MATRIX.search(name) else tensor for name, tensor in published.items()}
    served["transformer.wte.weight"] = torch.nn.functional.pad(published["transformer.wte.weight"], (0, 0, 0, 34))
    digests = {name: tensor_sha256(tensor + (name == stale)) for name, tensor in served.items()}
    refused = pytest.raises(WeightSyncError, match=f"1 tensors differ, {stale}") if stale else nullcontext()
    with refused:
        assert find_unproven("http://e", published, "v1", HeldTensors(digests=digests, dtype=torch.float32)) == []


@pytest.mark.parametrize("name", [QKV, HEAD, EMBEDDING, "model.norm.weight"])
def test_any_tensor_that_differs_is_named(tied_dir: Path, name: str) -> None:
    served = held_by_a_fusing_server(tied_dir, torch.float32)
    served[name] = served[name] + 1e-6
    digests = {each: tensor_sha256(tensor) for each, tensor in served.items()}
    with pytest.raises(WeightSyncError, match=f"http://e says it serves v1, but 1 tensors differ, {name} first"):
        find_unproven("http://e", read_tensors(tied_dir), "v1", HeldTensors(digests=digests, dtype=torch.float32))


def test_the_checksum_of_nothing_proves_nothing(tied_dir: Path) -> None:
    served = held_by_a_fusing_server(tied_dir, torch.float32)
    digests = {name: tensor_sha256(tensor) for name, tensor in served.items()} | {QKV: EMPTY_DIGEST}
    held = HeldTensors(digests=digests, dtype=torch.float32)
    unproven = find_unproven("http://e", read_tensors(tied_dir), "v1", held)
    assert unproven == [f"{LAYER}.self_attn.{part}_proj.weight" for part in "kqv"]


def test_checksums_of_an_unknown_kind_prove_nothing(tied_dir: Path) -> None:
    published = read_tensors(tied_dir)
    held = HeldTensors(digests={EMBEDDING: "0" * 16}, dtype=None)
    assert find_unproven("http://e", published, "v1", held) == sorted(published)


@pytest.mark.parametrize("shard_size", ["1GB", "10KB"])
def test_an_untied_copy_computes_the_same_and_leaves_the_original(
    model: PreTrainedModel, tmp_path: Path, shard_size: str
) -> None:
    original = tmp_path / "original"
    model.save_pretrained(original, max_shard_size=shard_size)
    before = {path.name: path.read_bytes() for path in original.iterdir()}
    copy = tmp_path / "copy"
    write_untied(original, copy)
    loaded = AutoModelForCausalLM.from_pretrained(copy)
    tokens = torch.tensor([[3, 4, 5]])
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert json.loads((copy / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(read_tensors(copy)[HEAD], model.get_input_embeddings().weight)
    assert {path.name: path.read_bytes() for path in original.iterdir()} == before


@pytest.mark.parametrize(
    ("settings", "tied"),
    [
        ({"model_type": "gemma3_text"}, True),  # as on the hub: the class says it
        ({"model_type": "gemma3_text", "tie_word_embeddings": False}, False),
        ({"model_type": "qwen3"}, False),
        ({"model_type": "qwen3", "tie_word_embeddings": True}, True),
        ({"model_type": "gemma2", "tie_word_embeddings": True}, False),  # vLLM has no head of it
        ({"model_type": "of-somebody", "tie_word_embeddings": True}, True),
        ({"model_type": "of-somebody"}, False),
    ],
)
def test_what_a_configuration_leaves_out_of_its_head_the_class_of_the_model_says(
    tmp_path: Path, settings: dict[str, object], tied: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert is_tied(tmp_path) is tied


def test_an_untied_copy_can_be_made_again_where_one_lies(tied_dir: Path, tmp_path: Path) -> None:
    for _ in range(2):
        write_untied(tied_dir, tmp_path / "copy")
    assert read_tensors(tmp_path / "copy").keys() == {*read_tensors(tied_dir), HEAD}


def test_an_untied_copy_can_be_made_again_where_one_of_a_model_that_moved_lies(tied_dir: Path, tmp_path: Path) -> None:
    write_untied(tied_dir, tmp_path / "copy")
    moved = tied_dir.rename(tmp_path / "moved")
    write_untied(moved, tmp_path / "copy")
    assert read_tensors(tmp_path / "copy").keys() == {*read_tensors(moved), HEAD}


def test_a_link_that_leads_nowhere_is_named_with_where_it_leads(tied_dir: Path, tmp_path: Path) -> None:
    (tied_dir / "model.safetensors").unlink()
    (tied_dir / "model.safetensors").symlink_to(tmp_path / "cache" / "blob")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a link to .*/cache/blob, which is missing"):
        write_untied(tied_dir, tmp_path / "copy")


def test_a_shard_that_the_index_names_and_that_is_not_there_is_named(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    [first, *_] = sorted((tmp_path / "sharded").glob("*.safetensors"))
    first.unlink()
    with pytest.raises(CheckpointError, match=f"index.json names {first.name}, which does not exist"):
        write_untied(tmp_path / "sharded", tmp_path / "copy")


def test_a_model_that_sees_images_has_the_vocabulary_and_the_shape_of_its_language_model(tmp_path: Path) -> None:
    for name, hidden_size in (("published", 16), ("served", 32)):
        config = {"model_type": "gemma3", "text_config": {"hidden_size": hidden_size, "vocab_size": 64}}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    assert vocabulary_size(tmp_path / "published") == 64
    create_engine(Endpoint(provider="sglang", url="http://127.0.0.1:9", model=str(tmp_path / "published")))
    with pytest.raises(WeightSyncError, match="serves a model with hidden_size 32, but the published model has 16"):
        check_same_model("engine", tmp_path / "served", tmp_path / "published")


def test_models_of_other_shapes_are_told_apart_and_unreadable_ones_are_left(tied_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_model(num_hidden_layers=3).save_pretrained(other)
    check_same_model("http://e", tied_dir, tied_dir)
    check_same_model("http://e", tmp_path / "elsewhere", tied_dir)
    with pytest.raises(
        WeightSyncError, match=r"http://e serves a model with num_hidden_layers 2, but the published model has 3"
    ):
        check_same_model("http://e", tied_dir, other)
    with pytest.raises(CheckpointError, match=r"elsewhere/config\.json cannot be read"):
        check_same_model("http://e", tied_dir, tmp_path / "elsewhere")
