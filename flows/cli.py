"""The `rollouts` command: a list of its subcommands, and the functions of subcommands that run or check a pipeline.

Not here: the stages of a pipeline (pipeline.py), the Prefect server (own_server/), reading a configuration (form.py).

Exit codes: 0 done, 1 failed, 2 the user must change something, 3 RL did not improve the model, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer
from typer._completion_classes import completion_init

from rollouts.flows.assignments import check_assignments, is_assignment
from rollouts.flows.automations import LEAST_MINUTES, SILENT_MINUTES, mark_silent_runs
from rollouts.flows.commands.cancel import cancel
from rollouts.flows.commands.compare import compare
from rollouts.flows.commands.completion import complete_preset, complete_setting, completion
from rollouts.flows.commands.credentials import credentials, with_credentials
from rollouts.flows.commands.explain import explain
from rollouts.flows.commands.explained import explained, note_what_next
from rollouts.flows.commands.fetch import pull
from rollouts.flows.commands.finish import finish
from rollouts.flows.commands.init import init
from rollouts.flows.commands.machines import add_machine_commands
from rollouts.flows.commands.models import add_model_commands
from rollouts.flows.commands.notify import notify
from rollouts.flows.commands.plugins import plugins
from rollouts.flows.commands.prefect_yaml import prefect_yaml
from rollouts.flows.commands.preset import load_preset, preset
from rollouts.flows.commands.prune import prune
from rollouts.flows.commands.runs import logs, report, runs, samples, show
from rollouts.flows.commands.serve import chat, serve
from rollouts.flows.commands.status import status
from rollouts.flows.commands.terminal import (
    DEFAULT_STORE,
    LOOKING_FOR_SERVER,
    AsJson,
    EngineArgs,
    EngineGpus,
    EnginePython,
    Port,
    Store,
    console,
    describe_finding,
    emit,
    say,
    served_at,
    show_checks,
)
from rollouts.flows.commands.trigger import trigger_run
from rollouts.flows.commands.up import down, up
from rollouts.flows.deployments import evaluation_options
from rollouts.flows.evaluate_settings import EvaluateConfig
from rollouts.flows.form import Pipeline, RunOptions, load_pipeline
from rollouts.flows.live import find_live_pages, served_live_pages
from rollouts.flows.overview import ASKED_BY, create_app
from rollouts.flows.own_server.lend import (
    ServerAddress,
    local_server,
    named_url,
    prefect_environment,
    run_url,
)
from rollouts.flows.own_server.password import own_password
from rollouts.flows.preflight import check_evaluation, check_files, check_pipeline, check_writable, load_checkable
from rollouts.flows.quickstart_files import CONFIG_NAME, quickstart_folder, write_quickstart
from rollouts.flows.store import STORE_VARIABLE, from_home
from rollouts.flows.upkeep import look_after
from rollouts.infra.foreign_text import shown_lines
from rollouts.tasks.inputs import bring_inputs
from rollouts_core.config import Config, parse_config
from rollouts_core.config.record import MAX_INTEGER
from rollouts_core.errors import InputError, RolloutsError
from rollouts_core.mistakes import Mistakes
from rollouts_core.stages import STAGE_NAMES
from rollouts_core.system.utf8 import ensure_utf8

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas.objects import FlowRun, State

    from rollouts.flows.evaluate import EvaluationResult
    from rollouts.flows.pipeline import PipelineResult

ResultT = TypeVar("ResultT")

ConfiguredStore = Annotated[
    Path | None,
    typer.Option(
        envvar=STORE_VARIABLE,
        callback=from_home,
        help="Folder for checkpoints, results and the database; default: run.store of the configuration.",
    ),
]
RunArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG [KEY=VALUE]...",
        help="TOML, JSON or Python file that describes the run, and settings that replace settings of the file, as in "
        "training.rl.num_steps=10. With --preset or --deployment: only settings.",
        autocompletion=complete_setting,
    ),
]
PresetName = Annotated[
    str,
    typer.Option(
        "--preset",
        metavar="NAME",
        help="Use this preset as the configuration; `rollouts preset` lists the presets.",
        autocompletion=complete_preset,
    ),
]

app = create_app()


def run(
    context: typer.Context,
    arguments: RunArguments = None,
    store: ConfiguredStore = None,
    preset: PresetName = "",
    deployment: Annotated[
        str, typer.Option(help="Start a run of this deployment of `rollouts up`, in the background.")
    ] = "",
    name: Annotated[str, typer.Option(help="Name of the run; default: run.name of the configuration.")] = "",
    fresh: Annotated[
        list[str] | None, typer.Option(help=f"Run this stage again: {', '.join(STAGE_NAMES)}. Repeatable.")
    ] = None,
    port: Port = 0,
    as_json: AsJson = False,
) -> None:
    """Run the pipeline that CONFIG describes.

    The run reuses the results of stages that an earlier run finished with the same settings and data. It attaches to
    a stage that another run is executing, and resumes a stopped stage from its last checkpoint.

    Exit codes: 0 done, 1 failed, 2 a setting, a file or the machine must be changed, 3 RL did not improve the model,
    130 interrupted or cancelled.
    """
    if deployment:
        if arguments and not is_assignment(arguments[0]):
            raise InputError(
                f"--deployment {deployment} has its own configuration, but found {arguments[0]}: give only "
                "settings as key=value, or leave --deployment out"
            )
        if port:
            raise InputError(
                "--port cannot be used with --deployment: runs of a deployment use the server of `rollouts up`"
            )
        of_run = [f"run.{key}={json.dumps(value)}" for key, value in (("name", name), ("fresh", fresh)) if value]
        link = trigger_run(store or Path(RunOptions().store), deployment, [*(arguments or []), *of_run])
        console.print(f"follow it at   {link}", markup=False)
        if as_json:
            emit([{"kind": "triggered_run", "url": link}])
        return
    pipeline = load_chosen(context, arguments, preset)
    given = {"store": str(store) if store else "", "name": name, "fresh": fresh}
    settings = pipeline.run.model_dump() | {option: value for option, value in given.items() if value}
    options = parse_config(RunOptions, settings, source="command line", table="run")
    run_pipeline(replace(pipeline, run=options, retrain=None, schedule=None, evaluate=None), port=port, as_json=as_json)


def load_chosen(
    context: typer.Context, arguments: list[str] | None, preset: str, *, reads_rows: bool = False
) -> Pipeline:
    """Load the pipeline of a configuration file or of a preset, with the settings on the command line.

    Args:
        reads_rows: if settings are invalid, also check models and rows, which loads torch.
    """
    if preset:
        return load_preset(preset, arguments or [])
    config, *assignments = arguments or [""]
    if not config:
        raise typer.BadParameter("Missing argument 'CONFIG'.", ctx=context)
    if is_assignment(config) and not Path(config).is_file():
        raise InputError(f"expected CONFIG before {config}: name the configuration that the setting belongs to")
    check_assignments(assignments)
    return load_checkable(Path(config), assignments, reads_rows=reads_rows)


def evaluate(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG|RUN", help="TOML, JSON or Python file. With --lm-eval: a model to score.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [KEY=VALUE]...",
            help="MODEL: base, production, candidate, a registered model, a run or stage of the store, a folder, or a "
            "URL; default: evaluate.model of CONFIG. Settings as key=value replace settings of CONFIG.",
            autocompletion=complete_setting,
        ),
    ] = None,
    against: Annotated[str, typer.Option(metavar="MODEL", help="Compare with this model on the same rows.")] = "",
    data: Annotated[str, typer.Option(metavar="FILE|URL", help="Rows to score on; default: data.heldout.")] = "",
    store: ConfiguredStore = None,
    name: Annotated[str, typer.Option(help="Name of the evaluation; default: the run's name and -evaluate.")] = "",
    fresh: Annotated[bool, typer.Option("--fresh", help="Score again even if the same scores exist.")] = False,
    port: Port = 0,
    lm_eval: Annotated[
        str, typer.Option(metavar="TASK[,TASK]", help="Score RUN on these tasks of lm-evaluation-harness.")
    ] = "",
    limit: Annotated[int, typer.Option(min=0, help="With --lm-eval: number of rows per task to score (0: all).")] = 0,
    include_path: Annotated[str, typer.Option(metavar="DIR", help="With --lm-eval: folder with your own tasks.")] = "",
    lm_eval_args: Annotated[
        str, typer.Option(metavar="'--A B'", help="Further arguments for lm-evaluation-harness.")
    ] = "",
    harness_python: Annotated[
        str, typer.Option(metavar="PATH", help="Interpreter that has lm_eval; default: it is installed in the store.")
    ] = "",
    harness_wheels: Annotated[
        str, typer.Option(metavar="DIR", help="Install lm_eval from the wheels in this folder.")
    ] = "",
    engine: Annotated[
        str, typer.Option(metavar="KIND", help="With --lm-eval: embedded (default), sglang or vllm.")
    ] = "",
    gpus: EngineGpus = "",
    engine_python: EnginePython = "",
    engine_args: EngineArgs = "",
    as_json: AsJson = False,
) -> None:
    """Score a model on held-out rows with the settings of CONFIG, as a run of CONFIG does at its end.

    Earlier scores with the same settings and rows are reused.

    With --lm-eval, lm-evaluation-harness scores a run, a registered model or a folder on its tasks, and the base model
    of the run on the same rows. The command serves the models as `rollouts serve` does.
    """
    own = {"--data": data, "--name": name, "--port": port, "MODEL": arguments}
    of_harness: dict[str, str | int] = {
        "--limit": limit,
        "--include-path": include_path,
        "--lm-eval-args": lm_eval_args,
        "--harness-python": harness_python,
        "--harness-wheels": harness_wheels,
        "--engine": engine,
        "--gpus": gpus,
        "--engine-python": engine_python,
        "--engine-args": engine_args,
    }
    if not lm_eval:
        for option in [option for option, value in of_harness.items() if value]:
            raise InputError(f"{option} is an option of benchmarks: add --lm-eval TASK, or remove it")
        evaluate_on_rows(
            config,
            arguments or [],
            against=against,
            data=data,
            store=store,
            name=name,
            fresh=fresh,
            port=port,
            as_json=as_json,
        )
        return
    for option in [option for option, value in own.items() if value]:
        raise InputError(f"{option} cannot be used with --lm-eval: give only a run, a registered model or a folder")
    if config.is_file():
        raise InputError(
            f"--lm-eval scores a model, and {config} is a file: give a run, a registered model or a folder"
        )
    from rollouts.flows.commands.benchmarks import HarnessOptions, evaluate_by_harness, split_arguments
    from rollouts_core.harnesses import HARNESSES
    from rollouts_core.harnesses.spec import HarnessTask

    harness = HARNESSES["--lm-eval"]
    task = HarnessTask(
        tasks=lm_eval, limit=limit, include_path=include_path, arguments=split_arguments(lm_eval_args, harness)
    )
    options = HarnessOptions(
        harness=harness,
        task=task,
        against=against,
        python=harness_python,
        wheels=harness_wheels,
        engine=engine or "embedded",
        engine_python=engine_python,
        engine_arguments=engine_args,
        gpus=gpus,
        fresh=fresh,
        as_json=as_json,
    )
    evaluate_by_harness(str(config), options, store or DEFAULT_STORE)


def evaluate_on_rows(
    config: Path,
    arguments: list[str],
    *,
    against: str,
    data: str,
    store: Path | None,
    name: str,
    fresh: bool,
    port: int,
    as_json: bool,
) -> None:
    """Score a model on held-out rows, by the evaluation that runs do at their end."""
    model, assignments = (
        ("", arguments) if not arguments or is_assignment(arguments[0]) else (arguments[0], arguments[1:])
    )
    check_assignments(assignments)
    pipeline = load_checkable(config, assignments)
    given = {key: value for key, value in (("model", model), ("against", against), ("data", data)) if value}
    own = pipeline.evaluate.model_dump() if pipeline.evaluate else {}
    if not (own | given).get("model"):
        raise InputError(f"{config}: evaluate.model is missing: name a model: rollouts evaluate {config} production")
    chosen = parse_config(EvaluateConfig, own | given, source="command line", table="evaluate").beside(Path())
    options = {"store": str(store) if store else "", "name": name, "fresh": ("evaluate",) if fresh else ()}
    settings = evaluation_options(pipeline.run).model_dump() | {key: value for key, value in options.items() if value}
    run_evaluation(
        replace(
            pipeline,
            evaluate=chosen,
            run=parse_config(RunOptions, settings, source="command line", table="run"),
        ),
        port=port,
        as_json=as_json,
    )


def quickstart(
    store: Store = DEFAULT_STORE,
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_INTEGER, help="Random seed of the data and of the untrained model.")
    ] = 0,
    port: Port = 0,
    as_json: AsJson = False,
) -> None:
    """Generate a small task, a tokenizer and a model, and run the whole pipeline on them: a few minutes on a CPU."""
    check_writable(store)
    folder = quickstart_folder(store, seed=seed)
    write_quickstart(folder, seed=seed)
    pipeline = load_pipeline(folder / CONFIG_NAME)
    console.print(f"made {folder}: data, tokenizer, untrained model and quickstart.toml", markup=False)
    options = pipeline.run.model_copy(update={"store": str(store)})
    run_pipeline(Pipeline(config=pipeline.config, node=pipeline.node, run=options), port=port, as_json=as_json)


def validate(
    context: typer.Context,
    arguments: RunArguments = None,
    store: ConfiguredStore = None,
    preset: PresetName = "",
    show: Annotated[
        int, typer.Option(min=0, max=1000, help="Print this many rows of each data file, as training sees them.")
    ] = 0,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print a JSON object per finding, or with --show only one per row."),
    ] = False,
) -> None:
    """Check everything about CONFIG that can be checked without training.

    Prints facts, then warnings. Warnings do not stop a run. With --show N it first prints N rows of each file; [[ and
    ]] enclose the text that the loss is computed on.
    """
    pipeline = load_chosen(context, arguments, preset, reads_rows=True)
    place = store or Path(pipeline.run.store)
    if show:
        print_rows(pipeline.config, place, show, as_json=as_json)
        if as_json:
            return
    with with_credentials(pipeline.run.credentials, place):
        if as_json:
            emit(describe_finding(each) for each in check_pipeline(pipeline, place))
        else:
            show_checks(lambda: check_pipeline(pipeline, place), fact="ok    ", caution="warn  ")


def print_rows(config: Config, store: Path, num_rows: int, *, as_json: bool) -> None:
    """Print the first rows of each data file, with the text that enters the loss marked."""
    from rollouts_core.checks.shown import show_rows  # loads torch and transformers
    from rollouts_core.data.shown_rows import describe_row

    mistakes = Mistakes()
    check_files(config.data, mistakes)
    mistakes.check()
    for shown in show_rows(bring_inputs(config, store, lambda line: typer.echo(line, err=True)), num_rows):
        if as_json:
            emit([{"kind": "row", **asdict(shown)}])
        else:
            typer.echo(f"{shown_lines(describe_row(shown))}\n")


def ui(store: Store = DEFAULT_STORE, port: Port = 0, as_json: AsJson = False) -> None:
    """Serve Prefect's UI with the runs of the store, until Ctrl-C."""
    check_writable(store)
    with local_server(store, port=port) as address:
        console.print(f"Prefect UI at {address.ui_url} (Ctrl-C stops it)")
        if as_json:
            emit([served_at(address.ui_url)])
        if address.password:
            console.print(f"log in with {address.password}", markup=False)
        with suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)


