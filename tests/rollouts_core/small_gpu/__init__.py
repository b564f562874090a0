"""A small GPU for the processes of a test: sitecustomize.py says what it does."""

from pathlib import Path

import pytest

from rollouts_core.less_memory import LESS_MEMORY
from rollouts_core.metrics import read_json_lines

FOLDER = Path(__file__).parent


def use_small_gpu(monkeypatch: pytest.MonkeyPatch, num_tokens: int, **variables: object) -> None:
    """Give the processes that the test starts a GPU for passes of this many tokens."""
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    monkeypatch.setenv("CUDA_SMALL_TOKENS", str(num_tokens))
    for name, value in variables.items():
        monkeypatch.setenv(f"CUDA_SMALL_{name}", str(value))


def lowered_in(directory: Path) -> list[tuple[str, int | bool, int | bool]]:
    """Name, former and later value of the settings that a run lowered."""
    return [
        (line["setting"], line["was"], line["now"])
        for line in read_json_lines(directory / "events.jsonl")
        if line["event"] == LESS_MEMORY
    ]
