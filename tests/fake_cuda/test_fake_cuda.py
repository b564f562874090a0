"""Runs the steps of a GPU on a fake one: no value is computed, everything else is as on CUDA.

Without it the first GPU that anybody trains on would be the first to show a tensor on the wrong device, a wait for the
GPU in the loop, a mask in memory that no kernel needs, or an estimate of memory that is wrong.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARY_VARIABLE = "FAKE_CUDA_LIBRARY"
"""Where plugin.py finds the device."""

FOLDER = Path(__file__).parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake device, built against this torch."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed, which builds the fake CUDA device")
    import torch  # its folder is all that is wanted

    root = Path(torch.__file__).parent
    target = tmp_path_factory.mktemp("fake_cuda") / "fake_cuda.so"
    include = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    link = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root / 'lib'}"]
    command = ["g++", "-shared", "-fPIC", "-O1", "-std=c++20", str(FOLDER / "fake_cuda.cpp"), "-o", str(target)]
    subprocess.run([*command, *include, *link], check=True)
    return target


@pytest.mark.promise
@pytest.mark.parametrize(
    "chosen", ["not matrix", pytest.param("matrix", marks=[pytest.mark.matrix, pytest.mark.timeout(1800)])]
)
def test_on_the_fake_device(library: Path, chosen: str) -> None:
    """A process of its own: torch must find the device when it is imported."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.fake_cuda.plugin", "--noconftest", "-q", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "-m", chosen, *map(str, sorted(FOLDER.glob("inside_*.py")))],
        cwd=FOLDER.parents[1],
        env={**os.environ, LIBRARY_VARIABLE: str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
