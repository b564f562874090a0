"""A run of the small pipeline that is held at a place, broken there in some way, and asked for again.

Not here: which places and ways there are, and what is expected (test_retry_matrix.py). Nothing in the product knows of
this: a place is seen in files, processes and the provider's list, and held by stopping processes or by the node's
interpreter, which is a script of ours that can wait or refuse.

    start -> reach (a place, held) -> break (a way) -> over? -> mend -> again -> let go -> Completed
"""

from __future__ import annotations

import getpass
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from rollouts.flows.commands.serving_state import find_serving
from rollouts.flows.own_server.lend import ServerAddress, local_server
from rollouts_core.metrics import read_json_lines
from tests.infra.fake_cloud import KEY
from tests.infra.fake_runpod import FakeRunPod
from tests.infra.ssh_server import SSHServer, running_server
from tests.kit.commands import Rollouts, pids_of
from tests.kit.runs import events_of, exits_of, program_of
from tests.kit.serving import ASK_S, flows_of, set_state, state_of, trigger, up
from tests.kit.small_pipeline import small_settings

POLL_S = 0.002
"""What is to be held at a place lasts some hundredths of a second there."""
UNASKED_S = 20.0
"""An engine that nobody has asked anything for so long is not asked any more."""
PLACE_TIMEOUT_S = 180.0
END_TIMEOUT_S = 240.0
LEASE_TOUCH_S = 2.0
NEVER_S = 1e9
OVER = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")

INTERPRETER = """#!/bin/sh
# The interpreter of the node: waits, or refuses, where a file says so.
case "$*" in
  *node_probe*) door=probe ;;
  *"rollouts_core serve "*) door=engine ;;
  *) door=none ;;
esac
while [ -e "{doors}/$door.wait" ]; do : > "{doors}/$door.waiting"; sleep 0.05; done
if [ -e "{doors}/$door.refuse" ]; then echo "this interpreter is broken" >&2; exit 1; fi
exec "{python}" "$@"
"""


