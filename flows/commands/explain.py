"""`rollouts explain`: print the help of a setting, of a section, or of all settings that mention a word.

Not here: the help texts (rollouts_core/config/), the search for settings (setting_help.py).
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from rollouts.flows.commands.completion import complete_name
from rollouts.flows.commands.terminal import AsJson, emit, page, style
from rollouts.flows.setting_help import SettingHelp, find_settings, setting_helps
from rollouts_core.config.messages import closest_name
from rollouts_core.errors import InputError

WIDTH = 100


def explain(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]",
            help="A setting, a section, a setting of another system, or a word; default: all settings.",
            autocompletion=complete_name,
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Explain a setting: help, type, default, range, the stage or command that reads it, and its names elsewhere.

    `rollouts explain training.rl` lists a section. `rollouts explain clip` lists all settings that mention the word.
    """
    known = setting_helps()
    found = find_settings(name, known) if name else known
    if not found:
        close = closest_name(name.rpartition(".")[2], sorted({each.name.rpartition(".")[2] for each in known}))
        hint = close if close.startswith("; did you mean") else "; rollouts explain lists all settings"
        raise InputError(f"no setting has {name} in its name or help{hint}")
    if as_json:
        emit({"kind": "setting_help", **asdict(each)} for each in found)
    elif len(found) == 1 or found[0].name == name:
        page(f"{line}\n" for line in render_help(found[0]))
    else:
        page(f"{line}\n" for line in render_list(found))


def render_help(setting: SettingHelp) -> Iterator[str]:
    """Format the complete help of a setting, as lines."""
    yield style(setting.name, bold=True)
    yield from textwrap.wrap(setting.help, WIDTH, initial_indent="  ", subsequent_indent="  ")
    yield ""
    default = "(required)" if setting.is_required else json.dumps(setting.default, ensure_ascii=False)
    parts = {
        "type": setting.type,
        "choices": ", ".join(each for each in setting.choices if each),
        "names": ", ".join(setting.names),
        "range": setting.range,
        "default": default,
        "acts": setting.acts,
        "elsewhere": ", ".join(setting.other_names),
    }
    for title, text in parts.items():
        if text:
            yield from textwrap.wrap(text, WIDTH, initial_indent=f"  {title:<10}", subsequent_indent=" " * 12)
    for sentence in setting.effects:
        yield f"  {sentence}"


def render_list(found: list[SettingHelp]) -> Iterator[str]:
    """A line per setting: name, default, and the first sentence of the help."""
    width = max(len(each.name) for each in found)
    for each in found:
        default = "required" if each.is_required else json.dumps(each.default, ensure_ascii=False)
        shown = textwrap.shorten(default, 24, placeholder="...")
        yield f"{each.name:<{width}}  {shown:<10}  {textwrap.shorten(each.first_sentence, 90, placeholder=' ...')}"
