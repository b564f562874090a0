"""`rollouts --help` without the commands: their names and sentences, for a help within a fraction of a second.

Importing all commands takes a second. A test compares this list with the commands.

Not here: the commands (cli.py).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Annotated

import typer

ALONE: tuple[list[str], ...] = ([], ["--help"], ["--version"])
"""Arguments that need no command."""
ASKED_BY = "_ROLLOUTS_COMPLETE"
"""Environment variable by which a shell asks for the words that may follow."""
COMMANDS: Mapping[str, Mapping[str, str]] = {
    "Pipelines": {
        "quickstart": "Make a small task, a tokenizer and a model, and run the whole pipeline on them: a few "
        "minutes on a CPU.",
        "init": "Write a first configuration CONFIG, from questions or options, and validate it.",
        "preset": "Print the preset NAME, a configuration to start from; without NAME, list them.",
        "explain": "Explain a setting: help, type, default, range, place of effect, and names in other systems.",
        "validate": "Check everything about CONFIG that can be checked without training.",
        "run": "Run the pipeline that CONFIG describes.",
        "evaluate": "Score a model on held-out rows with the settings of CONFIG, as its run does at its end.",
        "status": "Show the server, the process that serves the deployments, the runs, jobs without a run, and "
        "rented machines.",
        "finish": "End the training of RUN after the step under way. RUN goes on with its best checkpoint so far.",
        "cancel": "Cancel RUN: jobs that no other run wants save a checkpoint and end, and its machine is released.",
    },
    "Runs": {
        "runs": "List the runs of the store, the latest first: state, step, score, change and cost.",
        "show": "Show the settings of a run or of a file: value, default, and whether the file sets it.",
        "samples": "Show completions of a run, by a pager on a terminal: RL samples of a step, or held-out answers "
        "of a model.",
        "logs": "Print the output of a stage's processes.",
        "report": "Render the report of a finished run again, with the present code, and print its path.",
        "compare": "Compare finished runs in one HTML file: settings and data that differ, curves, scores, "
        "answers, costs.",
    },
    "Prefect": {
        "up": "Start Prefect with a deployment per preset, and per CONFIG, in the background. `rollouts down` ends "
        "Prefect.",
        "down": "End what `up` started: the Prefect server and the runs. The runs' training jobs go on.",
        "ui": "Serve Prefect's UI over the store's database until Ctrl-C.",
        "watch": "Serve pages with the curves and samples of runs that are under way, until Ctrl-C.",
        "notify": "Have Prefect send a message when runs end, fail or wait for approval. Without NAME, list the "
        "receivers and their states.",
        "credentials": "Save keys under NAME in Prefect, for runs that it starts. Without NAME, list the saved "
        "credentials.",
        "prefect-yaml": "Print a prefect.yaml with these configurations, for a Prefect server that several people "
        "share.",
    },
    "Models and files": {
        "serve": "Serve a checkpoint by the embedded engine, SGLang or vLLM. All speak the APIs of OpenAI and "
        "Anthropic.",
        "chat": "Talk to one model, or to two at once. Each line is a message, from a terminal or a pipe.",
        "pull": "Download a published checkpoint, or any folder or object, to DIR, which appears when everything "
        "is verified.",
        "prune": "Remove stages, checkpoints of runs and fetched inputs that were not used for long and that "
        "nothing refers to.",
        "plugins": "List the objectives, environments, rewards, trackers and providers that installed packages add.",
        "completion": "Print the completion script of a shell: `source <(rollouts completion bash)` in ~/.bashrc, or "
        "zsh in ~/.zshrc.",
        "models": "The models of this store: candidates, production, history.",
    },
    "Machines": {
        "gpus": "Search the offers of all providers whose keys are in the environment, cheapest first.",
        "reap": "End every machine of this store that no living run wants, and print what is left.",
        "nodes": "The machines that this store has rented, and their cost.",
    },
}
"""The first paragraph of each command's docstring, by the panel of the help and the command's name."""


def show_version(is_asked: bool) -> None:
    """What `--version` prints."""
    if is_asked:
        stands_on = ", ".join(f"{name} {metadata.version(name)}" for name in ("prefect", "torch", "transformers"))
        typer.echo(f"rollouts {metadata.version('rollouts')} on {stands_on}, Python {platform.python_version()}")
        raise typer.Exit


def rollouts(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="Show the version and leave.")
    ] = False,
) -> None:
    """Options before any command."""


def create_app() -> typer.Typer:
    """The command without commands below it."""
    app = typer.Typer(
        name="rollouts",
        help="Turn a base model and data into a trained, evaluated checkpoint: SFT, checkpoint selection, RL.\n\n"
        "Begin with `rollouts quickstart`, which needs nothing; then `rollouts init`, `rollouts validate` and "
        "`rollouts run` with your own data.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(rollouts)
    return app


def create_overview() -> typer.Typer:
    """The command with names and sentences in place of its commands."""
    app = create_app()
    for panel, commands in COMMANDS.items():
        for name, sentence in commands.items():
            app.command(name, help=sentence, rich_help_panel=panel)(_say_nothing)
    return app


def _say_nothing() -> None:
    """Stands for a command in the help."""
