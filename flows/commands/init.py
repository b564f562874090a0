"""`rollouts init`: create a configuration file from answers to questions, or from options, and validate it.

Not here: the questions (init_questions.py). init_questions.py loads all checks, so this module imports it late.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollouts.flows.commands.terminal import DEFAULT_STORE, AsJson, Store, tell

if TYPE_CHECKING:
    from rollouts.flows.new_configuration import DataName

DEFAULT_CONFIG = Path("my.toml")
QUESTIONS: Mapping[DataName, str] = {
    "sft": "File of demonstrations to imitate, or a dataset of the hub",
    "prompts": "File of prompts for RL",
    "selection": "File of rows to choose the best checkpoint with (empty: split off)",
    "heldout": "File of rows for the final scores in the report (empty: split off)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InitOptions:
    """The options of the command. On a terminal, the command asks for the options that are not given."""

    config: Path
    model: str
    goal: str
    files: Mapping[DataName, str]
    reward: str
    machine: str
    python: str
    gpu: str
    max_usd: float
    convert: bool
    force: bool


def init(
    config: Annotated[Path, typer.Argument(metavar="[CONFIG]", help="The file to write.")] = DEFAULT_CONFIG,
    model: Annotated[str, typer.Option(metavar="FOLDER|ID", help="Folder or hub id of the base model.")] = "",
    goal: Annotated[str, typer.Option(metavar="GOAL", help="One of imitate, reward, both.")] = "",
    sft: Annotated[str, typer.Option(metavar="FILE", help=f"{QUESTIONS['sft']}.")] = "",
    prompts: Annotated[str, typer.Option(metavar="FILE", help=f"{QUESTIONS['prompts']}.")] = "",
    selection: Annotated[
        str, typer.Option(metavar="FILE", help="File of rows to choose the best checkpoint with.")
    ] = "",
    heldout: Annotated[str, typer.Option(metavar="FILE", help="File of rows for the final scores.")] = "",
    reward: Annotated[
        str, typer.Option(metavar="NAME", help="An environment, a reward, or package.module:function.")
    ] = "",
    machine: Annotated[str, typer.Option(metavar="MACHINE", help="this, rented, or user@host for SSH.")] = "",
    python: Annotated[
        str, typer.Option(metavar="PATH", help="Path of a Python with torch on a machine reached by SSH.")
    ] = "",
    gpu: Annotated[str, typer.Option(help="GPU of a rented machine, such as H100.")] = "",
    max_usd: Annotated[float, typer.Option(min=0.0, help="Most US dollars that a rented machine may cost.")] = 0.0,
    convert: Annotated[
        bool,
        typer.Option("--convert", help="Convert rows of other formats, and split off held-out rows, into new files."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")] = False,
    store: Store = DEFAULT_STORE,
    as_json: AsJson = False,
) -> None:
    """Create the configuration file CONFIG from answers to questions, or from options, and validate it.

    Rows in the formats of TRL, verl, slime, OpenAI and ShareGPT are recognised. Without a terminal, give all answers
    as options.
    """
    # A slow import: reward environments, and the checks of data.
    from rollouts.flows.init_questions import write_first_configuration

    options = InitOptions(
        config=config,
        model=model,
        goal=goal,
        files={"sft": sft, "prompts": prompts, "selection": selection, "heldout": heldout},
        reward=reward,
        machine=machine,
        python=python,
        gpu=gpu,
        max_usd=max_usd,
        convert=convert,
        force=force,
    )
    write_first_configuration(options, store)
    if as_json:
        tell(f"wrote {config}", as_json=True)
