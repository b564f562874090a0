"""Keep the results of benchmarks: per model in the store, and with their comparison in the run and in the registry.

    <store>/benchmarks/<harness>-<digest>/result.json   one model's results, for later commands
    <store>/runs/<run>/benchmarks.json                  comparisons, for `rollouts report`
    registry                                            comparisons, for `rollouts models --json`

Not here: running a benchmark (flows/commands/benchmarks.py), the comparison (rollouts_core/benchmarks.py). This module
must not import prefect, because the `rollouts` command imports it.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.registry import BENCHMARKS, models, note_benchmarks
from rollouts.tasks.store_paths import BENCHMARKS_FILE, RUNS
from rollouts_core.benchmarks import Benchmark, BenchmarkTable
from rollouts_core.data.rows import digest_path
from rollouts_core.harnesses import Harness
from rollouts_core.harnesses.spec import HarnessTask, MetricResult
from rollouts_core.system.files import write_json

PLACE = "benchmarks"
"""Folder in a store for the results of single models."""
RESULT = "result.json"
_DIGEST_CHARS = 16

JsonObject = Mapping[str, Any]  # Any: JSON


def place_of_result(
    store: Path, harness: Harness, task: HarnessTask, *, version: str, engine: Sequence[str], model_digest: str
) -> Path:
    """The folder of a model's results. Equal models, tasks, settings and versions have the same folder.

    The content of the user's own tasks counts, but not data that these tasks read from elsewhere.

    Args:
        engine: kind and arguments of the engine that serves the model.
    """
    paths = [task.include_path, *(each for each in task.tasks.split(",") if Path(each).is_file())]
    identity = {
        "task": asdict(task) | {"include_path": ""},
        "own_tasks": [digest_path(path) for path in paths if path],
        "version": version,
        "requirements": digest_path(harness.file),
        "engine": list(engine),
        "model": model_digest,
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:_DIGEST_CHARS]
    return store / PLACE / f"{harness.name}-{digest}"


def load_result(place: Path) -> list[MetricResult] | None:
    """The results in a folder, or None without a readable result.json."""
    try:
        found = json.loads((place / RESULT).read_text(encoding="utf-8"))
        return [MetricResult(**{**each, "scores": tuple(each["scores"])}) for each in found["metrics"]]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def save_result(place: Path, results: Sequence[MetricResult]) -> None:
    write_json(place / RESULT, {"metrics": [asdict(each) for each in results]})


def describe_comparison(
    harness: Harness, task: HarnessTask, found: Sequence[Benchmark], *, version: str, engine: str, against: str
) -> dict[str, Any]:  # Any: JSON
    """The entry for benchmarks.json and for the registry.

    Args:
        against: name of the other model; empty without another model.
    """
    return {
        "harness": harness.name,
        "version": version,
        **asdict(task),
        "engine": engine,
        "against": against,
        "metrics": [asdict(each) for each in found],
    }


def note_in_run(store: Path, run: str, entry: JsonObject) -> None:
    """Add an entry to the run's benchmarks.json. The entry replaces an earlier entry with the same settings."""
    folder = store / RUNS / run
    write_json(folder / BENCHMARKS_FILE, with_entry(load_comparisons(folder), entry))


def load_comparisons(folder: Path) -> list[JsonObject]:
    """The entries of a run's benchmarks.json; empty without the file."""
    path = folder / BENCHMARKS_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def load_tables(folder: Path) -> tuple[BenchmarkTable, ...]:
    """The results in a run's benchmarks.json, for the report."""
    return tuple(
        BenchmarkTable(
            title=_title_of(entry),
            against=entry["against"],
            metrics=tuple(Benchmark(**each) for each in entry["metrics"]),
        )
        for entry in load_comparisons(folder)
    )


def _title_of(entry: JsonObject) -> str:
    settings = [f"first {entry['limit']} rows"] if entry["limit"] else []
    settings += [shlex.join(entry["arguments"])] if entry["arguments"] else []
    return ", ".join([f"{entry['harness']} {entry['version']}: {entry['tasks']}", *settings])


def note_in_registry(store: Path, model_digest: str, entry: JsonObject) -> list[str]:
    """Add an entry to the registered models with this digest. Returns the names of these models."""
    if not (store / LEDGER_FILE).is_file():
        return []
    with Ledger(store / LEDGER_FILE) as ledger:
        found = [each for each in models(ledger) if each.digest == model_digest]
        for model in found:
            note_benchmarks(ledger, model, with_entry(model.evaluation.get(BENCHMARKS, ()), entry))
    return [each.name for each in found]


def with_entry(entries: Sequence[JsonObject], entry: JsonObject) -> list[JsonObject]:
    """The entries with one more. An entry that differs from the new entry only in its results is removed."""

    def settings(each: JsonObject) -> str:
        return json.dumps({key: value for key, value in each.items() if key not in ("metrics", "version")})

    return [*(each for each in entries if settings(each) != settings(entry)), entry]
