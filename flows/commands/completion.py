"""`rollouts completion`, and the completions of a shell: commands, options, presets, settings and their values.

Typer generates the completion scripts. While a user types, the shell calls `rollouts` to get the completions.

Not here: the help of settings (setting_help.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated

import typer
from typer._completion_shared import get_completion_script

from rollouts.flows.commands.terminal import AsJson, print_text
from rollouts.flows.overview import ASKED_BY
from rollouts_core.errors import InputError

SHELLS = ("bash", "zsh", "fish")
NO_SPACE = "    [[ ${COMPREPLY-} == *[=.] ]] && compopt -o nospace\n    return 0\n"
"""Lines of the script for bash that add no space after a completion that ends with a dot or an equals sign."""


def completion(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
    as_json: AsJson = False,
) -> None:
    """Print the completion script of a shell: `source <(rollouts completion bash)` in ~/.bashrc, or zsh in ~/.zshrc.

    fish: `rollouts completion fish > ~/.config/fish/completions/rollouts.fish`
    """
    if shell not in SHELLS:
        raise InputError(f"completion does not support {shell}: expected one of {', '.join(SHELLS)}")
    script = get_completion_script(prog_name="rollouts", complete_var=ASKED_BY, shell=shell)
    script = script.replace("    return 0\n", NO_SPACE) if shell == "bash" else script
    print_text(f"{script}\n", as_json=as_json)


def complete_preset(incomplete: str) -> list[str]:
    """The names of presets that begin with `incomplete`."""
    from rollouts.flows.deployments import PRESETS

    return sorted(path.stem for path in PRESETS.glob(f"{incomplete}*.toml"))


def complete_setting(incomplete: str) -> list[str]:
    """Complete a setting's name up to its next dot or, after an equals sign, the setting's value.

    An empty word has no completions, so that the shell offers files.
    """
    from rollouts.flows.setting_help import setting_helps

    key, equals, begun = _typed(incomplete)
    if not equals:
        begin = [each.name for each in setting_helps() if each.name.startswith(key)] if key else []
        return sorted({_up_to_next_dot(name, key) for name in begin})
    setting = next((each for each in setting_helps() if each.name == key), None)
    values = (setting.choices or setting.names) if setting else ()
    booleans = ("true", "false") if setting and setting.type == "true or false" else ()
    found = [value for value in (*values, *booleans) if value and value.startswith(begun)]
    return found if incomplete != f"{key}={begun}" else [f"{key}={value}" for value in found]


def complete_name(incomplete: str) -> list[str]:
    """Complete a setting's name up to its next dot."""
    return [each.rstrip("=") for each in complete_setting(incomplete)] if "=" not in incomplete else []


def _up_to_next_dot(name: str, begun: str) -> str:
    """The name up to its next dot, as in `training.`; without a further dot, the name and an equals sign."""
    head, dot, _ = name[len(begun) :].partition(".")
    return f"{begun}{head}{dot or '='}"


def _typed(incomplete: str) -> tuple[str, str, str]:
    """The setting, the equals sign and the start of the value. Bash splits these three parts into separate words."""
    if "=" in incomplete and incomplete != "=":
        return incomplete.partition("=")[0], "=", incomplete.partition("=")[2]
    words = list(_words_of_bash())
    if incomplete == "=" and len(words) >= 2:
        return words[-2], "=", ""
    if len(words) >= 3 and words[-2] == "=":
        return words[-3], "=", incomplete
    return incomplete, "", ""


def _words_of_bash() -> Iterator[str]:
    """The words of the command line up to the cursor, from the variables that bash sets."""
    words, number = os.environ.get("COMP_WORDS", "").split(), os.environ.get("COMP_CWORD", "")
    yield from words[: int(number) + 1] if number.isdecimal() else ()
