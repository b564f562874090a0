"""Find the stages of a store that nothing refers to any more, and remove them.

Not here: the command (flows/prune_cli.py), checkpoints that a stage itself deletes while it trains.

    kept      in the lineage of a registered model | used by a run that lives | claimed by a job or under way
              named by a stage that is kept, or by a configuration that is served
    old       everything else that was last used longer ago than asked for
    large     and, oldest use first, as much more as is needed to fit

A run notes that it uses a stage before it looks for it (caching.py), and a stage is moved away under the ledger's lock,
after a last look at these notes: a run finds a stage whole, or not at all, and then does it again.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.ledger import Ledger
from infra.registry import Model, models, select_models
from infra.supervisor import is_supervised
from rollouts_core.files import remove_partial_directories
from rollouts_core.run_directory import RunDirectory

STAGE_NAME = re.compile(r"[a-z][a-z-]*-[0-9a-f]{16}(-\d+)?")
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundStage:
    """A stage's directory in the store."""

    name: str
    num_bytes: int
    used_at: float
    """When a run used it last, seconds since 1970."""
    reason: str = ""
    """Why it is kept; empty where nothing refers to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What would be removed, and what not."""

    removed: tuple[FoundStage, ...]
    kept: tuple[FoundStage, ...]


def plan_prune(
    store: Path, ledger: Ledger, *, unused_days: float, max_bytes: int | None = None, now: float | None = None
) -> PrunePlan:
    """What nothing refers to and was not used for so many days; and more of it, longest unused first, until all fits.

    Args:
        max_bytes: what all stages together may take; None does not ask.
    """
    at = time.time() if now is None else now
    found = sorted(find_stages(store, ledger), key=lambda stage: (stage.used_at, stage.name))
    total = sum(stage.num_bytes for stage in found)
    removed: list[FoundStage] = []
    for stage in found:
        is_old = at - stage.used_at > unused_days * DAY_S
        is_too_much = max_bytes is not None and total > max_bytes
        if not stage.reason and (is_old or is_too_much):
            removed.append(stage)
            total -= stage.num_bytes
    return PrunePlan(removed=tuple(removed), kept=tuple(stage for stage in found if stage not in removed))


def remove_stages(store: Path, ledger: Ledger, plan: PrunePlan) -> list[FoundStage]:
    """Remove what the plan says, unless something refers to it by now; returns what was removed."""
    remove_partial_directories(store / "stages")
    done = []
    for stage in plan.removed:
        path = store / "stages" / stage.name
        with ledger.transaction() as database:
            is_used = any(ledger.is_alive(use.run_id) for use in ledger.stage_uses() if use.stage == stage.name)
            is_named = stage.name in _lineages(select_models(database)) or stage.name in _named_by_deployments(store)
            if is_used or is_named or stage.name in _claimed(ledger) or is_supervised(str(path)):
                continue
            doomed = path.with_name(f".{stage.name}.partial-{secrets.token_hex(4)}")
            try:
                path.rename(doomed)
            except FileNotFoundError:  # another prune was faster
                continue
            ledger.forget_uses(stage.name)
        shutil.rmtree(doomed, ignore_errors=True)
        done.append(stage)
    return done


def find_stages(store: Path, ledger: Ledger) -> list[FoundStage]:
    """Every stage of the store, with the reason to keep it."""
    paths = [path for path in sorted((store / "stages").glob("*")) if path.is_dir() and STAGE_NAME.fullmatch(path.name)]
    reasons = _with_what_they_name(store, reasons_to_keep(store, ledger, paths))
    used_at = {use.stage: use.used_at for use in ledger.stage_uses()}  # oldest first: the last one counts
    return [
        FoundStage(
            name=path.name,
            num_bytes=_num_bytes(path),
            used_at=max(used_at.get(path.name, 0.0), path.stat().st_mtime),
            reason=reasons.get(path.name, ""),
        )
        for path in paths
    ]


def reasons_to_keep(store: Path, ledger: Ledger, paths: list[Path]) -> dict[str, str]:
    """Why stages are kept that something outside of the stages refers to, by name."""
    reasons: dict[str, str] = {}
    reasons |= _named_by_deployments(store)
    for path in paths:
        if is_supervised(str(path)):
            reasons[path.name] = "its job goes on"
    uses = ledger.stage_uses()
    alive = {run_id: ledger.is_alive(run_id) for run_id in {use.run_id for use in uses}}
    reasons |= {use.stage: "used by a run that goes on" for use in uses if alive[use.run_id]}
    reasons |= dict.fromkeys(_claimed(ledger), "claimed by a run")
    return reasons | _lineages(models(ledger))


def _lineages(registered: Sequence[Model]) -> dict[str, str]:
    """The stages that registered models came from, each with the reason to keep it."""
    reasons: dict[str, str] = {}
    for model in registered:
        reasons |= dict.fromkeys([*model.stages, *_names_of(model.checkpoint)], f"{model.name} came from it")
    return reasons


def _named_by_deployments(store: Path) -> dict[str, str]:
    """The stages that configurations of deployments name, each with the reason to keep it."""
    reasons: dict[str, str] = {}
    for path in sorted((store / "prefect/deployments").glob("*.json")):
        reasons |= dict.fromkeys(_names_in(path), f"named by the deployment {path.stem}")
    return reasons


def _num_bytes(folder: Path) -> int:
    """What the files of a folder take; a job may be removing some of them meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_size if path.is_file() else 0
    return total


def _claimed(ledger: Ledger) -> set[str]:
    """The stages whose jobs are claimed by runs that have not died."""
    return {Path(lease.run_dir).name for lease in ledger.leases() if not ledger.has_died(lease.run_id)}


def _with_what_they_name(store: Path, reasons: Mapping[str, str]) -> dict[str, str]:
    """The reasons, and one for each stage that a kept stage's job names, to any depth."""
    every, waiting = dict(reasons), list(reasons)
    while waiting:
        name = waiting.pop()
        for other in _names_in(RunDirectory(store / "stages" / name).job):
            if other not in every:
                every[other] = f"{name} began with it"
                waiting.append(other)
    return every


def _names_in(path: Path) -> set[str]:
    """The stages that a JSON file names by path."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return set()
    return {name for text in _texts(content) for name in _names_of(text)}


def _names_of(text: str) -> set[str]:
    """The stages in a path: the parts that are named as stages are, below `stages`."""
    pairs = itertools.pairwise(Path(text).parts)
    return {part for before, part in pairs if before == "stages" and STAGE_NAME.fullmatch(part)}


def _texts(value: Any) -> Iterator[str]:  # Any: JSON
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
