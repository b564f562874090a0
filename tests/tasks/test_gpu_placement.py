"""Pins the placement that a run plans on its node: for which machines and settings, that it is kept, and that settings
by hand win.

Without it a machine with eight GPUs would train and generate on its first, or a retried run would place its engines
elsewhere. The memory of each GPU is as nvidia-smi reports it, in MiB.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollouts.infra.gpu_state import GpuState, parse_gpus
from rollouts.infra.node import FurtherNode, LocalNode, NodeSettings, RentedNode, SSHNode
from rollouts.infra.offers import GPUQuery
from rollouts.infra.providers import provision_node
from rollouts.infra.session import LocalSession
from rollouts.tasks.bootstrap import bootstrap
from rollouts.tasks.engine_choice import EngineChoice, choice_file, with_choice_of, with_kept_choice
from rollouts.tasks.gpu_placement import has_open_placement, plan_on_gpus, read_usable_gpus
from rollouts.tasks.plan import plan_training
from rollouts.tasks.plan_node import with_enough_memory
from rollouts.tasks.records import RunScope
from rollouts_core.checks.placement_plan import with_placement
from rollouts_core.config import Config
from rollouts_core.errors import ConfigError
from rollouts_core.model.model_size import ModelSize
from rollouts_core.stages.planning import base_model
from tests.infra.test_bootstrap import GOOD
from tests.kit.small_pipeline import write_small_pipeline
from tests.rollouts_core.checks.test_placement_plan import config_of, size_of

MEMORY_MIB = {
    "NVIDIA B200": 183_359,
    "NVIDIA H200": 143_771,
    "NVIDIA GH200 480GB": 97_871,
    "NVIDIA H100 NVL": 95_830,
    "NVIDIA H100 80GB HBM3": 81_559,
    "NVIDIA A100-SXM4-80GB": 81_920,
    "NVIDIA A100-PCIE-40GB": 40_960,
    "NVIDIA RTX A6000": 49_140,
    "NVIDIA L40S": 46_068,
    "NVIDIA A40": 46_068,
    "NVIDIA GeForce RTX 5090": 32_607,
    "Tesla V100-SXM2-32GB": 32_768,
    "Tesla V100-SXM2-16GB": 16_384,
    "NVIDIA GeForce RTX 4090": 24_564,
    "NVIDIA GeForce RTX 3090": 24_576,
    "NVIDIA L4": 23_034,
    "NVIDIA A10G": 23_028,
    "Tesla T4": 15_360,
}


def gpus_of(*names: str, programs: str = "") -> list[GpuState]:
    """The GPUs of a machine, from answers of nvidia-smi."""
    rows = [
        f"GPU-{rank}, {name}, {MEMORY_MIB[name]}, {MEMORY_MIB[name] - 600}, 580.95.05"
        for rank, name in enumerate(names)
    ]
    return parse_gpus("\n".join(rows), programs)


@pytest.mark.parametrize(
    ("number", "name", "model", "lora", "expected"),
    [
        # trainers, GPUs of engines, engines, the engines' share in turns (0 apart)
        (1, "Tesla T4", "0.5B", 0, (1, 1, 1, 0.53)),
        (4, "Tesla T4", "0.5B", 0, (1, 3, 3, 0)),
        (4, "Tesla T4", "1.5B", 0, (3, 1, 1, 0)),
        (8, "Tesla T4", "8B", 16, (2, 6, 3, 0)),
        (1, "NVIDIA A10G", "0.5B", 0, (1, 1, 1, 0.65)),
        (2, "NVIDIA A10G", "8B", 16, (1, 1, 1, 0)),
        (2, "NVIDIA L4", "1.5B", 0, (2, 2, 2, 0.51)),
        (8, "NVIDIA L4", "1.5B", 0, (2, 6, 6, 0)),
        (1, "NVIDIA GeForce RTX 3090", "0.5B", 0, (1, 1, 1, 0.66)),
        (2, "NVIDIA GeForce RTX 4090", "1.5B", 0, (2, 2, 2, 0.54)),
        (4, "NVIDIA GeForce RTX 4090", "1.5B", 0, (2, 2, 2, 0)),
        (2, "Tesla V100-SXM2-16GB", "1.5B", 0, (2, 2, 2, 0.36)),
        (8, "Tesla V100-SXM2-16GB", "8B", 16, (2, 6, 3, 0)),
        (1, "Tesla V100-SXM2-32GB", "1.5B", 0, (1, 1, 1, 0.36)),
        (1, "NVIDIA GeForce RTX 5090", "1.5B", 0, (1, 1, 1, 0.35)),
        (2, "NVIDIA GeForce RTX 5090", "8B", 16, (1, 1, 1, 0)),
        (1, "NVIDIA A40", "8B", 16, (1, 1, 1, 0.56)),
        (1, "NVIDIA L40S", "1.5B", 0, (1, 1, 1, 0.51)),
        (8, "NVIDIA L40S", "1.5B", 0, (1, 7, 7, 0)),
        (1, "NVIDIA RTX A6000", "8B", 16, (1, 1, 1, 0.58)),
        (1, "NVIDIA A100-PCIE-40GB", "1.5B", 0, (1, 1, 1, 0.46)),
        (8, "NVIDIA A100-PCIE-40GB", "1.5B", 0, (1, 7, 7, 0)),
        (1, "NVIDIA A100-SXM4-80GB", "1.5B", 0, (1, 1, 1, 0.68)),
        (2, "NVIDIA A100-SXM4-80GB", "1.5B", 0, (1, 1, 1, 0)),
        (8, "NVIDIA A100-SXM4-80GB", "32B", 0, (8, 8, 2, 0.32)),
        (1, "NVIDIA H100 80GB HBM3", "8B", 16, (1, 1, 1, 0.7)),
        (4, "NVIDIA H100 80GB HBM3", "1.5B", 0, (1, 3, 3, 0)),
        (8, "NVIDIA H100 80GB HBM3", "1.5B", 0, (1, 7, 7, 0)),
        (8, "NVIDIA H100 80GB HBM3", "32B", 0, (8, 8, 2, 0.32)),
        (1, "NVIDIA H100 NVL", "8B", 16, (1, 1, 1, 0.73)),
        (1, "NVIDIA GH200 480GB", "8B", 16, (1, 1, 1, 0.74)),
        (1, "NVIDIA H200", "1.5B", 0, (1, 1, 1, 0.77)),
        (8, "NVIDIA H200", "32B", 0, (5, 3, 3, 0)),
        (1, "NVIDIA B200", "1.5B", 0, (1, 1, 1, 0.8)),
        (4, "NVIDIA B200", "32B", 0, (4, 4, 2, 0.38)),
        (8, "NVIDIA B200", "32B", 0, (4, 4, 4, 0)),
        (1, "NVIDIA L4", "1.5B", 0, "nothing fits on 1 x 22 GiB; the smallest plan that fits needs 2 such GPUs"),
        (2, "Tesla T4", "1.5B", 0, "nothing fits on 2 x 15 GiB; the smallest plan that fits needs 4 such GPUs"),
        (1, "NVIDIA H100 80GB HBM3", "8B", 0, "nothing fits on 1 x 80 GiB; the smallest plan that fits needs 2"),
        (4, "NVIDIA H200", "32B", 0, "nothing fits on 4 x 140 GiB; the smallest plan that fits needs 8 such GPUs"),
        (8, "NVIDIA A100-PCIE-40GB", "32B", 0, "nothing fits on 8 x 40 GiB, nor on 8 such GPUs: take larger GPUs"),
    ],
)
def test_each_machine_has_its_plan(
    number: int, name: str, model: str, lora: int, expected: tuple[int, int, int, float] | str
) -> None:
    gpus = gpus_of(*[name] * number)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            plan_on_gpus(gpus, config_of(lora=lora), size_of(model))
        return
    plan = plan_on_gpus(gpus, config_of(lora=lora), size_of(model))
    assert plan is not None
    found = (len(plan.trainer_ranks), len(plan.engine_ranks), plan.num_engines, plan.engine_share)
    assert found == expected, str(plan)
    assert plan.is_colocated == (plan.engine_share > 0) == (plan.trainer_ranks == plan.engine_ranks)
    placed = with_placement(config_of(lora=lora), plan.settings).deployment
    assert placed.engine_gpu_ranks == plan.engine_ranks and placed.colocated == plan.is_colocated


def test_gpus_of_several_kinds_are_one_sentence() -> None:
    with pytest.raises(ConfigError, match="the GPUs have 80, 22 GiB, but a plan needs GPUs of one size: use GPUs of"):
        plan_on_gpus(gpus_of("NVIDIA H100 80GB HBM3", "NVIDIA L4"), config_of(), size_of("0.5B"))
    mixed = gpus_of("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3")
    assert plan_on_gpus(mixed, config_of(), size_of("0.5B")) is not None  # within 2 %


def test_gpus_with_other_programs_are_left_out_unless_all_have_some() -> None:
    on_first = "GPU-0, 4242, /usr/bin/python3, 1024\n"
    eight = gpus_of(*["NVIDIA L4"] * 4, programs=on_first)
    plan = plan_on_gpus(eight, config_of(), size_of("0.5B"))
    assert plan is not None and (plan.trainer_ranks, plan.engine_ranks) == ((1,), (2, 3))
    one = plan_on_gpus(gpus_of("NVIDIA L4", programs=on_first), config_of(), size_of("0.5B"))
    assert one is not None and one.trainer_ranks == (0,)


def test_without_gpus_or_the_size_of_the_model_there_is_no_plan() -> None:
    assert plan_on_gpus([], config_of(), size_of("0.5B")) is None
    assert plan_on_gpus(gpus_of("NVIDIA L4"), config_of(), ModelSize(problem="the hub did not answer")) is None


OPEN: dict[str, Any] = {"mode": "rl", "rollout__engine": {"kind": "sglang"}, "deployment__trainer_processes": 0}
FURTHER = (FurtherNode(host="b", address="10.0.0.2", python="/p"),)


@pytest.mark.parametrize(
    ("settings", "node", "expected"),
    [
        ({}, LocalNode(), True),
        ({"rollout__engine": {"kind": "auto"}}, LocalNode(), True),
        ({"rollout__engine": {"kind": "vllm", "extra_args": ["--seed", "3"]}}, LocalNode(), True),
        ({"deployment__engine_threads": 4}, LocalNode(), True),
        ({}, SSHNode(host="a", python="/p"), True),
        ({"rollout__engine": {"kind": "embedded"}}, LocalNode(), False),
        ({"mode": "sft", "evaluation__metric": "loss"}, LocalNode(), False),
        ({"deployment__trainer_gpu_ranks": [0]}, LocalNode(), False),
        ({"deployment__trainer_processes": 1}, LocalNode(), False),
        ({"deployment__engine_gpu_ranks": [0]}, LocalNode(), False),
        ({"deployment__num_engines": 2}, LocalNode(), False),
        ({"deployment__colocated": True}, LocalNode(), False),
        ({"deployment__engine_memory_share": 0.5}, LocalNode(), False),
        ({"rollout__engine": {"kind": "sglang", "extra_args": ["--mem-fraction-static=0.5"]}}, LocalNode(), False),
        ({"rollout__engine": {"kind": "vllm", "extra_args": ["--tensor-parallel-size", "2"]}}, LocalNode(), False),
        ({}, SSHNode(host="a", address="10.0.0.1", python="/p", engine_nodes=FURTHER), False),
        ({}, SSHNode(host="a", address="10.0.0.1", python="/p", trainer_nodes=FURTHER), False),
    ],
)
def test_a_placement_by_hand_wins(settings: dict[str, Any], node: NodeSettings, expected: bool, tmp_path: Path) -> None:
    config = small(tmp_path, **settings)
    assert has_open_placement(config, node) is expected
    ranks = {"trainer_gpu_ranks": [1], "engine_gpu_ranks": [2]}
    if not settings_of_others(node):
        assert (with_placement(config, ranks) != config) is expected


def settings_of_others(node: NodeSettings) -> bool:
    return isinstance(node, SSHNode) and bool(node.trainer_nodes or node.engine_nodes)


def small(folder: Path, **settings: Any) -> Config:  # Any: settings of every type
    from rollouts.flows.form import load_pipeline

    return load_pipeline(write_small_pipeline(folder / "small", **OPEN | settings)).config


def test_settings_that_need_apart_or_turns_are_kept() -> None:
    config, two = config_of(), gpus_of("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB")
    ahead = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_staleness": 1})})
    assert plan_on_gpus(two, ahead, size_of("1.5B")) is not None
    with pytest.raises(ConfigError, match="needs 2 such GPUs"):
        plan_on_gpus(two[:1], ahead, size_of("1.5B"))
    engine = config.rollout.engine.model_copy(update={"weight_transfer": "tensors"})
    mapped = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})
    plan = plan_on_gpus(two, mapped, size_of("1.5B"))
    assert plan is not None and (plan.is_colocated, plan.num_engines) == (True, 1)


PROGRAM = """#!/bin/sh
case $* in *--query-gpu=*) cat "$0.gpus" ;; esac
"""


@pytest.mark.parametrize(
    ("memory", "visible", "number"), [("81559", None, 1), ("81559", "0", 0), ("[Not Supported]", None, 0)]
)
def test_gpus_that_others_chose_or_divided_get_no_plan(
    memory: str, visible: str | None, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    (tmp_path / "nvidia-smi.gpus").write_text(f"GPU-0, NVIDIA H100 80GB HBM3, {memory}, {memory}, 580.95.05\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert len(read_usable_gpus(LocalSession("/usr/bin/python3"))) == number


def fingerprint_of(config: Config, tmp_path: Path) -> str:
    return plan_of(config, tmp_path)[0]


def plan_of(config: Config, tmp_path: Path) -> tuple[str, dict[str, Any]]:  # Any: JSON
    scope = RunScope(run_id="1" * 32, run_name="r", store=str(tmp_path / "store"))
    node = provision_node(LocalNode(), tmp_path / "store")
    stage = plan_training("rl", base_model(config), config, scope, node)
    return stage.fingerprint, stage.job["deployment"]


@pytest.mark.parametrize("kind", ["sglang", "auto"])
def test_bootstrap_plans_and_later_attempts_keep_the_plan(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = gpus_of("NVIDIA H200", "NVIDIA H200")
    use_machine(monkeypatch, gpus, kind="sglang")
    config, store = small(tmp_path, rollout__engine={"kind": kind}), tmp_path / "store"
    file = choice_file(store, config, LocalNode())
    ready = bootstrap.fn(provision_node(LocalNode(), store), config, LocalNode(), kept_choice=file)
    placed = with_choice_of(config, ready)
    fingerprint, deployment = plan_of(placed, tmp_path)
    assert (deployment["trainer_gpu_ranks"], deployment["engine_gpu_ranks"]) == ([0], [1])
    use_machine(monkeypatch, gpus[:1], kind="embedded")
    again = with_kept_choice(config, LocalNode(), store)
    assert again == placed
    later = bootstrap.fn(provision_node(LocalNode(), store), again, LocalNode(), kept_choice=file)
    assert with_choice_of(again, later) == placed
    named = small(tmp_path / "b", rollout__engine={"kind": "sglang"})
    assert fingerprint == fingerprint_of(named, tmp_path)  # the placement is no part of the identity


def test_a_machine_without_gpus_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_machine(monkeypatch, [], kind="embedded")
    config, store = small(tmp_path), tmp_path / "store"
    file = choice_file(store, config, LocalNode())
    monkeypatch.setattr("rollouts.tasks.bootstrap.check_node", lambda report, needs: None)
    ready = bootstrap.fn(provision_node(LocalNode(), store), config, LocalNode(), kept_choice=file)
    assert ready.placement == "" and not file.exists()
    assert with_choice_of(config, ready) == config


def test_the_embedded_engine_has_no_placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_machine(monkeypatch, gpus_of("NVIDIA H200", "NVIDIA H200"), kind="embedded")
    config, store = small(tmp_path, rollout__engine={"kind": "auto"}), tmp_path / "store"
    file = choice_file(store, config, LocalNode())
    ready = bootstrap.fn(provision_node(LocalNode(), store), config, LocalNode(), kept_choice=file)
    assert (ready.engine_kind, ready.placement) == ("embedded", "")
    assert with_kept_choice(config, LocalNode(), store).deployment == config.deployment


def use_machine(monkeypatch: pytest.MonkeyPatch, gpus: list[GpuState], *, kind: str) -> None:
    """Let bootstrap find a machine with two GPUs that torch can use, and nvidia-smi report `gpus`."""
    choice = EngineChoice(kind=kind, reason="r")
    monkeypatch.setattr("rollouts.tasks.gpu_placement.read_gpus", lambda session: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("rollouts.tasks.bootstrap.probe_node", lambda session, node: replace(GOOD, free_disk_gb=900.0))
    monkeypatch.setattr("rollouts.tasks.bootstrap.choose_engine", lambda *arguments: choice)
    monkeypatch.setattr("rollouts.tasks.bootstrap.with_planned_engine", lambda session, node, *rest, **named: node)


def test_a_rented_machine_needs_less_memory_if_a_plan_divides_the_work() -> None:
    eight = RentedNode(query=GPUQuery(gpu_count=8), max_usd=1.0)
    asked = with_enough_memory(eight, config_of(), size_of("32B"))
    assert 60 < asked.query.min_vram_gb < 80  # 16 bytes for each of 32.8e9 parameters, divided by 8
    alone = with_enough_memory(RentedNode(query=GPUQuery(), max_usd=1.0), config_of(), size_of("8B"))
    assert alone.query.min_vram_gb > 120
