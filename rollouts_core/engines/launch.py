"""Build and execute the command that serves a model by SGLang or vLLM with the settings that RL needs.

ServeJob -> a copy of the model for vLLM, if its head is tied -> command and environment -> exec
                                        a folder for its sockets -> removed at its end (cleanup_process.py)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from rollouts_core.checks.cpu_formats import describe_slow_bfloat16
from rollouts_core.config import EngineConfig
from rollouts_core.embedded.gate import is_loopback
from rollouts_core.engine_kinds import LaunchPart
from rollouts_core.engines import cleanup_process
from rollouts_core.engines.transfer.checksums import can_be_untied, is_tied, read_config, write_untied
from rollouts_core.engines.transfer.nccl import check_version, nccl_version
from rollouts_core.errors import ConfigError
from rollouts_core.job import ServeJob
from rollouts_core.keys import API_KEY_VARIABLE
from rollouts_core.model.pickled_weights import refuse_pickled_weights

FOREIGN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Environment variables to remove, because they would give the engine's interpreter packages of other versions."""
MAX_SOCKET_PATH = 107
"""Highest number of bytes in the path of a unix socket."""
SOCKET_NAME_BYTES = 64
"""Bytes reserved for socket names below the folder: vLLM uses UUIDs, and multiprocessing adds two levels of names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """The command and the environment that start a server."""

    argv: tuple[str, ...]
    """The command."""
    env: Mapping[str, str]
    """Environment variables to add to the caller's environment."""


def exec_engine(job: ServeJob, run_dir: Path, *, api_key: str = "") -> NoReturn:
    """Replace this process by the server that the job describes. The process id stays the same, so the supervisor still
    controls the server.

    Args:
        api_key: key that every request must have. It may be empty only for a loopback address.

    Raises:
        ConfigError: the interpreter of the engine's environment does not exist or has another NCCL, or `check_host`
            refuses the address.
        CheckpointError: the weights are pickled.
    """
    check_host(job, api_key)
    model_dir = Path(job.model.model.path)
    if not job.model.model.allow_pickle:
        refuse_pickled_weights(model_dir)
    # Models whose head cannot be untied are served unchanged. They answer requests, but the client refuses to load new
    # weights.
    takes_weights = not job.served_name
    if takes_weights and job.engine.spec.needs_own_head and is_tied(model_dir) and can_be_untied(model_dir):
        write_untied(model_dir, run_dir / "served_model")
        model_dir = run_dir / "served_model"
    command = render_launch(job, model_dir, on_gpu=has_gpu())
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}
    if job.engine.weight_transfer == "nccl":
        check_version(command.argv[0], kept, own=nccl_version())
    scratch = _scratch_folder()
    secret = LaunchPart(arguments=(), env={})
    if api_key and job.engine.spec.render_key:
        secret = job.engine.spec.render_key(api_key, Path(scratch["TMPDIR"]))
    try:
        os.execve(command.argv[0], (*command.argv, *secret.arguments), {**kept, **command.env, **scratch, **secret.env})
    except OSError as error:
        raise ConfigError(
            f"rollout.engine.python: {command.argv[0]} cannot be started ({error.strerror}): give the interpreter of "
            f"the environment in which {job.engine.kind} is installed"
        ) from error


def check_host(job: ServeJob, api_key: str) -> None:
    """Raise ConfigError if other machines can reach the address without an API key, or can reach a vLLM that takes new
    weights."""
    if is_loopback(job.host):
        return
    if job.engine.spec.is_local_only and not job.served_name:
        raise ConfigError(
            f"{job.host} is reachable from other machines, but the development endpoints of {job.engine.spec.title} "
            "replace weights and run code without a key: listen on 127.0.0.1, and reach the engine through a tunnel"
        )
    if not api_key:
        raise ConfigError(
            f"{job.host} is reachable from other machines, so the server needs an API key: set {API_KEY_VARIABLE}, or "
            "listen on 127.0.0.1"
        )


