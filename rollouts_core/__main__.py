"""`python -m rollouts_core {sft,rl,eval,generate,serve} job.json`: run one job in the directory of its job.json.

Exit codes: 0 done, 1 failed, 2 the user must change something, 75 one of several machines is gone and a restart may
help, 76 a GPU was full and the next start needs less memory. With exit code 2, 75 or 76, the last line of the output
says what to do.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from safetensors import SafetensorError

from rollouts_core.backends.launch import (
    is_follower,
    is_launched,
    launch,
    needs_launcher,
    num_processes,
    run_worker,
)
from rollouts_core.backends.multi_node import MACHINE_LOST_CODE, Unit, follow, lead
from rollouts_core.checkpoint import newest_step
from rollouts_core.config.messages import first_line
from rollouts_core.errors import FullGPUError, InputError, MachineLostError
from rollouts_core.hub_cache import use_fallback
from rollouts_core.job import Job, ServeJob, TrainingJob, load_job
from rollouts_core.keys import OWN_KEY_VARIABLE, read_key
from rollouts_core.less_memory import (
    FULL_GPU_CODE,
    find_lowered,
    find_next,
    is_gpu_full,
    with_less,
)
from rollouts_core.metrics import EventLog
from rollouts_core.run_directory import RunDirectory, attempt_number
from rollouts_core.stages import TRAININGS
from rollouts_core.stages.kind import load
from rollouts_core.stopping import TrainingStop
from rollouts_core.system.home import check_home
from rollouts_core.system.open_files import raise_file_limit
from rollouts_core.system.parent_death import die_with_parent
from rollouts_core.system.private_files import keep_private
from rollouts_core.system.utf8 import ensure_utf8
from rollouts_core.user_code.failures import is_raised_by_user_code

USER_ERROR_CODE = 2
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
JOB_KINDS = {
    **{name: (kind.purpose, kind.leaves) for name, kind in TRAININGS.items()},
    "eval": (
        "Score checkpoints on the same rows and name the best.",
        "Writes samples/ with the completions of each checkpoint and, at the end, result.json with their scores.",
    ),
    "generate": (
        "Sample completions of prompts and grade them.",
        "Writes samples/ with the completions and, at the end, result.json.",
    ),
    "serve": (
        "Serve a model over HTTP until stopped.",
        "The pipeline starts its engines this way, at the address in job.json. To try a checkpoint by hand, use "
        "`rollouts serve FOLDER`, which needs no job.json.",
    ),
}
"""Purpose and details of each kind of job, for --help."""
ABOUT_JOBS = """
Run one stage of training from its job.json, without Prefect.

job.json holds the settings, and the inputs with their digests. All output is
written beside it. `rollouts run` writes a job.json for every stage into
<store>/stages/<stage>-<fingerprint>/ and runs this command there. To repeat a
stage by hand, copy its job.json into an empty folder, and start it in the
folder where the run was started:

    mkdir again && cp .rollouts/stages/sft-3f9c1d20b7a64e58/job.json again/
    python -m rollouts_core sft again/job.json

For a whole pipeline, begin with `rollouts --help`.
"""
EXIT_CODES = """
exit codes:
  0   done
  1   failed
  2   the user must change something: see the last line
  75  one of several machines is gone: a restart may help
  76  a GPU ran out of memory: the next start needs less

docs/run_directory.md describes the files, docs/library.md the same from Python.
"""

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the job that the command line names; returns the exit code."""
    arguments = _build_parser().parse_args(argv)
    use_fallback(os.environ)
    raise_file_limit()
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # an inherited SIG_IGN hides the exit codes of children
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    level = logging.WARNING if is_follower() else logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx logs one line per engine request at lower levels
    directory = RunDirectory(arguments.job.resolve().parent)
    keep_private(directory.root)
    try:
        return _run(arguments.kind, arguments.job, directory)
    except InputError as error:
        if not arguments.job.is_file():  # without job.json, the folder is not a run directory
            sys.stderr.write(f"rollouts: {error}\n")
            return USER_ERROR_CODE
        if is_raised_by_user_code(error):
            logger.error("the user's code failed", exc_info=error)
        return _fail(directory, str(error))
    except MachineLostError as error:
        return _fail(directory, str(error), code=MACHINE_LOST_CODE)


def _run(kind: str, path: Path, directory: RunDirectory) -> int:
    """Run the job in this process, or in processes of torchrun. Returns the exit code."""
    check_home()
    job = load_job(path)
    if job.kind != kind:
        raise InputError(f"{path} describes a job of kind {job.kind}, not {kind}")
    if is_launched():
        die_with_parent()
    elif needs_launcher(job):
        _look_for_garbage()
        code = launch(
            [job.kind, str(path.resolve())],
            num_processes=num_processes(job),
            log_dir=directory.root / "torchrun",
            join=partial(_join_machines, job, directory),
        )
        assert isinstance(job, TrainingJob), "only training has a launcher"
        is_to_lower = code == FULL_GPU_CODE and not job.node_rank  # only the leader lowers settings
        return need_less_memory(job, directory, "the traceback is in a log of this training") if is_to_lower else code
    if isinstance(job, TrainingJob) and not is_follower():
        tell_saved_step(directory)
        job = with_less(job, directory)
    run = _load_runner(job)
    _look_for_garbage()
    try:
        run(directory)
    except FullGPUError as error:
        logger.error("a GPU has too little memory", exc_info=error)
        assert isinstance(job, TrainingJob), "only training raises it"
        return FULL_GPU_CODE if is_launched() else need_less_memory(job, directory, str(error))
    except (OSError, SafetensorError) as error:
        if not is_disk_full(error):
            raise
        return _fail(directory, f"the disk is full ({error}): free some space, then start again")
    except RuntimeError as error:
        if not is_gpu_full(error):
            raise
        logger.error("a GPU has too little memory", exc_info=error)
        return _fail(directory, describe_full_gpu(job, first_line(error)))
    return 0


