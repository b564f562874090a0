"""`rollouts evaluate RUN --lm-eval TASK`: score a checkpoint and the run's base model by a harness.

    find the models ── install the harness ── per model: serve ── run the harness ── read its results
                                                  └─ or reuse the results of an earlier command
    compare both models by row ── table or JSON, runs/<run>/benchmarks.json, registry

Not here: evaluations on held-out rows (cli.py), the harnesses (rollouts_core/harnesses), their installation
(tasks/harness_installs.py), the files (tasks/benchmark_records.py), the engine (serve_engine.py).
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import typer

from rollouts.flows.commands.machines import render_table
from rollouts.flows.commands.runs import load_settings_of_run
from rollouts.flows.commands.serve import check_engine, find_checkpoint
from rollouts.flows.commands.terminal import console, emit
from rollouts.infra.foreign_text import shown_line
from rollouts.infra.locks import lock_file, try_lock
from rollouts.tasks.benchmark_records import (
    describe_comparison,
    load_result,
    note_in_registry,
    note_in_run,
    place_of_result,
    save_result,
)
from rollouts.tasks.harness_installs import find_harness
from rollouts.tasks.model_names import BASE, find_named_model
from rollouts.tasks.store_paths import RUNS, note_named, places_in
from rollouts_core.benchmarks import Benchmark, compare_benchmarks, show_benchmark
from rollouts_core.config import ModelConfig
from rollouts_core.engine_kinds import ENGINES
from rollouts_core.errors import InputError, RolloutsError
from rollouts_core.fingerprint import digest_model
from rollouts_core.harnesses import Harness
from rollouts_core.harnesses.spec import HarnessTask, MetricResult, ServedModel
from rollouts_core.keys import key_header
from rollouts_core.system.processors import count_processors

SERVED_NAME = "model"
MAX_REQUESTS = 64
LOOK_S = 0.5
GRACE_S = 5.0
"""Seconds between asking the harness to end and killing it."""
TAIL_BYTES, TAIL_LINES = 65_536, 10
"""Bytes at the end of the log that are searched for the cause of a failure, and number of lines shown."""
FOREIGN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Environment variables to remove, because they would give the harness packages of other versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessOptions:
    """The options of the command."""

    harness: Harness
    task: HarnessTask
    against: str
    python: str
    wheels: str
    engine: str
    engine_python: str
    engine_arguments: str
    gpus: str
    fresh: bool
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A model to score."""

    name: str
    folder: Path
    digest: str


def split_arguments(given: str, harness: Harness) -> tuple[str, ...]:
    """Split the further arguments for a harness as a shell does.

    Raises:
        InputError: a quote is not closed, or an argument is one that the command sets.
    """
    try:
        found = tuple(shlex.split(given))
    except ValueError as error:
        raise InputError(
            f"--{harness.name}-args is not a valid shell command line ({error}): close the quotes"
        ) from error
    for argument in found:
        if argument.partition("=")[0] in harness.own_arguments:
            raise InputError(f"--{harness.name}-args has {argument}, which this command sets: remove it")
    return found


def evaluate_by_harness(given: str, options: HarnessOptions, store: Path) -> None:
    """Score a model and the model that it is compared with, print the results, and save them for the run."""
    harness, store = options.harness, store.resolve()
    own_options = {
        "--gpus": options.gpus,
        "--engine-python": options.engine_python,
        "--engine-args": options.engine_arguments,
    }
    check_engine(options.engine, threads=1, own_options=own_options)
    if options.task.include_path and not Path(options.task.include_path).is_dir():
        raise InputError(f"--include-path {options.task.include_path} is not a folder: give the folder of your tasks")
    folder = find_checkpoint(given, store)
    run = next((each.partition("/")[2] for each in places_in(str(folder.resolve())) if each.startswith(RUNS)), "")
    model = _scored(given, folder, harness)
    against = find_against(options.against, run, store, harness)
    if against is None:
        say(harness, f"{given} is not the model of a run, so it is scored alone: --against MODEL compares it")
    note_named([str(each.folder) for each in (model, *([against] if against else []))], store)
    python, version = find_harness(
        harness, store, python=options.python, wheels=options.wheels, say=lambda sentence: say(harness, sentence)
    )
    results = [
        score(each, options, store, python=python, version=version) for each in (model, *([against] if against else []))
    ]
    found = compare_benchmarks(results[0], results[1] if against else ())
    other = against.name if against else ""
    entry = describe_comparison(harness, options.task, found, version=version, engine=options.engine, against=other)
    registered = note_in_registry(store, model.digest, entry)
    if run:
        note_in_run(store, run, entry)
    if options.as_json:
        settings = {key: value for key, value in entry.items() if key != "metrics"}
        emit({"kind": "benchmark", "model": given, **settings, **asdict(each)} for each in found)
        return
    typer.echo(render_benchmarks(found, model=given, against=other))
    for name in registered:
        say(harness, f"the registry has the results for {name}")
    if run:
        say(harness, f"rollouts report {run} shows the results")


def find_against(given: str, run: str, store: Path, harness: Harness) -> Scored | None:
    """The model to compare with: the given model, or the base model of the run. None if there is no run."""
    if given and given != BASE:
        return _scored(given, find_checkpoint(given, store), harness)
    if not run:
        if given:
            raise InputError("--against base needs a model of a run, which has a base model: give a run, or a folder")
        return None
    config = load_settings_of_run(store, run).config
    base = find_named_model(BASE, config, store, lambda sentence: say(harness, sentence))
    return _scored(BASE, Path(base.model.path), harness)


