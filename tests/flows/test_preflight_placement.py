"""Pins that `validate` shows the placement that a run plans on the GPUs of a node, and warns when no plan fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollouts.flows.form import load_pipeline
from rollouts.flows.preflight import _choose_on_node
from rollouts.flows.run_plan import describe_plan
from rollouts.infra.gpu_state import GpuState
from rollouts.tasks.engine_choice import EngineChoice
from rollouts_core.findings import Caution
from tests.kit.small_pipeline import write_small_pipeline

H100 = GpuState(name="NVIDIA H100", total_gb=85.5, free_gb=84.9, driver="580.95.05")
L4 = GpuState(name="NVIDIA L4", total_gb=24.1, free_gb=23.6, driver="580.95.05")


def check(folder: Path, *assignments: str, kind: str = "sglang") -> tuple[list[str], list[str]]:
    """The findings about the placement, and the lines of the run's opening plan about GPUs."""
    path = write_small_pipeline(folder, mode="rl", rollout__engine__kind=kind, deployment__trainer_processes=0)
    pipeline, said = load_pipeline(path, assignments), list[str]()
    config, gpus = _choose_on_node(pipeline.node, pipeline.config, folder / "store", said)
    lines = describe_plan(pipeline, config, folder / "store", gpus)
    return said, [line for line in lines if line.startswith("plan: GPU")]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[GpuState]:
    """The GPUs that this machine has for the checks."""
    found: list[GpuState] = []
    monkeypatch.setattr("rollouts.tasks.gpu_placement.read_gpus", lambda session: found)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


def test_a_plan_is_shown_with_its_memory(gpus: list[GpuState], tmp_path: Path) -> None:
    gpus += [H100, H100]
    [said], lines = check(tmp_path)
    assert said.endswith("apart; as settings of deployment: trainer_gpu_ranks = [0], engine_gpu_ranks = [1]")
    assert [line.partition(": about ")[0] for line in lines] == ["plan: GPU 0, trainer", "plan: GPU 1, 1 engine"]
    assert all(line.endswith(" of 79.6 GiB") for line in lines)


def test_a_placement_by_hand_is_shown_without_a_plan(gpus: list[GpuState], tmp_path: Path) -> None:
    gpus += [H100] * 4
    by_hand = ("deployment.trainer_gpu_ranks=[0,1]", "deployment.engine_gpu_ranks=[0,1]", "deployment.colocated=true")
    said, lines = check(tmp_path, *by_hand)
    assert said == []
    assert [line.partition(": about ")[0] for line in lines] == [
        "plan: GPU 0 to 1, trainer",
        "plan: GPU 0 to 1, 1 engine of 2 GPUs each, in turns with the trainer",
    ]
    assert lines[0].endswith(" of 79.6 GiB on each")


def test_the_embedded_engine_is_on_no_gpu(
    gpus: list[GpuState], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus += [H100, H100]
    choice = EngineChoice(kind="embedded", reason="r")
    monkeypatch.setattr("rollouts.flows.preflight.choose_engine", lambda *arguments, installs: choice)
    said, [line] = check(tmp_path, kind="auto")
    assert said == [str(choice)]
    assert line.startswith("plan: GPU 0, trainer: about ")


def test_a_machine_without_gpus_has_no_lines(gpus: list[GpuState], tmp_path: Path) -> None:
    assert check(tmp_path) == ([], [])


def test_unlike_gpus_are_a_warning(gpus: list[GpuState], tmp_path: Path) -> None:
    gpus += [H100, L4]
    [said], lines = check(tmp_path)
    assert isinstance(said, Caution) and "a plan needs GPUs of one size" in said
    assert [line.partition(": about ")[0] for line in lines] == ["plan: GPU 0, trainer", "plan: GPU 0, 1 engine"]
