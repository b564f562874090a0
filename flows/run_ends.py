"""Save the final state of a run in the store, in case Prefect's server does not receive it.

A run's process reports its final state to Prefect as its last step. If the server is unreachable for longer than
Prefect's client retries, the run would stay Running forever, or become Crashed although it completed. lost_runs.py
then sets the saved state.

Not here: killed processes, which save nothing. A released lock shows that a process is gone (infra/ledger.py).
"""

# No `from __future__ import annotations`: Prefect pickles the flow by value, without the names to resolve annotations.

import inspect
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import Pause, TerminationSignal
from prefect.runtime import flow_run

from rollouts.flows.earlier_states import recall_states
from rollouts.flows.own_server.lend import held_server
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts_core.config.messages import first_line
from rollouts_core.system.files import write_json

FOLDER = "ledger.ends"
"""Folder in a store, with a file for each run whose final state Prefect may not know."""
FlowP = ParamSpec("FlowP")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """The final state of a run, as its process determined it."""

    type: str
    name: str
    message: str
    ended_at: float
    """Seconds since 1970."""

    def state(self) -> State:
        """Return a state of Prefect with these values."""
        return State(type=StateType(self.type), name=self.name, message=self.message)


def note_end(store: Path, run_id: str, state: State) -> None:
    """Save the final state of a run in the store."""
    (store / FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
    end = RunEnd(type=state.type.value, name=state.name or "", message=state.message or "", ended_at=time.time())
    write_json(store / FOLDER / run_id, asdict(end))


def forget_end(store: Path, run_id: str) -> None:
    """Delete the saved final state of a run, because Prefect knows it or the run starts again."""
    (store / FOLDER / run_id).unlink(missing_ok=True)


def read_end(store: Path, run_id: str) -> RunEnd | None:
    """The saved final state of a run (None if there is no readable file)."""
    try:
        return RunEnd(**json.loads((store / FOLDER / run_id).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def read_ends(store: Path, *, older_than_s: float) -> dict[str, RunEnd]:
    """The final states that were saved at least `older_than_s` ago, by run id."""
    kept = {path.name: read_end(store, path.name) for path in (store / FOLDER).glob("*-*-*-*-*")}
    now = time.time()
    return {run_id: end for run_id, end in kept.items() if end is not None and now - end.ended_at >= older_than_s}


@contextmanager
def known_tool(store: Path) -> Iterator[None]:
    """While the block runs, keep the server running, and hold the lock that shows that this run's process lives."""
    with held_server(), Ledger(store / LEDGER_FILE) as ledger, ledger.living_run(str(flow_run.id)):
        yield


def with_noted_end(flow_function: Callable[FlowP, ResultT]) -> Callable[FlowP, ResultT]:
    """Decorate a flow function: save the final state of its run in the store.

    One argument of the flow function must have an attribute `store` with the store's path.
    """

    @wraps(flow_function)
    def run_and_note(*args: FlowP.args, **kwargs: FlowP.kwargs) -> ResultT:
        given = inspect.signature(flow_function).bind(*args, **kwargs).arguments.values()
        store = Path(next(each.store for each in given if hasattr(each, "store"))).resolve()
        run_id = str(flow_run.id or "")
        if not run_id:
            return flow_function(*args, **kwargs)
        forget_end(store, run_id)
        try:
            result = flow_function(*args, **kwargs)
        except Exception as error:
            note_end(store, run_id, State(type=StateType.FAILED, message=first_line(error)))
            recall_states(run_id)
            raise
        except (KeyboardInterrupt, TerminationSignal):
            note_end(store, run_id, State(type=StateType.CRASHED, message="its process received a signal to end"))
            raise
        except Pause:  # the run is suspended: recall its states, so that the notification is sent without delay
            recall_states(run_id)
            raise
        note_end(store, run_id, result if isinstance(result, State) else State(type=StateType.COMPLETED))
        recall_states(run_id)
        return result

    return run_and_note
