"""Pins what is promised when a run breaks anywhere, in any way, and is asked for again: PLACES x WAYS, on real runs.

The run then completes; finished stages are not done again; a job that lives is attached to; what was trained is what an
undisturbed run trained, bit for bit; no machine, process or port is left. Without these tests a retry could train anew,
go on from half a checkpoint, or pay for a second machine, and would still end with a report that looks right.

A case has four factors: where it breaks, how, on which node, and by what it is asked for again. These cases
meet all pairs of their values that make sense, every place in every way among them: first, in few cases, every
place, and all pairs of the other factors and of each of them with whether there is a job at the place. Of these few,
`make test` takes one, `make test-nightly` the others: a case takes half a minute to two. Rented machines are in
test_rented.py, too.

                 exception  job  flow  serving  sigterm  server  node
    provision        x       -    x      x        x        x      x       -: EXCLUDED says why
    bootstrap        x       -    x      x        x        x      x
    sft-early        x       x    x      x        x        x      x
    sft-late         x       x    x      x        x        x      x
    select           x       x    x      x        x        x      x
    engine           x       x    x      x        x        x      x
    rl-step          x       x    x      x        x        x      x
    rl-publish       x       x    x      x        x        x      x
    sync             x       -    x      x        x        x      x
    report           x       -    x      x        x        x      x
"""

from __future__ import annotations

import itertools
import shutil
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollouts.infra.ledger import Ledger
from rollouts.infra.renting.rentals import all_rentals
from rollouts.infra.supervisor.processes import find_processes
from rollouts_core.checkpoint import load_manifest
from rollouts_core.metrics import read_json_lines
from tests.flows import breaking
from tests.flows.breaking import Bench, open_bench
from tests.kit.commands import Rollouts, copy_home, pids_of
from tests.kit.runs import GONE_S, digests_of, events_of, exits_of, last_run, program_of, run_dir
from tests.kit.small_pipeline import write_small_pipeline
from tests.kit.waiting import wait_until

SETTINGS: dict[str, Any] = {  # Any: settings of every type
    "training__sft__num_steps": 120,
    "training__sft__checkpoint_every": 40,
    "training__sft__log_every": 1,
    "training__rl__num_steps": 12,
    "training__rl__checkpoint_every": 4,
}
STAGES = ("sft", "select-sft", "rl", "select-rl", "evaluate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run breaks."""

    reach: Callable[[Bench], None]
    """Return when the run is there, and held there."""
    hold: Callable[[Bench], None] = lambda bench: None
    """What has to be prepared for that before the run begins."""
    fail: Callable[[Bench], None]
    """Make something fail there that is needed."""
    stage: str = ""
    """The stage of the report that is under way; it, and no other, is done by the run."""
    job: str = ""
    """The job that can be killed; an engine is a job, and no stage."""
    is_saved: bool = False
    """Whether the stage has a checkpoint to go on from."""


PLACES = {
    "provision": Place(
        hold=breaking.hold_provision,
        reach=breaking.reach_provision,
        fail=breaking.refuse_machines,
    ),
    "bootstrap": Place(
        hold=breaking.hold_bootstrap,
        reach=breaking.reach_bootstrap,
        fail=breaking.break_probe,
    ),
    "sft-early": Place(
        stage="sft",
        job="sft",
        reach=breaking.reach_step("sft", step=1, is_saved=False),
        fail=breaking.fill_disk("sft"),
    ),
    "sft-late": Place(
        stage="sft",
        job="sft",
        is_saved=True,
        reach=breaking.reach_step("sft", step=45, is_saved=True),
        fail=breaking.fill_disk("sft"),
    ),
    "select": Place(
        stage="select-sft",
        job="select-sft",
        reach=breaking.reach_start("select-sft"),
        fail=breaking.fill_disk("select-sft"),
    ),
    "engine": Place(
        stage="rl",
        job="engine",
        reach=breaking.reach_start("engine"),
        fail=breaking.break_engine,
    ),
    "rl-step": Place(
        stage="rl",
        job="rl",
        is_saved=True,
        reach=breaking.reach_step("rl", step=5, is_saved=True),
        fail=breaking.fill_disk("rl"),
    ),
    "rl-publish": Place(
        stage="rl",
        job="rl",
        is_saved=True,
        reach=partial(breaking.reach_publication, first_step=5, last_step=12),
        fail=breaking.fill_disk("rl"),
    ),
    "sync": Place(reach=breaking.reach_sync, fail=breaking.block_sync),
    "report": Place(reach=breaking.reach_report, fail=breaking.block_report),
}

WAYS = {
    "exception": "something that the place needs fails, and the flow ends by an exception",
    "job": "kill -9 of the job",
    "flow": "kill -9 of the flow's process",
    "serving": "kill -9 of the process that serves, and of its flow",
    "sigterm": "SIGTERM of the flow's process",
    "server": "kill -9 of Prefect's server, which is started again",
    "node": "the machine is taken away, with its processes and files",
}
NODES = ("local", "rented")
AGAINS = ("command", "retry")
"""The same command, or a run of a deployment and Prefect's Retry."""

EXCLUDED = {
    ("provision", "job"): "no job has begun",
    ("bootstrap", "job"): "no job has begun",
    ("sync", "job"): "all jobs have ended",
    ("report", "job"): "all jobs have ended",
    ("provision", "local"): "this machine is there, nothing can break before it is looked at",
    ("node", "local"): "the machine is this one, and the test with it",
    ("serving", "command"): "a run of the command has no process that serves",
}
"""Pairs of values that make no sense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One break."""

    place: str
    way: str
    node: str
    again: str

    @property
    def values(self) -> tuple[str, ...]:
        """Its factors."""
        return (self.place, self.way, self.node, self.again)

    @property
    def needed_by(self) -> str:
        """A stage that is left to do, so that a machine is rented for a place that has none; nothing rents one else."""
        return "evaluate" if self.node == "rented" and not PLACES[self.place].stage else ""

    @property
    def name(self) -> str:
        """What the test is called."""
        return "-".join(self.values)


Pairs = frozenset[tuple[str, ...]]


def is_possible(case: Case) -> bool:
    """True where no pair of its values is excluded."""
    return EXCLUDED.keys().isdisjoint(itertools.combinations(case.values, 2))


def pairs_of(case: Case) -> Pairs:
    """The pairs of values that a case meets."""
    return frozenset(itertools.combinations(case.values, 2))


def pairs_by_job(case: Case) -> Pairs:
    """The same, of the place only whether it has a job; and the place by itself."""
    kind = "a job" if PLACES[case.place].job else "no job"
    return frozenset({*itertools.combinations((kind, *case.values[1:]), 2), (case.place,)})


def cover(cases: Sequence[Case], met_by: Callable[[Case], Pairs], *, known: Iterable[Case] = ()) -> list[Case]:
    """Few cases that meet whatever all meet, but for what the known ones meet: each time the first with most of it."""
    missing = set().union(*map(met_by, cases)).difference(*map(met_by, known))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(met_by(case) & missing))
        missing -= met_by(best)
        chosen.append(best)
    return chosen


