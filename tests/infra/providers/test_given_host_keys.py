"""Pins that the first connection to a fresh machine is held against a key that was known before, where that can be.

Without it whoever sits on the way to a new machine gets the code, the data and the model that are sent there.
"""

from __future__ import annotations

import getpass
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.requests import Request
from starlette.responses import Response

from rollouts.infra.errors import HostKeyError, NoMachineError
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.node import Node, RentedNode
from rollouts.infra.offers import GPUQuery, Instance, MachineSpec
from rollouts.infra.providers import open_session, provision_node
from rollouts.infra.providers.lambda_cloud import Lambda
from rollouts.infra.providers.rented import find_machine, known_hosts_of
from rollouts.infra.providers.runpod import RunPod
from rollouts.infra.renting.rentals import RentalState, all_rentals
from rollouts.infra.ssh.host_keys import fingerprint_of, make_host_key
from rollouts.infra.ssh.openssh import login_command
from tests.infra import ssh_server
from tests.infra.fake_cloud import KEY, FakeCloud, Machine
from tests.infra.fake_lambda import FakeLambda
from tests.infra.fake_runpod import FakeRunPod, runpod_with
from tests.infra.ssh_server import SSHServer
from tests.kit.processes import Watch

SAYS_ALL = "LogLevel DEBUG1\n"
AUTHENTICATION = "userauth-request"
"""What the server logs of whoever asks to be let in; before that, nothing of ours was sent."""


class BootingLambda(FakeLambda):
    """Its machines really boot: what a test does with what one was created with."""

    boot: Callable[[dict[str, Any]], None]

    def add(self, name: str, body: dict[str, Any]) -> Machine:
        self.boot(body)
        return super().add(name, body)


def apply_cloud_config(user_data: str, server: SSHServer) -> None:
    """What cloud-init's module for SSH does with the configuration, in the server's folder in place of /etc/ssh."""
    assert user_data.startswith("#cloud-config\n")
    config = yaml.safe_load(user_data)
    if config["ssh_deletekeys"]:
        server.host_key_file.unlink()
        Path(f"{server.host_key_file}.pub").unlink()
    server.host_key_file.touch(mode=0o600)
    server.host_key_file.write_text(config["ssh_keys"]["ed25519_private"])
    Path(f"{server.host_key_file}.pub").write_text(config["ssh_keys"]["ed25519_public"])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SSHServer]:
    """A machine that does not run yet."""
    server = SSHServer(tmp_path / "server", more_config=SAYS_ALL)
    yield server
    server.stop()


