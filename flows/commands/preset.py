"""`rollouts preset`: a configuration to start from, with comments that say what it needs.

Not here: the presets (presets/), what `rollouts up` makes of them (deployments.py).
"""

from __future__ import annotations

import re
from typing import Annotated

import typer

from rollouts.flows.deployments import PRESETS
from rollouts_core.config.messages import closest_name
from rollouts_core.errors import InputError

SENTENCE = re.compile(r"(.+?)[.:;](?:\s|$)", re.DOTALL)


def preset(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Name of the preset; without it all are listed.")] = "",
) -> None:
    """Print the preset NAME, a configuration to start from; without NAME, list them.

    `rollouts preset sft_qwen > my.toml` writes one; its comments say what it needs, and how its data are made.
    """
    found = {path.stem: path.read_text(encoding="utf-8") for path in sorted(PRESETS.glob("*.toml"))}
    if not name:
        width = max(map(len, found))
        for each, text in found.items():
            typer.echo(f"{each:<{width}}  {first_sentence(text)}")
        return
    if name not in found:
        raise InputError(f"there is no preset {name}{closest_name(name, list(found))}")
    typer.echo(found[name], nl=False)


def first_sentence(text: str) -> str:
    """The purpose of a preset: the first sentence of its comment, up to a colon or semicolon."""
    comment = " ".join(line.removeprefix("#").strip() for line in text.partition("\n\n")[0].splitlines())
    found = SENTENCE.match(comment)
    return found[1] if found else comment
