"""Pins what people may write about a machine to rent, and how one is reached whose address or key changes.

Without it money is spent before a typing error is found, or a stranger's machine is given our data.
"""

from __future__ import annotations

import re
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollouts.flows.form import parse_pipeline
from rollouts.infra.errors import HostKeyError, MachineGoneError, MissingKeyError, NoMachineError, PermanentInfraError
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.node import Node, RentedNode
from rollouts.infra.providers import open_session, provision_node, release_node
from rollouts.infra.providers.rented import ended_when_expired, find_rentable, keep_rented, release_rentals
from rollouts.infra.renting.rentals import RentalState, add_rental, all_rentals, change_rental
from rollouts_core.errors import ConfigError
from tests.infra.fake_runpod import FakeRunPod, runpod_with
from tests.infra.ssh_server import SSHServer, make_key, running_server
from tests.kit.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
DATA = {name: f"/data/{name}.jsonl" for name in ("sft", "prompts", "selection", "heldout")}
GIVEN = {"kind": "rented", "max_usd": 5.0, "python": "/opt/env/bin/python"}


def parse(node: dict[str, Any]) -> RentedNode:
    settings = parse_pipeline({"model": {"path": "/model"}, "data": DATA, "node": node}, Path("a.toml")).node
    assert isinstance(settings, RentedNode)
    return settings


