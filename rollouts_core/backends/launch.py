"""Start a job as several processes with torchrun, and end as they ended.

Not here: what the processes do (sft_job.py, rl_job.py), how they talk (ranks.py). Nothing here imports torch before it
is needed.

    python -m rollouts_core sft job.json                      the launcher, with torchrun's agent in it
        +-- RANK=0 python -m rollouts_core sft job.json       the leader
        +-- RANK=1 python -m rollouts_core sft job.json       a follower, which dies with the launcher

A process that fails ends the others. A signal to the launcher reaches all. Of several machines each has a launcher
(unit.py).
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import NoReturn

from rollouts_core.backends.store_tunnel import LOOPBACK
from rollouts_core.backends.unit import Meeting, Unit, network_variables
from rollouts_core.job import Job, TrainingJob

SHUTDOWN_S = 8
"""With several machines: between SIGTERM and SIGKILL, since a process may wait for one that is gone."""
LAUNCHER = -1
"""Stands for the launcher itself among ranks."""


def num_processes(job: Job) -> int:
    """How many processes of this machine do a job: several where it trains and its deployment says so."""
    return job.deployment.num_trainer_processes if isinstance(job, TrainingJob) else 1


def needs_launcher(job: Job) -> bool:
    """Whether several processes do a job, of this machine or of several."""
    return num_processes(job) > 1 or (isinstance(job, TrainingJob) and bool(job.further_trainers))


def is_launched() -> bool:
    """Whether torchrun started this process, alone or as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_follower() -> bool:
    """Whether this process writes no files, because another one leads."""
    return is_launched() and os.environ["RANK"] != "0"


def launch(
    arguments: Sequence[str],
    *,
    num_processes: int,
    log_dir: Path,
    join: Callable[[], AbstractContextManager[Unit | None]] = nullcontext,
) -> int:
    """Run `python -m rollouts_core arguments` as several processes of this machine; returns the exit code.

    Args:
        log_dir: folder of torchrun's own files while they run; what a launcher left there that was killed is removed.
        join: how this machine joins others whose processes belong to these.

    The exit code is that of a process that failed. Where a signal killed one, this process dies of the same signal, so
    that who started it learns of it, for instance that memory ran out.

    Raises:
        MachineLostError: another machine did not come, or is gone.
    """
    import torch.distributed.run  # noqa: F401 - it takes seconds, in which others would wait for this machine

    with _removed_before_and_after(log_dir), join() as unit, _meeting_of(unit) as meeting:
        where = agent_arguments(meeting)
        shutdown = {} if unit is None else {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S)}
        os.environ.update(network_variables(meeting.own_address) | shutdown | dict(os.environ))  # what is set stays
        program = ["--no-python", sys.executable, "-P", "-u", "-m", "rollouts_core", *arguments]
        exit_codes = _run_agent([*where, "--nproc-per-node", str(num_processes), "--log-dir", str(log_dir), *program])
        code = choose_exit_code(exit_codes) if exit_codes else 0
        if unit is not None:
            unit.conclude(code)
    return _end_like(code, exit_codes)


@contextmanager
def _meeting_of(unit: Unit | None) -> Iterator[Meeting]:
    """Where this machine's agent meets those of the others, or its own ranks if it trains alone."""
    if unit is not None:
        yield unit.meeting
        return
    from rollouts_core.backends.process_group import open_store

    store, port = open_store(LOOPBACK, multi_tenant=True)
    yield Meeting(num_nodes=1, node_rank=0, store_port=port, own_address=LOOPBACK)
    del store  # until here: it ends with its last reference


def agent_arguments(meeting: Meeting) -> list[str]:
    """The arguments that tell torchrun where its agents and ranks meet.

    The leader's agent finds the store that this process has opened at the port. torchrun's own store would listen on
    all interfaces, and with `--standalone` the agent would unpickle whatever is written there.
    """
    size = ["--nnodes", str(meeting.num_nodes), "--node-rank", str(meeting.node_rank)]
    place = ["--master-addr", LOOPBACK, "--master-port", str(meeting.store_port)]
    return [*size, *place, "--local-addr", meeting.own_address]


def _run_agent(arguments: Sequence[str]) -> dict[int, int]:
    """Run torchrun to its end; returns the exit codes of processes that failed, by rank."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # it would talk after the job's last line
    try:
        run.run(run.parse_args(list(arguments)))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    except SignalException as error:
        return {LAUNCHER: 128 + int(error.sigval)}
    return {}


@contextmanager
def _removed_before_and_after(folder: Path) -> Iterator[None]:
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def choose_exit_code(exit_codes: Mapping[int, int]) -> int:
    """The exit code that says most about why a job ended, negative for a signal.

    One that tells the user to change something comes first, then a signal: the others often fail because of it. SIGTERM
    is what torchrun ends the others with, as early as they had nothing left to do with it.

    Args:
        exit_codes: those of the processes that failed, by rank.
    """
    codes = list(exit_codes.values())
    own = [code for code in codes if code not in (-signal.SIGTERM, 128 + signal.SIGTERM)] or codes
    return next((code for code in own if code == 2), min(own) if min(own) < 0 else own[0])


def _end_like(code: int, exit_codes: Mapping[int, int]) -> int:
    if code >= 0:
        return code
    ranks = ", ".join(str(rank) for rank, other in exit_codes.items() if other == code)
    sys.stderr.write(f"rollouts: rank {ranks} was killed by signal {-code}\n")
    sys.stderr.flush()
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code


def run_worker(program: Callable[[], int]) -> NoReturn:
    """Run a worker's program and end the process with its exit code, without the interpreter's shutdown.

    That shutdown aborts now and then because of threads of torch's connections: torch 2.13 with gloo did so in one of
    eight jobs that had done all their work.
    """
    code = 1
    try:
        code = program()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - the last frame of the process: what it does not print is lost
        traceback.print_exc()
    # This much of the shutdown is wanted: the threads of a pool that nobody closed end only when they are told here.
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter calls it
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
