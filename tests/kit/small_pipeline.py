"""A pipeline small enough for tests: two-digit additions, a 20k-parameter model, stages of a second.

Its RL earns no reward in so few steps, but its completions differ in length, which is penalised: so it trains, and what
it trains can be compared. It cannot improve anything: `max_p_value` accepts whatever comes out, unless a test says
otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w

from rollouts_core.quickstart import SMALL_SIZE, write_quickstart_files


def small_settings(**overrides: Any) -> dict[str, Any]:  # Any: settings of every type
    """Settings of the small pipeline; `overrides` are dotted keys with `__` for the dot, training__rl__num_steps=3."""
    settings: dict[str, Any] = {
        "model": {"path": "./base_model"},
        "data": {name: f"{name}.jsonl" for name in ("sft", "prompts", "selection", "heldout")},
        "training": {
            "sft": {
                "num_steps": 40,
                "max_length": 128,
                "checkpoint_every": 20,
                "log_every": 5,
                "optim": {"lr": 5e-3},
            },
            "rl": {
                "num_steps": 4,
                "checkpoint_every": 2,
                "optim": {"lr": 3e-4, "schedule": "constant"},
                "reward_shaping": {"max_response_tokens": 30, "overlong_buffer_tokens": 30},
            },
        },
        "rollout": {
            "batch_size": 4,
            "n_samples_per_prompt": 4,
            "max_prompt_tokens": 32,
            "environment": "arithmetic",
            "engine": {"kind": "embedded"},
            "sampling": {"max_new_tokens": 30},
        },
        "evaluation": {"max_p_value": 1.0},
        "deployment": {"trainer_threads": 1, "trainer_processes": 1},
        "node": {"min_free_gb": 0.1},
        "run": {"name": "small", "restarts": 0},
    }
    for dotted, value in overrides.items():
        *sections, key = dotted.split("__")
        section = settings
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value
    return settings


def write_small_pipeline(folder: Path, **overrides: Any) -> Path:  # Any: settings of every type
    """Write the small pipeline's files into `folder`; returns its configuration file."""
    write_quickstart_files(folder, size=SMALL_SIZE)
    config = folder / "small.toml"
    config.write_text(tomli_w.dumps(small_settings(**overrides)))
    return config


OWN_REWARD = "graders_beside:score"
"""The function of `write_own_reward`."""


def write_own_reward(folder: Path) -> None:
    """Write a module of the user's own beside a configuration; it grades as the environment of the small pipeline."""
    (folder / "graders_beside.py").write_text(
        "from rollouts_core.environments import ENVIRONMENTS\n\n\n"
        "def score(sample):\n    return ENVIRONMENTS['arithmetic']().grade(sample)\n"
    )
