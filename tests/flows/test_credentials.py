"""Credentials as Prefect's blocks: a real server keeps them, and whoever acts for a run has them.

Without these tests a key could be read in the database or a terminal, or a machine that was rented with a team's key
would be paid for until somebody finds out that nobody else could end it. That a run works with them is in
test_rented.py.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.providers.runpod import RunPod
from rollouts.infra.renting.rentals import NEVER_SEEN, Rental, RentalState, change_rental
from tests.flows.test_reap import reap
from tests.infra.fake_cloud import KEY
from tests.infra.fake_runpod import FakeRunPod
from tests.kit.commands import Rollouts
from tests.kit.renting import REQUEST, World
from tests.kit.serving import up
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.slow

CANARY = "CANARY-6d0f"


def test_keys_are_kept_by_name_and_never_shown(rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUNPOD_API_KEY", "AWS_SECRET_ACCESS_KEY", "JUDGE_KEY"):
        monkeypatch.setenv(name, f"{CANARY}-{name}")
    said = []
    for variables in (["RUNPOD_API_KEY", "JUDGE_KEY"], ["AWS_SECRET_ACCESS_KEY"]):  # the second adds to the first
        code, output = rollouts.run("credentials", "kept-team", *variables)
        assert code == 0, output
        said.append(output)
    code, listed = rollouts.run("credentials")
    assert (code, listed) == (0, "kept-team: AWS_SECRET_ACCESS_KEY, JUDGE_KEY, RUNPOD_API_KEY\n")
    assert CANARY not in "".join(said)
    database = (rollouts.store / "prefect" / "prefect.db").resolve()
    for path in database.parent.glob("prefect.db*"):
        assert CANARY.encode() not in path.read_bytes(), path
    code, output = rollouts.run("credentials", "kept-team", "--remove")
    assert code == 0, output
    assert rollouts.run("credentials")[1].startswith("there are no credentials")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["team"], "expected the variables to save in team, as in: rollouts credentials team RUNPOD_API_KEY"),
        (["team", "NOT_EXPORTED"], "the environment has no variable NOT_EXPORTED, or it is empty: export it first"),
        (["Team Blue", "HOME"], "'Team Blue' is not a name for credentials: expected lower-case letters, digits"),
        (["--remove"], "--remove takes a NAME and no other option"),
        (["nobody", "--remove"], "Prefect has no credentials named nobody: rollouts credentials lists the saved"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(rollouts: Rollouts, arguments: list[str], sentence: str) -> None:
    code, output = rollouts.run("credentials", *arguments)
    assert code == 2 and sentence in output and len(output.strip().splitlines()) == 1, output


def test_a_run_whose_credentials_were_deleted_is_one_sentence(rollouts: Rollouts, folder: Path) -> None:
    config = folder / "small.toml"
    config.write_text(config.read_text().replace("[run]", '[run]\ncredentials = "gone"'))
    for command in ("validate", "run"):
        code, output = rollouts.run(command, str(config))
        assert code == 2, output
        expected = "rollouts: Prefect has no credentials named gone: save them in the UI under Blocks"
        assert output.strip().splitlines()[-1].startswith(expected)


def rent(world: World) -> Rental:
    """A machine of a run that is no more, rented with the team's key."""
    with Ledger(world.path) as ledger, ledger.living_run(REQUEST.run_id):
        return world.rent(replace(REQUEST, credentials="team"))


@pytest.mark.matrix
def test_machines_are_ended_with_the_credentials_that_rented_them(
    served: Rollouts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeRunPod()
    with fake.served() as url, RunPod(KEY, url) as cloud:
        monkeypatch.setenv("RUNPOD_API_URL", url)
        with monkeypatch.context() as for_now:
            for_now.setenv("RUNPOD_API_KEY", KEY)
            code, output = served.run("credentials", "team", "RUNPOD_API_KEY")
            assert code == 0, output
        assert "RUNPOD_API_KEY" not in os.environ
        world = World(fake, cloud, served.store / LEDGER_FILE)
        rental = rent(world)
        with Ledger(world.path) as ledger:
            change_rental(ledger, rental, expires_at=time.time() - 1)
        up(served)  # what it serves looks at once
        wait_until(lambda: fake.alive() == [], what="the end of the machine that expired")

        rental = rent(world)
        message, [row] = reap(served, "reap.spare=false")
        assert (message, row["outcome"]) == ("1 ended, 0 kept", "ended") and rental.name in row["machine"]

        for command in (["reap"], ["nodes", "release"]):
            rental = rent(world)
            code, output = served.run(*command, *([rental.name] if "release" in command else []))
            assert code == 0 and fake.alive() == [], output

        given_up = {"state": RentalState.REFUSED, "note": NEVER_SEEN, "ended_at": time.time(), "instance_id": ""}
        rental = rent(world)
        with Ledger(world.path) as ledger:
            change_rental(ledger, rental, **given_up)  # it appears more than an hour after it was asked for
        code, output = served.run("reap")
        assert code == 0 and fake.alive() == [], output

        rental = rent(world)
        code, output = served.run("credentials", "team", "--remove")
        assert code == 0, output
        message, [row] = reap(served, state="FAILED")
        assert "machines rented with the credentials team cannot be checked: Prefect has no credentials" in message
        assert [machine.name for machine in fake.alive()] == [rental.name]
