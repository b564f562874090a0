"""Write the files of the quickstart: data, tokenizer, untrained model and configuration.

Not here: their content (rollouts_core/quickstart.py), running the quickstart (cli.py).
"""

from __future__ import annotations

from pathlib import Path

from rollouts.flows.deployments import PRESETS
from rollouts_core.system.files import write_atomically

CONFIG_NAME = "quickstart.toml"


def quickstart_folder(store: Path, *, seed: int) -> Path:
    """The folder of the quickstart's data, tokenizer, model and configuration."""
    return store / "quickstart" / f"seed-{seed}"


def write_quickstart(folder: Path, *, seed: int) -> None:
    """Generate the data, the tokenizer and the untrained model, and copy the preset `quickstart` to the folder."""
    from rollouts_core.model.loading import silence_progress_bars  # loads torch
    from rollouts_core.quickstart import QuickstartSize, write_quickstart_files

    silence_progress_bars()
    write_quickstart_files(folder, size=QuickstartSize(), seed=seed)
    _write_config(folder)


def write_missing_quickstart(folder: Path) -> Path:
    """Write the files of the quickstart with seed 0 if the folder lacks them, and return the folder."""
    if (folder / CONFIG_NAME).is_file():
        _write_config(folder)  # replaces a configuration of an earlier version
    else:
        write_quickstart(folder, seed=0)
    return folder


def _write_config(folder: Path) -> None:
    write_atomically(folder / CONFIG_NAME, (PRESETS / CONFIG_NAME).read_text())
