"""Pins that a run on a rented machine ends as any other, and that nothing is rented afterwards, however it ends.

Without it a stage that fails, a Ctrl-C or a kill costs money until somebody looks. RunPod is a stand-in; the machine
that it rents out is this one, by a real SSH server.
"""

from __future__ import annotations

import getpass
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rollouts.infra.ledger import Ledger
from rollouts.infra.offers import GPUQuery, MachineSpec
from rollouts.infra.providers.clouds import open_account
from rollouts.infra.renting.rentals import RentalState, all_rentals, change_rental
from rollouts_core.checkpoint import list_checkpoints, verify_checkpoint
from tests.flows.breaking import rent, rented_node
from tests.infra.fake_cloud import KEY
from tests.infra.fake_runpod import FakeRunPod
from tests.infra.ssh_server import SSHServer, running_server
from tests.kit.commands import Rollouts, pids_of
from tests.kit.runs import assert_last_step_is_saved, events_of, paused, program_of
from tests.kit.serving import logs_of, set_state, state_of, trigger, up, wait_for_state
from tests.kit.small_pipeline import write_small_pipeline
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SFT = {"mode": "sft", "training__sft__checkpoint_every": 10, "training__sft__log_every": 1}
LONG = SFT | {"training__sft__num_steps": 100_000}
OF_RENTING = ("query", "max_usd")
SHORT = SFT | {"training__sft__num_steps": 20}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SSHServer]:
    with running_server(tmp_path / "sshd") as server:
        yield server


@pytest.fixture
def fake(server: SSHServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRunPod]:
    fake = FakeRunPod()
    fake.port, fake.user = server.port, getpass.getuser()
    with fake.served() as url:
        rent(monkeypatch, url)
        yield fake


def node_settings(server: SSHServer, root: Path) -> dict[str, Any]:
    """A node of which only a failed run keeps the machine, and not where it is lost or no longer paid for."""
    setup = f"mkdir -p '{root}' && echo once >> '{root}/setup.txt'"
    return {**rented_node(server, root), "setup": [setup], "keep_on_failure_minutes": 60}


def start_run(
    rollouts: Rollouts, node: dict[str, Any], folder: Path, *, num_steps: int
) -> tuple[Path, subprocess.Popen[bytes]]:
    """The configuration of a run that trains on such a node, and its process."""
    config = write_small_pipeline(folder, node=node, **(SHORT | {"training__sft__num_steps": num_steps}))
    return config, rollouts.start("run", str(config))


def train_until_checkpoint(
    rollouts: Rollouts, server: SSHServer, folder: Path
) -> tuple[dict[str, Any], subprocess.Popen[bytes]]:
    """The settings of the node, and the process of a run that trains there for long and has a checkpoint."""
    settings = node_settings(server, folder / "machine")
    _, process = start_run(rollouts, settings, folder / "small", num_steps=100_000)
    wait_for_checkpoint(folder / "machine")
    return settings, process


def rows(rollouts: Rollouts) -> list[RentalState]:
    with Ledger(rollouts.store / "ledger.db") as ledger:
        return [rental.state for rental in all_rentals(ledger)]


@pytest.mark.promise
def test_a_run_rents_a_machine_works_on_it_and_gives_it_back(
    rollouts: Rollouts, server: SSHServer, fake: FakeRunPod, tmp_path: Path
) -> None:
    root = tmp_path / "machine"
    fake.faults.boot_s, fake.faults.drop_creates, fake.faults.end_lag_s = 1.0, 1, 1.0
    config = write_small_pipeline(tmp_path / "small", node=node_settings(server, root), **SHORT)
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    assert fake.alive() == [] and len(fake.machines) == 1 and rows(rollouts) == [RentalState.GONE]
    (run,) = (rollouts.store / "runs").iterdir()
    verify_checkpoint(run / "checkpoint")
    assert (root / "setup.txt").read_text() == "once\n" and list(root.glob("stages/sft-*/result.json"))
    assert KEY not in output and "is the cheapest of" in output and "5 USD (node.max_usd) last " in output
    assert "the machines of the run cost 0." in output
    spent = json.loads((run / "run.json").read_text())["spent"]
    assert spent["is_final"] and spent["total_usd"] > spent["outside_stages_usd"] > 0
    assert "Start, set-up and the rest" in (run / "report.html").read_text()
    for path in [*rollouts.store.rglob("*"), *root.rglob("*")]:
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path

    # Scores that the run has: there is nothing to do on a machine.
    code, output = rollouts.run("evaluate", str(config), run.name, "--against", "base")
    assert (code, "every stage is finished: nothing is rented" in output) == (0, True), output
    assert len(fake.machines) == 1


