"""Find unused folders in a store, and remove them (`rollouts prune`).

Not here: the command (flows/commands/prune.py), checkpoints that a stage itself deletes while it trains.

    stages/<stage>             a stage with all its files
    runs/<run>/checkpoint      the copy of a run's final checkpoint (the run's report and settings are small, and stay)
    inputs/<digest>            a download or prepared data (made again when a run needs the data)
    engines/<engine>           an installed engine (installed again when a run needs the engine)

    kept      in the lineage of a registered model | used by a live run, or since the oldest live run started
              claimed by a run | with a running job or download | named by the job of a kept stage, or by a deployment
    old       all other folders that were unused for longer than `unused_days`: removed
    large     more folders, longest unused first, until the rest fits into `max_bytes`: removed

A run records the use of a folder before it looks for the folder (stage_tasks.py, inputs.py, store_paths.py). Prune
checks these records again under the ledger's lock, and moves unused folders away under the same lock. A run therefore
finds a folder either complete or missing, and creates a missing folder again.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollouts.infra.ledger import Ledger
from rollouts.infra.registry import Model, models, select_models
from rollouts.infra.run_ids import short_id
from rollouts.infra.stores.download import is_being_fetched
from rollouts.infra.supervisor.status import is_supervised
from rollouts.tasks.store_paths import ENGINES, INPUTS, NAMES, RUNS, STAGES, is_place, places_in
from rollouts_core.run_directory import RunDirectory
from rollouts_core.system.files import remove_partial_directories

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFolder:
    """A folder in the store. Prune may remove the folder if `reason` is empty."""

    place: str
    """Path in the store: stages/<stage>, runs/<run>, inputs/<digest> or engines/<engine>."""
    num_bytes: int
    """Bytes that removing the folder frees. A file with several hard links counts only in the folder that is kept
    longest."""
    used_at: float
    """When a run last used the folder, in seconds since 1970."""
    reason: str = ""
    """Why the folder must be kept; empty if it may be removed."""

    @property
    def name(self) -> str:
        """The path that prune removes, for messages. Prune removes only the checkpoint from a run's folder."""
        return f"{self.place}/checkpoint" if self.place.startswith(f"{RUNS}/") else self.place


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    removed: tuple[FoundFolder, ...]
    kept: tuple[FoundFolder, ...]


def plan_prune(
    store: Path, ledger: Ledger, *, unused_days: float, max_bytes: int | None = None, now: float | None = None
) -> PrunePlan:
    """Choose which folders to remove, without removing them.

    A folder without a reason to keep it is chosen if it was unused for `unused_days`. If the other folders take more
    than `max_bytes`, more folders without a reason are chosen, longest unused first.

    Args:
        max_bytes: the most bytes that all folders together may take; None sets no limit.
    """
    at = time.time() if now is None else now
    found = sorted(find_folders(store, ledger), key=lambda folder: (folder.used_at, folder.place))
    total = sum(folder.num_bytes for folder in found)
    removed: list[FoundFolder] = []
    kept: list[FoundFolder] = []
    for folder in found:
        is_old = at - folder.used_at > unused_days * DAY_S
        is_too_much = max_bytes is not None and total > max_bytes
        if not folder.reason and (is_old or is_too_much):
            removed.append(folder)
            total -= folder.num_bytes
        else:
            kept.append(folder)
    return PrunePlan(removed=tuple(removed), kept=tuple(kept))


