"""Check the settings of a run that Prefect starts, before its first stage and before a machine is rented.

Not here: the checks (preflight.py). `rollouts run` checks its settings before it creates the flow run (cli.py).

    settings ──stdin──> python -m rollouts.flows.check ──> progress of long checks, then the findings;
                                                           exit code 2 and a line per mistake

The checks load torch and transformers, so they run in a child process to save memory in the run's process.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from prefect import task
from pydantic import TypeAdapter

from rollouts.flows.commands.terminal import told_progress
from rollouts.flows.evaluate_settings import EvaluateConfig
from rollouts.flows.form import FormNode, Pipeline, RunOptions
from rollouts.flows.preflight import check_evaluation, check_pipeline
from rollouts.flows.retrain_settings import RetrainConfig
from rollouts.flows.trusted_code import check_trusted
from rollouts.infra.errors import InfraError, PermanentInfraError, TransientInfraError
from rollouts.infra.node import NodeSettings
from rollouts.tasks.progress import StageProgress
from rollouts.tasks.retries import TRIED_AGAIN
from rollouts_core.config import Config
from rollouts_core.errors import InputError
from rollouts_core.findings import count_cautions, split_findings

CODES: dict[type[Exception], int] = {InputError: 2, PermanentInfraError: 3, TransientInfraError: 4}
"""Exit code of the child process for each type of exception that the checks raise."""


@task(name="check", **TRIED_AGAIN)
def check_settings(
    config: Config,
    node: NodeSettings,
    run: RunOptions,
    evaluate: EvaluateConfig | None = None,
    retrain: RetrainConfig | None = None,
) -> None:
    """Check everything that can be checked without training or, for an evaluation, without scoring.

    Raises:
        InputError: a setting is wrong, or names code that this machine does not trust.
        InfraError: the node or its provider fails or does not answer.
    """
    check_trusted(config, evaluate, Path(run.store), node)
    parts = {"config": config, "node": node, "run": run, "evaluate": evaluate, "retrain": retrain}
    settings = {name: part.model_dump(mode="json") for name, part in parts.items() if part is not None}
    with StageProgress("check") as progress, tempfile.TemporaryFile("w+", encoding="utf-8") as refusal:
        exit_code = _run_checks(json.dumps(settings), progress.say, refusal)
        refusal.seek(0)
        if exit_code != 0:
            raise _error_of(exit_code, refusal.read().strip())


def _run_checks(settings: str, say: Callable[[str], None], refusal: IO[str]) -> int:
    """Run the checks in a child process, pass its output lines to `say`, and return its exit code."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-P", "-m", "rollouts.flows.check"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=refusal, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # the child ended early, and printed the reason
                process.stdin.write(settings)
                process.stdin.close()
            for line in process.stdout:
                say(line.rstrip("\n"))
            return process.wait()
        except BaseException:
            process.kill()
            raise


def _error_of(exit_code: int, said: str) -> Exception:
    """The exception that the checks raised in the child process, from its exit code and message."""
    for kind, code in CODES.items():
        if exit_code == code:
            return kind(said)
    return RuntimeError(f"the check of the settings ended with exit code {exit_code}: {said[-2000:]}")


def main() -> None:
    """Read the settings as JSON from standard input, check them, and print the findings."""
    settings = json.load(sys.stdin)
    pipeline = Pipeline(
        config=Config.model_validate(settings["config"]),
        node=TypeAdapter[NodeSettings](FormNode).validate_python(settings["node"]),
        run=RunOptions.model_validate(settings["run"]),
        evaluate=EvaluateConfig.model_validate(settings["evaluate"]) if "evaluate" in settings else None,
        retrain=RetrainConfig.model_validate(settings["retrain"]) if "retrain" in settings else None,
    )
    check = check_pipeline if pipeline.evaluate is None else check_evaluation
    try:
        with told_progress(_write_line):
            facts, cautions = split_findings(check(pipeline, Path(pipeline.run.store).resolve()))
        for line in (*facts, *(f"warning: {caution}" for caution in cautions)):
            _write_line(line)
        if cautions:
            _write_line(f"{count_cautions(cautions)} in all")
    except (InputError, InfraError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(next(code for kind, code in CODES.items() if isinstance(error, kind)))


def _write_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