class Bench:
    """A store, a node, a run: what a case breaks, and what it finds afterwards."""

    def __init__(
        self,
        rollouts: Rollouts,
        config: Path,
        doors: Path,
        *,
        is_served: bool,
        machine: Path | None,
        fake: FakeRunPod,
        sshd: SSHServer | None,
    ) -> None:
        self.rollouts, self.config, self.doors, self.is_served = rollouts, config, doors, is_served
        self.fake, self.sshd, self.machine = fake, sshd, machine
        self.process: subprocess.Popen[bytes] | None = None
        self.run_id = ""
        self._frozen: set[int] = set()
        self._touched_at = 0.0
        self._server: AbstractContextManager[ServerAddress] | None = None

    # ── the run ──

    def start(self) -> None:
        """Ask for the run; by `up` and a deployment, or by a command."""
        self.join_server()
        if self.is_served:
            up(self.rollouts, str(self.config))
            self.run_id = trigger(self.rollouts, self.config.stem)
        else:
            self.process = self.rollouts.start("run", str(self.config))

    def again(self) -> None:
        """Ask again: Prefect's Retry, or the same command."""
        assert self.is_over(), "it still runs"
        if self.is_served:
            set_state(self.rollouts, self.run_id, "SCHEDULED", name="AwaitingRetry")
        else:
            self.process = self.rollouts.start("run", str(self.config))

    def is_over(self) -> bool:
        """True when the run has ended, one way or another."""
        if self.is_served:
            return state_of(self.rollouts, self.run_id) in OVER
        assert self.process is not None
        return self.process.poll() is not None

    def is_complete(self) -> bool:
        """True when it has ended well."""
        if self.is_served:
            return state_of(self.rollouts, self.run_id) == "COMPLETED"
        assert self.process is not None
        return self.process.poll() == 0

    def said(self) -> str:
        """What the run, or the process that serves, has said since it was started."""
        log = self.rollouts.store / "prefect/serving.log"
        if not self.is_served:
            return self.rollouts.said()
        return log.read_text(errors="replace") if log.exists() else ""

    def wait(self, is_true: Callable[[], bool], what: str, *, timeout_s: float = PLACE_TIMEOUT_S) -> None:
        """Return when the condition holds. Leases of engines go on meanwhile: who renews them may be held."""
        deadline = time.monotonic() + timeout_s
        while not is_true():
            assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}:\n{self.said()[-3000:]}"
            if time.monotonic() - self._touched_at > LEASE_TOUCH_S:
                self._touched_at = time.monotonic()
                for lease in self.node_root.glob("stages/engine-*/.job/lease"):
                    with suppress(FileNotFoundError):
                        os.utime(lease)
                ended = self.process is not None and self.process.poll() is not None
                assert not ended or is_true(), f"the run ended before {what}:\n{self.said()[-3000:]}"
            time.sleep(POLL_S)

    def wait_until_over(self) -> None:
        """Return when the run has ended."""
        deadline = time.monotonic() + END_TIMEOUT_S
        while not self.is_over():
            assert time.monotonic() < deadline, f"it does not end:\n{self.said()[-3000:]}"
            time.sleep(ASK_S)

    # ── the node ──

    @property
    def node_root(self) -> Path:
        """Where run directories lie on the node."""
        return self.machine or self.rollouts.store

    def directory(self, stage: str) -> Path:
        """The stage's only run directory on the node; a path that does not exist as long as there is none."""
        return next(iter(self.node_root.glob(f"stages/{stage}-*")), self.node_root / "stages" / f"{stage}-none")

    def output(self) -> Path | None:
        """The folder of the run's results, from the moment on that something is about to be copied there."""
        return next(iter(self.rollouts.store.glob("runs/*-*")), None)

    def flow_pid(self) -> int:
        """The process of the flow."""
        if not self.is_served:
            assert self.process is not None
            return self.process.pid
        serving = find_serving(self.rollouts.store)
        assert serving is not None, "nobody serves"
        (pid,) = flows_of(serving.pid)
        return pid

    # ── holding ──

    def freeze(self, pid: int) -> None:
        """Stop a process until `let_go`."""
        os.kill(pid, signal.SIGSTOP)
        self._frozen.add(pid)

    def thaw(self, pid: int) -> None:
        """Let a process go on."""
        self._frozen.discard(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def let_go(self) -> None:
        """End whatever holds the run at its place."""
        for pid in tuple(self._frozen):
            self.thaw(pid)
        for door in self.doors.glob("*.wait*"):
            door.unlink()
        self.fake.faults.boot_s = 0.0

    # ── breaking ──

    def kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a process, which gets it although it may be held."""
        os.kill(pid, number)
        if pid in self._frozen:
            self.thaw(pid)

    def kill_flow(self, number: signal.Signals) -> None:
        """End the flow's process by a signal, and return when the run counts as over."""
        self.kill(self.flow_pid(), number)
        self.wait_until_over()

    def kill_serving_and_flow(self) -> None:
        """kill -9 of the process that serves and of its flow, then `up`; returns when the run counts as lost."""
        serving = find_serving(self.rollouts.store)
        assert serving is not None
        for pid in (self.flow_pid(), serving.pid):
            self.kill(pid)
        up(self.rollouts)
        self.wait_until_over()

    def join_server(self) -> None:
        """Join the store's server, which is started where none runs."""
        self._server = local_server(self.rollouts.store)
        self._server.__enter__()

    def leave_server(self) -> None:
        """Let go of the server."""
        if self._server is not None:
            self._server.__exit__(None, None, None)
            self._server = None

    def restart_server(self) -> None:
        """kill -9 of Prefect's server, then start one."""
        os.kill(json.loads((self.rollouts.store / "prefect/server.json").read_text())["pid"], signal.SIGKILL)
        self.leave_server()
        self.join_server()

    def lose_node(self) -> None:
        """The provider takes the machine away: its processes, connections and files."""
        assert self.sshd is not None and self.machine is not None
        [rented] = self.fake.alive()
        rented.status = "TERMINATED"
        self.sshd.signal_sessions(signal.SIGKILL)
        for pid in pids_of(self.machine):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.machine.exists():
            self.machine.rename(self.machine.with_name(f"lost-{rented.id}"))

    def fill_disk_of(self, pid: int) -> None:
        """Whatever the process writes into a file from now on fails."""
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    def break_interpreter(self, door: str) -> None:
        """The node's interpreter refuses what comes to this door."""
        (self.doors / f"{door}.refuse").touch()

    def mend(self) -> None:
        """Undo what was broken on purpose; processes that were killed stay dead."""
        for door in self.doors.glob("*.refuse"):
            door.unlink()
        self.fake.faults.no_capacity = 0
        for path in self.rollouts.store.glob("runs/*"):
            if path.is_file():  # in the place of the results' folder
                path.unlink()
            elif (path / "report.html").is_dir():
                (path / "report.html").rmdir()


# ── places ──


def reach_provision(bench: Bench) -> None:
    """The machine is rented and boots for ever."""
    bench.wait(lambda: bool(bench.fake.alive()), "a rented machine")


def hold_provision(bench: Bench) -> None:
    bench.fake.faults.boot_s = NEVER_S


def hold_bootstrap(bench: Bench) -> None:
    (bench.doors / "probe.wait").touch()


def reach_bootstrap(bench: Bench) -> None:
    """The node is being looked at."""
    bench.wait((bench.doors / "probe.waiting").exists, "the probe of the node")


def reach_start(stage: str) -> Callable[[Bench], None]:
    """The stage's program has begun."""

    def reach(bench: Bench) -> None:
        bench.wait(lambda: bool(events_of(bench.directory(stage), "started")), f"the start of {stage}")
        bench.freeze(program_of(bench.directory(stage)))

    return reach


def reach_step(stage: str, *, step: int, is_saved: bool) -> Callable[[Bench], None]:
    """The training is past a step, and has a checkpoint or none."""

    def reach(bench: Bench) -> None:
        def has_checkpoint() -> bool:
            return bool(events_of(bench.directory(stage), "checkpoint"))

        def is_there() -> bool:
            steps = [line["step"] for line in read_json_lines(bench.directory(stage) / "metrics.jsonl")]
            return max(steps, default=0) >= step and (has_checkpoint() or not is_saved)  # it is written beside steps

        bench.wait(is_there, f"step {step} of {stage}")
        bench.freeze(program_of(bench.directory(stage)))
        assert has_checkpoint() is is_saved, "the step was chosen badly"
        assert exits_of(bench.directory(stage)) == [], "it ended before it could be held"

    return reach


def reach_publication(bench: Bench, *, first_step: int, last_step: int) -> None:
    """RL has sent the weights of a step to its engine, which has not answered.

    The engine is stopped when the samples of a step are complete. What it is asked next is either to take the weights
    of that step, or, where it was stopped too late, to sample: then the step is in the metrics. Where it had read the
    request already, nobody asks it anything more, and the next step is tried.
    """
    for step in range(first_step, last_step + 1):
        bench.wait(lambda: (bench.directory("rl") / f"samples/step_{step:06d}.jsonl").exists(), f"step {step}")  # noqa: B023
        rl, engine = bench.directory("rl"), bench.directory("engine")
        port = int(json.loads((engine / "job.json").read_text())["port"])
        bench.freeze(program_of(engine))
        late = time.monotonic() + UNASKED_S
        bench.wait(lambda: has_unread_requests(port) or exits_of(rl) != [] or time.monotonic() > late, "a request")  # noqa: B023
        is_met = has_unread_requests(port) and exits_of(rl) == []
        if is_met and step not in {line["step"] for line in read_json_lines(rl / "metrics.jsonl")}:
            bench.freeze(program_of(rl))
            bench.thaw(program_of(engine))
            return
        bench.thaw(program_of(engine))
    raise AssertionError(f"no publication was met in steps {first_step} to {last_step}")


def has_unread_requests(port: int) -> bool:
    """True when the listener of a loopback port has bytes before it that it has not read."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    established = [row for row in rows if row[3] == "01"]
    return any(int(row[1].partition(":")[2], 16) == port and int(row[4].partition(":")[2], 16) for row in established)


def reach_sync(bench: Bench) -> None:
    """The results are about to be copied, or are being copied."""
    bench.wait(lambda: bench.output() is not None, "the folder of the results")
    bench.freeze(bench.flow_pid())
    output = bench.output()
    assert output is not None and not (output / "checkpoint").exists(), "they were copied before it could be held"


def reach_report(bench: Bench) -> None:
    """The results are there, their report is not."""
    bench.wait(lambda: any(bench.rollouts.store.glob("runs/*/checkpoint")), "the copied results")
    bench.freeze(bench.flow_pid())
    output = bench.output()
    assert output is not None and not (output / "report.html").exists(), "it was written before it could be held"


# ── what fails at a place ──


def refuse_machines(bench: Bench) -> None:
    """The machine fails while it boots, and nobody has another."""
    bench.fake.faults.no_capacity = 1000
    for machine in bench.fake.alive():
        machine.status = "TERMINATED"


def break_probe(bench: Bench) -> None:
    bench.break_interpreter("probe")


def break_engine(bench: Bench) -> None:
    """Its program dies, and cannot be started any more."""
    bench.break_interpreter("engine")
    bench.kill(program_of(bench.directory("engine")))


def fill_disk(stage: str) -> Callable[[Bench], None]:
    """The disk is full for the stage's program."""
    return lambda bench: bench.fill_disk_of(program_of(bench.directory(stage)))


def block_sync(bench: Bench) -> None:
    """A file lies where the folder of the results belongs."""
    output = bench.output()
    assert output is not None
    shutil.rmtree(output)
    output.touch()


def block_report(bench: Bench) -> None:
    """A directory lies where the report belongs."""
    output = bench.output()
    assert output is not None
    (output / "report.html").mkdir()


# ── benches ──


@contextmanager
def open_bench(
    folder: Path,
    finished: Path,
    *,
    unknown_stages: tuple[str, ...],
    is_served: bool,
    is_rented: bool,
    settings: dict[str, Any],  # Any: settings of every type
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Bench]:
    """A bench over a copy of a finished store in which some stages are to be done; whatever is left of it is ended.

    Args:
        finished: a folder with `store`, and with `small`, the files that its run was made of.
        unknown_stages: those that the store is to know nothing of.
    """
    store, small, doors, machine = folder / "store", folder / "small", folder / "doors", folder / "machine"
    shutil.copytree(
        finished / "store", store, ignore=shutil.ignore_patterns("*.lock", "server.*", "ledger.db*", "runs")
    )
    shutil.copytree(finished / "small", small)
    for stage in unknown_stages:
        for path in store.glob(f"stages/{stage}-*"):
            shutil.rmtree(path)
        for path in store.glob(f"prefect/results/{stage}-*"):
            path.unlink()
    doors.mkdir()
    python = doors / "python"
    python.write_text(INTERPRETER.format(doors=doors, python=sys.executable))
    python.chmod(0o755)
    with ExitStack() as open_:
        fake = FakeRunPod()
        sshd = open_.enter_context(running_server(folder / "sshd")) if is_rented else None
        node: dict[str, Any] = {"kind": "local", "min_free_gb": 0.1, "python": str(python)}  # Any: settings
        if sshd is not None:
            fake.port, fake.user = sshd.port, getpass.getuser()
            rent(monkeypatch, open_.enter_context(fake.served()))
            node = rented_node(sshd, machine, python=str(python))
        config = small / "small.toml"
        config.write_text(tomli_w.dumps(small_settings(**settings, node=node)))
        bench = Bench(
            Rollouts(store, folder / "output.txt"),
            config,
            doors,
            is_served=is_served,
            machine=machine if is_rented else None,
            fake=fake,
            sshd=sshd,
        )
        try:
            yield bench
        finally:
            end_everything(bench)


def rent(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Set the variables by which RunPod is at this address, and no other provider has a key."""
    for name in ("LAMBDA_API_KEY", "PRIME_API_KEY", "SHADEFORM_API_KEY", "VAST_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RUNPOD_API_KEY", KEY)
    monkeypatch.setenv("RUNPOD_API_URL", url)


def rented_node(server: SSHServer, root: Path, *, python: str = sys.executable) -> dict[str, Any]:  # Any: settings
    """Settings of a node that is rented, and is this machine by SSH."""
    return rented_settings(server.client_key_file, root, python=python)


def rented_settings(key_file: Path, root: Path, *, python: str = sys.executable) -> dict[str, Any]:  # Any: settings
    """Settings of a node that is rented, with all that it needs."""
    return {
        "kind": "rented",
        "query": {"gpu_types": ["H100"], "max_usd_per_gpu_hour": 3.0},
        "max_usd": 5.0,
        "key_file": str(key_file),
        "root": str(root),
        "python": python,
        "install": "nothing",
        "min_free_gb": 0.1,
    }


def end_everything(bench: Bench) -> None:
    """Nothing of a bench goes on, whatever became of its test."""
    bench.let_go()
    bench.leave_server()
    for root in (bench.rollouts.store, bench.machine):
        for pid in pids_of(root) if root else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
