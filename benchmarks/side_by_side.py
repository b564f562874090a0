"""Measure contenders side by side: warm worker processes that take short turns, A B A B, and the ratios of the rounds.

Not here: what a contender does (sft_speed.py, grpo_speed.py), the inputs (inputs.py).

    parent   --{"seconds": 3}-->  worker A      trains whole steps until 3 s are over, then stops inside its loop
             <--{"units": ...}--                and waits; idle workers hold memory and take no CPU time
             --{"seconds": 3}-->  worker B      ...
    round 1: A B C   round 2: C B A   round 3: A B C

A machine that is busy with other things, or that changes its clock, slows all contenders of a round alike. Hence a
ratio is taken within each round, and the report gives its smallest, median and largest value.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollouts_core.backends.allocator import KEPT_MEMORY

REPOSITORY = Path(__file__).resolve().parents[1]
SKIPPED = 3
"""The exit code of a benchmark that needs programs which are not here."""
PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "safetensors", "numpy")
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a worker did in one turn."""

    units: float
    """Trained tokens, or steps: what the contender's speed is counted in."""
    seconds: float
    """From the permission to the end of the last step."""
    cpu_seconds: float
    """Processor time of the worker's process in that time, on all its threads, without its children."""
    num_steps: int
    """Whole steps."""
    losses: list[float] = field(default_factory=list)
    """The loss of each step."""
    parts: dict[str, float] = field(default_factory=dict)
    """Sums over the turn of whatever else the worker measured."""

    @property
    def speed(self) -> float:
        """Units per second."""
        return self.units / self.seconds