def watch(
    store: Store = DEFAULT_STORE,
    silent_after: Annotated[
        int,
        typer.Option(
            min=LEAST_MINUTES,
            metavar="MINUTES",
            help="With PREFECT_API_URL: the server marks a run Crashed after this time without a heartbeat. Runs send "
            "a heartbeat every three minutes, or every PREFECT_FLOWS_HEARTBEAT_FREQUENCY seconds.",
        ),
    ] = SILENT_MINUTES,
    as_json: AsJson = False,
) -> None:
    """Serve web pages with the curves and samples of the store's runs, until Ctrl-C.

    With PREFECT_API_URL, the command also finds runs of the server there whose process on this machine was killed. It
    marks these runs Crashed and restarts each of them up to `run.restarts` times. It also ends expired rented machines.
    """
    is_new = not store.exists()
    check_writable(store)
    if address := find_live_pages(store):
        console.print(f"the pages about the runs of {store} are already served at {address.url}", markup=False)
        if as_json:
            emit([served_at(address.url)])
        return
    if is_new:
        console.print(f"{store} did not exist: the pages show its runs when they begin", markup=False)
    with served_live_pages(store) as address, suppress(KeyboardInterrupt):
        console.print(f"watch the runs of {store} at {address.url} (Ctrl-C stops it)", markup=False)
        if as_json:
            emit([served_at(address.url)])
        user, _, password = own_password(store.resolve() / "prefect").partition(":")
        console.print(f"log in as {user} with the password {password}", markup=False)
        if named_url():
            os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "WARNING")  # show logs of `look_after`
            with local_server(store) as shared:
                os.environ.update(prefect_environment(store, shared))
                mark_silent_runs(shared, after_minutes=silent_after)
                console.print(f"restarts runs of {shared.ui_url} whose process on this machine died", markup=False)
                asyncio.run(look_after(store.resolve()))
        while True:
            time.sleep(3600)


