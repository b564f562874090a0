"""The state of a store's serving process: whether the process runs, its deployments, and its Prefect server.

Not here: starting and ending this process (up.py), its code (serving.py).
"""

from __future__ import annotations

import fcntl
import json
from dataclasses import dataclass
from pathlib import Path

from rollouts.flows.own_server.lend import ServerAddress, ServerError, named_server, named_url, running_server
from rollouts.flows.store import DEFAULT_GPU_SLOTS
from rollouts.infra.locks import is_locked
from rollouts.infra.process_identity import ProcessIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The process that starts the runs of a store's deployments."""

    pid: int
    process: ProcessIdentity
    """Tells whether `pid` is a process of this machine. Several containers may share the store."""
    since: float
    """Seconds since 1970."""
    deployments: dict[str, str]
    """Digest of each served deployment, by the deployment's name."""
    gpu_slots: int = DEFAULT_GPU_SLOTS
    """Maximum number of concurrent runs."""
    named_url: str | None = None
    """The value of PREFECT_API_URL in the process. Empty: the process uses the store's own server. None: unknown,
    because an earlier version wrote the file."""


def find_server(store: Path) -> tuple[ServerAddress | None, str]:
    """The Prefect server that commands for this store use (None if no server answers), and a sentence about it."""
    try:
        address = named_server(store) if named_url() else running_server(store)
    except ServerError as error:
        return None, str(error)
    return address, address.ui_url if address else "none: rollouts up starts one"


def find_serving(store: Path) -> Serving | None:
    """The serving process of the store (None if the process does not run or is not ready yet)."""
    home = store.resolve() / "prefect"
    try:
        state = json.loads((home / "serving.json").read_text())
    except (OSError, ValueError):
        return None
    if not is_serving(home):
        return None
    unknown = {"pid": state["pid"], "started": "", "boot_id": "", "namespace": "", "host": "an unknown machine"}
    return Serving(**{**state, "process": ProcessIdentity(**state.get("process", unknown))})


def is_starting(store: Path) -> bool:
    """Whether the serving process of the store runs but is not ready yet."""
    home = store.resolve() / "prefect"
    return home.is_dir() and is_serving(home) and find_serving(store) is None


def served_elsewhere(serving: Serving) -> str:
    """A sentence that names the serving process's Prefect server, if the commands of this terminal use another server
    (otherwise empty)."""
    if serving.named_url in (None, named_url()):
        return ""
    if url := serving.named_url:
        return f"its deployments and runs are at the Prefect server {url}: export PREFECT_API_URL={url}"
    return "its deployments are at the store's own Prefect server, not at PREFECT_API_URL: unset PREFECT_API_URL"


def describe_deployments(serving: Serving) -> str:
    """A phrase with the names of the served deployments.

    The short forms and evaluations of pipelines are mentioned only by the endings of their names.
    """
    from rollouts.flows.deployments import evaluation_name, form_name  # loads all settings
    from rollouts.flows.tools import TOOLS

    others = {ending(name) for name in serving.deployments for ending in (form_name, evaluation_name)} | TOOLS.keys()
    names = [name for name in serving.deployments if name not in others]
    tools = [name for name in serving.deployments if name in TOOLS]
    alike = f"{form_name('NAME')} is NAME by a short form; {evaluation_name('NAME')} scores models as NAME does"
    return f"{', '.join(names)}; {alike}; {', '.join(tools)}"


def describe_gpu_slots(serving: Serving) -> str:
    """A phrase about the maximum number of concurrent runs."""
    return f"{serving.gpu_slots}: number of runs under way at once; further runs are queued"


def is_serving(home: Path) -> bool:
    """Whether the serving process runs. The process holds a lock, which the system releases when the process ends."""
    return is_locked(home / "serving.lock", fcntl.LOCK_EX)
