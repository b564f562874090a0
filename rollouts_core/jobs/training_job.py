"""Code that SFT and RL jobs share: processes, threads, signals, and parts of result.json.

The jobs are in sft_job.py and rl_job.py. The communication between processes is in backends/ranks.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import FrameType
from typing import Any

import torch

from rollouts_core.backends.launch import is_follower, is_launched
from rollouts_core.backends.protocol import TrainingBackend
from rollouts_core.backends.ranks import Ranks, join_ranks
from rollouts_core.checkpoint import list_checkpoints, load_manifest, newest_step
from rollouts_core.checks.cpu_formats import describe_slow_training
from rollouts_core.config.messages import first_line
from rollouts_core.errors import FullGPUError
from rollouts_core.job import TrainingJob
from rollouts_core.less_memory import is_gpu_full
from rollouts_core.metrics import EventLog, read_last_lines
from rollouts_core.model.loading import silence_progress_bars
from rollouts_core.roll_back import ROLLED_BACK, RollBack
from rollouts_core.run_directory import RunDirectory, attempt_number
from rollouts_core.stopping import STOPPED_CODE, StoppedError, TrainingStop, describe_stop
from rollouts_core.system.gpu_use import gpus_in_use, sampled_gpu_use
from rollouts_core.system.processors import count_processors
from rollouts_core.system.provenance import describe_process

JAX_THREADS = "PJRT_NPROC"
"""Environment variable with the size of JAX's thread pools, which JAX reads when it starts. XLA has no flag for this
size."""


def run_training_job(
    job: TrainingJob,
    directory: RunDirectory,
    *,
    create: Callable[[Ranks | None], TrainingBackend],
    train: Callable[[EventLog, Ranks | None, TrainingStop], Coroutine[Any, Any, None]],
) -> None:
    """Run a training in this process, which may be one of several processes that torchrun started.

    Only the first process runs the training loop and writes files. The other processes execute the commands of the
    first process.

    Args:
        create: creates the backend; with several processes, this rank's part of the backend.
        train: the training loop, for the first process. SIGTERM stops it.
    """
    silence_progress_bars()
    _set_num_threads(job)
    if is_follower():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the leader handles the signal, and ends the followers
    device = "cpu" if job.deployment.shares_cpu else ""
    with join_ranks(device=device) if is_launched() else nullcontext() as ranks:
        if ranks is not None and not ranks.is_leader:
            backend = create(ranks)
            with full_gpu_told():
                _follow(backend)
            return
        attempt = attempt_number()
        sampled = sampled_gpu_use(directory.gpu_use, gpus_in_use(job), attempt=attempt)
        with EventLog(directory.events, attempt=attempt) as events, sampled:
            events.write("started", kind=job.kind, pid=os.getpid(), **describe_process())
            events.warn(describe_slow_training(job.kind, job.training.policy, job.deployment))
            stop = TrainingStop(
                told=directory.stop_state,
                granted=directory.stop_request,
                attempt=attempt,
                can_abandon=ranks is None,
            )
            stop.note_saved(newest_step(directory.checkpoints))
            with stop.watching(partial(write_stop, events)), full_gpu_told(lambda: stop.is_training):
                asyncio.run(until_stopped(train(events, ranks, stop), stop, events))


@contextmanager
def full_gpu_told(is_training: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Raise FullGPUError if a GPU runs out of memory in the `with` block. A smaller micro-batch may then help.

    Args:
        is_training: returns False before the first step. An error before the first step is raised unchanged, because a
            smaller micro-batch does not help while the model is loaded.
    """
    try:
        yield
    except RuntimeError as error:
        if not (is_gpu_full(error) and is_training()):
            raise
        raise FullGPUError(first_line(error)) from error


def _follow(backend: TrainingBackend) -> None:
    """Execute the commands of the first process until its training ends."""
    from rollouts_core.backends.fsdp import FSDPTrainingBackend

    assert isinstance(backend, FSDPTrainingBackend)
    backend.follow()


def _set_num_threads(job: TrainingJob) -> None:
    """Set the number of compute threads of torch, and of JAX if JAX trains. Must be called before JAX starts."""
    torch.set_num_threads(_num_threads(job))
    if job.deployment.trainer_threads and job.training.policy.backend == "jax":  # JAX uses all cores by default
        os.environ[JAX_THREADS] = str(job.deployment.trainer_threads)


def _num_threads(job: TrainingJob) -> int:
    """Number of compute threads of each process of the job on this machine."""
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # from torchrun: processes on this machine
    return job.deployment.trainer_threads or max(1, count_processors() // num_processes)


async def until_stopped(work: Coroutine[Any, Any, None], stop: TrainingStop, events: EventLog) -> None:
    """Run a training. SIGTERM stops it after the current step, or at its next await if no step has started.

    The signal handler raises no exception, because an exception could interrupt any line, such as a thread's start.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def ask(number: int, frame: FrameType | None) -> None:
        if not stop.is_asked and not stop.is_training:  # a second signal must not cancel the cleanup after the first
            loop.call_soon_threadsafe(task.cancel)
        stop.ask()

    previous = signal.signal(signal.SIGTERM, ask)
    try:
        await work
    except asyncio.CancelledError:
        if not stop.is_asked:
            raise
        write_stop(events, stop.saved_step)
        sys.exit(STOPPED_CODE)
    except StoppedError as stopped:
        write_stop(events, stopped.step)
        sys.exit(STOPPED_CODE)
    finally:
        signal.signal(signal.SIGTERM, previous)


def write_stop(events: EventLog, step: int, problem: str = "") -> None:
    """Write the last saved step of a stopped training to stderr and events.jsonl.

    Args:
        problem: why a later step could not be saved; empty without a problem.
    """
    sys.stderr.write(f"rollouts: {describe_stop(step, problem)}\n")
    with suppress(OSError):  # the disk may be full
        events.write("stopped", step=step, **({"problem": problem} if problem else {}))


def describe_training(job: TrainingJob, directory: RunDirectory) -> dict[str, Any]:  # Any: JSON
    """The fields of result.json that SFT and RL share: the checkpoints, or after a rollback only the best one; and if a
    user ended the training early, the last step and the run that requested the end."""
    checkpoints = describe_checkpoints(directory)
    if roll_back := _find_roll_back(directory):
        best = [each for each in checkpoints if each["step"] == roll_back.step]
        return {"checkpoints": best, ROLLED_BACK: roll_back.model_dump(), "warning": roll_back.sentence}
    step, num_steps = checkpoints[-1]["step"], job.training.num_steps
    if step == num_steps:
        return {"checkpoints": checkpoints}
    early = {"step": step, "num_steps": num_steps, "asked_by": directory.end_request.read_text(encoding="utf-8")}
    return {"checkpoints": checkpoints, "finished_early": early}


def _find_roll_back(directory: RunDirectory) -> RollBack | None:
    """The rollback that ended the training in this process; None if the training was not rolled back."""
    for event in reversed(read_last_lines(directory.events)):
        if event["event"] == ROLLED_BACK:
            return RollBack.model_validate(event)
        if event["event"] == "started":  # earlier events belong to earlier attempts
            break
    return None


def describe_checkpoints(directory: RunDirectory) -> list[dict[str, Any]]:  # Any: JSON
    """Name, step and digest of every checkpoint in a run directory, in order of steps."""
    return [
        {"name": path.name, "step": (manifest := load_manifest(path)).step, "digest": manifest.digest}
        for path in list_checkpoints(directory.checkpoints)
    ]