def run_pipeline(pipeline: Pipeline, *, port: int, as_json: bool) -> None:
    """Check the pipeline, run it at the store's Prefect server, and print the paths of its results."""
    result = run_checked(pipeline, check_pipeline, run_flow, port=port)
    if as_json:
        emit([{"kind": "result", "run": Path(result.report).parent.name, **result.model_dump()}])
    console.print()
    if result.verdict:
        say("Result:      ", result.verdict)
    console.print(f"Report:      {result.report}\nCheckpoint:  {result.checkpoint}", markup=False)
    if result.published:
        console.print(f"Published:   {result.published}  (rollouts pull fetches it)", markup=False)
    store = Path(pipeline.run.store).resolve()
    place = "" if store == DEFAULT_STORE.resolve() else f" --store {shlex.quote(str(store))}"
    run, command = Path(result.report).parent.name, own_command()
    console.print(f"\nNext:        {command} report {run} --open{place}", markup=False)
    for step in (f"samples {run}", f"chat {run}", f"serve {run}", "ui"):
        console.print(f"             {command} {step}{place}", markup=False)


def run_evaluation(pipeline: Pipeline, *, port: int, as_json: bool) -> None:
    """Check the evaluation, run it at the store's Prefect server, and print the scores."""
    result = run_checked(pipeline, check_evaluation, run_evaluation_flow, port=port)
    if as_json:
        emit([{"kind": "evaluation", **result.model_dump()}])
    else:
        typer.echo(f"\n{result.summary}")
    console.print(f"Record:      {result.record}", markup=False)


