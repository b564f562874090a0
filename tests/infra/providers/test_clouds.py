"""Pins that a provider is one file and one row, or an installed package, and that all else follows from it.

Without it a provider could be rented from and be unknown to the form, to the credentials, or to whoever ends machines.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from typer.testing import CliRunner

from rollouts.flows.cli import app
from rollouts.flows.credentials import _key_fields
from rollouts.flows.form import _expected_kind
from rollouts.infra.clouds import CLOUDS, _find_fault, cloud_names, find_cloud
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.node import InstanceNode, RentedNode
from rollouts.infra.offers import GPUQuery
from rollouts.infra.providers.clouds import clouds_with_keys, open_clouds, open_usable_clouds
from rollouts.infra.renting.provision import rent_machines
from rollouts.infra.renting.release import release_machine
from rollouts.infra.renting.rentals import RentalState
from rollouts.infra.renting.request import Renting
from tests.infra.fake_cloud import KEY, FakeCloud, Machine, reply
from tests.kit.renting import PACE, REQUEST, usable

ROOT = Path(__file__).resolve().parents[3]
TOY = Path(__file__).with_name("toy_cloud.py")


class FakeToy(FakeCloud):
    def routes(self) -> list[Any]:  # Any: Starlette's
        return [
            Route("/kinds", self.kinds),
            Route("/machines", self.list, methods=["GET"]),
            Route("/machines", self.create, methods=["POST"]),
            Route("/machines/{id}", self.get, methods=["GET"]),
            Route("/machines/{id}", self.delete, methods=["DELETE"]),
        ]

    def is_create(self, method: str, path: str) -> bool:
        return method == "POST"

    def error(self, status: int, text: str) -> Response:
        return reply({"error": text}, status)

    def refuse_capacity(self) -> Response:
        return self.error(409, "none left")

    async def kinds(self, request: Request) -> Response:
        return reply({"kinds": [{"id": "h", "gpu": "H100", "gb": 80.0, "usd": 1.25}]})

    async def create(self, request: Request) -> Response:
        return await self.creates(request, "name", lambda machine: reply(self.describe(machine)))

    async def list(self, request: Request) -> Response:
        return reply({"machines": [self.describe(machine) for machine in self.listed()]})

    async def get(self, request: Request) -> Response:
        machine = self.shown(request.path_params["id"])
        return reply(self.describe(machine)) if machine else self.error(404, "no such machine")

    async def delete(self, request: Request) -> Response:
        machine = self.shown(request.path_params["id"])
        return (machine and self.end(machine)) or Response(status_code=204)

    def describe(self, machine: Machine) -> dict[str, Any]:  # Any: JSON
        status = self.status_of(machine, "starting", "up")
        return {"id": machine.id, "name": machine.name, "status": status, "ip": self.host, "port": self.port}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeToy]:
    """The provider, served, with its row; no other provider has a key."""
    for name in CLOUDS:
        monkeypatch.delenv(find_cloud(name).endpoint.key_variable, raising=False)
    fake = FakeToy()
    with fake.served() as url:
        monkeypatch.setenv("TOY_API_KEY", KEY)
        monkeypatch.setenv("TOY_API_URL", url)
        monkeypatch.setitem(CLOUDS, "toy", "tests.infra.providers.toy_cloud:Toy")
        yield fake


def test_a_machine_of_a_new_provider_is_rented_and_given_back(toy: FakeToy, tmp_path: Path) -> None:
    request = replace(REQUEST, query=GPUQuery(gpu_types=("H100",), providers=("toy",)))
    toy.faults.drop_creates = 1
    with Ledger(tmp_path / LEDGER_FILE) as ledger, open_clouds(request.query.providers) as clouds:
        [rental] = rent_machines(Renting(request, ledger, clouds, check=usable, pace=PACE))
        assert (rental.provider, rental.usd_per_hour, len(toy.alive())) == ("toy", 1.25, 1)
        assert release_machine(rental, ledger, clouds["toy"], pace=PACE).state is RentalState.GONE
    assert toy.alive() == []


def test_the_command_finds_its_offers_and_its_machines(toy: FakeToy, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["gpus", "--store", str(tmp_path)])
    assert found.exit_code == 0 and found.stdout.splitlines()[1].split()[:2] == ["1.25", "1.25"]
    assert "Vast.ai (VAST_API_KEY), SkyPilot (ROLLOUTS_SKY)" in found.stdout
    refused = CliRunner().invoke(app, ["gpus", "--provider", "toytown"])
    assert "toytown is reached through Toy Cloud: name the provider toy instead, and set its key in TOY_API_KEY" in (
        refused.output + str(refused.exception)
    )


def test_settings_form_and_credentials_know_it(toy: FakeToy) -> None:
    assert GPUQuery.model_json_schema()["properties"]["providers"]["items"]["enum"][-1] == "toy"
    assert InstanceNode(instance="toy:m1").instance == "toy:m1"
    several = {"query": {"providers": ["toy"]}, "max_usd": 1.0, "num_trainer_nodes": 2}
    assert RentedNode.model_validate(several).num_machines == 2
    assert _key_fields()["toy_api_key"][1].title == "Toy Cloud API key"
    assert 'node.query.providers = ["toy"]' in _expected_kind("toy")
    assert 'node.query.providers = ["toy"]' in _expected_kind("toytown")


@pytest.mark.parametrize("name", ["toy", "", "aws"])
def test_without_a_row_it_is_unknown(name: str) -> None:
    with pytest.raises(ValidationError):
        GPUQuery(providers=(name,))
    with pytest.raises(ValidationError, match=f"runpod:abc123, of one of {', '.join(CLOUDS)}"):
        InstanceNode(instance=f"{name}:m1")


def test_machines_of_a_provider_that_is_gone_do_not_keep_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package may be removed while machines are rented. Then the machines of others would never be ended."""
    monkeypatch.setenv("RUNPOD_API_KEY", KEY)
    with open_usable_clouds(["acme", "runpod"]) as (clouds, problems):
        assert [*clouds] == ["runpod"]
    assert problems == [
        "the provider acme is unknown here: install the package that adds it; `rollouts plugins` lists the "
        "installed ones"
    ]
    assert clouds_with_keys(["acme", "runpod"]) == (["runpod"], ["acme"])


