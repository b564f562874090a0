"""The process that serves the deployments of a store: whether it lives, what it serves, and at which server.

Not here: starting and ending it (up.py), the process (serving.py).
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
    """The process that serves the deployments of a store."""

    pid: int
    process: ProcessIdentity
    """Tells whether `pid` is a process of this machine: several containers may share the store."""
    since: float
    """Seconds since 1970."""
    deployments: dict[str, str]
    """Digests by name."""
    gpu_slots: int = DEFAULT_GPU_SLOTS
    """So many runs go at once."""
    named_url: str | None = None
    """The server of PREFECT_API_URL that the process uses. Empty: the store's own. None: an earlier version wrote the
    file."""


def find_server(store: Path) -> tuple[ServerAddress | None, str]:
    """The Prefect server that commands for this store use (None if no server answers), and a sentence about it."""
    try:
        address = named_server(store) if named_url() else running_server(store)
    except ServerError as error:
        return None, str(error)
    return address, address.ui_url if address else "none: rollouts up starts one"


def find_serving(store: Path) -> Serving | None:
    """The process that serves the store's deployments (None if no such process lives or it is not ready)."""
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
    """Whether the serving process of the store lives but is not ready yet."""
    home = store.resolve() / "prefect"
    return home.is_dir() and is_serving(home) and find_serving(store) is None


def served_elsewhere(serving: Serving) -> str:
    """The other server at which the deployments are served, if commands of this terminal use another one."""
    if serving.named_url in (None, named_url()):
        return ""
    if url := serving.named_url:
        return f"its deployments are served, and its runs shown, at {url}: export PREFECT_API_URL={url}"
    return "its deployments are served at a server of its own, and PREFECT_API_URL names another: unset PREFECT_API_URL"


def describe_deployments(serving: Serving) -> str:
    """The names of the served deployments. Short forms and evaluations, one per pipeline, are summed up by their common
    endings."""
    from rollouts.flows.deployments import evaluation_name, form_name  # loads all settings
    from rollouts.flows.tools import TOOLS

    others = {ending(name) for name in serving.deployments for ending in (form_name, evaluation_name)} | TOOLS.keys()
    names = [name for name in serving.deployments if name not in others]
    tools = [name for name in serving.deployments if name in TOOLS]
    alike = f"{form_name('NAME')} is NAME by a short form; {evaluation_name('NAME')} scores models as NAME does"
    return f"{', '.join(names)}; {alike}; {', '.join(tools)}"


def describe_gpu_slots(serving: Serving) -> str:
    """A phrase about the number of runs that may be under way at once."""
    return f"{serving.gpu_slots}: as many runs go at once, further ones are queued"


def is_serving(home: Path) -> bool:
    """Whether the process lives: a killed one holds no lock, whatever its file says."""
    return is_locked(home / "serving.lock", fcntl.LOCK_EX)
