"""`rollouts preset`: print or load a preset, which is a commented configuration to start from.

Not here: the presets (presets/), the deployments of presets (deployments.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rollouts.flows.commands.completion import complete_preset
from rollouts.flows.commands.terminal import AsJson, emit
from rollouts.flows.deployments import PRESETS
from rollouts.flows.form import Pipeline, parse_pipeline
from rollouts_core.config import read_settings
from rollouts_core.config.messages import closest_name
from rollouts_core.errors import InputError

QUICKSTART = "quickstart"
SENTENCE = re.compile(r"(.+?)[.:;](?:\s|$)", re.DOTALL)


def preset(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]", help="Name of the preset; without it, list all presets.", autocompletion=complete_preset
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Print the preset NAME, a configuration to start from; without NAME, list them.

    `rollouts run --preset sft_qwen` runs a preset. `rollouts preset sft_qwen > my.toml` copies a preset to a file.
    """
    found = {path.stem: path.read_text(encoding="utf-8") for path in sorted(PRESETS.glob("*.toml"))}
    if name:
        check_preset(name)
    if as_json:
        chosen = [name] if name else sorted(found)
        emit(
            {"kind": "preset", "name": each, "about": first_sentence(found[each]), "text": found[each]}
            for each in chosen
        )
        return
    if not name:
        width = max(map(len, found))
        for each, text in found.items():
            typer.echo(f"{each:<{width}}  {first_sentence(text)}")
        return
    typer.echo(found[name], nl=False)


def check_preset(name: str) -> None:
    """Raise InputError if no preset has this name."""
    known = sorted(path.stem for path in PRESETS.glob("*.toml"))
    if name not in known:
        raise InputError(f"there is no preset {name}{closest_name(name, known)}")


def load_preset(name: str, assignments: Sequence[str]) -> Pipeline:
    """Load a preset and replace settings by `key=value`. Relative paths in the preset start in the current folder.

    Raises:
        InputError: the preset does not exist, or a setting does not fit.
    """
    check_preset(name)
    if name == QUICKSTART:
        raise InputError("the preset quickstart needs a generated model and generated data: run `rollouts quickstart`")
    return parse_pipeline(read_settings(PRESETS / f"{name}.toml"), Path(f"preset {name}"), assignments)


def first_sentence(text: str) -> str:
    """The purpose of a preset, from its file: the first sentence of the leading comment, up to a colon or
    semicolon."""
    comment = " ".join(line.removeprefix("#").strip() for line in text.partition("\n\n")[0].splitlines())
    found = SENTENCE.match(comment)
    return found[1] if found else comment
