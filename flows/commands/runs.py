"""Commands that read the files of a store: list its runs, and print a run's settings, samples, logs and report.

    rollouts runs                          one line per run
    rollouts show RUN|CONFIG               settings with their defaults and origin
    rollouts samples RUN --reward '<1'     completions, filtered
    rollouts logs RUN rl -f                output of a stage
    rollouts report RUN --open             the report, rendered again

Results go to stdout. With --json, results are JSON objects with a `kind`, one per line (docs/terminal.md). The commands
need no Prefect server.

Not here: finding and summarizing runs (store_runs.py), comparing settings with defaults (shown_settings.py).
"""

from __future__ import annotations

import json
import operator
import re
import time
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import typer

from rollouts.flows.assignments import check_assignments
from rollouts.flows.commands.completion import complete_setting
from rollouts.flows.commands.machines import render_table
from rollouts.flows.commands.terminal import DEFAULT_STORE, AsJson, Store, emit, page, style
from rollouts.flows.form import Pipeline, load_pipeline, parse_pipeline, with_present_kind
from rollouts.flows.shown_settings import Setting, settings_of
from rollouts.flows.store_runs import (
    ModelScore,
    RunSummary,
    find_named_run,
    lives,
    living_runs,
    report_path,
    runs_by_use,
    stage_name,
    summarize_run,
)
from rollouts.infra.foreign_text import shown_line, shown_lines
from rollouts.infra.ledger import LEDGER_FILE, StageUse
from rollouts.tasks.earlier_report import render_again
from rollouts.tasks.store_paths import EVALUATION_FILE, RUN_FILE
from rollouts_core.config import read_settings
from rollouts_core.config.messages import closest_name
from rollouts_core.errors import InputError
from rollouts_core.metrics import parse_line
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import EVALUATE, is_training, label_of

FOLLOW_S = 0.5
"""Seconds between two reads of a log with --follow."""
STEP_FILE = re.compile(r"step_(\d+)\.jsonl")
COMPARISON = re.compile(r"(<=|>=|<|>|=)?\s*(-?\d+(?:\.\d+)?)")
COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "=": operator.eq,
    ">=": operator.ge,
    ">": operator.gt,
}
RunName = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run's folder, my-run-5793d50a, its id, or its name (the latest run)."),
]


def runs(
    store: Store = DEFAULT_STORE,
    limit: Annotated[int, typer.Option(min=0, help="Number of latest runs to show (0: all).")] = 20,
    as_json: AsJson = False,
) -> None:
    """List the runs of the store, the latest first: state, step, score, change, cost, and whether a report exists."""
    store = store.resolve()
    listed = runs_by_use(store) if (store / LEDGER_FILE).is_file() else []
    living = living_runs(store) if listed else ()
    found = [summarize_run(store, uses, living=living) for uses in (listed[:limit] if limit else listed)]
    if as_json:
        emit({"kind": "run", **asdict(each)} for each in found)
    elif found:
        typer.echo(render_runs(found))
        if len(found) < len(listed):
            typer.echo(f"{len(listed) - len(found)} older runs: --limit 0 shows all", err=True)
    else:
        typer.echo(f"the store {store} has no runs yet", err=True)


def render_runs(found: Sequence[RunSummary]) -> str:
    """Format the runs as a table, which fits in 80 columns if names have up to 12 letters."""
    rows = [
        (
            each.run,
            each.state,
            f"{each.training} {each.step}/{each.num_steps}" if each.training else each.stage,
            describe_score(each.score),
            "" if each.change is None else f"{each.change:+.3f}",
            "" if each.usd is None else f"${each.usd:.2f}",
            "yes" if each.report else "",
        )
        for each in found
    ]
    head = ("RUN", "STATE", "STEP", "SCORE", "CHANGE", "COST", "REPORT")
    used = [
        column for column in range(len(head)) if any(row[column] for row in rows)
    ]  # COST is empty without rented machines
    return render_table([head[column] for column in used], [[row[column] for column in used] for row in rows])


def describe_score(score: ModelScore | None) -> str:
    """Format the mean score with its confidence interval."""
    return "" if score is None else f"{score.mean:.3f} ({score.low:.3f}-{score.high:.3f})"


# ── settings ──


