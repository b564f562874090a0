"""Take the scores of an evaluation from finished ones that scored the same models in the same way.

    a run's evaluate-<a>:    base, sft          ──┐ each model by itself has an identity: its content, the rows and the
    asked for, evaluate-<b>: baseline, model    <─┘ settings; what it is called is no part of that

Not here: the same models under the same names, which are the same stage (plan.py).
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
    """A model's entry in the record of a finished evaluation."""

    directory: RunDirectory
    name: str
    """The model's name in the evaluation."""
    entry: dict[str, Any]  # Any: JSON


def take_earlier_scores(stage: Stage, scope: RunScope) -> str:
    """Give an evaluation that was not begun the record that earlier evaluations add up to; says from where, or ""."""
    own = RunDirectory(Path(stage.run_dir))
    if stage.kind != "eval" or own.result.exists() or own.job.exists():
        return ""
    job = EvalJob.model_validate(stage.job)
    if fingerprint_job(stage.name, job) != stage.fingerprint:  # a fresh start was asked for
        return ""
    wanted = [identity_of(model, job) for model in job.checkpoints]
    # Losses compare only over the same tokens, and that these are the same was seen where models were scored together.
    scores = find_scores(own.root.parent, wanted, are_together=job.evaluation.metric == "loss")
    if scores is None:
        return ""
    reused_from = sorted({name_of_run(score.directory.root, scope) for score in scores})
    best = job.checkpoints[select_best([float(score.entry["mean"]) for score in scores])]
    own.root.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError), locked(own.root / ".begin.lock"):  # not found: pruned this moment
        if own.job.exists() and not own.result.exists():  # its job was begun meanwhile
            return ""
        if not own.result.exists():  # else another run was faster, and found the same
            _write_record(own, stage, job, scores, {"best": best.name, "reused_from": reused_from})
        return f"reused from run {' and '.join(reused_from)}, which scored the same"
    return ""


def _write_record(
    own: RunDirectory,
    stage: Stage,
    job: EvalJob,
    scores: Sequence[EarlierScore],
    found: dict[str, Any],  # Any: JSON
) -> None:
    """Write what the evaluation would have, its record last."""
    entries = []
    estimates = estimate_means([score.entry["scores"] for score in scores])  # their intervals by one method
    for score, model, estimate in zip(scores, job.checkpoints, estimates, strict=True):
        entries.append({**score.entry, "name": model.name, "step": model.step, **asdict(estimate)})
        samples = own.samples / f"{model.name}.jsonl"
        if job.evaluation.metric != "loss" and not samples.exists():
            link_or_copy(score.directory.samples / f"{score.name}.jsonl", samples)
    write_json(own.job, stage.job)
    own.write_result({"metric": job.evaluation.metric, "checkpoints": entries, **found})


def find_scores(stages: Path, wanted: Sequence[str], *, are_together: bool) -> list[EarlierScore] | None:
    """The scores of these identities, from the first finished evaluations that have them; None if one is missing.

    Args:
        are_together: whether one evaluation must have all of them.
    """
    found: dict[str, EarlierScore] = {}
    for scores in _iterate_scores(stages, set(wanted)):
        found = scores if are_together else scores | found
        if found.keys() >= set(wanted):
            return [found[each] for each in wanted]
    return None


def _iterate_scores(stages: Path, wanted: Set[str]) -> Iterator[dict[str, EarlierScore]]:
    """The wanted scores of each finished evaluation, by the identity of the model and the way.

    An evaluation counts if it has a record, and if its job has by the present rules the identity that names the
    directory. Records have a number for every row, so the records of other evaluations are not read.
    """
    for path in sorted(stages.glob("evaluate-*")):
        directory = RunDirectory(path)
        try:
            job = EvalJob.model_validate_json(directory.job.read_text())
            models = {identity: model for model in job.checkpoints if (identity := identity_of(model, job)) in wanted}
            result = directory.read_result() if models and is_named_after(job, path) else None
        except (OSError, ValueError):  # of another version, damaged, or removed this moment
            continue
        if result is not None:
            by_name = {entry["name"]: entry for entry in result["checkpoints"]}
            yield {
                identity: EarlierScore(directory=directory, name=model.name, entry=by_name[model.name])
                for identity, model in models.items()
            }


def is_named_after(job: EvalJob, path: Path) -> bool:
    """Whether a directory has the name that an evaluation gets by the present rules."""
    name, _, fingerprint = path.name.partition("-")
    return fingerprint_job(name, job) == fingerprint


def identity_of(model: InputModel, job: EvalJob) -> str:
    """The identity of scoring one model alone, whatever it is called."""
    alone = model.model_copy(update={"name": "", "step": 0})
    return fingerprint_job("evaluate", job.model_copy(update={"checkpoints": (alone,)}))


def name_of_run(directory: Path, scope: RunScope) -> str:
    """The run that came to a stage first."""
    with Ledger(scope.ledger_path) as ledger:
        use = ledger.first_use(directory.name)
    return use.run if use else directory.name
