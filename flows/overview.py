"""The text of `rollouts --help`, without an import of the commands' modules.

Importing these modules takes a second. A test compares the texts here with the docstrings of the commands.

Not here: the commands (cli.py).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Annotated

import typer

ALONE: tuple[list[str], ...] = ([], ["--help"], ["--version"])
"""Command lines that are answered without the module of a command."""
ASKED_BY = "_ROLLOUTS_COMPLETE"
"""Environment variable that a shell sets when it asks this program for completions."""
COMMANDS: Mapping[str, Mapping[str, str]] = {
    "Pipelines": {
        "quickstart": "Generate a small task, a tokenizer and a model, and run the whole pipeline on them: a few "
        "minutes on a CPU.",
        "init": "Create the configuration file CONFIG from answers to questions, or from options, and validate it.",
        "preset": "Print the preset NAME, a configuration to start from; without NAME, list them.",
        "explain": "Explain a setting: help, type, default, range, the stage or command that reads it, and its names "
        "elsewhere.",
        "validate": "Check everything about CONFIG that can be checked without training.",
        "run": "Run the pipeline that CONFIG describes.",
        "evaluate": "Score a model on held-out rows with the settings of CONFIG, as a run of CONFIG does at its end.",
        "status": "Show the Prefect server, the process that starts its runs, the runs, training jobs without a run, "
        "and rented machines.",
        "finish": "End the training of RUN after the current step. RUN continues with its best checkpoint so far.",
        "cancel": "Cancel RUN: its jobs save a checkpoint and end, unless another run uses them; its machine is freed.",
    },
    "Runs": {
        "runs": "List the runs of the store, the latest first: state, step, score, change, cost, and whether a report "
        "exists.",
        "show": "Show the settings of a run or of a file: value, default, and whether the file sets the value.",
        "samples": "Show completions of a run: the RL samples of a step, or a model's answers to held-out prompts.",
        "logs": "Print the output of a stage's processes.",
        "report": "Render the report of a finished run again with the installed version, and print the file's path.",
        "compare": "Compare finished runs in one HTML file: settings and data that differ, curves, scores, "
        "answers, costs.",
    },
    "Prefect": {
        "up": "Start a Prefect server in the background, with a deployment for each preset and each CONFIG. "
        "`rollouts down` stops it.",
        "down": "Stop the Prefect server and the runs of `rollouts up`. The training jobs of these runs go on.",
        "ui": "Serve Prefect's UI with the runs of the store, until Ctrl-C.",
        "watch": "Serve web pages with the curves and samples of the store's runs, until Ctrl-C.",
        "notify": "Make Prefect send a message when runs end, fail or wait for approval. Without NAME, list the "
        "receivers, each with the states of runs that it gets messages about.",
        "credentials": "Save API keys in Prefect, for runs with run.credentials = NAME. Without NAME, list the saved "
        "credentials.",
        "prefect-yaml": "Print a prefect.yaml that deploys these configurations to a shared Prefect server.",
    },
    "Models and files": {
        "serve": "Serve a checkpoint over the APIs of OpenAI and Anthropic, with the embedded engine, SGLang or vLLM.",
        "chat": "Chat with one model, or with two at once. Each line of input is a message.",
        "pull": "Download a published checkpoint, or another folder or object of an object store, to DIR.",
        "prune": "Remove stages, checkpoints of runs and downloaded inputs that are long unused and not referred to.",
        "plugins": "List the objectives, environments, rewards, trackers and providers that installed packages add.",
        "completion": "Print the completion script of a shell: `source <(rollouts completion bash)` in ~/.bashrc, or "
        "zsh in ~/.zshrc.",
        "models": "The models of this store: candidates, production, history.",
    },
    "Machines": {
        "gpus": "List the GPU offers of all providers whose API keys are in the environment, cheapest first.",
        "reap": "End every rented machine of this store that no running run uses, and print the machines that remain.",
        "nodes": "The machines that this store has rented, and their cost.",
    },
}
"""The first paragraph of each command's docstring, by the panel of the help and the command's name."""


def show_version(is_asked: bool) -> None:
    """Print the versions of this package and of its main dependencies for `--version`, and exit."""
    if is_asked:
        stands_on = ", ".join(f"{name} {metadata.version(name)}" for name in ("prefect", "torch", "transformers"))
        typer.echo(f"rollouts {metadata.version('rollouts')} on {stands_on}, Python {platform.python_version()}")
        raise typer.Exit


def rollouts(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="Show the version and leave.")
    ] = False,
) -> None:
    """Define the options that stand before a command's name."""


def create_app() -> typer.Typer:
    """Return the `rollouts` command without its subcommands."""
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
    """Return the `rollouts` command with placeholders for its subcommands, for the help only."""
    app = create_app()
    for panel, commands in COMMANDS.items():
        for name, sentence in commands.items():
            app.command(name, help=sentence, rich_help_panel=panel)(_say_nothing)
    return app


def _say_nothing() -> None:
    """Placeholder for the function of a subcommand."""