def remove_folders(store: Path, ledger: Ledger, plan: PrunePlan) -> list[FoundFolder]:
    """Remove the folders in the plan, except folders that a run now uses. Returns the removed folders."""
    alive = {short_id(run_id) for run_id in ledger.living_runs()}  # a live run may be copying a model into its folder
    runs = [path for path in (store / RUNS).glob("*") if path.name.rpartition("-")[2] not in alive]
    for parent in (store / STAGES, store / INPUTS, store / ENGINES, *runs):
        remove_partial_directories(parent)
    done, doomed = [], []
    with ledger.transaction() as database:
        reasons = reasons_to_keep(store, ledger, [folder.place for folder in plan.removed], select_models(database))
        for folder in plan.removed:
            if folder.place in reasons:
                continue
            aside = [moved for each in _removable(store / folder.place) if (moved := _move_aside(each)) is not None]
            if aside:
                done.append(folder)
                doomed += aside
            kind, _, name = folder.place.partition("/")
            if kind == STAGES:
                ledger.forget_uses(name)
    for each in doomed:
        shutil.rmtree(each, ignore_errors=True)
    return done


def find_folders(store: Path, ledger: Ledger) -> list[FoundFolder]:
    """All folders of the store that take disk space, each with its size, last use and the reason to keep it."""
    places = [
        f"{kind}/{path.name}"
        for kind in NAMES
        for path in sorted((store / kind).glob("*"))
        if _is_own_folder(path) and is_place(kind, path.name) and _removable(path)
    ]
    reasons = reasons_to_keep(store, ledger, places, models(ledger))
    used_at = _last_uses(store, ledger, places)
    found = [
        FoundFolder(place=place, num_bytes=0, used_at=used_at[place], reason=reasons.get(place, "")) for place in places
    ]
    return _measured(store, found)


def reasons_to_keep(store: Path, ledger: Ledger, places: Sequence[str], registered: Sequence[Model]) -> dict[str, str]:
    """The folders that must be kept, each with the reason in words. The inputs of a kept stage are kept, too."""
    reasons = _named_by_deployments(store)
    reasons |= {place: what for place in places if (what := _work_under_way(store / place))}
    reasons |= _wanted_by_runs(ledger, places)
    reasons |= _lineages(registered)
    began_at = min(ledger.living_runs().values(), default=None)
    if began_at is not None:
        used_at = _last_uses(store, ledger, places)
        recent = [place for place in places if used_at[place] >= began_at]
        reasons = dict.fromkeys(recent, "used after the start of a run in progress") | reasons
    return _with_what_they_name(store, reasons)


def _work_under_way(path: Path) -> str:
    """The reason to keep a folder with a running job or download, or ""."""
    if is_supervised(str(path)):
        return "its job is still running"
    return "it is being fetched" if is_being_fetched(path) else ""


def _wanted_by_runs(ledger: Ledger, places: Sequence[str]) -> dict[str, str]:
    """The folders of stages and runs that live runs use or claim, each with the reason to keep it."""
    alive = ledger.living_runs()
    claims = [lease for lease in ledger.leases() if not ledger.has_died(lease.run_id)]
    wanted_by = {short_id(run_id) for run_id in (*alive, *(claim.run_id for claim in claims))}
    reasons = {
        f"{STAGES}/{use.stage}": "used by a run in progress" for use in ledger.stage_uses() if use.run_id in alive
    }
    reasons |= {f"{STAGES}/{Path(claim.run_dir).name}": "claimed by a run" for claim in claims}
    runs = [place for place in places if place.startswith(f"{RUNS}/")]
    return reasons | {place: "its run is in progress" for place in runs if place.rpartition("-")[2] in wanted_by}


def _lineages(registered: Sequence[Model]) -> dict[str, str]:
    """The stages and checkpoints from which registered models were made, each with the reason to keep it."""
    reasons: dict[str, str] = {}
    for model in registered:
        places = {f"{STAGES}/{stage}" for stage in model.stages} | places_in(model.checkpoint)
        reasons |= dict.fromkeys(places, f"in the lineage of {model.name}")
    return reasons


def _named_by_deployments(store: Path) -> dict[str, str]:
    """The folders that the configurations of Prefect deployments name, each with the reason to keep it."""
    reasons: dict[str, str] = {}
    for path in sorted((store / "prefect/deployments").glob("*.json")):
        deployment = _read_json(path)
        places = places_in(deployment) | _scored_by(deployment)
        reasons |= dict.fromkeys(places, f"named by the deployment {path.stem}")
    return reasons


