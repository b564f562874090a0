"""Pins what the pipeline asks of its machines before the first stage, and with which sentence one is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollouts.flows.preflight import check_own_disk
from rollouts.infra.bootstrap import NodeNeeds
from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.node import LocalNode
from rollouts.infra.providers import provision_node
from rollouts.tasks.bootstrap import (
    bootstrap,
    modules_called,
    wants_gpu,
    warn_of_memory,
    warn_of_precision,
)
from rollouts_core.errors import ConfigError
from rollouts_core.model.model_size import ModelSize
from tests.infra.test_bootstrap import GOOD
from tests.kit.mounts import mounted_tmpfs
from tests.tasks.finished_stages import config_at


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, True),
        ({"deployment": {"trainer_gpu_ranks": [0, 1], "trainer_processes": 2}}, True),
        ({"deployment": {"trainer_processes": 1}}, False),
        ({"deployment": {"trainer_processes": 2}}, False),
        ({"training": {"sft": {"policy": {"backend": "jax"}}}, "mode": "sft"}, False),
        ({"training": {"sft": {"policy": {"backend": "jax"}}}}, True),
    ],
)
def test_a_gpu_is_wanted_unless_the_settings_say_that_the_cpu_will_do(
    settings: dict[str, Any], wanted: bool, tmp_path: Path
) -> None:
    assert wants_gpu(config_at(tmp_path, **settings)) is wanted


@pytest.mark.parametrize(
    ("settings", "trains", "called"),
    [
        ({}, True, {"rollout.reward_fn": "graders", "rollout.filter_fn": "filters", "training.rl.loss_fn": "losses"}),
        ({}, False, {"rollout.reward_fn": "graders"}),
        ({"mode": "sft", "evaluation": {"metric": "loss"}}, True, {}),
    ],
)
def test_modules_of_the_users_are_tried_where_a_stage_imports_them(
    settings: dict[str, Any], trains: bool, called: dict[str, str], tmp_path: Path
) -> None:
    own = {"reward_fn": "graders:score", "filter_fn": "filters:keep"}
    config = config_at(tmp_path, rollout=own, training={"rl": {"loss_fn": "losses:own_loss"}}, **settings)
    assert modules_called(config, trains=trains) == called


@pytest.mark.slow
def test_a_run_that_is_gone_on_with_needs_no_second_room_for_the_checkpoints_that_it_has(tmp_path: Path) -> None:
    kept = {"num_steps": 4, "checkpoint_every": 1, "keep_checkpoints": 4, "keep_best": 0}
    sections: dict[str, Any] = {
        "mode": "sft",
        "training": {"sft": kept},
        "deployment": {"trainer_processes": 1},
    }
    config = config_at(tmp_path, **sections)
    save_file({"weight": torch.zeros(1_000_000)}, tmp_path / "model" / "model.safetensors")
    settings = LocalNode(min_free_gb=0.0)
    with mounted_tmpfs(tmp_path / "store", "size=64m") as disk:
        node = provision_node(settings, disk)
        checkpoints = disk / "stages" / "sft-0123" / "checkpoints"
        (disk / "filler").write_bytes(bytes(30_000_000))
        with pytest.raises(ConfigError, match="48 MB of free disk are needed"):
            check_own_disk(config, settings, node)
        (checkpoints / "step_000002").mkdir(parents=True)
        (disk / "filler").rename(checkpoints / "step_000002" / "model.safetensors")
        check_own_disk(config, settings, node)
        with pytest.raises(PermanentInfraError, match="48 MB of free disk are needed"):
            bootstrap.fn(node, config, settings, begun=[str(disk / "stages" / "rl-0123")])
        ready = bootstrap.fn(node, config, settings, begun=[str(checkpoints.parent), str(disk / "gone")])
        assert ready == replace(node, engine_kind="embedded")


def test_a_gpu_that_holds_the_weights_and_little_more_is_warned_of(tmp_path: Path) -> None:
    config = config_at(tmp_path)
    said: list[str] = []
    shape = {"hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32, "vocab_size": 32_000}
    size = ModelSize(tensors={"weight": (8_000_000, 1000)}, settings=shape)
    needs = NodeNeeds(trainer_gb=128, trainer_gpu_ranks=(1,))
    warn_of_memory(GOOD, needs, config, size, num_machines=1, say=said.append)
    assert said and all("GPU 1, NVIDIA H200, has only 131.3 GiB and may run out of memory" in each for each in said)
    said.clear()
    warn_of_memory(GOOD, needs, config, ModelSize(tensors={"weight": (8, 1000)}), num_machines=1, say=said.append)
    sharing = NodeNeeds(trainer_gb=128, num_trainers=2)
    warn_of_memory(GOOD, sharing, config, size, num_machines=1, say=said.append)
    warn_of_memory(GOOD, NodeNeeds(), config, size, num_machines=1, say=said.append)
    assert said == []


def test_float32_on_a_gpu_that_is_made_for_bfloat16_is_warned_of(tmp_path: Path) -> None:
    modern = replace(GOOD, gpus=(GOOD.gpus[0], replace(GOOD.gpus[1], has_bfloat16=True)))
    needs = NodeNeeds(trains_on_gpu=True, trainer_gpu_ranks=(1,))
    said: list[str] = []
    warn_of_precision(modern, needs, config_at(tmp_path), say=said.append)
    assert [each.split(" on NVIDIA")[0] for each in said] == [
        f"training.{k} computes in float32" for k in ("sft", "rl")
    ]
    said.clear()
    policy = {"policy": {"precision": "bfloat16"}}
    rounded = config_at(tmp_path, training={"sft": policy, "rl": policy})
    warn_of_precision(modern, needs, rounded, say=said.append)
    warn_of_precision(GOOD, needs, config_at(tmp_path), say=said.append)
    warn_of_precision(modern, NodeNeeds(), config_at(tmp_path), say=said.append)
    assert said == []