@pytest.fixture
def cloud(server: SSHServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[BootingLambda]:
    """Lambda, whose machines are that one."""
    fake = BootingLambda()
    monkeypatch.setattr(Lambda, "endpoint", replace(Lambda.endpoint, min_interval_s=0.0, create_interval_s=0.0))
    monkeypatch.setattr(
        "rollouts.infra.providers.lambda_cloud.USER", getpass.getuser()
    )  # theirs are at port 22, as ubuntu
    monkeypatch.setattr("rollouts.infra.providers.lambda_cloud.Instance", partial(Instance, port=server.port))
    with fake.served() as url:
        monkeypatch.setenv("LAMBDA_API_KEY", KEY)
        monkeypatch.setenv("LAMBDA_API_URL", url)
        yield fake


@pytest.fixture
def pods(server: SSHServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRunPod]:
    with runpod_with(server, monkeypatch) as fake:
        yield fake


def rent(server: SSHServer, tmp_path: Path, provider: str, **more: object) -> Node:
    settings = RentedNode.model_validate(
        {
            **more,
            "query": {"gpu_types": ["H100"], "providers": [provider]},
            "max_usd": 5.0,
            "key_file": str(server.client_key_file),
            "root": str(tmp_path / "machine"),
            "python": sys.executable,
            "usable_within_minutes": 1.0,
        }
    )
    return provision_node(settings, tmp_path / "store", run_id="run")


def assert_refused(fake: FakeCloud, server: SSHServer, tmp_path: Path, provider: str, expected: str) -> None:
    """Somebody else answers: nothing is sent, the sentence names both keys, and the machine is given back."""
    shown = ssh_server.fingerprint_of(server.host_key_file)
    with pytest.raises(HostKeyError, match="another machine may be answering") as refused:
        rent(server, tmp_path, provider)
    assert expected in str(refused.value) and shown in str(refused.value) and "\n" not in str(refused.value)
    log = (server.folder / "log").read_text()
    assert "Connection from" in log and AUTHENTICATION not in log
    assert fake.alive() == [] and len(fake.machines) == 1
    with Ledger(tmp_path / "store" / LEDGER_FILE) as ledger:
        assert [(row.state, row.host_key) for row in all_rentals(ledger)] == [(RentalState.GONE, "")]


def assert_a_person_can_log_in(node: Node, server: SSHServer, tmp_path: Path) -> None:
    """As by `rollouts nodes ssh`: that client knows the host key from a file alone."""
    known = known_hosts_of(tmp_path / "store", node.name)
    words = login_command(find_machine(node), known, key_file=str(server.client_key_file), command=["echo", "in"])
    said = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert said.stdout == "in\n", said.stderr


def parts_of(private: str) -> list[str]:
    """Every piece of 16 characters of the secret lines of a key."""
    lines = [line for line in private.splitlines() if not line.startswith("-----")]
    return [
        line[start : start + 16] for line in lines[1:] for start in range(len(line) - 15)
    ]  # the first has no secret


def test_a_key_that_we_make_is_one_to_openssh_and_does_not_show_its_private_half(tmp_path: Path) -> None:
    pair, path = make_host_key(), tmp_path / "key"
    path.touch(mode=0o600)
    path.write_text(pair.private)
    Path(f"{path}.pub").write_text(pair.public)
    public = subprocess.run(["ssh-keygen", "-y", "-f", path], capture_output=True, text=True, check=True).stdout
    assert public.split()[:2] == pair.public.split()[:2]
    assert fingerprint_of(pair.public) == ssh_server.fingerprint_of(path)
    assert "PRIVATE" not in repr(pair) + repr(MachineSpec(name="n", public_key="k", disk_gb=1, host_key=pair))
    assert make_host_key().public != pair.public


@pytest.mark.slow
def test_the_first_connection_is_held_against_the_key_that_the_machine_was_created_with(
    cloud: BootingLambda, server: SSHServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    own = ssh_server.fingerprint_of(server.host_key_file)

    def boot(body: dict[str, Any]) -> None:
        apply_cloud_config(body["user_data"], server)
        server.start()

    cloud.boot = boot
    with Watch("OPENSSH PRIVATE KEY") as sightings:
        node = rent(server, tmp_path, "lambda")
        with open_session(node) as session:
            assert session.run(["echo", "there"], timeout_s=30).stdout == b"there\n"
        again = rent(server, tmp_path, "lambda")
    assert node.believed_by == again.believed_by == "injected" and len(cloud.machines) == 1
    assert node.access is not None and node.access.host_key == ssh_server.fingerprint_of(server.host_key_file) != own
    assert_a_person_can_log_in(node, server, tmp_path)

    assert sightings == []
    private, public = server.host_key_file.read_text(), Path(f"{server.host_key_file}.pub").read_text()
    said = caplog.text + json.dumps(asdict(node))
    files = [path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()]
    secrets = [part for part in parts_of(private) if part not in public]  # a private key has its public half in it
    assert files != [] and len(secrets) > 100
    for part in secrets:
        assert part not in said and not any(part.encode() in content for content in files)


@pytest.mark.slow
def test_somebody_on_the_way_to_a_machine_that_was_given_a_key_is_refused(
    cloud: BootingLambda, server: SSHServer, tmp_path: Path
) -> None:
    cloud.boot = lambda body: server.start()  # with a key of its own
    with Ledger(tmp_path / "store" / LEDGER_FILE) as ledger:
        assert_refused(cloud, server, tmp_path, "lambda", "SHA256:")
        [row] = all_rentals(ledger)
    given = yaml.safe_load(next(iter(cloud.machines.values())).request["user_data"])["ssh_keys"]["ed25519_public"]
    assert row.expected_key == fingerprint_of(given) and row.expected_key in row.note


@pytest.mark.slow
def test_an_image_that_makes_its_own_key_is_believed_where_the_settings_say_so(
    cloud: BootingLambda, server: SSHServer, tmp_path: Path
) -> None:
    cloud.boot = lambda body: server.start()
    node = rent(server, tmp_path, "lambda", host_keys="first_use")
    assert node.believed_by == "first_use" and (tmp_path / "store" / "machine_keys" / node.name).exists()
    assert "user_data" not in next(iter(cloud.machines.values())).request


@pytest.mark.slow
def test_a_provider_that_repeats_what_was_sent_puts_the_key_into_no_message_and_no_ledger(
    cloud: BootingLambda, server: SSHServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    sent: list[str] = []

    class Echoing(BootingLambda):
        async def launch(self, request: Request) -> Response:
            sent.append(json.loads(await request.body())["user_data"])
            private = yaml.safe_load(sent[-1])["ssh_keys"]["ed25519_private"]
            return self.error(400, f"user_data is not understood: {private[80:]}")

    with Echoing().served() as url, pytest.MonkeyPatch.context() as patched:
        patched.setenv("LAMBDA_API_URL", url)
        with pytest.raises(NoMachineError, match="a text that repeats one of our secrets") as refused:
            rent(server, tmp_path, "lambda")
    with Ledger(tmp_path / "store" / LEDGER_FILE) as ledger:
        notes = "".join(row.note for row in all_rentals(ledger))
    said = str(refused.value) + caplog.text + notes
    assert sent != [] and notes != ""
    for user_data in sent:
        parts = parts_of(yaml.safe_load(user_data)["ssh_keys"]["ed25519_private"])
        assert parts != [] and [part for part in parts if part in said] == []


def start_script_log(server: SSHServer) -> list[str]:
    """What the start script of RunPod's images writes."""
    shown = ["ssh-keygen", "-lf", str(server.host_key_file)]
    line = subprocess.run(shown, capture_output=True, text=True, check=True).stdout.strip()
    return [
        *("Pod Started", "Setting up SSH...", "ED25519 key fingerprint:", line, "SSH host keys:"),
        *("Key: /etc/ssh/ssh_host_dsa_key.pub", "1024 SHA256:" + 43 * "d" + " root@pod (DSA)"),
        *("Key: /etc/ssh/ssh_host_ecdsa_key.pub", "256 SHA256:" + 43 * "e" + " root@pod (ECDSA)"),
        *("Key: /etc/ssh/ssh_host_ed25519_key.pub", line),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("goes_on", [False, True], ids=["ended", "going on"])
def test_the_first_connection_is_held_against_the_key_that_the_log_of_the_pod_names(
    pods: FakeRunPod, server: SSHServer, tmp_path: Path, goes_on: bool
) -> None:
    pods.log, pods.log_goes_on = start_script_log(server), goes_on
    server.start()
    node = rent(server, tmp_path, "runpod")
    assert node.believed_by == "provider" == rent(server, tmp_path, "runpod").believed_by
    assert node.access is not None and node.access.host_key == ssh_server.fingerprint_of(server.host_key_file)
    assert_a_person_can_log_in(node, server, tmp_path)


@pytest.mark.slow
def test_somebody_on_the_way_to_a_pod_whose_log_names_its_key_is_refused(
    pods: FakeRunPod, server: SSHServer, tmp_path: Path
) -> None:
    pod = SSHServer(tmp_path / "pod")
    pods.log = start_script_log(pod)
    server.start()
    assert_refused(pods, server, tmp_path, "runpod", ssh_server.fingerprint_of(pod.host_key_file))


@pytest.mark.slow
def test_a_pod_whose_log_names_no_key_is_believed_at_the_first_login(
    pods: FakeRunPod, server: SSHServer, tmp_path: Path
) -> None:
    pods.log = ["256 SHA256:" + 43 * "u" + " me@home (ED25519)", "Start script(s) finished, Pod is ready to use."]
    server.start()
    node = rent(server, tmp_path, "runpod")
    assert node.believed_by == "first_use" and (tmp_path / "store" / "machine_keys" / node.name).exists()


@pytest.mark.slow
def test_a_log_is_not_asked_where_the_settings_believe_the_first_login(
    pods: FakeRunPod, server: SSHServer, tmp_path: Path
) -> None:
    pods.log = start_script_log(SSHServer(tmp_path / "pod"))
    server.start()
    assert rent(server, tmp_path, "runpod", host_keys="first_use").believed_by == "first_use"


ECDSA, ED25519 = ("256 SHA256:" + 43 * letter + " root@pod (WHICH)" for letter in "aB")
ECDSA_FILE, ED25519_FILE = (f"Key: /etc/ssh/ssh_host_{name}_key.pub" for name in ("ecdsa", "ed25519"))


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ([ECDSA_FILE, ECDSA, ED25519_FILE, ED25519], "SHA256:" + 43 * "B"),
        ([ECDSA_FILE, ECDSA], "SHA256:" + 43 * "a"),
        ([ED25519_FILE, "is not readable", ED25519], ""),
        ([f"echo {ED25519_FILE}", ED25519], ""),
        ([ED25519_FILE, "256 SHA256:short root@pod"], ""),
        (["\x1b[2J", "{", "null", "x" * 100_000], ""),
        ([], ""),
    ],
)
def test_only_what_the_start_script_says_of_the_host_keys_counts(
    log: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollouts.infra.providers.runpod.LOG_WITHIN_S", 0.3)
    fake = FakeRunPod()
    fake.log, fake.log_goes_on = log, True
    with fake.served() as url, RunPod(KEY, url) as account:
        offer = account.search(GPUQuery(gpu_types=("H100",)))[0]
        pod = account.create(offer, MachineSpec(name="rollouts-1", public_key="ssh-ed25519 AAAA me", disk_gb=50))
        assert account.host_key(pod) == expected
        assert account.host_key("another") == ""
