"""Register a run's final model as the candidate, and compare the candidate's scores with the production model's.

Not here: promoting or rejecting the candidate (retraining.py), the registry (infra/registry.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollouts.infra.ledger import Ledger
from rollouts.infra.registry import Model, models, move_model, register_model
from rollouts.tasks.artifacts import find_checkpoint_damage
from rollouts.tasks.measures import compare_measures
from rollouts.tasks.model_aliases import note_in_reports
from rollouts.tasks.records import RunScope, StageRecord
from rollouts.tasks.retraining import Compared
from rollouts_core.checkpoint import load_manifest
from rollouts_core.comparison import compare_paired, judge_improvement
from rollouts_core.config import Config
from rollouts_core.errors import CheckpointError
from rollouts_core.job import InputModel
from rollouts_core.report.markdown import escaped
from rollouts_core.system.files import new_directory


def candidate_name(config: Config) -> str:
    """The name of a run's final model in evaluations: the name of the last training, such as "rl"."""
    return list(config.trainings)[-1]


def register_candidate(
    line: str, checkpoint: str, records: Sequence[StageRecord], data: Mapping[str, str], scope: RunScope
) -> Model:
    """Register a run's final checkpoint in the registry. A new model becomes the candidate of the series `line`.

    Args:
        line: the name of a series of models, such as "small" for small-1, small-2, ...
        data: digests of the training data, by path.
    """
    folder = Path(checkpoint)
    with Ledger(scope.ledger_path) as ledger:
        model = register_model(
            ledger,
            line,
            checkpoint=str(folder.relative_to(scope.store)),
            digest=load_manifest(folder).digest,
            run_id=scope.run_id,
            stages=[Path(record.run_dir).name for record in records],
            data=data,
            by=f"run {scope.run_name}",
        )
        note_in_reports(Path(scope.store), ledger)
    return model


def keep_registered(folder: Path, digest: str, scope: RunScope) -> None:
    """Copy a registered model's checkpoint from `folder` to a new folder before a run overwrites `folder`.

    A run overwrites `folder` if an earlier attempt registered its model and then failed, and a retry with other data
    has another result.

    Args:
        digest: digest of the new checkpoint. A registered model with the same digest needs no copy.
    """
    place = str(folder.relative_to(scope.store))
    with Ledger(scope.ledger_path) as ledger:
        for model in models(ledger):
            if model.checkpoint != place or model.digest == digest or find_checkpoint_damage(folder, model.digest):
                continue
            own = folder.with_name(f"{folder.name}-{model.name}")
            with new_directory(own) as partial:
                shutil.copytree(folder, partial, dirs_exist_ok=True)
            move_model(ledger, model, str(own.relative_to(scope.store)))


def registered_input(name: str, model: Model, config: Config, store: Path) -> InputModel:
    """A registered model as the input of an evaluation.

    Args:
        name: the model's name in the evaluation.

    Raises:
        CheckpointError: the model's checkpoint is damaged or missing.
    """
    check_whole(model, store)
    path = store / model.checkpoint
    return InputModel(name=name, model=config.model.at(path), digest=model.digest)


def check_whole(model: Model, store: Path) -> None:
    """Raise CheckpointError if a registered model's checkpoint is damaged, missing, or has another digest."""
    if damage := find_checkpoint_damage(store / model.checkpoint, model.digest):
        raise CheckpointError(f"{model.name} cannot be used: {damage}; `rollouts models` lists other models")


def judge_candidate(
    model: Model,
    evaluation: StageRecord,
    *,
    names: tuple[str, str],
    production: Model | None,
    margin: float,
    max_p_value: float,
) -> Compared:
    """Compare the candidate with the production model, row by row on the held-out data.

    If the line has no production model, the candidate is compared with the start model.

    Args:
        names: the names of the two models in the evaluation. The second name is the candidate's.
    """
    by_name = {entry["name"]: entry for entry in evaluation.result["checkpoints"]}
    before, after = (by_name[name] for name in names)
    against = production.name if production else "the start model"
    verdict = judge_improvement(
        before["scores"], after["scores"], names=(against, model.name), max_p_value=max_p_value, margin=margin
    )
    comparison = compare_paired(before["scores"], after["scores"])
    figures = {key: after[key] for key in ("mean", "low", "high", "num_rows")}
    evaluation_figures = {
        "metric": evaluation.result["metric"],
        **figures,
        "against": against,
        "against_mean": before["mean"],
        "against_low": before["low"],
        "against_high": before["high"],
        **{key: value for key, value in asdict(comparison).items() if key in ("difference", "p_value")},
        "difference_low": comparison.low,
        "difference_high": comparison.high,
        **({"measures": measures} if (measures := compare_measures(before, after)) else {}),
        "sentence": verdict.sentence,
    }
    return Compared(
        model=model, is_better=verdict.is_accepted, sentence=verdict.sentence, evaluation=evaluation_figures
    )


def render_comparison(name: str, evaluation: Mapping[str, Any]) -> str:  # Any: JSON
    """A Markdown table with the scores of a candidate, of the model it was compared with, and their difference."""
    lines = _comparison_lines(name, evaluation)
    for measure, figures in evaluation.get("measures", {}).items():
        lines += _comparison_lines(name, {**figures, "against": evaluation["against"]}, f", {measure}")
    table = "\n".join(["| model | mean score | 95 % interval |", "|---|---|---|", *lines])
    return f"{table}\n\n{escaped(str(evaluation['sentence']))}"


def _comparison_lines(name: str, figures: Mapping[str, Any], measure: str = "") -> list[str]:  # Any: JSON
    rows = [
        (figures["against"], "against_mean", "against_low", "against_high"),
        (name, "mean", "low", "high"),
        ("difference", "difference", "difference_low", "difference_high"),
    ]
    return [
        f"| {escaped(f'{title}{measure}')} | {figures[mean]:.3f} | {figures[low]:.3f} to {figures[high]:.3f} |"
        for title, mean, low, high in rows
    ]
