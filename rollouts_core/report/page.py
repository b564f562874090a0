"""Write the report of one pipeline run: the training, the data, the scores of the model, and how to use the model.

The report is one HTML file that loads nothing. The content comes only from the files in the run directories and from
`ReportInput`, and the same input gives the same bytes. Only the model's registered name is inserted into the page
later. The other modules of this package turn numbers into texts and coordinates, and page.html.jinja draws them.
Printed pages and browsers without scripts show only the content of page.html.jinja; viewer.js adds the other views.

    evaluation_dir            result.json, samples/   -> results.py, transcripts.py
    trainings: run_dir        job.json, metrics.jsonl -> trainings.py, curves.py
    trainings: selection_dir  result.json             -> results.py
    samples of both           samples/                -> embedded.py -> viewer.js
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from rollouts_core.benchmarks import show_benchmark
from rollouts_core.comparison import NUM_RESAMPLES
from rollouts_core.job import EvalJob
from rollouts_core.report.assets import asset_blocks, make_assets
from rollouts_core.report.charts import format_seconds
from rollouts_core.report.curve_data import describe_curves
from rollouts_core.report.curves import load_curves
from rollouts_core.report.embedded import embed_samples
from rollouts_core.report.inputs import ReportInput
from rollouts_core.report.markdown import as_code, escaped
from rollouts_core.report.packed import data_block, embedded_size, pack_json
from rollouts_core.report.provenance import describe_provenance, describe_reused_time, describe_settings
from rollouts_core.report.results import Results, load_results, load_selections
from rollouts_core.report.trainings import describe_trainings, load_job_of
from rollouts_core.report.transcripts import iterate_samples, load_transcripts
from rollouts_core.report.warnings import load_warnings
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import TRAININGS, describe_mode, is_training, kind_of

MAX_EXAMPLE_CHARS = 80
GREETING = "Hello!"
DATA_PLACE = "<!-- data -->"
REGISTERED_NAME = ("<!-- registered as -->", "<!-- that was it -->")
"""Marks around the model's registered name in the page. The name is unknown when the page is written, and may
change."""


def render_report(report: ReportInput) -> str:
    """The report as one HTML page.

    Raises:
        DataError: the final evaluation is not finished.
    """
    results = load_results(report)
    templates = page_templates()
    has_samples = report.contents.samples != "none"
    names = [score.name for score in results.scores]
    page = templates.get_template("page.html.jinja").render(
        report=report,
        mode=describe_mode(report.mode),
        results=results,
        benchmarks=[(table, [show_benchmark(each) for each in table.metrics]) for table in report.benchmarks],
        trainings=describe_trainings(report),
        warnings=load_warnings(report),
        curve_sections=load_curves(report),
        selections=load_selections(report),
        transcripts=load_transcripts(report.evaluation_dir, names) if has_samples else [],
        assets=make_assets(bare_style(templates)),
        data_place=Markup(DATA_PLACE),
        provenance=describe_provenance(report),
        stages=[(stage, format_seconds(stage.seconds), describe_reused_time(stage)) for stage in report.stages],
        costs=format_costs(report),
        outside_stages=OUTSIDE_STAGES,
        total_time=format_seconds(sum(stage.seconds for stage in report.stages)),
        python_code=usage_code(report),
        num_resamples=NUM_RESAMPLES,
        registered_name=Markup("".join(REGISTERED_NAME)),
    )
    return _with_data(page, report)


def _with_data(page: str, report: ReportInput) -> str:
    """The page with the data and scripts of the views that need scripts. report.max_mb limits the size of the page."""
    blocks = asset_blocks() | {"curves": pack_json(describe_curves(report))}
    if settings := describe_settings(report.config):
        blocks["settings"] = pack_json(settings)
    taken = len(page.encode(errors="replace")) + sum(map(embedded_size, blocks.values()))
    blocks |= embed_samples(report, room=int(report.contents.max_mb * 1e6) - taken).blocks
    before, _, after = page.rpartition(DATA_PLACE)
    return "".join([before, *(data_block(name, packed) for name, packed in blocks.items()), after])


def bare_style(templates: Environment) -> str:
    """The CSS of all pages, without the `<style>` tags."""
    return templates.get_template("style.html.jinja").render().strip().removeprefix("<style>").removesuffix("</style>")


OUTSIDE_STAGES = "Start, set-up and the rest"


def format_costs(report: ReportInput) -> list[str]:
    """The cost of each stage, the cost outside of stages, and the total; empty if the run rented no machine."""
    if report.usd_outside_stages is None:
        return []
    usd = [*(stage.usd or 0.0 for stage in report.stages), report.usd_outside_stages]
    return [f"{each:.2f} USD" for each in (*usd, sum(usd))]


def with_registered_name(page: str, name: str) -> str:
    """The report with its model's name in the registry. An empty name removes the former name."""
    before, after = REGISTERED_NAME
    start, _, rest = page.partition(before)
    _, mark, end = rest.partition(after)
    said = escape(f"In the registry: {name}" if name else "")
    return f"{start}{before}{said}{after}{end}" if mark else page


