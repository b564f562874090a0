"""Pins the words that a shell is offered: commands, options, presets, settings and their values.

Without it a completion could name a setting that is gone, or print words where bash expects the rest of one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollouts.flows.cli import app
from rollouts.flows.commands.completion import complete_name, complete_preset, complete_setting
from rollouts.flows.deployments import PRESETS
from tests.kit.commands import clean_environment

COMMAND = "from rollouts.flows.command import main; main()"


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("", []),
        ("my.toml", []),
        ("training.s", ["training.sft."]),
        ("training.rl.num_m", ["training.rl.num_minibatches="]),
        ("training.rl.loss.clip", ["training.rl.loss.clip_high=", "training.rl.loss.clip_low="]),
        ("training.rl.loss.objective=g", ["training.rl.loss.objective=gspo"]),
        ("training.rl.packing=", ["training.rl.packing=true", "training.rl.packing=false"]),
        ("rollout.environment=math", ["rollout.environment=math", "rollout.environment=math_verify"]),
        ("training.rl.num_steps=", []),
    ],
)
def test_settings_are_offered_up_to_their_next_dot_and_then_their_values(typed: str, words: list[str]) -> None:
    assert complete_setting(typed) == words


def test_bash_makes_words_of_an_equals_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_WORDS", "rollouts run my.toml mode = s")
    monkeypatch.setenv("COMP_CWORD", "5")
    assert complete_setting("s") == ["sft", "sft+rl"]
    monkeypatch.setenv("COMP_WORDS", "rollouts run my.toml mode =")
    monkeypatch.setenv("COMP_CWORD", "4")
    assert complete_setting("=") == ["sft", "rl", "sft+rl"]


def test_presets_and_names_of_settings_are_offered() -> None:
    assert complete_preset("") == sorted(path.stem for path in PRESETS.glob("*.toml"))
    assert complete_preset("sft_q") == ["sft_qwen"]
    assert complete_name("training.rl.num_m") == ["training.rl.num_minibatches"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_asks_this_command(shell: str) -> None:
    outcome = CliRunner().invoke(app, ["completion", shell])
    assert outcome.exit_code == 0 and f"_ROLLOUTS_COMPLETE=complete_{shell}" in outcome.stdout


def test_another_shell_is_refused_in_one_sentence() -> None:
    outcome = CliRunner().invoke(app, ["completion", "tcsh"])
    assert outcome.exit_code == 2
    assert "completion does not support tcsh: expected one of bash, zsh, fish" in outcome.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["rollouts", "val"], ["validate"]),
        (["rollouts", "validate", "--pre"], ["--preset"]),
        (["rollouts", "run", "--preset", "sft_q"], ["sft_qwen"]),
        (["rollouts", "run", "my.toml", "training.rl.num_m"], ["training.rl.num_minibatches="]),
        (["rollouts", "run", "my.toml", "training.rl.loss.objective", "=", "g"], ["gspo"]),
    ],
)
def test_bash_completes_a_line(words: list[str], offered: list[str], tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text(f"#!/bin/sh\nexec {sys.executable} -c '{COMMAND}'\n")
    (tmp_path / "rollouts").chmod(0o755)
    script = CliRunner().invoke(app, ["completion", "bash"]).stdout
    line = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _rollouts_completion rollouts 2>/dev/null"
    environment = clean_environment()
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    program = f"{script}\n{ask}\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    ended = subprocess.run(
        ["bash", "--norc", "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.stdout.split() == offered, ended.stderr