def run_checked(
    pipeline: Pipeline,
    check: Callable[[Pipeline, Path], list[str]],
    run_it: Callable[[Pipeline, ServerAddress], ResultT],
    *,
    port: int,
) -> ResultT:
    """Check the settings, run the flow in this process with the store's Prefect server, and return its result."""
    store = Path(pipeline.run.store).resolve()
    with with_credentials(pipeline.run.credentials, store, port=port):
        show_checks(lambda: check(pipeline, store), fact="checked        ", caution="warning        ")
        console.print(LOOKING_FOR_SERVER)
        with local_server(store, port=port) as address:
            os.environ.update(prefect_environment(store, address))
            try:
                return run_it(pipeline, address)
            except InputError:
                raise
            except KeyboardInterrupt as interrupt:
                from rollouts.flows.cancellation import was_ended_by_state  # the run has already imported prefect

                said = "the run was cancelled in Prefect, or a final state was set there"
                raise KeyboardInterrupt(*([said] if was_ended_by_state() else [])) from interrupt
            except Exception as error:
                console.print()  # Prefect's message about a server that refuses connections lacks a line break
                check_writable(store)  # raises if the disk is full, which errors of Prefect and jobs do not mention
                expected = explain_server(error, address)
                note_what_next(expected or error)
                if expected:
                    raise expected from error
                raise


