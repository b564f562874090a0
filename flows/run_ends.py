"""Note in the store how a run's process ended, until Prefect knows the end.

A process reports its end to Prefect as its last step. If the server is unreachable for longer than Prefect's client
tries, the run would stay Running for ever, or become Crashed although it completed. lost_runs.py then sets the noted
state.

Not here: killed processes, which note nothing, and are found by their free locks (infra/ledger.py).
"""

# No postponed annotations: a served run gets the flow by value, without this module's names to resolve them.

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
"""Folder in a store, with a file for each run whose end Prefect may not know."""
FlowP = ParamSpec("FlowP")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """The state with which a run's process ended."""

    type: str
    name: str
    message: str
    ended_at: float
    """Seconds since 1970."""

    def state(self) -> State:
        """The end as a state of Prefect."""
        return State(type=StateType(self.type), name=self.name, message=self.message)


def note_end(store: Path, run_id: str, state: State) -> None:
    """Note the end of a run."""
    (store / FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
    end = RunEnd(type=state.type.value, name=state.name or "", message=state.message or "", ended_at=time.time())
    write_json(store / FOLDER / run_id, asdict(end))


def forget_end(store: Path, run_id: str) -> None:
    """Delete the noted end of a run, because Prefect knows the end or the run starts again."""
    (store / FOLDER / run_id).unlink(missing_ok=True)


def read_end(store: Path, run_id: str) -> RunEnd | None:
    """The noted end of a run (None without a note, or if its file cannot be read)."""
    try:
        return RunEnd(**json.loads((store / FOLDER / run_id).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def read_ends(store: Path, *, older_than_s: float) -> dict[str, RunEnd]:
    """The noted ends that are at least `older_than_s` old, by the ids of their runs."""
    kept = {path.name: read_end(store, path.name) for path in (store / FOLDER).glob("*-*-*-*-*")}
    now = time.time()
    return {run_id: end for run_id, end in kept.items() if end is not None and now - end.ended_at >= older_than_s}


@contextmanager
def known_tool(store: Path) -> Iterator[None]:
    """While the block runs, keep the server, and hold the lock of a living run, which a killed process releases."""
    with held_server(), Ledger(store / LEDGER_FILE) as ledger, ledger.living_run(str(flow_run.id)):
        yield


def with_noted_end(flow_function: Callable[FlowP, ResultT]) -> Callable[FlowP, ResultT]:
    """Decorate a flow's function, so that it notes how the run ended, in the `store` that one of its arguments
    names."""

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
            note_end(store, run_id, State(type=StateType.CRASHED, message="its process was told to end"))
            raise
        except Pause:  # the run is suspended, and receivers get a notification
            recall_states(run_id)
            raise
        note_end(store, run_id, result if isinstance(result, State) else State(type=StateType.COMPLETED))
        recall_states(run_id)
        return result

    return run_and_note