def _scored_by(deployment: Any) -> set[str]:  # Any: JSON
    """The folders of the runs and stages whose models a deployment evaluates.

    The deployment's `evaluate` settings name models without `runs/` or `stages/`, so both folders are returned.
    """
    try:
        evaluate = deployment["parameters"]["evaluate"]
        firsts = {str(evaluate.get(key, "")).partition("/")[0] for key in ("model", "against")}
    except (AttributeError, KeyError, TypeError):
        return set()  # this deployment names no models to score
    return {f"{kind}/{name}" for kind in (RUNS, STAGES) for name in firsts if is_place(kind, name)}


def _with_what_they_name(store: Path, reasons: Mapping[str, str]) -> dict[str, str]:
    """Add the folders that the job.json of a kept stage names, recursively."""
    every, waiting = dict(reasons), list(reasons)
    while waiting:
        place = waiting.pop()
        for other in _places_in_file(RunDirectory(store / place).job):
            if other not in every:
                every[other] = f"an input of {place}"
                waiting.append(other)
    return every


def _places_in_file(path: Path) -> set[str]:
    """The store folders in the paths of a JSON file."""
    return places_in(_read_json(path))


def _read_json(path: Path) -> Any:  # Any: JSON
    """The content of a JSON file, or None if the file is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _last_uses(store: Path, ledger: Ledger, places: Sequence[str]) -> dict[str, float]:
    """The time of each folder's last use, in seconds since 1970. A change of the folder counts as a use."""
    uses: dict[str, float] = {}
    for use in ledger.stage_uses():  # uses are listed oldest first, so a later use replaces an earlier use
        uses[f"{STAGES}/{use.stage}"] = uses[f"{RUNS}/{use.run}"] = use.used_at
    return {place: max(uses.get(place, 0.0), *_changed_at(store / place)) for place in places}


def _changed_at(path: Path) -> list[float]:
    """The time at which a folder last changed. For a run's folder, also the times of the files in it."""
    paths = [path, *path.glob("*")] if path.parent.name == RUNS else [path]
    times = [0.0]
    for each in paths:
        with suppress(FileNotFoundError):  # another prune has just removed the file
            times.append(each.stat().st_mtime)
    return times


def _removable(path: Path) -> list[Path]:
    """The folders that prune removes for a path: only the checkpoints of a run's folder, or the path itself."""
    if path.parent.name != RUNS:
        return [path]
    return [each for each in sorted(path.glob("*checkpoint*")) if _is_own_folder(each)]


def _is_own_folder(path: Path) -> bool:
    """True for a real folder. A symlink to a folder is skipped, because it takes no space in the store."""
    return path.is_dir() and not path.is_symlink()


def _move_aside(path: Path) -> Path | None:
    """Rename a folder, so that runs no longer find it. Returns the new path, or None if the folder no longer exists."""
    doomed = path.with_name(f".{path.name.lstrip('.')}.partial-{secrets.token_hex(4)}")
    try:
        path.rename(doomed)
    except FileNotFoundError:
        return None
    return doomed


def _measured(store: Path, found: Sequence[FoundFolder]) -> list[FoundFolder]:
    """Compute the sizes of folders. A file with several hard links counts only in the folder that is kept longest."""
    seen: set[tuple[int, int]] = set()
    longest_first = sorted(found, key=lambda folder: (not folder.reason, -folder.used_at))
    return [replace(folder, num_bytes=_num_bytes(store / folder.place, seen)) for folder in longest_first]


def _num_bytes(place: Path, seen: set[tuple[int, int]]) -> int:
    """Bytes of the files that prune would remove, without files in `seen`. Adds the counted files to `seen`.

    Args:
        seen: device and inode numbers of files.
    """
    total = 0
    walked = (each for folder in _removable(place) for each in os.walk(folder))  # os.walk skips vanished folders
    for path in (Path(parent, name) for parent, _, names in walked for name in names):
        with suppress(OSError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                total += status.st_size
    return total