def test_the_examples_are_what_can_be_written() -> None:
    [example] = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "machines.md").read_text(), re.DOTALL)
    assert parse(tomllib.loads(example)["node"]).query.gpu_types == ("H100", "A100")
    preset = (ROOT / "flows/presets/sft_qwen.toml").read_text()
    block = preset[preset.index("#     [node]") : preset.index("\n[node]")]
    commented = "\n".join(line.removeprefix("#").strip() for line in block.splitlines())
    assert parse(tomllib.loads(commented)["node"]).query.max_usd_per_gpu_hour == 1.5


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"max_usd": 0}, "max_usd"),
        ({"query": {"gpu_type": "H100"}}, "gpu_type"),
        ({"query": {"providers": ["moon"]}}, "providers"),
        ({"query": {"max_usd_per_gpu_hour": -1}}, "max_usd_per_gpu_hour"),
        ({"query": {"min_cuda": "twelve"}}, "min_cuda"),
        ({"keep_on_failure_minutes": -1}, "keep_on_failure_minutes"),
        ({"keep_on_failure_minutes": 1441}, "keep_on_failure_minutes"),
        ({"root": "runs"}, "expected a path on the machine"),
        ({"python": "python3"}, "expected the absolute path"),
        ({"hots": 1}, "unknown key node.hots"),
    ],
)
def test_a_misfit_is_one_sentence(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        parse({**GIVEN, **change})


def test_the_money_has_to_be_named() -> None:
    with pytest.raises(ConfigError, match="max_usd is missing"):
        parse({"kind": "rented", "python": "/p"})


@pytest.fixture
def fake(ssh_server: SSHServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRunPod]:
    with runpod_with(ssh_server, monkeypatch) as fake:
        yield fake


def rent(server: SSHServer, tmp_path: Path, run_id: str = "run", **more: Any) -> Node:  # Any: settings of every type
    settings = RentedNode.model_validate(
        {
            "query": {"gpu_types": ["H100"], "providers": ["runpod"]},
            "max_usd": 5.0,
            "key_file": str(server.client_key_file),
            "root": str(tmp_path / "machine"),
            "python": sys.executable,
            **more,
        }
    )
    return provision_node(settings, tmp_path / "store", run_id=run_id)


@pytest.mark.slow
def test_a_key_that_is_missing_keeps_nothing_rented_at_other_providers(
    fake: FakeRunPod, ssh_server: SSHServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is over asked at Lambda, too, in vain; who cancels it has the key of RunPod alone."""
    monkeypatch.delenv("LAMBDA_API_KEY", raising=False)
    rent(ssh_server, tmp_path)
    with Ledger(tmp_path / "store" / LEDGER_FILE) as ledger:
        [rental] = all_rentals(ledger)
        lost = replace(rental, name=f"{rental.name}0", provider="lambda", state=RentalState.INTENDED, instance_id="")
        add_rental(ledger, lost)
    gave_back, left = release_rentals(tmp_path / "store", "run")
    assert gave_back == f"gave back {rental.name} at runpod" and fake.alive() == []
    assert f"{lost.name} may be rented at lambda and was left: " in left and "LAMBDA_API_KEY" in left
    with pytest.raises(MissingKeyError, match="LAMBDA_API_KEY"):
        release_rentals(tmp_path / "store", "run")


@pytest.mark.slow
def test_a_machine_of_a_failed_run_is_kept_and_taken_over_whatever_its_keeping_was_set_to(
    fake: FakeRunPod, ssh_server: SSHServer, tmp_path: Path
) -> None:
    with Ledger(tmp_path / "store" / LEDGER_FILE) as ledger:
        with ledger.living_run("failed"):
            node = rent(ssh_server, tmp_path, "failed", keep_on_failure_minutes=30)
            [said, who_ends_it] = keep_rented(node, 30)
        [kept] = all_rentals(ledger)
        assert kept.kept_until == pytest.approx(time.time() + 1800, abs=60) and kept.state is RentalState.READY
        until = time.strftime("%H:%M UTC", time.gmtime(kept.kept_until))
        for part in (
            f"{until}, because the run failed, at {kept.usd_per_hour:.2f} USD/h",
            f"`rollouts nodes release {node.name}` ends",
        ):
            assert part in said
        assert "`rollouts reap`" in who_ends_it
        assert rent(ssh_server, tmp_path, "next").name == node.name
        [taken] = all_rentals(ledger)
        assert (taken.run_id, taken.kept_until) == ("next", None) and len(fake.machines) == 1


@pytest.mark.slow
def test_a_machine_is_kept_no_longer_than_its_hours_and_money_and_not_where_it_is_of_no_use(
    fake: FakeRunPod, ssh_server: SSHServer, tmp_path: Path
) -> None:
    node = rent(ssh_server, tmp_path, max_hours=1.0)
    with Ledger(tmp_path / "store" / LEDGER_FILE) as ledger:
        assert keep_rented(node, 1440) != []
        [kept] = all_rentals(ledger)
        assert kept.kept_until == kept.expires_at
        change_rental(ledger, kept, kept_until=None, expires_at=time.time() - 1)
        assert keep_rented(node, 30) == []
        fake.machines[kept.instance_id].status = "TERMINATED"
        with pytest.raises(MachineGoneError):
            keep_rented(node, 30)
        assert [rental.kept_until for rental in all_rentals(ledger)] == [None]


@pytest.mark.slow
def test_a_machine_is_ended_when_its_hours_are_over_by_the_clock_also_where_that_fails_at_first(
    fake: FakeRunPod,
    ssh_server: SSHServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("rollouts.infra.providers.rented.EXPIRY_LOOK_S", 0.1)
    node = rent(ssh_server, tmp_path)
    later = SimpleNamespace(time=lambda: time.time() + 24 * 3600)
    with ended_when_expired(node):
        fake.faults.refuses_key = True
        monkeypatch.setattr(
            "rollouts.infra.providers.rented.time", later
        )  # as after a sleep, in which no timer goes on
        wait_until(lambda: "may still be rented" in caplog.text)
        assert len(fake.alive()) == 1
        fake.faults.refuses_key = False
        wait_until(lambda: fake.alive() == [])


@pytest.mark.slow
def test_a_machine_is_found_where_it_is_now_and_known_by_its_key(
    fake: FakeRunPod, ssh_server: SSHServer, tmp_path: Path
) -> None:
    node = rent(ssh_server, tmp_path)
    assert node.access is not None and node.access.host_key.startswith("SHA256:") and node.is_rented
    moved = replace(node, access=replace(node.access, port=1))  # where it was before
    with open_session(moved) as session:
        assert session.run(["echo", "there"], timeout_s=30).stdout == b"there\n"
    with running_server(tmp_path / "stranger") as stranger:
        fake.port = stranger.port
        with open_session(node) as session, pytest.raises(HostKeyError, match="expected is SHA256:"):
            session.run(["echo", "there"], timeout_s=30)
    release_node(node)
    assert fake.alive() == []
    release_node(node)
    with open_session(node) as session, pytest.raises(MachineGoneError, match="took it away"):
        session.run(["echo", "there"], timeout_s=30)


@pytest.mark.slow
def test_a_machine_that_its_provider_took_away_or_stopped_is_gone_for_its_run(
    fake: FakeRunPod, ssh_server: SSHServer, tmp_path: Path
) -> None:
    node = rent(ssh_server, tmp_path)
    [machine] = fake.alive()
    for status, word in (("TERMINATED", "gone"), ("EXITED", "stopped"), ("ERROR", "failed")):
        machine.status = status
        with (
            open_session(node) as session,
            pytest.raises(MachineGoneError, match=f" is {word}: its provider"),
        ):
            session.run(["echo", "there"], timeout_s=30)
    machine.status = "MELTING"  # nobody knows what that means: it is asked where it was
    with open_session(node) as session:
        assert session.run(["echo", "there"], timeout_s=30).stdout == b"there\n"
    machine.status = ""
    release_node(node)


@pytest.mark.slow
def test_a_key_that_cannot_be_used_is_said_before_anything_is_rented(
    fake: FakeRunPod, ssh_server: SSHServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    make_key(tmp_path / "encrypted", passphrase="secret")
    make_key(tmp_path / "open")
    (tmp_path / "open").chmod(0o644)
    make_key(tmp_path / "gone")
    (tmp_path / "gone").unlink()
    for name, sentence in (
        ("encrypted", "is encrypted: give it to the agent by `ssh-add"),
        ("open", r"other users may read the key .* \(mode 0644\): chmod 600 it"),
        ("gone", "cannot be read: No such file"),
        ("missing", "make a key by `ssh-keygen"),
    ):
        with pytest.raises(PermanentInfraError, match=sentence):
            rent(ssh_server, tmp_path, key_file=str(tmp_path / name), usable_within_minutes=0.01)
    assert fake.machines == {} and fake.num_creates() == 0


@pytest.mark.slow
def test_before_anything_is_rented_the_cheapest_is_named_where_all_is_too_dear(
    fake: FakeRunPod, ssh_server: SSHServer
) -> None:
    query = {"gpu_types": ["H100"], "providers": ["runpod"], "max_usd_per_gpu_hour": 1.0}
    settings = parse({**GIVEN, "query": query, "key_file": str(ssh_server.client_key_file)})
    sentence = r"the cheapest is 1x H100 SXM at runpod for 2\.99 USD .* raise node\.query\.max_usd_per_gpu_hour"
    with pytest.raises(PermanentInfraError, match=sentence):
        find_rentable(settings)


@pytest.mark.slow
def test_a_machine_whose_ssh_server_never_comes_up_is_given_back(
    fake: FakeRunPod, ssh_server: SSHServer, tmp_path: Path
) -> None:
    fake.port = 1  # nobody listens there
    with pytest.raises(NoMachineError, match=r"could not be used within 0\.6 s .*Connection refused"):
        rent(ssh_server, tmp_path, usable_within_minutes=0.01)
    assert fake.alive() == [] and len(fake.machines) == 1


@pytest.mark.slow
@pytest.mark.parametrize("demand", [pytest.param("min_link_mbit_s", marks=pytest.mark.matrix), "min_disk_mb_s"])
def test_a_machine_that_is_too_slow_is_given_back_and_the_next_offer_taken(
    fake: FakeRunPod, ssh_server: SSHServer, tmp_path: Path, demand: str
) -> None:
    several = {"providers": ["runpod"], "max_usd_per_gpu_hour": 20.0}
    settings: dict[str, Any] = {"query": several, demand: 1e9}
    with pytest.raises(NoMachineError, match=rf"it is too slow \(\d+ Mbit/s to it and .*node\.{demand} (is )?1e\+09"):
        rent(ssh_server, tmp_path, **settings)
    assert fake.alive() == [] and len(fake.machines) > 1
    assert not (tmp_path / "machine/.set-up").exists() and list(tmp_path.glob("machine/*")) == []


@pytest.mark.slow
def test_a_machine_whose_gpus_do_not_compute_together_is_given_back_and_the_next_offer_taken(
    fake: FakeRunPod, ssh_server: SSHServer, tmp_path: Path
) -> None:
    """What finds that out is pinned by test_acceptance.py; this machine's interpreter says so."""
    python = tmp_path / "python"
    answer = '{"is_tried": true, "problem": "after 240 s rank 1 did not sum up"}'
    says = f"case \"$*\" in '- nccl 2 '*) echo '{answer}'; exit ;; esac"
    python.write_text(f'#!/bin/sh\n{says}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    several = {"providers": ["runpod"], "max_usd_per_gpu_hour": 20.0, "gpu_count": 2}
    refusal = r"its 2 GPUs cannot compute together \(after 240 s rank 1 did not sum up\).* NCCL_P2P_DISABLE=1"
    with pytest.raises(NoMachineError, match=refusal):
        rent(ssh_server, tmp_path, query=several, python=str(python))
    assert fake.alive() == [] and len(fake.machines) > 1


@pytest.mark.slow
def test_a_machine_is_set_up_no_longer_than_the_money_of_the_run_lasts(
    fake: FakeRunPod, ssh_server: SSHServer, tmp_path: Path
) -> None:
    seconds_paid_for = 8.0
    began = time.monotonic()
    with pytest.raises(NoMachineError, match=r"run's money were used up .*sleep 120"):
        rent(ssh_server, tmp_path, max_usd=2.99 / 3600 * seconds_paid_for, setup=["sleep 120"])
    assert time.monotonic() - began < 100 and fake.alive() == [] and len(fake.machines) == 1


@pytest.mark.slow
def test_a_machine_that_lacks_what_the_settings_promise_is_given_back(
    fake: FakeRunPod, ssh_server: SSHServer, tmp_path: Path
) -> None:
    settings = RentedNode.model_validate(
        {
            "query": {"gpu_types": ["H100"], "providers": ["runpod"]},
            "max_usd": 5.0,
            "key_file": str(ssh_server.client_key_file),
            "root": str(tmp_path / "machine"),
            "python": sys.executable,
            "setup": ["echo no such package >&2; exit 3"],
        }
    )
    with pytest.raises(PermanentInfraError, match="no such package"):
        provision_node(settings, tmp_path / "store", run_id="run")
    assert fake.alive() == [] and len(fake.machines) == 1
    with Ledger(tmp_path / "store" / LEDGER_FILE) as ledger:
        assert [rental.state for rental in all_rentals(ledger)] == [RentalState.GONE]
