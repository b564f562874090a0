"""The work of `rollouts init`: ask for missing options, write the configuration, and validate it.

Not here: the options (commands/init.py), the text of the configuration and of data files (new_configuration.py), the
checks (preflight.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import typer

from rollouts.flows.commands.init import QUESTIONS, InitOptions
from rollouts.flows.commands.terminal import console, show_checks
from rollouts.flows.new_configuration import (
    GOALS,
    Answers,
    DataFile,
    DataName,
    Goal,
    check_choice,
    check_reward,
    data_folder,
    inspect_file,
    inspect_files,
    needs_writing,
    render_configuration,
    write_rows,
)
from rollouts.flows.preflight import check_pipeline, load_checkable
from rollouts_core.config.files import HUB_ID
from rollouts_core.errors import ConfigError, InputError
from rollouts_core.system.files import write_atomically


def write_first_configuration(options: InitOptions, store: Path) -> None:
    """Ask for missing options, write the configuration, and validate it.

    Raises:
        InputError: an answer is invalid, a file exists, rows must be converted first, or the checks find mistakes.
    """
    config = options.config
    _check_new(config, force=options.force)
    chosen = cast("Goal", _answer(options.goal, "--goal", f"Goal ({', '.join(GOALS)})", _check_goal, "imitate"))
    model = _answer(options.model, "--model", "Folder or hub id of the start model", _check_model)
    answers = Answers(path=config, model=model, goal=chosen, files={})
    if chosen != "imitate":
        answers = replace(answers, reward=_answer(options.reward, "--reward", "Environment or reward", check_reward))
    answers = replace(answers, files=_ask_files(answers, options.files))
    answers = _ask_machine(answers, options)
    files = inspect_files(answers)
    for each in files.values():
        console.print(each.describe(), markup=False)
    paths, columns = _bring_rows(answers, files, convert=options.convert, force=options.force)
    config.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(config, render_configuration(answers, paths, columns))
    console.print(f"wrote {config}", markup=False)
    _validate(config, store)


def _check_new(path: Path, *, force: bool) -> None:
    if path.suffix != ".toml":
        raise InputError(f"{path}: a configuration is written as TOML: give a name that ends in .toml")
    if path.exists() and not force:
        raise InputError(f"{path} exists: give another name, or --force to overwrite it")


def _answer(given: str, option: str, question: str, check: Callable[[str], str], default: str = "") -> str:
    """The value of an option, or the user's answer at the terminal if the option is missing.

    An invalid answer repeats the question.

    Raises:
        InputError: the option is invalid, or is missing without a default and without a terminal.
    """
    if given or (default and not sys.stdin.isatty()):
        return check(given or default)
    if not sys.stdin.isatty():
        raise InputError(f"{option} is missing ({question}): without a terminal, give every answer as an option")
    while True:
        try:
            return check(typer.prompt(question, default=default or None, err=True).strip())
        except InputError as error:
            console.print(f"  {error}", markup=False)


def _check_goal(value: str) -> str:
    return check_choice(value, GOALS, option="--goal")


def _check_model(value: str) -> str:
    if Path(value).is_dir() or "://" in value or (HUB_ID.fullmatch(value) and not Path(value).exists()):
        return value
    raise InputError(f"--model: {value} is neither a folder nor a hub id such as Qwen/Qwen3-0.6B")


def _ask_files(answers: Answers, given: Mapping[DataName, str]) -> dict[DataName, str]:
    """The data files by setting. An empty path means that rows are to be split off from the training data."""
    found: dict[DataName, str] = {}
    for name in (*answers.trained, "selection", "heldout"):

        def check(path: str, name: DataName = name) -> str:
            for_rewards = answers.is_for_rewards(name)
            inspect_file(path, for_rewards=for_rewards, needs_answer=":" not in answers.reward)
            return path

        if name in answers.trained:
            found[name] = _answer(given[name], f"--{name}", QUESTIONS[name], check)
        elif given[name] or not sys.stdin.isatty():
            found[name] = check(given[name]) if given[name] else ""
        else:
            said = typer.prompt(QUESTIONS[name], default="", show_default=False, err=True).strip()
            found[name] = check(said) if said else ""
    return found


def _ask_machine(answers: Answers, options: InitOptions) -> Answers:
    """Ask for the machine, and return the answers with the machine."""
    chosen = _answer(options.machine, "--machine", "Machine (this, rented, or user@host)", _check_machine, "this")
    if chosen == "rented":
        given = f"{options.max_usd:g}" if options.max_usd else ""
        limit = _answer(given, "--max-usd", "Most US dollars for machines", _check_usd)
        wanted = _answer(options.gpu, "--gpu", "GPU, such as H100", str)
        return replace(answers, machine=chosen, gpu=wanted, max_usd=float(limit))
    if chosen != "this":
        return replace(
            answers,
            machine=chosen,
            python=_answer(options.python, "--python", "Python with torch on that machine", str),
        )
    return replace(answers, machine=chosen)


def _check_machine(value: str) -> str:
    return value if "@" in value else check_choice(value, ("this", "rented", "user@host"), option="--machine")


def _check_usd(value: str) -> str:
    try:
        if float(value) > 0:
            return value
    except ValueError:
        pass
    raise InputError(f"--max-usd: expected an amount above 0, found {value!r}")


def _bring_rows(
    answers: Answers, files: dict[DataName, DataFile], *, convert: bool, force: bool
) -> tuple[dict[DataName, str], dict[DataName, dict[str, str]]]:
    """Write converted or split data files if necessary. Returns the paths of all data files, and the types of their CSV
    columns.

    Raises:
        InputError: rows must be converted or split, but the user did not agree.
    """
    reasons = needs_writing(answers, files)
    if not reasons:
        return {name: each.path for name, each in files.items()}, {
            name: dict(each.columns) for name, each in files.items() if each.columns
        }
    folder = data_folder(answers.path)
    said = "; ".join(reasons)
    if not convert and sys.stdin.isatty():
        console.print(said, markup=False)
        convert = typer.confirm(f"Write files for training into {folder}?", default=True, err=True)
    if not convert:
        raise InputError(f"{said}: --convert writes files for training into {folder}")
    if folder.exists() and not force:
        raise InputError(f"{folder} exists: give CONFIG another name, or --force to overwrite its files")
    written = write_rows(answers, files)
    console.print(f"wrote {', '.join(written.values())}", markup=False)
    return written, {}


def _validate(config: Path, store: Path) -> None:
    """Check the new configuration as `rollouts validate` does, and print the result."""
    try:
        pipeline = load_checkable(config, reads_rows=True)
        show_checks(lambda: check_pipeline(pipeline, store), fact="ok    ", caution="warn  ")
    except (InputError, ConfigError) as error:
        error.add_note(f"{config} was written: change it, then run rollouts validate {config}")
        raise
    console.print(f"rollouts validate accepts {config}\n\nNext:        rollouts run {config}", markup=False)