class Gate:
    """The worker's end: `step_done` after each step blocks while it is another's turn.

    Standard output belongs to the parent from here on; what libraries print goes to standard error.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._until = 0.0
        self._steps_left = 0
        self._clear()

    def start(self) -> None:
        """Say that the worker is ready, and wait for the first turn."""
        self._send({"ready": True})
        self._wait()

    def step_done(self, *, units: float, loss: float = 0.0, **parts: float) -> None:
        """Count a step; at the end of the turn report it and wait for the next. Exits when there is none."""
        self._units += units
        self._losses.append(loss)
        for name, value in parts.items():
            self._parts[name] = self._parts.get(name, 0.0) + value
        self._steps_left -= 1
        now = time.perf_counter()
        if self._steps_left > 0 or now < self._until:
            return
        turn = Turn(
            units=self._units,
            seconds=now - self._began,
            cpu_seconds=time.process_time() - self._cpu_began,
            num_steps=len(self._losses),
            losses=self._losses,
            parts=self._parts,
        )
        self._send(asdict(turn))
        self._wait()

    def _wait(self) -> None:
        line = sys.stdin.readline()
        if not line:
            raise SystemExit(0)
        order = json.loads(line)
        self._clear()
        self._steps_left = order.get("steps", 1)
        self._until = self._began + order.get("seconds", 0.0)

    def _clear(self) -> None:
        self._units = 0.0
        self._losses: list[float] = []
        self._parts: dict[str, float] = {}
        self._began = time.perf_counter()
        self._cpu_began = time.process_time()

    def _send(self, message: Mapping[str, Any]) -> None:  # Any: JSON
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()


class Contender:
    """The parent's end of one worker process; used with `with`.

    Args:
        command: the worker's command line.
        log: file that gets what the worker prints.
    """

    def __init__(self, name: str, command: Sequence[str], *, num_threads: int, log: Path) -> None:
        self.name = name
        self.turns: list[Turn] = []
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=worker_environment(num_threads) | (KEPT_MEMORY if keeps_memory(name) else {}),
                text=True,
            )

    def wait_until_ready(self) -> None:
        """Return when the worker has loaded everything."""
        self._receive()

    def take_turn(self, **order: float) -> Turn:
        """Let the worker run for `seconds` or `steps`; returns what it did."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return Turn(**self._receive())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self) -> dict[str, Any]:  # Any: JSON
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log.read_text().splitlines()[-15:])
            raise RuntimeError(f"{self.name} ended with code {self._process.wait()}:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The smallest, the median and the largest of some numbers."""

    low: float
    middle: float
    high: float

    def render(self, digits: int = 2) -> str:
        """As `median (min to max)`."""
        low, middle, high = (f"{value:,.{digits}f}" for value in (self.low, self.middle, self.high))
        return f"{middle} ({low} to {high})"


def range_of(values: Sequence[float]) -> Range:
    """The range of `values`."""
    return Range(low=min(values), middle=statistics.median(values), high=max(values))


def measure(
    commands: Mapping[str, Sequence[str]],
    *,
    num_threads: Mapping[str, int] | int,
    log_dir: Path,
    num_rounds: int,
    turn_s: float,
    warmup_steps: int,
) -> tuple[dict[str, list[Turn]], dict[str, Turn]]:
    """Start all contenders, warm them up, and let them take turns; returns the turns and the warm-ups by name."""
    log_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        contenders = [
            stack.enter_context(
                Contender(
                    name,
                    command,
                    num_threads=num_threads if isinstance(num_threads, int) else num_threads[name],
                    log=log_dir / f"{re.sub('[^a-z0-9=]+', '_', name)}.log",
                )
            )
            for name, command in commands.items()
        ]
        for contender in contenders:
            contender.wait_until_ready()
        warmups = {contender.name: contender.take_turn(steps=warmup_steps) for contender in contenders}
        turns: dict[str, list[Turn]] = {contender.name: [] for contender in contenders}
        for number in range(num_rounds):
            for contender in contenders if number % 2 == 0 else reversed(contenders):
                turns[contender.name].append(contender.take_turn(seconds=turn_s))
            speeds = "  ".join(f"{name} {taken[-1].speed:,.1f}" for name, taken in turns.items())
            print(f"round {number + 1}: {speeds}", file=sys.stderr, flush=True)
    return turns, warmups


def speed_ratios(turns: Mapping[str, Sequence[Turn]], name: str, reference: str) -> Range:
    """How many times faster `name` is than `reference`, round by round."""
    return range_of([ours.speed / theirs.speed for ours, theirs in zip(turns[name], turns[reference], strict=True)])


def cpu_ratios(turns: Mapping[str, Sequence[Turn]], name: str, reference: str) -> Range:
    """How many times less CPU time a unit takes `name` than `reference`: says more where others use the machine."""
    costs = {key: [turn.cpu_seconds / turn.units for turn in turns[key]] for key in (name, reference)}
    return range_of([theirs / ours for ours, theirs in zip(costs[name], costs[reference], strict=True)])


def speeds(turns: Sequence[Turn]) -> Range:
    """Units per second, over the rounds."""
    return range_of([turn.speed for turn in turns])


def check_equal_losses(warmups: Mapping[str, Turn], names: Sequence[str], *, tolerance: float) -> float:
    """The largest difference between the losses of contenders that train on equal batches.

    Raises:
        AssertionError: they do not do the same work.
    """
    worst = 0.0
    first = warmups[names[0]].losses
    for name in names[1:]:
        for step, (expected, found) in enumerate(zip(first, warmups[name].losses, strict=True), start=1):
            worst = max(worst, abs(expected - found))
            assert abs(expected - found) <= tolerance, f"step {step}: {names[0]} {expected}, {name} {found}"
    return worst


def describe_machine(num_threads: int) -> dict[str, Any]:  # Any: JSON
    """Where the figures come from: processor, versions, commit, load of the machine at this moment."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return {
        "cpu": _processor_name(),
        "cores": os.cpu_count(),
        "threads": num_threads,
        "extensions": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in _processor_flags()],
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES if _version(name)},
        "commit": commit.stdout.strip(),
    }


def render_machine(machine: Mapping[str, Any]) -> str:  # Any: JSON
    """One paragraph of provenance."""
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['extensions'])}), {machine['threads']} "
        f"threads in all; load before the start {machine['load_before']}; Python {machine['python']}, {packages}; "
        f"commit {machine['commit']}."
    )


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its first column to the left, the others to the right."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    cells = [[cell.replace("|", ", ") for cell in row] for row in rows]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in cells])


def write_results(path: Path | None, results: Mapping[str, Any]) -> None:  # Any: JSON
    """Write the figures of one script as JSON, if a path was given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")


def need_programs(*names: str) -> None:
    """Return if these programs are on this machine; else say which is not, and end with the code SKIPPED."""
    search_path = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/sbin"  # where sshd is
    if missing := [name for name in names if shutil.which(name, path=search_path) is None]:
        sys.stderr.write(f"{sys.argv[0]} is skipped: {', '.join(missing)} is not on this machine\n")
        raise SystemExit(SKIPPED)


def worker_environment(num_threads: int) -> dict[str, str]:
    """The environment of every worker: so many threads, and no hub."""
    search_path = [os.environ.get("PYTHONPATH", ""), str(REPOSITORY / "src")]
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(num_threads),
        "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }


def worker_command(script: str, *arguments: str) -> list[str]:
    """The command line that runs `script` as a worker."""
    return [sys.executable, str(Path(script).resolve()), *arguments]


def keeps_memory(name: str) -> bool:
    """Whether a contender runs with the allocator settings that trainers get from this library, or asks for them."""
    return name.startswith("ours") or "|memory=kept" in name


def parse_contender(text: str) -> tuple[str, dict[str, Any]]:  # Any: settings of many types
    """The name and the settings of `NAME|setting=value|...`."""
    name, *settings = text.split("|")
    words: dict[str, Any] = {"true": True, "false": False}
    pairs = [setting.split("=", 1) for setting in settings if setting != "memory=kept"]
    return name, {key: words.get(word, int(word) if word.isdigit() else word) for key, word in pairs}


def timed(function: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _processor_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _processor_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return {flag for line in lines if line.startswith("flags") for flag in line.partition(":")[2].split()}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
