"""Run a job in several processes with torchrun, and return their exit code. Only `launch` imports torch, which takes
seconds.

    python -m rollouts_core sft job.json                      the launcher, which runs torchrun's agent
        +-- RANK=0 python -m rollouts_core sft job.json       the leader
        +-- RANK=1 python -m rollouts_core sft job.json       a follower, which dies with the launcher

If a process fails, torchrun ends the other processes. A signal to the launcher reaches all processes. With several
machines, each machine has a launcher (`multi_node.py`).
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

from rollouts_core.backends.multi_node import Meeting, Unit, network_variables
from rollouts_core.backends.store_tunnel import LOOPBACK
from rollouts_core.job import Job, TrainingJob
from rollouts_core.less_memory import FULL_GPU_CODE

SHUTDOWN_S = 8
"""Seconds between SIGTERM and SIGKILL with several machines. A process waiting for a lost machine may need SIGKILL."""
LAUNCHER = -1
"""Key of the launcher's own exit code in mappings from rank to exit code."""


def num_processes(job: Job) -> int:
    """Number of processes that run a job on this machine: `num_trainer_processes` for training, else 1."""
    return job.deployment.num_trainer_processes if isinstance(job, TrainingJob) else 1


def needs_launcher(job: Job) -> bool:
    """True if several processes run the job, on one machine or several."""
    return num_processes(job) > 1 or (isinstance(job, TrainingJob) and bool(job.further_trainers))


def is_launched() -> bool:
    """True if torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_follower() -> bool:
    """True if torchrun started this process with a rank above 0. Only rank 0, the leader, writes files."""
    return is_launched() and os.environ["RANK"] != "0"


def launch(
    arguments: Sequence[str],
    *,
    num_processes: int,
    log_dir: Path,
    join: Callable[[], AbstractContextManager[Unit | None]] = nullcontext,
) -> int:
    """Run `python -m rollouts_core arguments` in several processes on this machine, and return the exit code.

    If a signal killed a rank, the launcher kills itself with the same signal, so that its caller sees the cause, for
    example a lack of memory. Otherwise the result is the exit code of a failed rank, or 0.

    Args:
        log_dir: folder for torchrun's own files. `launch` removes the folder at its end, and at its start.
        join: returns a context that connects this machine to the training's other machines.

    Raises:
        MachineLostError: another machine did not connect, or its connection was lost.
    """
    import torch.distributed.run  # noqa: F401 - imported before other machines wait, because it takes seconds

    with _removed_before_and_after(log_dir), join() as unit, _meeting_of(unit) as meeting:
        where = agent_arguments(meeting)
        shutdown = {} if unit is None else {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S)}
        # Environment variables that the user has set take precedence.
        os.environ.update(network_variables(meeting.own_address) | shutdown | dict(os.environ))
        program = ["--no-python", sys.executable, "-P", "-u", "-m", "rollouts_core", *arguments]
        exit_codes = _run_agent([*where, "--nproc-per-node", str(num_processes), "--log-dir", str(log_dir), *program])
        code = choose_exit_code(exit_codes) if exit_codes else 0
        if unit is not None:
            code = unit.conclude(code)
    return _end_like(code, exit_codes)


@contextmanager
def _meeting_of(unit: Unit | None) -> Iterator[Meeting]:
    """Yield the address of the store through which torchrun's agents and ranks find each other."""
    if unit is not None:
        yield unit.meeting
        return
    from rollouts_core.backends.process_group import open_store

    store, port = open_store(LOOPBACK, multi_tenant=True)
    yield Meeting(num_nodes=1, node_rank=0, store_port=port, own_address=LOOPBACK)
    del store  # the store closes with its last reference, so this variable keeps it open until here


def agent_arguments(meeting: Meeting) -> list[str]:
    """torchrun's arguments with the address of the store through which its agents and ranks find each other.

    The leader's agent uses the store that the launcher opened. A store opened by torchrun would listen on all network
    interfaces. With `--standalone`, the agent would also unpickle whatever other processes write to the store.
    """
    size = ["--nnodes", str(meeting.num_nodes), "--node-rank", str(meeting.node_rank)]
    place = ["--master-addr", LOOPBACK, "--master-port", str(meeting.store_port)]
    return [*size, *place, "--local-addr", meeting.own_address]


def _run_agent(arguments: Sequence[str]) -> dict[int, int]:
    """Run torchrun's agent until all processes ended, and return the exit codes of failed processes by rank."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # else its messages follow the job's last line
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
    """Choose the exit code that best explains the end of a job. It is negative for a signal.

    Code 2 (the user must change something) comes first, then a full GPU, then a signal, because these three often make
    other processes fail. SIGTERM comes last, because torchrun sends it to the remaining processes.

    Args:
        exit_codes: exit codes of failed processes by rank.
    """
    codes = list(exit_codes.values())
    own = [code for code in codes if code not in (-signal.SIGTERM, 128 + signal.SIGTERM)] or codes
    telling = next((code for code in (2, FULL_GPU_CODE) if code in own), None)
    return telling or (min(own) if min(own) < 0 else own[0])


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
    """Run the program of a worker process and exit with its code, without the interpreter's normal shutdown.

    The normal shutdown sometimes crashes in threads of torch's connections. With torch 2.13 and gloo, one in eight
    finished jobs crashed this way.
    """
    code = 1
    try:
        code = program()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - the last frame of the process: an unprinted error would be lost
        traceback.print_exc()
    # Threads of unclosed pools end only when `threading._shutdown` notifies them.
    threading._shutdown()  # type: ignore[attr-defined]  # the interpreter's shutdown calls it too
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