def test_a_class_that_lacks_a_part_is_left_out() -> None:
    cloud: Any = type("Acme", (), {"name": "acme"})
    assert _find_fault("acme", cloud) == "its class has no endpoint"


def test_the_page_of_machines_lists_every_provider() -> None:
    lines = (ROOT / "docs" / "machines.md").read_text().splitlines()
    rows = {line.split("`")[1]: line for line in lines if line.startswith("| `") and "_API_KEY" in line}
    assert [*rows] == [name for name in CLOUDS if find_cloud(name).endpoint.url]
    for name, row in rows.items():
        endpoint = find_cloud(name).endpoint
        shares = "yes" if find_cloud(name).is_networked else "no"
        assert row.startswith(f"| `{name}` | {endpoint.title} | `{endpoint.key_variable}` | {shares} |")
    assert len({find_cloud(name).endpoint.key_variable for name in cloud_names()}) == len(cloud_names())


def install(site: Path, name: str, code: str) -> None:
    """A package as pip leaves it, with a provider."""
    module = f"{name}_cloud"
    (site / f"{module}.py").write_text(code)
    about = site / f"{module}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[rollouts.providers]\n{name} = {module}:Toy\n")


@pytest.mark.slow
def test_an_installed_package_adds_a_provider_and_a_broken_one_is_left_out(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install(site, "toy", TOY.read_text())
    install(site, "broken", "raise SystemExit(3)\n")
    install(site, "vast", TOY.read_text().replace('"toy"', '"vast"'))
    kept = {name: value for name, value in os.environ.items() if not name.endswith(("_API_KEY", "ROLLOUTS_SKY"))}

    def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**kept, "PYTHONPATH": str(site), **variables}
        command = [sys.executable, "-m", "rollouts.flows.cli", *arguments, "--store", str(tmp_path / "store")]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)

    with FakeToy().served() as url:
        found = call("gpus", "--provider", "toy", TOY_API_KEY=KEY, TOY_API_URL=url)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[1].split()[:2] == ["1.25", "1.25"]
    assert "the provider broken of the package broken_cloud is left out" in found.stderr
    assert "the provider vast of the package vast_cloud is left out" in found.stderr
    (tmp_path / "store").mkdir()
    with Ledger(tmp_path / "store" / LEDGER_FILE):
        listed = call("nodes")
    assert listed.returncode == 0 and "Traceback" not in listed.stderr, listed.stderr
    shutil.rmtree(site / "toy_cloud-1.0.dist-info")
    gone = call("gpus", "--provider", "toy")
    assert gone.returncode == 2 and "there is no provider toy: choose one of runpod," in gone.stderr