def _load_runner(job: Job) -> Callable[[RunDirectory], None]:
    """The function that runs the job. Only the modules that the job needs are imported, torch last."""
    if isinstance(job, TrainingJob):
        return partial(load(TRAININGS[job.kind].run), job)
    if isinstance(job, ServeJob):
        from rollouts_core.jobs.serve_job import run_serve_job

        return partial(run_serve_job, job)
    from rollouts_core.jobs.eval_job import run_eval_job

    return partial(run_eval_job, job)


def tell_saved_step(directory: RunDirectory) -> None:
    """Write the last saved step to stop.json before the model is loaded, because a stop during loading reports that
    step too."""
    stop = TrainingStop(told=directory.stop_state, attempt=attempt_number())
    stop.note_saved(newest_step(directory.checkpoints))


def _join_machines(job: Job, directory: RunDirectory) -> AbstractContextManager[Unit | None]:
    """The connection to the other machines of a training; a null context if the training runs on one machine."""
    if not isinstance(job, TrainingJob) or not job.further_trainers:
        return contextlib.nullcontext()
    key = read_key(OWN_KEY_VARIABLE, "further_trainers")
    if job.node_rank == 0:
        return lead(job.further_trainers, key)
    own = job.further_trainers[job.node_rank - 1]
    return follow(own, node_rank=job.node_rank, key=key, lease_file=directory.lease_file)


def _look_for_garbage() -> None:
    """Enable garbage collection, but exclude the imported modules, because collecting them takes a second at exit."""
    if not gc.isenabled():
        gc.enable()
        gc.freeze()


def is_disk_full(error: OSError | SafetensorError) -> bool:
    """True if a write failed because the disk or a quota is full. safetensors reports a full disk only as text."""
    if isinstance(error, OSError):
        return error.errno in NO_ROOM
    return any(os.strerror(number) in str(error) for number in NO_ROOM)


def need_less_memory(job: TrainingJob, directory: RunDirectory, reason: str) -> int:
    """Lower a setting for the next start of a training that ran out of GPU memory. Returns the exit code."""
    current = with_less(job, directory)
    lowered = find_next(current, directory)
    if lowered is None:
        tried = [each.describe(job.kind) for each in find_lowered(job, directory)]
        return _fail(directory, describe_full_gpu(current, reason, tried))
    message = (
        f"a GPU has too little memory ({shorten(reason)}): the training restarts from its last checkpoint with "
        f"{lowered.describe(job.kind)} (was {json.dumps(lowered.was)})"
    )
    sys.stderr.write(f"rollouts: {message}\n")
    with EventLog(directory.events, attempt=attempt_number()) as events:
        events.write("less_memory", setting=lowered.setting, was=lowered.was, now=lowered.now, message=message)
    return FULL_GPU_CODE


def describe_full_gpu(job: Job, reason: str, tried: Sequence[str] = ()) -> str:
    """An error message about a full GPU, with the settings that lower the memory that the job needs.

    Args:
        tried: settings that the run already lowered by itself, as assignments.
    """
    from rollouts_core.checks.resource_needs import find_remedies  # only this function needs it

    remedies = find_remedies(job.kind, job.training) if isinstance(job, TrainingJob) else []
    advice = [*remedies, "end other programs on that GPU", "use more or larger GPUs"]
    already = f", also after the run set {' and '.join(tried)}" if tried else ""
    return (
        f"a GPU has too little memory ({shorten(reason)}){already}: {', '.join(advice[:-1])}, or {advice[-1]}; then "
        "start again"
    )


def shorten(reason: str) -> str:
    """The first sentences of torch's error text, which is a paragraph long."""
    return ". ".join(reason.split(". ")[:3]).rstrip(".")


def _fail(directory: RunDirectory, message: str, *, code: int = USER_ERROR_CODE) -> int:
    """Report a failure on stderr and in events.jsonl; returns the exit code."""
    sys.stderr.write(f"rollouts: {message}\n")
    if is_follower():
        return code
    # Writing the event fails if the disk is full.
    with contextlib.suppress(OSError), EventLog(directory.events, attempt=attempt_number()) as events:
        events.write("failed", message=message)
    return code


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rollouts_core",
        description=ABOUT_JOBS,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND", title="kinds of jobs")
    for kind, (purpose, details) in JOB_KINDS.items():
        sub = kinds.add_parser(kind, help=purpose, description=f"{purpose} {details}")
        sub.add_argument(
            "job", type=Path, metavar="job.json", help="the job's description; its folder is the run directory"
        )
    return parser


if __name__ == "__main__":
    ensure_utf8()
    gc.disable()  # imports leave no garbage, and garbage collection would take a fifth of their time
    if is_launched():
        run_worker(main)
    sys.exit(main())