@pytest.mark.matrix
def test_a_rented_machine_whose_gpus_torch_cannot_use_is_given_back_before_anything_is_trained(
    rollouts: Rollouts, server: SSHServer, fake: FakeRunPod, tmp_path: Path
) -> None:
    settings = SHORT | {"deployment__trainer_processes": 0}
    config = write_small_pipeline(tmp_path / "small", node=rented_node(server, tmp_path / "machine"), **settings)
    code, output = rollouts.run("run", str(config))
    assert code == 2 and "the training needs a GPU that torch can use, torch " in output, output
    assert len(fake.machines) == 1 and fake.alive() == [] and not (tmp_path / "machine" / "stages").exists()


@pytest.mark.matrix
def test_a_run_on_a_machine_that_somebody_rented_leaves_it_there(
    rollouts: Rollouts, server: SSHServer, fake: FakeRunPod, tmp_path: Path
) -> None:
    with open_account("runpod") as cloud:
        mine = cloud.create(cloud.search(GPUQuery())[0], MachineSpec(name="mine", public_key="", disk_gb=10))
    node = {key: value for key, value in rented_node(server, tmp_path / "machine").items() if key not in OF_RENTING}
    node |= {"kind": "instance", "instance": f"runpod:{mine}"}
    code, output = rollouts.run("run", str(write_small_pipeline(tmp_path / "small", node=node, **SHORT)))
    assert code == 0, output
    assert f"runpod:{mine} is yours and costs 2.99 USD/h: it keeps running after this run" in output
    assert f"runpod:{mine} was rented by you, and keeps running" in output and "gave back" not in output
    assert [each.id for each in fake.alive()] == [mine]
    assert rows(rollouts) == [] and list((tmp_path / "machine").glob("stages/sft-*/result.json"))
    [run] = (rollouts.store / "runs").iterdir()
    verify_checkpoint(run / "checkpoint")


@pytest.mark.matrix
def test_ctrl_c_fetches_the_last_checkpoint_and_gives_the_machine_back(
    rollouts: Rollouts, server: SSHServer, fake: FakeRunPod, tmp_path: Path
) -> None:
    _, process = train_until_checkpoint(rollouts, server, tmp_path)
    assert len(fake.alive()) == 1
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130, rollouts.said()
    assert fake.alive() == [] and rows(rollouts) == [RentalState.GONE]
    assert_last_step_is_here(rollouts, tmp_path / "machine", said=rollouts.said())


@pytest.mark.matrix
def test_after_a_second_ctrl_c_the_last_step_is_fetched_and_the_machine_given_back_in_the_background(
    rollouts: Rollouts, server: SSHServer, fake: FakeRunPod, tmp_path: Path
) -> None:
    _, process = train_until_checkpoint(rollouts, server, tmp_path)
    [there] = (tmp_path / "machine").glob("stages/sft-*")
    with paused(program_of(there)):
        process.send_signal(signal.SIGINT)
        rollouts.wait_until_said(f"waits until the job in {there} has saved its last step", process)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130, rollouts.said()
        assert len(fake.alive()) == 1 and not (there / "exit-1.json").exists()
    wait_until(lambda: fake.alive() == [], what="the end of the machine", timeout_s=120.0)
    wait_until(lambda: rows(rollouts) == [RentalState.GONE], what="the ledger's row")
    wait_until(lambda: pids_of(rollouts.store) == {}, what="the end of the process in the background")
    assert "Traceback" not in rollouts.said()
    [said] = [path.read_text() for path in (rollouts.store / "runs").glob("*-release.txt")]
    saved = json.loads((there / "exit-1.json").read_text())["saved_step"]
    [here] = (rollouts.store / "stages").glob("sft-*")
    assert verify_checkpoint(list_checkpoints(here / "checkpoints")[-1]).step == saved, said
    assert "Traceback" not in said and "gave back" in said, said


