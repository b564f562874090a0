"""Install the engines of a run in a thread, so that SFT need not wait for an installation of minutes.

    bootstrap: checks and plans ─┬─ sft ─────────────────────┬─ the first stage that needs an engine
                                 └─ install, try one prompt ─┘

The thread has its own sessions, because the stages close theirs. The installation is a job on the node, so an
interrupted run leaves it running, and the next run attaches to it.

Not here: the installation and its checks (engine_installs.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass

from rollouts.infra.node import FurtherNode, Node, NodeSettings, settings_of_engines
from rollouts.infra.providers import open_session
from rollouts.tasks.bootstrap import named_in_errors
from rollouts.tasks.engine_installs import install_planned
from rollouts.tasks.installed_engines import leads_engines
from rollouts.tasks.progress import StageProgress
from rollouts_core.config import Config

WaitForEngines = Callable[[str], None]
"""Returns when the engines are installed. The argument is the name of the waiting stage, for messages. Raises the error
of a failed installation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """A machine of a run that serves engines."""

    node: Node
    """The node as it was provisioned. Its interpreter builds the engine's environment."""
    ready: Node
    """The node as bootstrap returned it."""
    settings: NodeSettings | FurtherNode
    setting: str = ""
    """The setting that names a further machine."""


def engine_places(
    node: Node, ready: Node, settings: NodeSettings, config: Config, *, trains: bool
) -> list[EnginePlace]:
    """The machines of a run that serve installed engines.

    Args:
        node: the provisioned node.
        ready: the node as bootstrap returned it.
        config: the configuration with the chosen engine.
    """
    if config.rollout.engine.spec.is_own:
        return []
    leading = [EnginePlace(node=node, ready=ready, settings=settings)]
    further = zip(node.engine_nodes, ready.engine_nodes, settings_of_engines(settings), strict=True)
    return [
        *(leading if leads_engines(config, node, trains=trains) else []),
        *(EnginePlace(node=a, ready=b, settings=own, setting="node.engine_nodes") for a, b, own in further),
    ]


@contextmanager
def engines_installed_beside(places: Sequence[EnginePlace], config: Config) -> Iterator[WaitForEngines]:
    """Install the planned engines in a thread while the block runs.

    The end of the block does not wait for the thread: a run that reuses all its stages needs no engine.
    """
    if not places:
        yield lambda stage: None
        return
    progress, failures, is_over = StageProgress("engine"), list[Exception](), threading.Event()

    def say(sentence: str) -> None:
        if not is_over.is_set():
            progress.say(sentence)

    def install() -> None:
        try:
            for place in places:
                install_at(place, config, say)
        except Exception as error:  # noqa: BLE001 - `wait` raises every error of the thread
            failures.append(error)
            say("rollout.engine: the installation failed; the run ends when a stage needs the engine")

    # Prefect needs a copy of the context to assign the thread's log lines to the run.
    thread = threading.Thread(target=copy_context().run, args=(install,), name="installation of engines", daemon=True)

    def wait(stage: str) -> None:
        if thread.is_alive():
            say(f"{stage} waits for the installation of the engine")
        thread.join()
        if failures:
            raise failures[0]

    thread.start()
    try:
        yield wait
    finally:
        is_over.set()


def install_at(place: EnginePlace, config: Config, say: Callable[[str], None]) -> None:
    """Install the planned engine on a machine, and test it."""
    ranks = config.deployment.engine_gpu_ranks
    named = named_in_errors(place.setting, place.node) if place.setting else nullcontext()
    with named, open_session(place.node) as session:
        install_planned(session, place.ready, place.settings, config.rollout.engine, gpu_ranks=ranks, say=say)
