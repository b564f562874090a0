"""The environment of a job's program: selected inherited variables, and those of the spec."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rollouts.infra.supervisor.processes import JOB_VARIABLE
from rollouts.infra.supervisor.spec import JobSpec

ATTEMPT_VARIABLE = "ROLLOUTS_ATTEMPT"
_INHERITED_NAMES = """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR XDG_CACHE_HOME
    PYTHONPATH ROLLOUTS_CODE_PATH VIRTUAL_ENV
    CONDA_PREFIX LD_LIBRARY_PATH DYLD_LIBRARY_PATH OMP_NUM_THREADS MKL_NUM_THREADS
    HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_ENDPOINT HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE
    http_proxy https_proxy no_proxy all_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY
"""
# PIP_ and UV_: a machine may configure its package index only by variables.
_INHERITED_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "TORCH_", "TRITON_", "PIP_", "UV_")
_FOLDER_LISTS = ("PATH", "PYTHONPATH", "ROLLOUTS_CODE_PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SSL_CERT_DIR")
_PATHS = ("TMPDIR", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


def build_environment(inherited: Mapping[str, str], spec: JobSpec, attempt: int) -> dict[str, str]:
    """Return the program's environment: basic inherited variables, those of the spec, and the job's identity."""
    inherited_names = set(_INHERITED_NAMES.split())
    kept = {
        name: value
        for name, value in inherited.items()
        if name in inherited_names or name.startswith(_INHERITED_PREFIXES)
    }
    return {
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",  # the same behavior in every locale
        "SPT_NOENV": "1",  # otherwise setproctitle, which engines use, overwrites the variable that marks our processes
        **kept,
        **spec.env,
        JOB_VARIABLE: spec.run_dir,
        ATTEMPT_VARIABLE: str(attempt),
    }


def with_absolute_paths(variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the variables that contain relative paths, resolved against `folder`, for a process in another folder.

    An empty part of PYTHONPATH or PATH means the folder itself. Paths that begin with ~ or $ stay as they are.
    """

    def absolute(path: str) -> str:
        return path if path.startswith(("/", "~", "$")) else str(folder / path)

    lists = {
        name: os.pathsep.join(map(absolute, variables[name].split(os.pathsep)))
        for name in _FOLDER_LISTS
        if variables.get(name)
    }
    return lists | {name: absolute(variables[name]) for name in _PATHS if variables.get(name)}
