"""Describe the provenance of a run: dates, machine, software, seeds and settings.

Not here: the training data of each stage (trainings.py), the description of a process's machine (system/provenance.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rollouts_core.checks.needed_part import GIB
from rollouts_core.checks.placement_plan import placed_work
from rollouts_core.config import Config, DeploymentConfig
from rollouts_core.metrics import read_json_lines, read_metrics
from rollouts_core.model.model_size import read_folder
from rollouts_core.report.charts import format_number, format_seconds
from rollouts_core.report.curve_data import metrics_total
from rollouts_core.report.inputs import ReportInput, StageSummary
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import label_of

MAX_HEADER_BYTES = 64 << 20
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError)


class Setting(NamedTuple):
    name: str
    value: str
    default: str
    """The default as text; empty for a setting without a default."""
    is_changed: bool


def describe_provenance(report: ReportInput) -> list[tuple[str, str]]:
    """The provenance as (title, text) pairs. Facts that the run directories do not record are left out."""
    facts = [("Run", report.run_id), ("Report written", format_time(report.written_at))]
    ended_at = report.ended_at or report.written_at
    if report.began_at and ended_at > report.began_at:
        facts.append(("Whole wall time", format_seconds(ended_at - report.began_at)))
    facts += _machines(report)
    facts.append(("Placement", _placement(report)))
    facts.append(("Parameters", count_parameters(Path(report.checkpoint_path))))
    facts += [(f"Tokens of {label_of(name)}", text) for name, text in _tokens(report)]
    facts.append(("Seeds", _seeds(report.config)))
    return [(what, text) for what, text in facts if text]


def describe_reused_time(stage: StageSummary) -> str:
    """The running time of a reused stage's attempts, as text; empty for other stages, and without exit records."""
    took_s = sum(_attempt_seconds(Path(stage.run_dir))) if stage.how.startswith("reused") and stage.run_dir else 0.0
    return f"ran {format_seconds(took_s)}" if took_s else ""


def _attempt_seconds(run_dir: Path) -> Iterator[float]:
    for path in sorted(run_dir.glob("exit-*.json")):
        try:
            yield float(json.loads(path.read_text(encoding="utf-8"))["seconds"])
        except UNREADABLE:
            continue


def format_time(seconds: float) -> str:
    """A time in UTC as text; empty for 0."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds)) if seconds else ""


def _machines(report: ReportInput) -> list[tuple[str, str]]:
    """The machine and software of each training. A training on the same machine as the previous training gets no
    line."""
    facts, before = [], dict[str, Any]()  # Any: JSON
    for training in report.trainings:
        started = _last_start(training.run_dir)
        machine = {name: started[name] for name in MACHINE if name in started}
        if machine and machine != before:
            of = f" of {label_of(training.name)}" if before else ""
            facts += [(f"{MACHINE[name]}{of}", _as_text(value)) for name, value in machine.items()]
            before = machine
    return facts


def _last_start(run_dir: Path) -> dict[str, Any]:  # Any: JSON
    """The event `started` of a training's last attempt; empty without this event."""
    starts = [line for line in read_json_lines(RunDirectory(run_dir).events) if line["event"] == "started"]
    return starts[-1] if starts else {}


def _placement(report: ReportInput) -> str:
    """The work of each GPU during the last training, with the estimated memory; empty for a training without GPUs.

    The placement is read from job.json, because the report's settings lack the placement that the run planned on its
    node.
    """
    if report.config is None or not report.trainings or not _last_start(report.trainings[-1].run_dir).get("gpus"):
        return ""
    try:
        job = json.loads(RunDirectory(report.trainings[-1].run_dir).job.read_text(encoding="utf-8"))
        deployment = DeploymentConfig.model_validate(job["deployment"])
    except UNREADABLE:
        return ""
    config = report.config.model_copy(update={"deployment": deployment})
    placed = placed_work(config, read_folder(Path(report.checkpoint_path)))
    return "; ".join(
        f"GPU {each.gpus}: {each.work}" + (f", estimated at {each.num_bytes / GIB:.1f} GiB" if each.num_bytes else "")
        for each in placed
    )


MACHINE = {
    "host": "Host",
    "system": "System",
    "processors": "CPU cores",
    "gpus": "GPUs",
    "versions": "Versions",
    "commit": "Commit of rollouts",
}
"""Fields of the event `started` that describe the machine, with their titles."""


def _as_text(value: Any) -> str:  # Any: JSON
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {version}" for name, version in value.items())
    if isinstance(value, list):
        counts = {each: value.count(each) for each in value}
        return ", ".join(f"{count} × {each}" if count > 1 else str(each) for each, count in counts.items())
    return str(value)


def _tokens(report: ReportInput) -> Iterator[tuple[str, str]]:
    """The approximate number of tokens that each training saw or sampled, by the training's name."""
    for training in report.trainings:
        lines = read_metrics(RunDirectory(training.run_dir).metrics)
        if not lines:
            continue
        num_steps = int(lines[-1]["step"])
        if total := metrics_total(lines, "num_tokens", num_steps):
            yield training.name, f"about {round(total, -3):,.0f} in {num_steps:,} steps"
        elif total := metrics_total(lines, "response_tokens", num_steps):
            yield training.name, f"{format_number(total / num_steps)} sampled per completion, {num_steps:,} steps"


def _seeds(config: Config | None) -> str:
    if config is None:
        return ""
    seeds = {name: value for name, value in flatten(config.model_dump(mode="json")) if name.endswith("seed")}
    names = [f"training.{name}." for name in config.trainings]
    used = {
        name: value
        for name, value in seeds.items()
        if not name.startswith("training.") or name.startswith(tuple(names))
    }
    return ", ".join(f"{name} {value}" for name, value in used.items())


def describe_settings(config: Config | None) -> list[Setting]:
    """All settings of the run. Settings that differ from their defaults come first."""
    if config is None:
        return []
    changed = {name for name, _ in flatten(config.model_dump(mode="json", exclude_defaults=True))}
    defaults = dict(flatten(_defaults(config)))
    settings = [
        Setting(name, _shown(value), _shown(defaults[name]) if name in defaults else "", name in changed)
        for name, value in flatten(config.model_dump(mode="json"))
    ]
    return sorted(settings, key=lambda setting: not setting.is_changed)


def _defaults(config: Config) -> dict[str, Any]:  # Any: JSON
    sections = {name: field for name, field in type(config).model_fields.items() if not field.is_required()}
    defaults = {name: field.get_default(call_default_factory=True) for name, field in sections.items()}
    return {
        name: default.model_dump(mode="json") if hasattr(default, "model_dump") else default
        for name, default in defaults.items()
    }


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:  # Any: JSON
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:  # Any: JSON
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def count_parameters(directory: Path) -> str:
    """The number of parameters in a folder's weights as text, from the headers of its safetensors files; may be
    empty."""
    total = 0
    try:
        for path in sorted(directory.glob("*.safetensors")):
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > MAX_HEADER_BYTES:
                    return ""
                tensors = json.loads(file.read(size))
            for name, tensor in tensors.items():
                if name != "__metadata__":
                    count = 1
                    for length in tensor["shape"]:
                        count *= length
                    total += count
    except UNREADABLE:
        return ""
    return f"{total:,}" if total else ""
