"""Pins what is written down of GPUs while they train, and how it is drawn.

Without it a GPU that waits half of its time looks like one that works, or a driver's odd word ends a training.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from rollouts_core.config import DeploymentConfig, ModelConfig, RLTrainingConfig, RolloutConfig, SFTTrainingConfig
from rollouts_core.job import EngineAddress, InputDataset, InputFile, InputModel, RLJob, SFTJob
from rollouts_core.metrics import read_json_lines
from rollouts_core.report.charts import CHART_BOTTOM
from rollouts_core.report.curves import draw_gpu_use
from rollouts_core.system.gpu_use import gpus_in_use, parse_gpu_use, sampled_gpu_use
from tests.kit.nvidia_smi import install_nvidia_smi

MODEL = InputModel(name="base", model=ModelConfig(path="base"), digest="m")
ROWS = InputFile(path="rows.jsonl", digest="d")


def wait_for_samples(path: Path, number: int) -> None:
    deadline = time.monotonic() + 20
    while len(read_json_lines(path)) < number:
        assert time.monotonic() < deadline, f"fewer than {number} samples in {path}"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0, 97, 62667, 81559\n", [{"gpu": 0, "use_percent": 97.0, "memory_gib": 61.198, "total_gib": 79.647}]),
        ("3, [N/A], 1024, 2048\n", [{"gpu": 3, "memory_gib": 1.0, "total_gib": 2.0}]),
        ("0, [Not Supported], [Not Supported], [Not Supported]\n", [{"gpu": 0}]),
        ("0, 5, [Unknown Error], 2048\n1, 6, 0, 2048\n", [
            {"gpu": 0, "use_percent": 5.0, "total_gib": 2.0},
            {"gpu": 1, "use_percent": 6.0, "memory_gib": 0.0, "total_gib": 2.0},
        ]),
        ("Unable to determine the device handle for GPU 0000:01:00.0: GPU is lost.\n\n", []),
    ],
)  # fmt: skip
def test_what_nvidia_smi_does_not_tell_is_left_out(text: str, expected: list[dict[str, float]]) -> None:
    assert parse_gpu_use(text) == expected


def test_the_gpus_are_sampled_as_long_as_the_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvidia_smi(tmp_path / "bin", monkeypatch)
    path = tmp_path / "gpu_use.jsonl"
    path.write_text('{"time": 1.0, "gpus": []}\n{"torn')
    with sampled_gpu_use(path, ["0", "1"], attempt=2, interval_s=0.01):
        wait_for_samples(path, 3)
    [_, first, second, *_] = samples = read_json_lines(path)
    assert first["attempt"] == 2 and first["time"] <= second["time"]
    assert first["gpus"] == [
        {"gpu": 0, "use_percent": 97.0, "memory_gib": 61.198, "total_gib": 79.647},
        {"gpu": 1, "memory_gib": 1.0},
    ]
    assert read_json_lines(path) == samples, "somebody still writes"


def test_a_machine_without_gpus_gets_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sampled_gpu_use(tmp_path / "a", [], attempt=1):
        pass
    monkeypatch.setenv("PATH", str(tmp_path))
    with sampled_gpu_use(tmp_path / "b", ["0"], attempt=1):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_driver_that_fails_is_said_once_and_its_return_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install_nvidia_smi(tmp_path / "bin", monkeypatch, use="")
    path, use = tmp_path / "gpu_use.jsonl", tmp_path / "bin/nvidia-smi.use"
    with caplog.at_level(logging.WARNING), sampled_gpu_use(path, ["0"], attempt=1, interval_s=0.01):
        deadline = time.monotonic() + 20
        while not caplog.messages:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.2)  # for further warnings
        assert read_json_lines(path) == []
        use.write_text("0, 40, 1024, 2048\n")
        wait_for_samples(path, 1)
    [message] = caplog.messages
    assert message.startswith("the load of GPUs 0 cannot be read:")


@pytest.mark.parametrize(
    ("visible", "engine", "engine_ranks", "expected"),
    [
        (None, "embedded", (), ["0"]),
        ("2,3", "embedded", (1,), ["2", "3"]),
        ("2,3", "vllm", (1,), ["2", "3", "1"]),
        ("0,1", "vllm", (0, 1), ["0", "1"]),
        ("1", "sglang", (), ["1", "0"]),
        ("GPU-b0a1", "embedded", (), ["GPU-b0a1"]),
        ("", "embedded", (), []),
        ("-1", "embedded", (), []),
    ],
)
def test_the_gpus_of_an_rl_are_its_own_and_those_of_its_engines(
    visible: str | None,
    engine: str,
    engine_ranks: tuple[int, ...],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    deployment = DeploymentConfig(engine_gpu_ranks=engine_ranks)
    rollout = RolloutConfig.model_validate({"reward_fn": "exact_match", "engine": {"kind": engine}})
    here = EngineAddress.model_validate({"kind": engine, "url": "http://127.0.0.1:3", "lease_file": "/lease"})
    job = RLJob(
        model=MODEL,
        prompts=ROWS,
        training=RLTrainingConfig(),
        rollout=rollout,
        deployment=deployment,
        engines=(here,),
    )
    assert gpus_in_use(job) == expected
    elsewhere = here.model_copy(update={"lease_url": "http://10.0.0.2:4"})
    assert gpus_in_use(job.model_copy(update={"engines": (elsewhere,)})) == expected[: len((visible or "0").split(","))]


def test_an_sft_has_no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    data = (InputDataset(path="rows.jsonl", digest="d"),)
    deployment = DeploymentConfig(engine_gpu_ranks=(1,))
    job = SFTJob(model=MODEL, data=data, training=SFTTrainingConfig(num_steps=1), deployment=deployment)
    assert gpus_in_use(job) == ["2"]


def sample(at: float, *gpus: dict[str, float]) -> dict[str, object]:
    return {"time": at, "attempt": 1, "gpus": list(gpus)}


def test_each_gpu_has_a_line_for_its_use_and_one_for_its_memory() -> None:
    samples = [
        sample(
            100.0 + 30 * i,
            {"gpu": 0, "use_percent": 50.0 * i, "memory_gib": 40.0, "total_gib": 80.0},
            {"gpu": 3, "use_percent": 0.0, "memory_gib": 80.0, "total_gib": 80.0},
        )
        for i in range(3)
    ]
    [use, memory] = draw_gpu_use(samples)
    assert (use.title, use.headline, use.x_name) == ("GPU use", "mean 25 %", "minutes under way")
    assert (memory.title, memory.headline) == ("GPU memory", "most 80 of 80 GiB")
    assert [entry.path for entry in use.legend] == [entry.path for entry in memory.legend] == ["GPU 0", "GPU 3"]
    assert [tick.label for tick in use.x_ticks] == ["0", "1"]
    idle = use.lines[1].path.removeprefix("M").split("L")
    assert len(idle) == 3 and {point.split(",")[1] for point in idle} == {f"{CHART_BOTTOM}"}


def test_what_no_gpu_tells_is_not_drawn() -> None:
    assert draw_gpu_use([]) == draw_gpu_use([sample(1.0, {"gpu": 0})]) == []
    [memory] = draw_gpu_use([sample(1.0, {"gpu": 0, "memory_gib": 3.0})])
    assert (memory.title, memory.headline, memory.legend) == ("GPU memory", "most 3 GiB", ())


def test_the_time_between_two_attempts_takes_little_room() -> None:
    reading = {"gpu": 0, "use_percent": 1.0}
    times = (0.0, 10.0, 20.0, 86400.0, 86400.0 + 10.0)
    [use] = draw_gpu_use([sample(time, reading) for time in times])
    assert [tick.label for tick in use.x_ticks] == ["0", "1"], "10 + 10 + MAX_PAUSE_S + 10 s"


def test_samples_of_which_a_page_reads_few_have_no_pauses_between_them() -> None:
    reading = {"gpu": 0, "use_percent": 1.0}
    [use] = draw_gpu_use([sample(600.0 * n, reading) for n in range(7)])
    assert use.x_ticks[-1].label == "60"


def test_of_many_gpus_each_has_a_line_of_its_own_kind() -> None:
    [use] = draw_gpu_use([sample(1.0, *({"gpu": n, "use_percent": 1.0} for n in range(8)))])
    assert len({line.css for line in use.lines}) == 8