POSSIBLE = [
    case
    for place, way, node, again in itertools.product(PLACES, WAYS, NODES, AGAINS)
    if is_possible(case := Case(place=place, way=way, node=node, again=again))
]
FEW = cover(POSSIBLE, pairs_by_job)
REST = cover(POSSIBLE, pairs_of, known=FEW)


def test_every_place_is_broken_in_every_way_and_few_cases_meet_every_place_and_way() -> None:
    every = [*FEW, *REST]
    assert len(every) == len(set(every))
    assert {(case.place, case.way) for case in every} == set(itertools.product(PLACES, WAYS)) - EXCLUDED.keys()
    for factor in ("place", "way", "node", "again"):
        assert {getattr(case, factor) for case in FEW} == {getattr(case, factor) for case in POSSIBLE}
    assert all(is_possible(case) for case in every)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in (*FEW, *REST)])
def test_a_run_that_broke_is_completed_by_asking_again(
    case: Case, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = PLACES[case.place]
    with open_bench(
        tmp_path,
        finished,
        unknown_stages=(*(("engine",) if place.stage == "rl" else ()), *filter(None, [place.stage or case.needed_by])),
        is_served=case.again == "retry",
        is_rented=case.node == "rented",
        settings=SETTINGS,
        monkeypatch=monkeypatch,
    ) as bench:
        place.hold(bench)
        bench.start()
        place.reach(bench)
        is_left = break_run(bench, place, case.way)
        attaches = is_left and place.job == place.stage != ""
        if not bench.is_complete():
            bench.mend()
            if not attaches:
                bench.let_go()
            bench.again()
            if attaches:
                bench.wait(lambda: f"{place.stage:<14} attached to the running job" in bench.said(), "the attachment")
                bench.let_go()
            bench.wait_until_over()
        assert bench.is_complete(), bench.said()[-4000:]
        check_stages(bench, case, has_attached=attaches)
        check_results(bench, finished)
        bench.leave_server()
        check_nothing_is_left(bench)


def break_run(bench: Bench, place: Place, way: str) -> bool:
    """Break the run and return when it is over; True where that left its job alive, which is then held still."""
    match way:
        case "flow" | "sigterm":
            bench.kill_flow(signal.SIGKILL if way == "flow" else signal.SIGTERM)
            return True
        case "serving":
            bench.kill_serving_and_flow()
            return True
        case "exception":
            place.fail(bench)
        case "job":
            bench.kill(program_of(bench.directory(place.job)))
        case "server":
            bench.restart_server()
        case "node":
            bench.lose_node()
    bench.let_go()
    bench.wait_until_over()
    assert (way, place.job) == ("job", "engine") or way in ("server", "node") or not bench.is_complete(), (
        "nothing broke"
    )
    return False


# ── what is promised ──


def check_stages(bench: Bench, case: Case, *, has_attached: bool) -> None:
    """Only what was under way was done, and no more of it than had to be."""
    place = PLACES[case.place]
    how = {entry["stage"]: entry["how"] for entry in last_run(bench.rollouts)["stages"]}
    done = {place.stage: "attached" if has_attached else "ran"} if place.stage else {}
    if case.needed_by:
        by_whom = how.pop(case.needed_by)
        assert by_whom == "ran" or (by_whom == "reused" and case.place in ("sync", "report")), (
            "it was done before those"
        )
    assert how == dict.fromkeys(set(STAGES) - {case.needed_by}, "reused") | done
    if not place.stage:
        return
    directory = run_dir(bench.rollouts, place.stage)
    # A machine that is gone has taken its records along; a job that was ended by the flow's end has one.
    breaks_job = case.way in ("exception", "job") and place.job == place.stage
    if case.way != "node":
        assert exits_of(directory) == (["exit-1.json", "exit-2.json"] if breaks_job else ["exit-1.json"])
        assert len(events_of(directory, "started")) == (2 if breaks_job else 1)
    resumed = [event["step"] for event in events_of(directory, "resumed")]
    if breaks_job and place.is_saved:
        every = SETTINGS[f"training__{place.stage}__checkpoint_every"]
        trained = max(line["step"] for line in read_json_lines(directory / "metrics.jsonl") if line["attempt"] == 1)
        # The one of the last step may not have been whole yet. On a full disk there is no event that would say so.
        assert resumed in ([trained - trained % every], [trained - every])
    if has_attached or not place.is_saved:
        assert resumed == []


def check_results(bench: Bench, finished: Path) -> None:
    """What came out is what came out of the run that nobody disturbed."""
    undisturbed = Rollouts(finished / "store", finished / "output.txt")
    for stage in ("sft", "rl"):
        assert digests_of(run_dir(bench.rollouts, stage)) == digests_of(run_dir(undisturbed, stage)), stage
    digests = [load_manifest(of_last_run(each) / "checkpoint").files for each in (bench.rollouts, undisturbed)]
    assert digests[0] == digests[1]
    assert (of_last_run(bench.rollouts) / "report.html").is_file()


def of_last_run(rollouts: Rollouts) -> Path:
    """The folder of the results of the run that ended last."""
    return max(rollouts.store.glob("runs/*/run.json"), key=lambda path: path.stat().st_mtime).parent


def check_nothing_is_left(bench: Bench) -> None:
    """No machine is rented and no process lives, once nobody serves any more."""
    if bench.is_served:
        code, output = bench.rollouts.run("down")
        assert code == 0, output
    assert bench.fake.alive() == []
    with Ledger(bench.rollouts.store / "ledger.db") as ledger:
        assert [rental for rental in all_rentals(ledger) if not rental.state.is_over] == []
    for root in (bench.rollouts.store, bench.machine):
        if root is not None:
            wait_until(lambda: not pids_of(root), what=f"the end of {pids_of(root)}", timeout_s=GONE_S)  # noqa: B023
    # An engine's port says nothing: once it is free, another test's server may be given it.
    for stage in bench.node_root.glob("stages/*"):
        assert find_processes(str(stage)) == []


# ── the run that nobody disturbed ──


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, prefect_home: Path, quickstart_files: Path) -> Path:
    """A folder with the store of a finished run, and beside it, in `small`, the files of that run."""
    folder = tmp_path_factory.mktemp("finished")
    config = write_small_pipeline(folder / "small", **SETTINGS)
    copy_home(prefect_home, folder / "store")
    shutil.copytree(quickstart_files, folder / "store/quickstart")
    rollouts = Rollouts(folder / "store", folder / "output.txt")
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    assert len(events_of(run_dir(rollouts, "rl"), "weights_published")) > 5, "hardly anything was trained"
    for arguments in (("up", str(config)), ("down",)):  # makes what the first `up` of a store makes
        code, output = rollouts.run(*arguments)
        assert code == 0, output
    wait_until(lambda: not pids_of(folder / "store"), what="the end of the server")
    return folder