def _scored(name: str, folder: Path, harness: Harness) -> Scored:
    if not (folder / "tokenizer.json").is_file():
        raise InputError(f"{name} has no tokenizer.json, which {harness.name} needs: add it to {folder}")
    return Scored(name=name, folder=folder.resolve(), digest=digest_model(ModelConfig(path=str(folder.resolve()))))


def score(model: Scored, options: HarnessOptions, store: Path, *, python: str, version: str) -> list[MetricResult]:
    """The results of one model, from an earlier command or by running the harness.

    Raises:
        InputError: the harness does not know the task, or another command scores the model on the task.
        RolloutsError: the harness failed.
    """
    harness, task = options.harness, options.task
    engine = [options.engine, *shlex.split(options.engine_arguments)]
    place = place_of_result(store, harness, task, version=version, engine=engine, model_digest=model.digest)
    place.mkdir(parents=True, exist_ok=True)
    with lock_file(place / ".lock") as lock:
        if not try_lock(lock, fcntl.LOCK_EX):
            raise InputError(f"another command scores {model.name} on {task.tasks}: wait for its end")
        if not options.fresh and (earlier := load_result(place)) is not None:
            say(harness, f"{model.name} was scored before, in {place}: --fresh scores it again")
            return earlier
        say(harness, f"scores {model.name} on {task.tasks}; its log is {place / 'log.txt'}")
        run_served(model, options, store, place, python)
        try:
            results = harness.read(place / "output")
        except ValueError as error:
            raise RolloutsError(f"{harness.name} ended without results: {error}. See {place / 'log.txt'}") from error
        if not results:
            raise InputError(f"{harness.name} reports no metric of {task.tasks}: leave out arguments that skip metrics")
        save_result(place, results)
        return results


def run_served(model: Scored, options: HarnessOptions, store: Path, place: Path, python: str) -> None:
    """Serve a model, and run the harness against the server. The output is in `place`: output/, log.txt, server/."""
    from rollouts.flows.commands.serve_engine import EngineServer, started_engine, url_of  # loads torch
    from rollouts_core.engines.child import explain_end

    harness, key = options.harness, secrets.token_hex(16)
    server = EngineServer(
        kind=options.engine,
        name=SERVED_NAME,
        host="127.0.0.1",
        port=0,
        threads=count_processors(),
        max_running_requests=MAX_REQUESTS,
        api_key=key,
        context_length=0,
        gpus=options.gpus,
        python=options.engine_python,
        install="",
        arguments=options.engine_arguments,
    )
    for left in ("result.json", "log.txt"):
        (place / left).unlink(missing_ok=True)
    shutil.rmtree(place / "output", ignore_errors=True)
    with started_engine(model.folder, server, store, place / "server") as child:
        url = url_of(child)
        listed = httpx.get(f"{url}/v1/models", headers=key_header(key), trust_env=False).raise_for_status().json()
        served = ServedModel(
            url=url,
            name=SERVED_NAME,
            folder=model.folder,
            max_length=listed["data"][0]["max_model_len"] - ENGINES[options.engine].reserved_tokens,
            max_requests=MAX_REQUESTS,
        )
        command = [python, *harness.render(options.task, served, place / "output")]
        code = run_harness(command, place / "log.txt", harness, api_key=key, server=child.process)
        if child.process.poll() is not None:
            raise explain_end(child)
    if code:
        raise explain_failure(harness, code, place / "log.txt")


def run_harness(
    command: Sequence[str], log: Path, harness: Harness, *, api_key: str, server: subprocess.Popen[bytes]
) -> int:
    """Run the harness until it ends or the server ends. Returns the exit code. Shows the last line of the log."""
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}
    local = ",".join(filter(None, (os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1")))
    env = {**kept, "OPENAI_API_KEY": api_key, "NO_PROXY": local, "no_proxy": local}
    with log.open("wb") as output, console.status(f"{harness.name} starts") as status:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            while process.poll() is None and server.poll() is None:
                time.sleep(LOOK_S)
                status.update(shown_line("".join(tail_of(log, 1)))[:100].replace("[", r"\["))
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
    return process.returncode


def explain_failure(harness: Harness, code: int, log: Path) -> RolloutsError:
    """The error about a harness that failed: the user's mistake if the log shows it, or else the log's last lines."""
    lines = tail_of(log)
    if mistake := harness.explain("\n".join(lines)):
        return InputError(f"{mistake}. The log is {log}")
    shown = "\n".join(lines[-TAIL_LINES:])
    return RolloutsError(f"{harness.name} failed with exit code {code}. The last lines of {log}:\n{shown}")


def tail_of(log: Path, number: int = 0) -> list[str]:
    """The last `number` lines of a log, or all lines within TAIL_BYTES if `number` is 0. A progress bar is one line."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = [line.rpartition("\r")[2].rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    return [line for line in lines if line][-number:]


def render_benchmarks(found: Sequence[Benchmark], *, model: str, against: str) -> str:
    """The results as a table."""
    shown = [show_benchmark(each) for each in found]
    rows = [(each.task, each.metric, str(each.num_rows), each.value) for each in shown]
    if not against:
        return render_table(("TASK", "METRIC", "ROWS", model), rows)
    compared = [(*row, each.against, each.difference or "-") for row, each in zip(rows, shown, strict=True)]
    return render_table(("TASK", "METRIC", "ROWS", model, against, "DIFFERENCE"), compared)


def say(harness: Harness, sentence: str) -> None:
    console.print(f"{harness.name:<15}{sentence}", markup=False)