def show(
    given: Annotated[str, typer.Argument(metavar="RUN|CONFIG", help="A run, or a TOML, JSON or Python file.")],
    assignments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Settings that replace settings of CONFIG.", autocompletion=complete_setting
        ),
    ] = None,
    store: Store = DEFAULT_STORE,
    everything: Annotated[bool, typer.Option("--all", help="Also show settings with their default values.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the settings of a run or of a file: value, default, and whether the file sets the value."""
    path, changes = Path(given), assignments or []
    check_assignments(changes)
    if changes and not path.is_file():
        raise InputError(f"{given} is not a file, and the settings of a run are fixed: leave out {changes[0]}")
    found = settings_of(
        load_pipeline(path, changes) if path.is_file() else load_settings_of_run(store.resolve(), given)
    )
    kept = [each for each in found if everything or not each.is_default]
    if as_json:
        emit({"kind": "setting", **asdict(each)} for each in kept)
        return
    page(f"{line}\n" for line in render_settings(kept))
    if not everything:
        typer.echo(f"{len(found) - len(kept)} settings have their default values: --all shows them", err=True)


def load_settings_of_run(store: Path, given: str) -> Pipeline:
    """The settings of a finished run.

    Raises:
        InputError: the run does not exist or has not finished.
    """
    run = find_named_run(store, given)[0].run
    path = store / "runs" / run / "config.toml"
    if not path.is_file():
        raise InputError(f"{run} has not come to its end, so it has no config.toml yet: name its configuration")
    settings = read_settings(path)
    return parse_pipeline({**settings, "node": with_present_kind(settings.get("node", {}))}, path)


def render_settings(settings: Sequence[Setting]) -> Iterator[str]:
    """A line per setting: name, value, and the default if the value differs from it."""
    width = max((len(each.name) for each in settings), default=0)
    for each in settings:
        default = "" if each.is_default or each.is_required else f"default {_value(each.default)}"
        origin = f"set by {each.origin}" if each.origin not in ("file", "default") else ""
        note = ", ".join(filter(None, (default, origin)))
        line = f"{each.name:<{width}}  {_value(each.value)}"
        yield f"{line}  {style(f'({note})', dim=True)}" if note else line


def _value(value: object) -> str:
    return shown_line(json.dumps(value, ensure_ascii=False))


# ── samples ──


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFilter:
    """Conditions on samples; an empty field accepts every sample."""

    reward: str = ""
    """A condition on the reward, such as `<1`, `>=0.5` or `=0`."""
    pattern: re.Pattern[str] | None = None
    """A regular expression that must occur in the prompt, the completion or the reference answer."""
    prompt: str = ""
    """The id of the sample's prompt."""

    def fits(self, record: Mapping[str, Any]) -> bool:  # Any: JSON
        """Whether a sample meets the conditions."""
        if self.prompt and self.prompt != prompt_id(record):
            return False
        if self.reward and not _compare(record.get("reward"), self.reward):
            return False
        return self.pattern is None or any(self.pattern.search(text) for _, text in turns_of(record))


def samples(
    run: RunName,
    store: Store = DEFAULT_STORE,
    step: Annotated[int | None, typer.Option(min=1, help="RL samples of this step; default: the latest step.")] = None,
    model: Annotated[
        str, typer.Option(help="Instead of RL samples, held-out answers of this model: base, sft or rl.")
    ] = "",
    reward: Annotated[str, typer.Option(help="Only samples with such a reward: '<1', '>=0.5' or '=0'.")] = "",
    grep: Annotated[str, typer.Option(help="Only samples whose texts match this regular expression.")] = "",
    prompt: Annotated[str, typer.Option(help="Only samples of the prompt with this id, which the output shows.")] = "",
    limit: Annotated[int, typer.Option(min=0, help="Most samples to show (0: all).")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show completions of a run: the RL samples of a step, or a model's answers to held-out prompts."""
    if reward and not COMPARISON.fullmatch(reward.strip()):
        raise InputError(f"--reward {reward!r} is not a comparison: give one such as '<1', '>=0.5' or '=0'")
    try:
        pattern = re.compile(grep) if grep else None
    except re.error as error:
        raise InputError(f"--grep {grep!r} is not a regular expression: {error}") from error
    store = store.resolve()
    path = find_sample_file(store, find_named_run(store, run), step=step, model=model)
    wanted = SampleFilter(reward=reward.strip(), pattern=pattern, prompt=prompt)
    found = islice(filter(wanted.fits, _records(path)), limit or None)
    source = {"stage": stage_of(path), "name": path.stem}
    if as_json:
        emit({"kind": "sample", **source, **record} for record in found)
        return
    blocks = (render_sample(record, path.stem) for record in found)
    if (first := next(blocks, None)) is None:
        raise InputError(f"{path} has no matching sample: leave out --reward, --grep or --prompt")
    page(chain([first], blocks))


def find_sample_file(store: Path, uses: Sequence[StageUse], *, step: int | None, model: str) -> Path:
    """The file with the RL samples of a step (default: the latest step), or with the held-out answers of a model.

    Raises:
        InputError: the run has no such file. The message names the steps or models for which the run has files.
    """
    if step is not None and model:
        raise InputError("--step selects RL samples, --model selects held-out answers: give one of them")
    folders = [RunDirectory(store / "stages" / use.stage).samples for use in uses]
    files = [path for folder in folders for path in sorted(folder.glob("*.jsonl"))]
    trained = [path for path in files if is_training(stage_of(path))]
    steps = {int(match[1]): path for path in trained if (match := STEP_FILE.fullmatch(path.name))}
    answers = {path.stem: path for path in files if stage_of(path) == EVALUATE.name}
    if model:
        if model not in answers:
            raise InputError(f"{uses[0].run} has no held-out answers of {model}: {_choices(answers)}")
        return answers[model]
    if step is not None:
        if step not in steps:
            raise InputError(f"{uses[0].run} has no samples of step {step}: {_span(steps)}")
        return steps[step]
    if steps:
        return steps[max(steps)]
    if answers:
        return max(answers.values(), key=lambda path: path.stat().st_mtime)  # of the last evaluated model
    raise InputError(f"{uses[0].run} has no samples yet: RL writes them at each step, and the evaluation at the end")


def _choices(answers: Mapping[str, Path]) -> str:
    return f"it has those of {', '.join(answers)}" if answers else "its evaluation has not begun"


def _span(steps: Mapping[int, Path]) -> str:
    return f"it has steps {min(steps)} to {max(steps)}" if steps else "it has no samples of RL yet"


def stage_of(path: Path) -> str:
    """The name of the stage that wrote a file of samples."""
    return path.parent.parent.name.rpartition("-")[0]


def _records(path: Path) -> Iterator[dict[str, Any]]:  # Any: JSON
    with path.open("rb") as lines:
        yield from filter(None, map(parse_line, lines))


def _compare(found: object, wanted: str) -> bool:
    match = COMPARISON.fullmatch(wanted)
    assert match is not None, wanted
    return isinstance(found, int | float) and COMPARE[match[1] or "="](found, float(match[2]))


def prompt_id(record: Mapping[str, Any]) -> str:  # Any: JSON
    """The id of a sample's prompt, or the number of the sample's group if the data has no ids."""
    named = (record.get("metadata") or {}).get("prompt_id")
    return str(record.get("group_index") if named is None else named)


def turns_of(record: Mapping[str, Any]) -> list[tuple[str, str]]:  # Any: JSON
    """The roles and texts of a sample: the prompt, the policy's turns, the tools' answers, and the reference
    answer."""
    prompt = record.get("prompt") or []
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    metadata = record.get("metadata") or {}
    later = metadata.get("conversation", [])[len(before) :] or [
        {"role": "assistant", "content": record.get("response", "")}
    ]
    turns = [(str(each.get("role", "")), _text_of(each.get("content"))) for each in (*before, *later)]
    return [*turns, ("reference", str(metadata["answer"]))] if metadata.get("answer") is not None else turns


def _text_of(content: object) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def render_sample(record: Mapping[str, Any], source: str) -> str:  # Any: JSON
    """Format a sample: a line with its step, prompt id, reward and length, then its turns."""
    reward = record.get("reward")
    length = sum(1 for each in record.get("loss_mask") or () if each)
    facts = [
        label_of(source) if not source.startswith("step_") else f"step {int(source[5:])}",
        f"prompt {prompt_id(record)}",
        "no reward" if reward is None else f"reward {reward:g}",
        f"{length} tokens" if length else "",
        str(record.get("finish_reason") or ""),
    ]
    color = None if reward is None else "green" if reward > 0 else "red"
    lines = [style(shown_line(", ".join(filter(None, facts))), fg=color, bold=True)]
    for role, text in turns_of(record):
        first, *more = shown_lines(text).split("\n")
        lines.append(f"  {style(f'{shown_line(role):<10}', dim=True)} {first}")
        lines += [f"  {'':<10} {line}" for line in more]
    return "\n".join(lines) + "\n\n"


# ── logs and the report ──


def logs(
    run: RunName,
    stage: Annotated[
        str, typer.Argument(metavar="[STAGE]", help="sft, rl, engine, ...; default: the last stage.")
    ] = "",
    store: Store = DEFAULT_STORE,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Also print new lines, until the stage ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the output of a stage's processes."""
    store = store.resolve()
    uses = find_named_run(store, run)
    directory = RunDirectory(find_log_folder(store, uses, stage))
    has_lines = False
    for lines in read_growing(
        directory.log,
        is_over=lambda: not follow or directory.result.is_file() or not lives(uses, living_runs(store)),
    ):
        has_lines = has_lines or bool(lines)
        if as_json:
            emit({"kind": "log_line", "stage": directory.root.name, "text": text} for text in _split_log(lines))
        else:
            typer.echo(shown_lines(lines), nl=False)
    if not has_lines:
        typer.echo(f"{directory.log} is empty: the processes of the stage printed nothing", err=True)


def _split_log(lines: str) -> list[str]:
    """The lines of a log as a terminal would show them, each without its end."""
    return shown_lines(lines).removesuffix("\n").split("\n") if lines else []


def find_log_folder(store: Path, uses: Sequence[StageUse], stage: str) -> Path:
    """The run directory of a stage of the run, or of an inference engine of the run's RL stage.

    Raises:
        InputError: the run has not reached this stage.
    """
    folders = {stage_name(use): store / "stages" / use.stage for use in uses}
    for name, folder in [*folders.items()]:
        fingerprint = folder.name.removeprefix(f"{name}-")
        engines = sorted((store / "stages").glob(f"engine-{fingerprint}-*"))
        folders |= {"engine" if len(engines) == 1 else f"engine-{n}": path for n, path in enumerate(engines)}
    if not stage:
        return store / "stages" / uses[-1].stage
    if stage not in folders:
        hint = closest_name(stage, [*folders])
        raise InputError(f"{uses[0].run} has not reached a stage {stage}{hint}")
    return folders[stage]


def read_growing(path: Path, *, is_over: Callable[[], bool]) -> Iterator[str]:
    """Yield the text of a file in whole lines, and the lines that are appended, until `is_over` returns True."""
    offset, rest = 0, b""
    while True:
        ends_now = is_over()  # asked before the read, so that the last read gets all lines
        if path.is_file():
            with path.open("rb") as file:
                file.seek(offset)
                while chunk := file.read(1 << 20):
                    offset += len(chunk)
                    whole, separator, rest = (rest + chunk).rpartition(b"\n")
                    yield (whole + separator).decode(errors="replace")
        if ends_now:
            yield rest.decode(errors="replace")
            return
        time.sleep(FOLLOW_S)


def report(
    run: RunName,
    store: Store = DEFAULT_STORE,
    opens: Annotated[bool, typer.Option("--open", help="Open the report in the browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Render the report of a finished run again with the installed version, and print the file's path."""
    store = store.resolve()
    uses = find_named_run(store, run)
    path = report_path(store, uses)
    if not path.with_name(RUN_FILE).is_file() and not path.is_file():
        refuse_evaluation(store, uses[0].run)
        state = "is running" if lives(uses, living_runs(store)) else "ended before its report"
        raise InputError(f"{uses[0].run} {state}: the last stage of a run writes the report")
    try:
        render_again(store, uses[0].run)
    except InputError as error:
        if not path.is_file():
            raise
        typer.echo(f"{error}. The earlier report is kept.", err=True)
    if as_json:
        emit([{"kind": "report", "run": uses[0].run, "path": str(path)}])
    else:
        typer.echo(path)
    if opens:
        open_in_browser(path)


def refuse_evaluation(store: Path, run: str) -> None:
    """Raise InputError if the run is an evaluation by `rollouts evaluate`, because such a run has no report."""
    record = store / "runs" / run / EVALUATION_FILE
    if record.is_file():
        raise InputError(f"{run} is a run of `rollouts evaluate` and has no report: its scores are in {record}")


def open_in_browser(path: Path) -> None:
    """Open a file in the browser of this machine.

    Raises:
        InputError: this machine has no browser.
    """
    if not webbrowser.open(path.as_uri()):
        raise InputError(f"this machine has no browser: open {path} by hand")
