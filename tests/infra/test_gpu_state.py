"""Pins what is read of nvidia-smi: without it an engine would be installed for a driver that cannot run it.

The answers are as recorded, but for the programs' names.
"""

from __future__ import annotations

import pytest

from rollouts.infra.gpu_state import GpuProgram, driver_version, parse_gpus, read_gpus
from rollouts.infra.session import LocalSession

H200 = "GPU-b0a1, NVIDIA H200, 143771, 143153, 570.195.03\n"
A100 = "NVIDIA A100-SXM4-80GB, 81920"
TWO = f"GPU-b0a1, {A100}, 19000, 535.54.03\nGPU-a7c2, {A100}, [N/A], 535.54.03\n"


def test_gpus_have_their_memory_in_gb_and_the_driver() -> None:
    [gpu] = parse_gpus(H200, "")
    assert (gpu.name, gpu.driver, gpu.programs) == ("NVIDIA H200", "570.195.03", ())
    assert gpu.total_gb == pytest.approx(150.754, abs=1e-3)
    assert gpu.free_gb == pytest.approx(150.107, abs=1e-3)


def test_programs_belong_to_their_gpu_by_its_uuid() -> None:
    programs = "GPU-a7c2, 4242, /usr/bin/python3, 62667\nGPU-a7c2, 77, [Not Found], [N/A]\n"
    first, second = parse_gpus(TWO, programs)
    assert first.programs == ()
    python, hidden = second.programs
    assert (python.pid, python.name) == (4242, "python3")
    assert python.used_gb == pytest.approx(65.711, abs=1e-3)
    assert hidden == GpuProgram(pid=77, name="[Not Found]", used_gb=0.0)
    assert str(second.programs[0]) == "python3 (pid 4242, 65.7 GB)"
    assert second.free_gb == 0.0


@pytest.mark.parametrize(
    ("said", "expected"), [("580.65.06", (580, 65, 6)), ("570.195.03", (570, 195, 3)), ("[N/A]", ()), ("", ())]
)
def test_a_driver_is_compared_by_numbers(said: str, expected: tuple[int, ...]) -> None:
    assert driver_version(said) == expected


def test_a_machine_without_the_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert read_gpus(LocalSession("/usr/bin/python3")) == []