@pytest.mark.matrix
def test_ctrl_c_while_the_machine_is_being_made_gives_it_back_and_says_so(
    rollouts: Rollouts, server: SSHServer, fake: FakeRunPod, tmp_path: Path
) -> None:
    fake.faults.hang_creates = 1
    _, process = start_run(rollouts, node_settings(server, tmp_path / "machine"), tmp_path / "small", num_steps=20)
    wait_until(lambda: fake.alive() != [] or process.poll() is not None, what="the machine", every_s=0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130, rollouts.said()
    assert fake.alive() == [] and len(fake.machines) == 1 and rows(rollouts) == [RentalState.GONE]
    [machine] = fake.machines.values()
    assert f"gave back {machine.name} at runpod" in rollouts.said()


@pytest.mark.matrix
def test_before_the_money_is_used_up_the_last_checkpoint_is_fetched_and_the_machine_given_back(
    rollouts: Rollouts, server: SSHServer, fake: FakeRunPod, tmp_path: Path
) -> None:
    _, process = train_until_checkpoint(rollouts, server, tmp_path)
    with Ledger(rollouts.store / "ledger.db") as ledger:
        [rental] = all_rentals(ledger)
        change_rental(ledger, rental, expires_at=time.time() + 15)
    assert process.wait(120) == 2, rollouts.said()
    assert fake.alive() == [] and rows(rollouts) == [RentalState.GONE]
    assert_last_step_is_here(rollouts, tmp_path / "machine", said=rollouts.said())
    last_line = rollouts.said().strip().splitlines()[-1]
    assert last_line.startswith(f"rollouts: the work on {rental.name} was ended, because its hours (node.max_hours)")


@pytest.mark.matrix
def test_of_a_killed_run_that_is_cancelled_the_last_checkpoint_is_fetched_with_the_credentials_of_the_run(
    rollouts: Rollouts, server: SSHServer, fake: FakeRunPod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = server.client_key_file.read_text()
    monkeypatch.setenv("TEAM_SSH_KEY", key)
    code, output = rollouts.run("credentials", "cancelled-team", "TEAM_SSH_KEY", "RUNPOD_API_KEY")
    assert code == 0, output
    for name in ("TEAM_SSH_KEY", "RUNPOD_API_KEY"):
        monkeypatch.delenv(name)
    node = node_settings(server, tmp_path / "machine") | {"key_file": "", "key_variable": "TEAM_SSH_KEY"}
    run = {"name": "small", "credentials": "cancelled-team", "store": str(rollouts.store)}
    config = write_small_pipeline(tmp_path / "small", node=node, run=run, **LONG)
    process = rollouts.start("run", str(config))
    wait_for_checkpoint(tmp_path / "machine")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with Ledger(rollouts.store / "ledger.db") as ledger:
        [lease], [rental] = ledger.leases(), all_rentals(ledger)
    assert rental.credentials == "cancelled-team" and len(fake.alive()) == 1
    code, said = rollouts.run("cancel", "small")
    assert code == 0, said
    assert fake.alive() == [] and len(fake.machines) == 1 and rows(rollouts) == [RentalState.GONE]
    assert_last_step_is_here(rollouts, tmp_path / "machine", said=said)
    code, said = rollouts.run("cancel", lease.run_id)
    assert code == 2 and "is Cancelled and holds no jobs or machines" in said
    assert len(fake.machines) == 1, "nothing is rented for this"
    for path in [*rollouts.store.rglob("*"), *tmp_path.glob("machine/**/*"), rollouts.output]:
        content = path.read_bytes() if path.is_file() else b""
        assert KEY.encode() not in content and key.splitlines()[3].encode() not in content, path


def wait_for_checkpoint(machine: Path) -> None:
    wait_until(
        lambda: any(machine.glob("stages/sft-*/checkpoints/step_*/manifest.json")), what="a checkpoint", timeout_s=400
    )


def assert_last_checkpoint_is_here(rollouts: Rollouts, machine: Path, *, said: str) -> None:
    [there] = machine.glob("stages/sft-*/checkpoints")
    [here] = rollouts.store.glob("stages/sft-*/checkpoints")
    last = list_checkpoints(there)[-1]
    assert list_checkpoints(here)[-1].name == last.name
    verify_checkpoint(here / last.name)
    assert f"{last.name} is the last checkpoint in {here.parent}" in said


def assert_last_step_is_here(rollouts: Rollouts, machine: Path, *, said: str) -> None:
    assert_last_checkpoint_is_here(rollouts, machine, said=said)
    [there] = machine.glob("stages/sft-*")
    assert_last_step_is_saved(there)


def kill_the_job(machine: Path) -> None:
    """Let the run fail: the program of its SFT dies on the machine."""
    [stage] = machine.glob("stages/sft-*")
    os.kill(program_of(stage), signal.SIGKILL)


@pytest.mark.matrix
def test_a_run_that_fails_keeps_its_machine_until_a_reaper_ends_it_in_time(
    rollouts: Rollouts, server: SSHServer, fake: FakeRunPod, tmp_path: Path
) -> None:
    _, process = train_until_checkpoint(rollouts, server, tmp_path)
    kill_the_job(tmp_path / "machine")
    assert process.wait(120) == 1, rollouts.said()
    assert_last_checkpoint_is_here(rollouts, tmp_path / "machine", said=rollouts.said())
    assert pids_of(tmp_path / "machine" / "stages") == {}
    with Ledger(rollouts.store / "ledger.db") as ledger:
        [rental] = all_rentals(ledger)
        assert rental.is_kept and ledger.leases() == [] and ledger.has_died(rental.run_id)
        said = rollouts.said()
        until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(rental.ends_at))
        assert f"keeps {rental.name} until {until}, because the run failed, at {rental.usd_per_hour:.2f} USD/h" in said
        assert f"`rollouts nodes release {rental.name}` ends it now" in said and "USD so far" in said
        code, output = rollouts.run("reap")
        assert code == 0 and "0 ended, 1 kept" in output and len(fake.alive()) == 1
        change_rental(ledger, rental, kept_until=time.time() - 1)
    code, output = rollouts.run("reap", "--spare")
    assert code == 0 and "1 ended, 0 kept" in output and fake.alive() == []


@pytest.mark.matrix
def test_the_machine_that_a_failed_run_keeps_is_given_back_by_cancel(
    rollouts: Rollouts, server: SSHServer, fake: FakeRunPod, tmp_path: Path
) -> None:
    _, process = train_until_checkpoint(rollouts, server, tmp_path)
    kill_the_job(tmp_path / "machine")
    assert process.wait(120) == 1, rollouts.said()
    assert len(fake.alive()) == 1
    code, output = rollouts.run("cancel", "small")
    assert code == 0, output
    assert "gave back provision node" in output and fake.alive() == [] and rows(rollouts) == [RentalState.GONE]


@pytest.mark.matrix
def test_a_run_that_is_killed_while_it_fails_leaves_its_machine_to_the_next_start(
    rollouts: Rollouts, server: SSHServer, fake: FakeRunPod, tmp_path: Path
) -> None:
    config, process = start_run(
        rollouts, node_settings(server, tmp_path / "machine"), tmp_path / "small", num_steps=300
    )
    wait_for_checkpoint(tmp_path / "machine")
    kill_the_job(tmp_path / "machine")
    with Ledger(rollouts.store / "ledger.db") as ledger:
        # From here on what is there is fetched, then the keeping is written down.
        wait_until(lambda: ledger.leases() == [], what="the end of the run's claims", every_s=0.002)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        [rental] = all_rentals(ledger)
        assert rental.state is RentalState.READY and ledger.has_died(rental.run_id)
    code, output = rollouts.run("reap", "--spare")
    assert code == 0 and "0 ended, 1 kept" in output and len(fake.alive()) == 1
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    assert f"reuses {rental.name}" in output and len(fake.machines) == 1 and fake.alive() == []


@pytest.mark.matrix
def test_a_run_whose_stages_are_finished_rents_nothing(
    rollouts: Rollouts, server: SSHServer, fake: FakeRunPod, tmp_path: Path
) -> None:
    config = write_small_pipeline(tmp_path / "small", node=node_settings(server, tmp_path / "machine"), **SHORT)
    for said in ("the machines of the run cost 0.", "every stage is finished: nothing is rented"):
        code, output = rollouts.run("run", str(config))
        assert (code, said in output) == (0, True), output
    assert len(fake.machines) == 1 and fake.alive() == []
    hows = []
    for run in (rollouts.store / "runs").iterdir():
        verify_checkpoint(run / "checkpoint")
        hows.append([stage["how"] for stage in json.loads((run / "run.json").read_text())["stages"]])
    assert sorted(hows) == [["ran"] * 3, ["reused"] * 3]


@pytest.mark.matrix
def test_retry_of_a_run_that_failed_goes_on_with_the_machine_that_it_kept(
    served: Rollouts,
    server: SSHServer,
    fake: FakeRunPod,
    tmp_path: Path,
) -> None:
    machine, steps = tmp_path / "machine", {"training__sft__num_steps": 300}
    config = write_small_pipeline(tmp_path / "small", node=node_settings(server, machine), **(SHORT | steps))
    up(served, str(config))
    run_id = trigger(served, config.stem)
    wait_for_checkpoint(machine)
    kill_the_job(machine)
    wait_for_state(served, run_id, "FAILED")
    with Ledger(served.store / "ledger.db") as ledger:
        wait_until(lambda: ledger.has_died(run_id), what="the end of the flow's process")
        assert [rental.is_kept for rental in all_rentals(ledger)] == [True] and len(fake.alive()) == 1
    set_state(served, run_id, "SCHEDULED", name="AwaitingRetry")
    wait_until(lambda: state_of(served, run_id) in ("COMPLETED", "FAILED"), what="the run again", timeout_s=400)
    assert state_of(served, run_id) == "COMPLETED", logs_of(served, run_id)
    with Ledger(served.store / "ledger.db") as ledger:
        [rental] = all_rentals(ledger)
    assert (rental.run_id, rental.state, rental.kept_until) == (run_id, RentalState.GONE, None)
    assert len(fake.machines) == 1 and fake.alive() == []
    assert (machine / "setup.txt").read_text() == "once\n"
    assert len(list(machine.glob("stages/sft-*/exit-*.json"))) == 2


@pytest.mark.matrix
def test_a_run_that_was_killed_goes_on_with_its_machine(
    rollouts: Rollouts, server: SSHServer, fake: FakeRunPod, tmp_path: Path
) -> None:
    settings = node_settings(server, tmp_path / "machine")
    config, process = start_run(rollouts, settings, tmp_path / "small", num_steps=100)
    rollouts.wait_until_said("sft            started", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert len(fake.alive()) == 1
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    assert "reuses rollouts-" in output and len(fake.machines) == 1
    assert len(list((tmp_path / "machine").glob("stages/sft-*/exit-*.json"))) == 1, "the job was attached to"
    assert fake.alive() == [] and (tmp_path / "machine" / "setup.txt").read_text() == "once\n"


@pytest.mark.matrix
def test_a_machine_that_is_taken_away_ends_the_run_and_the_next_start_goes_on_elsewhere_from_what_was_fetched(
    rollouts: Rollouts, server: SSHServer, fake: FakeRunPod, tmp_path: Path
) -> None:
    root = tmp_path / "machine"
    config, process = start_run(rollouts, node_settings(server, root), tmp_path / "small", num_steps=400)
    wait_for_checkpoint(root)
    [there] = root.glob("stages/sft-*")
    os.kill(program_of(there), signal.SIGSTOP)
    here = rollouts.store / "stages" / there.name / "checkpoints"
    wait_until(lambda: any(here.glob("step_*/manifest.json")), what="the checkpoint here", timeout_s=60)
    time.sleep(1.0)  # more of them may be on their way
    [machine] = fake.alive()
    machine.status = "TERMINATED"
    server.signal_sessions(signal.SIGKILL)
    for pid in pids_of(root):
        with suppress(ProcessLookupError):  # the kernel ends a job with its supervisor
            os.kill(pid, signal.SIGKILL)
    root.rename(tmp_path / "lost")
    assert process.wait(240) == 1, rollouts.said()
    assert "took it away" in rollouts.said()
    assert rows(rollouts) == [RentalState.GONE]
    last_step = int(list_checkpoints(here)[-1].name.removeprefix("step_"))
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    assert [event["step"] for event in events_of(root / "stages" / there.name, "resumed")] == [last_step]
    assert len(fake.machines) == 2 and rows(rollouts) == [RentalState.GONE, RentalState.GONE]
