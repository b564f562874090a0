"""EleutherAI's lm-evaluation-harness, which asks a server for log-probs of given texts and for completions.

output/<model>/results_<date>.json            value and standard error of each metric, per task and per group
output/<model>/samples_<task>_<date>.jsonl    a line per row and filter, with the metrics of the row
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollouts_core.harnesses.spec import Harness, HarnessTask, MetricResult, ServedModel

REQUEST_TIMEOUT_S = 3600
"""Timeout of a request. The timeout is long, because requests wait for each other on a slow server."""
UNKNOWN_TASKS = re.compile(r"^ValueError: Tasks not found: (.+)$", re.MULTILINE)
REFUSED = re.compile(r"Response text: (.+?)\. Retrying\.\.\.$", re.MULTILINE)
SAME_VALUE = 1e-6
"""Largest relative or absolute difference between a reported value and the mean of its rows."""

JsonObject = Mapping[str, Any]  # Any: JSON


def render(task: HarnessTask, served: ServedModel, output: Path) -> list[str]:
    """The arguments for the interpreter. The API key is in the environment variable OPENAI_API_KEY."""
    model = {
        "model": served.name,
        "base_url": f"{served.url}/v1/completions",
        "tokenizer": str(served.folder),
        "tokenizer_backend": "huggingface",
        "max_length": served.max_length,
        "num_concurrent": served.max_requests,
        "timeout": REQUEST_TIMEOUT_S,
    }
    return [
        *("-P", "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", json.dumps(model)),
        *("--tasks", task.tasks, "--output_path", str(output), "--log_samples"),
        *(["--limit", str(task.limit)] if task.limit else []),
        *(["--include_path", task.include_path] if task.include_path else []),
        *task.arguments,
    ]


def read(output: Path) -> list[MetricResult]:
    """Read the results of all tasks and groups.

    Raises:
        ValueError: the folder does not have exactly one file with results.
    """
    files = sorted(output.glob("*/results_*.json"))
    if len(files) != 1:
        raise ValueError(f"expected one results_*.json below {output}, found {len(files)}")
    found = json.loads(files[0].read_text(encoding="utf-8"))
    date = files[0].stem.removeprefix("results_")
    samples = {task: _load_samples(files[0].with_name(f"samples_{task}_{date}.jsonl")) for task in found["n-samples"]}
    results = []
    for task, reported in found["results"].items():
        leaves = _leaves_of(task, found.get("group_subtasks", {}))
        for key, value in reported.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr") or not _is_number(value):
                continue
            stderr = reported.get(f"{metric}_stderr,{chosen}")
            rows = [
                row for leaf in leaves for row in samples.get(leaf, ()) if row["filter"] == chosen and metric in row
            ]
            scores = _scores_of(rows, metric, float(value))
            results.append(
                MetricResult(
                    task=task,
                    metric=metric if chosen == "none" else f"{metric} ({chosen})",
                    value=float(value),
                    stderr=float(stderr) if _is_number(stderr) else None,
                    is_lower_better=found.get("higher_is_better", {}).get(task, {}).get(metric) is False,
                    num_rows=len(rows) or int(reported.get("sample_len", 0)),
                    scores=scores,
                    rows=hashlib.sha256("".join(str(row["doc_hash"]) for row in rows).encode()).hexdigest(),
                )
            )
    return results


def explain(log: str) -> str:
    """The user's mistake that a failed harness reports: an unknown task, or a request that the server refused."""
    if unknown := UNKNOWN_TASKS.search(log):
        return (
            f"lm-eval does not know the task {unknown[1]}: give a name from `lm_eval ls tasks`, or the folder of your "
            "own tasks as --include-path"
        )
    if refused := REFUSED.findall(log):
        return f"the server refused a request of lm-eval: {refused[-1]}"
    return ""


def _load_samples(path: Path) -> list[JsonObject]:
    """The rows of a task, in the order of its data."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as lines:
        return sorted((json.loads(line) for line in lines), key=lambda row: row["doc_id"])


def _leaves_of(task: str, subtasks: Mapping[str, Sequence[str]]) -> list[str]:
    """The tasks with rows of their own below a group, or the task itself."""
    below = [leaf for each in subtasks.get(task, ()) for leaf in _leaves_of(each, subtasks)]
    return below or [task]


def _scores_of(rows: Sequence[JsonObject], metric: str, value: float) -> tuple[float, ...]:
    """The metric of each row, or () if the value is not the mean of the rows."""
    scores = [row[metric] for row in rows]
    if not scores or not all(map(_is_number, scores)):
        return ()
    mean = sum(scores) / len(scores)
    return tuple(map(float, scores)) if math.isclose(mean, value, rel_tol=SAME_VALUE, abs_tol=SAME_VALUE) else ()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


LM_EVAL = Harness(
    name="lm-eval",
    package="lm_eval",
    requirements="lm_eval.txt",
    disk_gb=1.0,
    own_arguments=(
        *("--model", "-M", "--model_args", "-a", "--tasks", "-t", "--output_path", "-o", "--log_samples", "-s"),
        *("--limit", "-L", "--include_path", "--config", "-C"),
    ),
    render=render,
    read=read,
    explain=explain,
)
