"""Pins that models of the hub go to the disk of everything else, and that a cache or a login of the machine is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts_core.hub_cache import FALLBACK, use_fallback


@pytest.mark.parametrize("chosen", ["HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"])
def test_what_the_machine_chooses_stays(chosen: str, tmp_path: Path) -> None:
    given = {FALLBACK: "/volume/cache", chosen: "/elsewhere", "HOME": str(tmp_path)}
    environment = dict(given)
    use_fallback(environment)
    assert environment == given


def test_models_that_the_machine_has_are_not_downloaded_again(tmp_path: Path) -> None:
    (tmp_path / ".cache" / "huggingface" / "hub").mkdir(parents=True)
    environment = {FALLBACK: "/volume/cache", "HOME": str(tmp_path)}
    use_fallback(environment)
    assert "HF_HOME" not in environment


def test_a_job_on_this_machine_keeps_the_cache_as_it_is() -> None:
    environment: dict[str, str] = {}
    use_fallback(environment)
    assert environment == {}


def test_a_machine_without_a_home_has_the_fallback() -> None:
    environment = {FALLBACK: "/volume/cache"}
    use_fallback(environment)
    assert environment["HF_HOME"] == "/volume/cache"


@pytest.mark.slow
def test_the_hubs_library_takes_the_folder_and_finds_the_token_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / ".cache" / "huggingface").mkdir(parents=True)
    (tmp_path / ".cache" / "huggingface" / "token").write_text("hf_of_the_machine")
    program = """
import json, sys
from rollouts_core.__main__ import main
assert "huggingface_hub" not in sys.modules
main(["eval", "no_such/job.json"])
import huggingface_hub, huggingface_hub.constants
print(json.dumps([huggingface_hub.constants.HF_HUB_CACHE, huggingface_hub.get_token()]))
"""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    volume = tmp_path / "volume"
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=kept | {"HOME": str(tmp_path), FALLBACK: str(volume)},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    assert json.loads(found.stdout.splitlines()[-1]) == [f"{volume}/hub", "hf_of_the_machine"]