def explain_server(error: Exception, address: ServerAddress) -> RolloutsError | None:
    """The error to show if the run was deleted in Prefect, or if the Prefect server is gone (else None)."""
    import httpx

    from rollouts.flows.cancellation import is_of_deleted_run  # the run has already imported prefect

    if is_of_deleted_run(error):
        return RolloutsError("the run was deleted in Prefect: its process ended")
    if not isinstance(error, httpx.TransportError | httpx.HTTPStatusError):
        return None
    is_refusal = isinstance(error, httpx.HTTPStatusError) and not error.response.is_server_error
    if is_refusal or not str(error.request.url).startswith(address.api_url):
        return None
    return RolloutsError(
        f"the Prefect server at {address.api_url} no longer answers, and the run ended ({error}): start "
        "the server again"
    )


def own_command() -> str:
    """The command to print in hints: `rollouts` if the shell finds this program by that name, else its full path."""
    found = shutil.which("rollouts")
    is_on_path = found is not None and Path(found).resolve() == Path(sys.argv[0]).resolve()
    return "rollouts" if is_on_path else sys.argv[0]


def run_flow(pipeline: Pipeline, address: ServerAddress) -> PipelineResult:
    """Run the pipeline in this process. When the run starts, print the link of its page."""
    from rollouts.flows.pipeline import sft_rl  # imports prefect, which reads the environment set above

    announced = sft_rl.with_options(on_running=[announce_at(address)])
    # The flow returns a state. Prefect gives the caller the result of this state.
    return cast("PipelineResult", announced(pipeline.config, pipeline.node, pipeline.run))


