"""Write a page that compares several runs. The page is one HTML file that loads nothing else, like a run's report.

    compared.py          -> settings, data, scores, tests, machines: compare.html.jinja
    compared_curves.py   -> curves on common axes: compare.js
    compared_answers.py  -> answers side by side: viewer.js

Not here: finding the runs (flows/commands/compare.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from markupsafe import Markup

from rollouts_core.comparison import NUM_RESAMPLES
from rollouts_core.report.assets import asset_blocks, compare_script, compare_style, make_assets
from rollouts_core.report.compared import RunComparison, letter_of, usd_of
from rollouts_core.report.compared_answers import embed_answers, find_answers, iterate_records
from rollouts_core.report.compared_curves import describe_same_stages, draw_overlays, overlay_curves
from rollouts_core.report.packed import data_block, embedded_size, pack_json, pack_text
from rollouts_core.report.page import DATA_PLACE, bare_style, page_templates
from rollouts_core.report.rollout_codec import prompt_turns

JsonObject = dict[str, Any]  # Any: JSON objects have no better type at this edge


def render_comparison_page(compared: RunComparison) -> str:
    """The comparison as one HTML page. The page's size limit is the largest report.max_mb of the runs."""
    templates = page_templates()
    blocks = asset_blocks() | {
        "compare": pack_text(compare_script()),
        "curves": pack_json(overlay_curves(compared.runs)),
    }
    max_bytes = int(1e6 * max(run.report.contents.max_mb for run in compared.runs))
    embedded = embed_answers(compared, room=max_bytes - sum(map(embedded_size, blocks.values())))
    page = templates.get_template("compare.html.jinja").render(
        compared=compared,
        letters=[letter_of(place) for place in range(len(compared.runs))],
        answer_notes=(*embedded.notes, *_answer_notes(compared)),
        has_answers=bool(embedded.blocks),
        curve_sections=draw_overlays(compared.runs),
        same=describe_same_stages(compared.runs),
        assets=make_assets(bare_style(templates) + compare_style(), compare_script()),
        data_place=Markup(DATA_PLACE),
        num_resamples=NUM_RESAMPLES,
    )
    before, _, after = page.rpartition(DATA_PLACE)
    packed = (data_block(name, content) for name, content in (blocks | embedded.blocks).items())
    return "".join([before, *packed, after])


def _answer_notes(compared: RunComparison) -> list[str]:
    silent = [letter_of(i) for i, run in enumerate(compared.runs) if run.report.contents.samples == "none"]
    return [f'The page has no answers of {", ".join(silent)}: report.samples is "none" there.'] if silent else []


def comparison_records(compared: RunComparison) -> Iterator[JsonObject]:
    """The page's content as JSON objects, each with a `kind`."""
    names = [run.name for run in compared.runs]
    for place, (run, scores) in enumerate(zip(compared.runs, compared.scores, strict=True)):
        facts = {fact.name: fact.values[place] for fact in compared.facts}
        found = [
            {"model": s.name, "mean": s.mean, "low": s.low, "high": s.high, "num_rows": len(s.scores)}
            for s in scores.scored
        ]
        yield {"kind": "compared_run", "run": run.name, "letter": letter_of(place), "run_id": run.report.run_id,
               "mode": run.report.mode, "verdict": run.report.verdict, "usd": usd_of(run.report), "scores": found,
               "facts": facts}  # fmt: skip
    for kind, differences in (("setting_difference", compared.settings), ("data_difference", compared.inputs)):
        for each in differences:
            yield {"kind": kind, "name": each.name, "values": dict(zip(names, each.values, strict=True))}
    for measure in compared.measures:
        means = [{"mean": s.mean, "low": s.low, "high": s.high} for s in measure.scored]
        yield {"kind": "measure", "name": measure.title, "values": dict(zip(names, means, strict=True))}
    for test in (*compared.tests, *(test for measure in compared.measures for test in measure.tests)):
        ends = {
            end: {"run": names[place], "model": model}
            for end, place, model in zip(("baseline", "candidate"), test.runs, test.models, strict=True)
        }
        yield {"kind": "paired_test", **ends, "measure": test.measure, "num_shared": test.num_shared,
               "outcome": test.outcome, **asdict(test.comparison), "sentence": test.sentence}  # fmt: skip
    yield from ({"kind": "note", "message": note} for note in compared.notes)
    yield from _curve_records(compared)
    yield from _answer_records(compared)


def _curve_records(compared: RunComparison) -> Iterator[JsonObject]:
    for stage in overlay_curves(compared.runs):
        for metric in stage["metrics"]:
            for run, section, values in zip(compared.runs, stage["runs"], metric["values"], strict=True):
                if values:
                    yield {"kind": "curve", "run": run.name, "stage": stage["label"], "metric": metric["name"],
                           stage["xName"] + "s": section["steps"], "values": values}  # fmt: skip


def _answer_records(compared: RunComparison) -> Iterator[JsonObject]:
    """A JSON object per shared prompt, with the answers of every model on the page."""
    prompts: dict[int, JsonObject] = {}
    for answers in find_answers(compared):
        for records in iterate_records(answers):
            first = records[0]
            entry = prompts.setdefault(
                answers.prompts[first["group_index"]],
                {"kind": "answers", "prompt": prompt_turns(first["prompt"]),
                 "reference": (first.get("metadata") or {}).get("answer"), "answers": []},
            )  # fmt: skip
            entry["answers"] += [
                {"run": compared.runs[answers.run].name, "model": answers.model, "reward": record.get("reward"),
                 "completion": record.get("response", "")}
                for record in records
            ]  # fmt: skip
    yield from (prompts[number] for number in sorted(prompts))
