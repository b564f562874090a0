"""Test a newly installed inference engine: it serves a tiny model and completes one prompt.

The test is a job on the node. The folder of the installation keeps the result, so each installation is tested once.
Not here: the program of the job (rollouts_core/engines/trial.py), the installation (infra/engine_environment.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollouts.infra.errors import JobFailedError, PermanentInfraError
from rollouts.infra.jobs import FIRST_GPU, JobSpec, follow_job, read_result, require_finished, start_or_attach
from rollouts.infra.node import Node
from rollouts.infra.session import Session
from rollouts.tasks.node_job import COUNTED_BY_BUS, variables_of_place
from rollouts.tasks.upload_inputs import place_code
from rollouts_core.config import EngineConfig

TRIAL_TIMEOUT_S = 1800.0


def try_engine(
    session: Session,
    node: Node,
    engine: EngineConfig,
    folder: str,
    *,
    gpu_ranks: Sequence[int],
    say: Callable[[str], None],
) -> None:
    """Let an installed engine complete a prompt, unless this installation has passed this test before.

    Args:
        folder: the folder of the installation on the node.

    Raises:
        PermanentInfraError: the engine returned no completion. The error has the last lines of the engine's log.
    """
    run_dir = f"{folder}/trial"
    if read_result(session, run_dir) is not None:
        return
    ranks = gpu_ranks[:1]
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, ranks))} if ranks else {}
    code_dir = place_code(session, node, say=say) if node.is_remote else ""
    say(f"tests {engine.spec.title} with a prompt for a tiny model")
    spec = JobSpec(
        run_dir=run_dir,
        argv=(node.python, "-P", "-m", "rollouts_core.engines.trial", run_dir),  # session.python may lack torch
        job={"kind": engine.kind, "python": node.engine_python, "start_timeout_s": engine.start_timeout_s},
        env={**COUNTED_BY_BUS, **devices, **variables_of_place(code_dir)},
        timeout_s=TRIAL_TIMEOUT_S,
        gpus=tuple(map(str, ranks)) or (FIRST_GPU,),
    )
    start_or_attach(session, spec)
    ended = follow_job(session, run_dir, on_metrics=_ignore, on_event=_ignore)
    try:
        require_finished(session, ended)
    except JobFailedError as error:
        raise PermanentInfraError(
            f"{engine.spec.title} is installed in {folder} on {node.name}, and does not work there: {error}"
        ) from error


def _ignore(_: object) -> None:
    """Callback that ignores the metrics and events of the test job."""
