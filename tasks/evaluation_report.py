"""Find the models of an evaluation, and write their scores to evaluation.json and to a table in Prefect.

Not here: scoring (evaluate.py), resolving a model's name (model_names.py), reports of pipelines (report.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from rollouts.infra.foreign_text import shown_line
from rollouts.tasks.measures import describe_measures
from rollouts.tasks.model_names import NamedModel, find_named_model, with_heldout
from rollouts.tasks.progress import StageProgress
from rollouts.tasks.records import RunScope, StageRecord, artifact_key
from rollouts.tasks.retries import TRIED_AGAIN
from rollouts.tasks.store_paths import EVALUATION_FILE, note_named
from rollouts_core.comparison import compare_paired
from rollouts_core.config import Config
from rollouts_core.fingerprint import digest_model
from rollouts_core.job import InputModel
from rollouts_core.report import describe_results, render_results_markdown
from rollouts_core.report.markdown import as_code, escaped
from rollouts_core.system.files import write_json

BASELINE, MODEL = "baseline", "model"
"""Fixed names for an evaluation's models. Because the user's names are not used, a second evaluation of the same models
under other names reuses the first evaluation."""


@task(name="inputs", **TRIED_AGAIN)
def find_inputs(
    model: str, against: str, data: str, config: Config, scope: RunScope
) -> tuple[Config, dict[str, NamedModel]]:
    """Download an evaluation's rows and models if they have URLs.

    Returns the settings with the local path of the rows, and the models by fixed name (BASELINE, MODEL).

    Args:
        model: name, path or URL of the model to evaluate (model_names.py).
        against: name, path or URL of the model to compare with; empty makes no comparison.
        data: path or URL of the rows; empty uses `data.heldout`.
    """
    with StageProgress("inputs") as progress:
        store = Path(scope.store)
        scored = with_heldout(config, data, store, progress.say)
        named = {BASELINE: against, MODEL: model} if against else {MODEL: model}
        found = {name: find_named_model(given, config, store, progress.say) for name, given in named.items()}
        for name, each in found.items():
            progress.say(f"{name} is {each.title}: {each.model.path}")
        note_named([scored.data.heldout, *(each.model.path for each in found.values())], store)
    return scored, found


def as_inputs(found: Mapping[str, NamedModel]) -> dict[str, InputModel]:
    """Convert the models to inputs of `plan_evaluation`, with the digests of the models."""
    return {
        name: InputModel(name=name, model=each.model, digest=digest_model(each.model)) for name, each in found.items()
    }


@task(name="report", cache_policy=NO_CACHE)
def write_evaluation(
    record: StageRecord, found: Mapping[str, NamedModel], data: str, scope: RunScope
) -> tuple[str, str, str]:
    """Write evaluation.json into the run's folder and show the table in Prefect.

    Returns the path of the file, the table for a terminal, and one sentence with the result.
    """
    results = describe_results(Path(record.run_dir), {name: each.title for name, each in found.items()})
    scored = {entry["name"]: entry for entry in record.result["checkpoints"]}
    pair = (BASELINE, MODEL) if BASELINE in found else None
    measures = describe_measures({name: scored[name] for name in found}, pair)
    path = scope.output_dir / EVALUATION_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        path,
        {
            "run_id": scope.run_id,
            "run_name": scope.run_name,
            "data": data,
            "metric": record.result["metric"],
            "models": {
                name: {
                    "named": each.title,
                    "path": each.model.path,
                    "digest": digest_model(each.model),
                    **{key: scored[name][key] for key in ("mean", "low", "high", "num_rows")},
                }
                for name, each in found.items()
            },
            "comparison": asdict(compare_paired(scored[BASELINE]["scores"], scored[MODEL]["scores"]))
            if BASELINE in found
            else None,
            **({"measures": measures} if measures else {}),
            "stage": record.model_dump(mode="json", exclude={"result"}),
            "reused_from": record.result.get("reused_from", []),
        },
    )
    rows = [
        {
            "model": escaped(score.label),
            results.display.title: score.mean,
            "95 % interval": score.interval,
            results.display.rows: score.num_rows,
        }
        for score in results.scores
    ]
    rows += [
        {
            "model": "difference",
            results.display.title: each.difference,
            "95 % interval": each.interval,
            "p": each.p_value,
        }
        for each in results.differences
    ]
    kept = as_code(str(path))
    create_table_artifact(
        rows, key=artifact_key("scores", scope), description=f"Scores on {as_code(data)}; kept in {kept}"
    )
    create_markdown_artifact(
        f"{render_results_markdown(results)}\n", key=artifact_key("report", scope), description=f"Record: {kept}"
    )
    said = "; ".join(
        f"{score.label}: {results.display.title} {score.mean} ({score.interval})" for score in results.scores
    )
    finding = results.finding if results.differences else said
    with StageProgress("report") as progress:
        progress.say(f"{path}: {finding}")
    return str(path), render_results_markdown(results, show=shown_line), finding