def render_launch(job: ServeJob, model_dir: Path, *, on_gpu: bool) -> LaunchCommand:
    """The command that serves `model_dir` with the job's settings.

    Raises:
        ConfigError: the engine must release GPU memory, but does not run on a GPU.
    """
    if job.deployment.colocated and not on_gpu:
        raise ConfigError(
            f"deployment.colocated: this machine has no GPU, and without a GPU {job.engine.kind} cannot free its "
            "memory while the trainer trains: remove the setting"
        )
    python = job.engine.python or sys.executable
    render = job.engine.spec.render
    assert render is not None, "the embedded engine has no command"
    dtype = weights_dtype(job.engine, model_dir, on_gpu=on_gpu)
    part = render(_without_unknown_adapters(job, model_dir), model_dir, dtype=dtype, on_gpu=on_gpu)
    return LaunchCommand(argv=(python, *part.arguments, *job.engine.extra_args), env=part.env)


def _without_unknown_adapters(job: ServeJob, model_dir: Path) -> ServeJob:
    """The job without adapters, if the engine may fail to start with adapters of this model, or else the job itself."""
    known = job.engine.spec.adapted_architectures
    if not job.adapter_rank or not known or (read_config(model_dir).get("architectures") or ["?"])[0] in known:
        return job
    return job.model_copy(update={"adapter_rank": 0})


def _scratch_folder() -> dict[str, str]:
    """Environment variables for the engine's folder of sockets and temporary files, which is removed when the engine
    ends.

    vLLM and SGLang choose new socket names at each start and leave the sockets behind when killed. A small process
    (cleanup_process.py) removes the folder and the engine's shared memory. This process notices the engine's end
    because a pipe to the engine closes.
    """
    inherited = Path(tempfile.gettempdir())
    is_short = len(f"{inherited}/rollouts-engine-12345678/") + SOCKET_NAME_BYTES <= MAX_SOCKET_PATH
    folder = tempfile.mkdtemp(prefix="rollouts-engine-", dir=inherited if is_short else "/tmp")
    closed_at_the_end, held_by_the_engine = os.pipe()
    subprocess.run(
        [sys.executable, "-I", "-S", cleanup_process.__file__, folder],
        stdin=closed_at_the_end,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    os.close(closed_at_the_end)
    os.set_inheritable(held_by_the_engine, True)
    # Compiled kernels go into a folder that is kept, because compiling takes a minute.
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{inherited}/torchinductor_{os.getuid()}"
    return {
        **cleanup_process.scratch_variables(folder),
        "VLLM_RPC_BASE_PATH": folder,
        "TORCHINDUCTOR_CACHE_DIR": compiled,
    }


def has_gpu() -> bool:
    """Whether engines are started on a GPU on this machine."""
    return torch.cuda.is_available()


def weights_dtype(engine: EngineConfig, model_dir: Path, *, on_gpu: bool) -> str:
    """The number format of the engine's weights by name, because checksums are compared in this format.

    A checkpoint of this trainer is float32. On a GPU, SGLang has no kernels for float32, and vLLM's float32 kernels are
    slow.
    """
    if engine.dtype != "auto":
        return engine.dtype
    config = read_config(model_dir)
    stored = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return "bfloat16" if on_gpu and stored == "float32" else stored


def describe_slow_engine(engine: EngineConfig, model_dir: Path) -> str:
    """The warning that SGLang or vLLM computes in a slow number format on this machine, or empty if the format is not
    slow.

    The embedded engine always computes in float32, regardless of the format of the model's files.
    """
    on_gpu = has_gpu()
    if engine.spec.is_own or on_gpu or weights_dtype(engine, model_dir, on_gpu=on_gpu) != "bfloat16":
        return ""
    return describe_slow_bfloat16("rollout.engine.dtype", 'set rollout.engine.dtype = "float32"')
