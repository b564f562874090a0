"""Pins that no machine is asked for that could not hold the training, whichever of the offers it were.

Without it a run would rent, set up and copy for half an hour, and end for want of memory.
"""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollouts.flows.preflight import check_query, describe_memory
from rollouts.infra.node import LocalNode, RentedNode
from rollouts.infra.offers import GPUQuery, Offer
from rollouts.tasks.plan_node import with_enough_memory
from rollouts_core.config import Config
from rollouts_core.errors import ConfigError
from rollouts_core.model.model_size import find_model_size


def write_header(folder: Path, *, num_parameters: int) -> Path:
    """A model's file that is all header: it says how many weights there are and holds none."""
    folder.mkdir()
    entry = {"dtype": "BF16", "shape": [num_parameters // 2, 2], "data_offsets": [0, 2 * num_parameters]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


def make_config(model: Path, **deployment: Any) -> Config:
    data = dict.fromkeys(("sft", "selection", "heldout"), "x.jsonl")
    training = {"sft": {"num_steps": 100, "checkpoint_every": 100, "keep_checkpoints": 1, "keep_best": 0}}
    settings = {"mode": "sft", "model": {"path": str(model)}, "data": data, "training": training}
    return Config.model_validate(settings | {"deployment": deployment})


def test_gpus_that_could_not_hold_the_training_are_not_rented(tmp_path: Path) -> None:
    config = make_config(write_header(tmp_path / "model", num_parameters=7_000_000_000))
    node = RentedNode(max_usd=1.0, query=GPUQuery(gpu_types=("H100", "H200")))
    asked = with_enough_memory(node, config)
    assert asked.query.min_vram_gb == pytest.approx(112e9 / 2**30, abs=0.1) and asked.query.gpu_types == (
        "H100",
        "H200",
    )
    assert asked.model_copy(update={"query": node.query}) == node
    roomy = RentedNode(max_usd=1.0, query=GPUQuery(min_vram_gb=140))
    assert with_enough_memory(roomy, config) == roomy
    assert with_enough_memory(LocalNode(), config) == LocalNode()
    sharing = make_config(tmp_path / "model", trainer_processes=2)
    assert with_enough_memory(node, sharing) == node
    assert describe_memory(node, sharing, find_model_size(sharing.model), []) == []


def test_eight_gpus_hold_an_eighth_each_and_have_to_be_asked_for(tmp_path: Path) -> None:
    model = write_header(tmp_path / "model", num_parameters=7_000_000_000)
    config = make_config(model, trainer_gpu_ranks=tuple(range(8)))
    with pytest.raises(ConfigError, match=r"uses GPU 7, but with node\.query\.gpu_count 1 the last GPU is 0"):
        check_query(GPUQuery(), config, find_model_size(config.model))
    check_query(GPUQuery(gpu_count=8), config, find_model_size(config.model))
    node = with_enough_memory(RentedNode(max_usd=1.0, query=GPUQuery(gpu_count=8)), config)
    assert node.query.min_vram_gb == pytest.approx(14e9 / 2**30, abs=0.1)


def test_a_disk_that_is_too_small_for_the_checkpoints_is_refused(tmp_path: Path) -> None:
    config = make_config(write_header(tmp_path / "model", num_parameters=7_000_000_000))
    with pytest.raises(ConfigError, match=r"checkpoints take 84\.0 GB.*, but node\.query\.disk_gb is 50"):
        check_query(GPUQuery(disk_gb=50), config, find_model_size(config.model))


def test_a_small_model_fits_on_whatever_is_rented(tmp_path: Path) -> None:
    config = make_config(write_header(tmp_path / "model", num_parameters=400_000_000))
    node = RentedNode(max_usd=1.0)
    assert with_enough_memory(node, config) == node
    check_query(node.query, config, find_model_size(config.model))


def test_what_the_smallest_gpu_on_offer_may_not_hold_is_said(tmp_path: Path) -> None:
    folder = write_header(tmp_path / "model", num_parameters=1_000_000_000)
    shape = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 32_000}
    (folder / "config.json").write_text(json.dumps(shape))
    config, node = make_config(folder), RentedNode(max_usd=1.0, query=GPUQuery(min_vram_gb=20))
    small = Offer(provider="runpod", id="x", gpu_type="L4", gpu_count=1, vram_gb=24, usd_per_hour=1.0, region="")
    large = replace(small, gpu_type="H200", vram_gb=141)
    said = describe_memory(node, config, find_model_size(config.model), [large, small])
    assert said[0].startswith("training.sft takes about ") and "AdamW's moments 7.5" in said[0]
    assert "the smallest GPU on offer, L4, has only 24.0 GiB and may run out of memory: lower training.sft" in said[-1]
    roomy = describe_memory(node, config, find_model_size(config.model), [large])
    assert roomy == said[:-1]


def test_a_model_of_unknown_size_is_said_to_be_unknown() -> None:
    config = make_config(Path("s3://bucket/model"))
    [said] = describe_memory(RentedNode(max_usd=1.0), config, find_model_size(config.model), [])
    assert "its size is unknown" in said
    check_query(GPUQuery(disk_gb=1), config, find_model_size(config.model))
