"""Reuse the scores of finished evaluations that scored the same models on the same rows with the same settings.

    finished evaluate-<a>:    base, sft          ──┐ a score is identified by the model's content, the rows and
    planned evaluate-<b>:     baseline, model    <─┘ the settings, but not by the model's name

Not here: reusing an evaluation of the same models under the same names, which is the same stage (plan.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollouts.infra.ledger import Ledger
from rollouts.infra.locks import locked
from rollouts.tasks.records import RunScope, Stage
from rollouts_core.comparison import estimate_means, select_best
from rollouts_core.fingerprint import fingerprint_job
from rollouts_core.job import EvalJob, InputModel
from rollouts_core.run_directory import RunDirectory
from rollouts_core.system.files import link_or_copy, write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierScore:
    """A model's score in the result.json of a finished evaluation."""

    directory: RunDirectory
    name: str
    """The model's name in the evaluation."""
    entry: dict[str, Any]  # Any: JSON


def take_earlier_scores(stage: Stage, scope: RunScope) -> str:
    """Write the result.json of a new evaluation, if earlier evaluations have all scores that it would compute.

    Returns a sentence that names the earlier runs, or "" if the evaluation has to run.
    """
    own = RunDirectory(Path(stage.run_dir))
    if stage.kind != "eval" or own.result.exists() or own.job.exists():
        return ""
    job = EvalJob.model_validate(stage.job)
    if fingerprint_job(stage.name, job) != stage.fingerprint:  # the user asked for a fresh evaluation
        return ""
    wanted = [identity_of(model, job) for model in job.checkpoints]
    # Losses are comparable only over the same tokens. An evaluation checks the tokens of only the models it scores.
    scores = find_scores(own.root.parent, wanted, are_together=job.evaluation.metric == "loss")
    if scores is None:
        return ""
    reused_from = sorted({name_of_run(score.directory.root, scope) for score in scores})
    best = job.checkpoints[select_best([float(score.entry["mean"]) for score in scores])]
    own.root.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError), locked(own.root / ".begin.lock"):  # prune may just have removed the folder
        if own.job.exists() and not own.result.exists():  # another run has just started this evaluation
            return ""
        if not own.result.exists():  # another run may just have written the same result.json
            _write_record(own, stage, job, scores, {"best": best.name, "reused_from": reused_from})
        return f"reused from run {' and '.join(reused_from)}, which scored the same models"
    return ""


def _write_record(
    own: RunDirectory,
    stage: Stage,
    job: EvalJob,
    scores: Sequence[EarlierScore],
    found: dict[str, Any],  # Any: JSON
) -> None:
    """Write the files that the evaluation would write. result.json comes last, because it marks the stage finished."""
    entries = []
    estimates = estimate_means([score.entry["scores"] for score in scores])  # one method for all intervals
    for score, model, estimate in zip(scores, job.checkpoints, estimates, strict=True):
        entries.append({**score.entry, "name": model.name, "step": model.step, **asdict(estimate)})
        samples = own.samples / f"{model.name}.jsonl"
        if job.evaluation.metric != "loss" and not samples.exists():
            link_or_copy(score.directory.samples / f"{score.name}.jsonl", samples)
    write_json(own.job, stage.job)
    own.write_result({"metric": job.evaluation.metric, "checkpoints": entries, **found})


def find_scores(stages: Path, wanted: Sequence[str], *, are_together: bool) -> list[EarlierScore] | None:
    """Find scores in finished evaluations, in the order of `wanted`. Returns None if a score is missing.

    Args:
        are_together: whether all scores must come from the same evaluation.
    """
    found: dict[str, EarlierScore] = {}
    for scores in _iterate_scores(stages, set(wanted)):
        found = scores if are_together else scores | found
        if found.keys() >= set(wanted):
            return [found[each] for each in wanted]
    return None


def _iterate_scores(stages: Path, wanted: Set[str]) -> Iterator[dict[str, EarlierScore]]:
    """Yield the wanted scores of each finished evaluation, by identity (`identity_of`).

    Evaluations whose fingerprint this version would compute differently are skipped. A result.json has a number for
    every row, so it is read only if the evaluation scored a wanted model.
    """
    for path in sorted(stages.glob("evaluate-*")):
        directory = RunDirectory(path)
        try:
            job = EvalJob.model_validate_json(directory.job.read_text())
            models = {identity: model for model in job.checkpoints if (identity := identity_of(model, job)) in wanted}
            result = directory.read_result() if models and is_named_after(job, path) else None
        except (OSError, ValueError):  # another version wrote the files, or they are damaged or gone
            continue
        if result is not None:
            by_name = {entry["name"]: entry for entry in result["checkpoints"]}
            yield {
                identity: EarlierScore(directory=directory, name=model.name, entry=by_name[model.name])
                for identity, model in models.items()
            }


def is_named_after(job: EvalJob, path: Path) -> bool:
    """True if the directory's name has the fingerprint that this version computes for the evaluation."""
    name, _, fingerprint = path.name.partition("-")
    return fingerprint_job(name, job) == fingerprint


def identity_of(model: InputModel, job: EvalJob) -> str:
    """A fingerprint of the model's content, the rows and the evaluation's settings, without the model's name."""
    alone = model.model_copy(update={"name": "", "step": 0})
    return fingerprint_job("evaluate", job.model_copy(update={"checkpoints": (alone,)}))


def name_of_run(directory: Path, scope: RunScope) -> str:
    """The name of the first run that used a stage's directory. The directory's name if the ledger has no such run."""
    with Ledger(scope.ledger_path) as ledger:
        use = ledger.first_use(directory.name)
    return use.run if use else directory.name