def run_evaluation_flow(pipeline: Pipeline, address: ServerAddress) -> EvaluationResult:
    """Run the evaluation in this process. When the run starts, print the link of its page."""
    from rollouts.flows.evaluate import evaluate_model  # imports prefect, which reads the environment set above

    assert pipeline.evaluate is not None, "the command names a model"
    announced = evaluate_model.with_options(on_running=[announce_at(address)])
    # The flow returns a state. Prefect gives the caller the result of this state.
    return cast("EvaluationResult", announced(pipeline.evaluate, pipeline.config, pipeline.node, pipeline.run))


def announce_at(address: ServerAddress) -> Any:  # Any: a hook for flows of every kind
    """A Prefect hook that prints the URL of a run's page in the UI when the run starts."""

    def announce(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:  # Any: any result
        console.print(f"follow it at   {run_url(address, str(flow_run.id))}")
        if address.password:
            console.print(f"log in with    {address.password}", markup=False)

    return announce


PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Pipelines": (quickstart, init, preset, explain, validate, run, evaluate, status, finish, cancel),
    "Runs": (runs, show, samples, logs, report, compare),
    "Prefect": (up, down, ui, watch, notify, credentials, prefect_yaml),
    "Models and files": (serve, chat, pull, prune, plugins, completion),
}
"""The commands in each panel of `rollouts --help`. `models`, `gpus`, `nodes` and `reap` are added below."""
for panel, functions in PANELS.items():
    for function in functions:
        app.command(rich_help_panel=panel)(explained(function))
add_model_commands(app, explained, panel="Models and files")
add_machine_commands(app, explained, panel="Machines")


def main() -> None:
    """Entry point of the `rollouts` command."""
    ensure_utf8()
    logging.raiseExceptions = False  # no traceback on the terminal if a log line cannot be sent to a lost server
    gc.set_threshold(50_000, 20, 100)  # fewer garbage collections during the imports: saves one second of three
    is_asked = ASKED_BY in os.environ  # True if a shell asks for completions
    if is_asked:
        completion_init()
    try:
        app(prog_name="rollouts" if is_asked else None)
    finally:
        gc.freeze()  # otherwise the garbage collection at exit takes another second


if __name__ == "__main__":
    main()