def page_templates() -> Environment:
    """The environment of this folder's templates. All inserted text is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["kinds"] = list(TRAININGS.values())
    environment.filters["css"] = lambda model: kind_of(model).name if is_training(model) else model
    return environment


def render_summary_markdown(report: ReportInput) -> str:
    """The results, comparisons, verdict and stages of a report as Markdown.

    Raises:
        DataError: the final evaluation is not finished.
    """
    results = load_results(report)
    heading = {True: "Improvement", False: "No improvement", None: "Result"}[report.is_improvement]
    lines = [f"# {escaped(report.run_name)}", "", f"**{heading}.** {escaped(report.verdict or results.finding)}", ""]
    lines += [render_results_markdown(results), ""]
    costs = format_costs(report)
    cells = [f" {cost} |" for cost in costs] or [""] * len(report.stages)
    head, rule = (" Cost |", "---:|") if costs else ("", "")
    lines += [f"| Stage | How | Why | Time |{head} Run directory |", f"|---|---|---|---:|{rule}---|"]
    lines += [
        f"| {' | '.join(map(escaped, (stage.name, stage.how, stage.why)))} | {format_seconds(stage.seconds)} |{cell} "
        f"{as_code(stage.run_dir).replace('|', '/')} |"
        for stage, cell in zip(report.stages, cells, strict=False)
    ]
    if costs:
        lines += [f"| {OUTSIDE_STAGES} | | | |{cells[-2]} |", f"| All, until this report | | | |{cells[-1]} |"]
    return "\n".join([*lines, "", f"Final checkpoint: {as_code(report.checkpoint_path)}", ""])


def render_results_markdown(results: Results, show: Callable[[str], str] = escaped) -> str:
    """The scores as a Markdown table, and a sentence for every comparison.

    Args:
        show: escapes a name or a sentence to one line. For output to a terminal, which does not render Markdown, the
            caller passes another function.
    """
    display = results.display
    lines = [f"| Checkpoint | {display.title.capitalize()} | 95 % interval | {display.rows.capitalize()} |"]
    lines += ["|---|---:|---:|---:|"]
    lines += [
        f"| {show(f'{s.label} {s.checkpoint}')} | {s.mean} | {s.interval} | {s.num_rows} |" for s in results.scores
    ]
    if results.measures:
        labels = [show(score.label) for score in results.scores]
        lines += ["", f"| Measure | {' | '.join(labels)} |", f"|---|{'---:|' * len(labels)}"]
        cells = [
            (measure.title, *(f"{mean} ({interval})" for mean, interval in measure.values))
            for measure in results.measures
        ]
        lines += [f"| {' | '.join(row)} |" for row in cells]
    # With rewards of 0 and 1, pass@1 equals the scores above and is left out.
    shown = tuple((score.mean, score.interval) for score in results.scores)
    of_measures = [each.difference for each in results.measures if each.difference and each.values != shown]
    compared = [*results.differences, *of_measures]
    return "\n".join([*lines, "", *(f"- {show(difference.sentence)}" for difference in compared)])


def usage_code(report: ReportInput) -> str:
    """Python code that sends a prompt to the final checkpoint."""
    job = load_job_of(report.evaluation_dir)
    max_new_tokens = job.rollout.sampling.max_new_tokens if isinstance(job, EvalJob) else 256
    has_samples = report.contents.samples != "none"
    question = _example_question(RunDirectory(report.evaluation_dir).samples) if has_samples else GREETING
    return (
        "from transformers import pipeline\n"
        f'generate = pipeline("text-generation", model={json.dumps(report.checkpoint_path)})\n'
        f'print(generate([{{"role": "user", "content": {json.dumps(question, ensure_ascii=False)}}}], '
        f'max_new_tokens={max_new_tokens})[0]["generated_text"][-1]["content"])'
    )


def _example_question(samples: Path) -> str:
    """The first held-out prompt if this prompt is a short question of one turn, otherwise a greeting."""
    first = next((sample for path in sorted(samples.glob("*.jsonl")) for sample in iterate_samples(path)), None)
    if first is None or isinstance(first.prompt, str) or len(first.prompt) != 1:
        return GREETING
    content = first.prompt[0]["content"]
    return content if len(content) <= MAX_EXAMPLE_CHARS and "\n" not in content else GREETING
