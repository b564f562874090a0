"""Pins what the Prefect server of a store shows other users of the machine, and pages of other sites in a browser."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollouts.flows.cli import app
from rollouts.flows.own_server.https import client_context
from rollouts.flows.own_server.lend import ServerAddress, local_server
from rollouts.flows.own_server.password import basic_authorization

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose folder for Prefect everybody may look into, as one that another tool made."""
    store = tmp_path_factory.mktemp("store")
    (store / "prefect").mkdir()
    (store / "prefect").chmod(0o755)
    return store


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[ServerAddress]:
    with local_server(store) as address:
        yield address


def test_other_users_can_read_nothing_of_it(server: ServerAddress, store: Path) -> None:
    home = store / "prefect"
    files = [home, *(home / name for name in ("password", "certificate.pem", "server.log", "prefect.db"))]
    assert [path.name for path in files if path.stat().st_mode & 0o077] == []


def test_a_password_that_others_may_read_ends_a_command_with_the_remedy(server: ServerAddress, store: Path) -> None:
    password = store / "prefect" / "password"
    password.chmod(0o644)
    try:
        refused = CliRunner().invoke(app, ["status", "--store", str(store)])
    finally:
        password.chmod(0o600)
    assert refused.exit_code == 2 and f"chmod600{password}" in "".join(refused.stderr.split())


@pytest.mark.parametrize("method", ["GET", "OPTIONS"])
def test_only_the_pages_of_its_ui_may_read_its_answers(method: str, server: ServerAddress) -> None:
    ui = server.ui_url.removesuffix("/v2")
    port = ui.rpartition(":")[2]
    own = {ui, f"http://localhost:{port}"}
    assert server.certificate is not None
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=client_context(server.certificate))
    )
    for origin in (*own, "https://evil.example", "null", f"http://127.0.0.1:{port}.evil.example", "http://127.0.0.1:1"):
        headers = {"Origin": origin, "Authorization": basic_authorization(server.password)}
        if method == "OPTIONS":
            headers["Access-Control-Request-Method"] = "GET"
        request = urllib.request.Request(f"{server.api_url}/admin/version", headers=headers, method=method)
        try:
            answer = opener.open(request, timeout=30)
        except urllib.error.HTTPError as refused:  # as the middleware answers a preflight of another origin
            answer = refused
        with answer:
            assert answer.headers.get("Access-Control-Allow-Origin") == (origin if origin in own else None), origin
