"""`rollouts notify` against a real Prefect server, with a service that takes the messages.

Without these tests a run could fail at night and nobody would know, or the address of a team's channel could be read in
a message, an automation or a terminal.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import uuid4

import pytest
from typer.testing import CliRunner

from rollouts.flows.automations import delete_automation, find_automations
from rollouts.flows.cli import app
from rollouts.flows.commands.notify import (
    BODY,
    DEFAULT_STATES,
    EARLIER_BODIES,
    TAG,
    RunState,
    describe_notifications,
    render_automation,
    renew_notifications,
)
from rollouts.flows.own_server.lend import ServerAddress, local_server, prefect_environment, run_url
from rollouts.flows.own_server.server_process import EARLIER_EVENT_WAIT
from rollouts.flows.prefect_api import ask
from tests.flows.shared_server import AUTH, SharedServer, free_port
from tests.flows.test_models_cli import register
from tests.flows.test_server import keeper_pid, processes_of
from tests.kit.commands import Rollouts
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.slow

SECRET = "T0SECRET"


class Webhook(BaseHTTPRequestHandler):
    """Keeps what is posted; the path /refuse answers that it is forbidden."""

    server: WebhookServer

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/refuse":
            self.send_error(403)
            return
        self.server.messages.append(json.loads(content))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Not on the tests' terminal."""


class WebhookServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Webhook)
        self.messages: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{SECRET}"


@pytest.fixture
def webhook() -> Iterator[WebhookServer]:
    with WebhookServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def server(rollouts: Rollouts) -> Iterator[ServerAddress]:
    """The store's server, which stays up between the commands of a test."""
    with local_server(rollouts.store) as address:
        yield address


def make_run(address: ServerAddress, name: str, *, flow: str = "sft-rl") -> str:
    flow_id = ask(address, "POST", "/flows/", {"name": flow})["id"]
    return str(ask(address, "POST", "/flow_runs/", {"flow_id": flow_id, "name": name})["id"])


def set_state(address: ServerAddress, run_id: str, state: str, message: str = "", *, name: str = "") -> None:
    asked = {"type": state.upper(), "name": name or state.capitalize(), "message": message}
    ask(address, "POST", f"/flow_runs/{run_id}/set_state", {"state": asked, "force": True})


@pytest.mark.matrix
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_run_that_is_tried_again_at_a_new_server_is_told_of_within_a_minute_and_once(
    is_killed: bool, rollouts_alone: Rollouts, webhook: WebhookServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new server waited for the event before, which only the former server had seen."""
    monkeypatch.setenv("TEAM_URL", webhook.url)
    store = rollouts_alone.store
    with local_server(store) as address:
        code, output = rollouts_alone.run("notify", "team", "--url-variable", "TEAM_URL", "--on", "completed")
        assert code == 0, output
        run = make_run(address, "small-1")
        for state in ("pending", "running", "crashed"):
            set_state(address, run, state)
        if is_killed:
            os.kill(keeper_pid(store), signal.SIGKILL)
    wait_until(lambda: not processes_of(store), what="the end of the first server")
    with local_server(store) as address:
        for state, name in (("scheduled", "AwaitingRetry"), ("pending", ""), ("running", ""), ("completed", "")):
            set_state(address, run, state, name=name)
        wait_until(lambda: len(webhook.messages) > 1, what="the message", timeout_s=60.0)
        time.sleep(2 * EARLIER_EVENT_WAIT.total_seconds())
    assert [each["subject"] for each in webhook.messages[1:]] == ["small-1: Completed"]


FLOW_OF_OURS = """
import sys
from types import SimpleNamespace
from uuid import UUID
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow
from rollouts.flows.run_ends import with_noted_end

@flow(name="sft-rl")
@with_noted_end
def nothing(run: object) -> None: ...

with get_client(sync_client=True) as client:
    options = {"run": SimpleNamespace(store=sys.argv[2])}
    run_flow(nothing, flow_run=client.read_flow_run(UUID(sys.argv[1])), parameters=options)
"""


@pytest.mark.matrix
def test_at_a_teams_server_that_was_started_again_a_run_is_told_of_within_a_minute_and_once(
    webhook: WebhookServer, tmp_path: Path
) -> None:
    """Prefect's server is as everybody starts it, and waits 15 minutes for an event that it has not seen."""
    url = f"http://127.0.0.1:{free_port()}"
    address = ServerAddress(api_url=f"{url}/api", ui_url=url, is_local=False, password=AUTH)
    server = SharedServer(address, tmp_path, f"sqlite+aiosqlite:///{tmp_path}/prefect.db")
    notifies = f"{sys.executable} -m rollouts.flows.cli notify team --url-variable TEAM_URL --on completed".split()
    try:
        server.start()
        environment = server.environment | {"TEAM_URL": webhook.url}
        subprocess.run([*notifies, "--store", str(tmp_path / "store")], env=environment, check=True)
        run = make_run(address, "small-1")
        for state in ("pending", "running", "crashed"):
            set_state(address, run, state)
        server.kill()
        server.start()
        set_state(address, run, "scheduled", name="AwaitingRetry")
        program = [sys.executable, "-c", FLOW_OF_OURS, run, str(tmp_path / "store")]
        subprocess.run(program, env=environment, check=True, timeout=120)
        assert ask(address, "GET", f"/flow_runs/{run}")["state_type"] == "COMPLETED"
        wait_until(lambda: len(webhook.messages) > 1, what="the message", timeout_s=60.0)
        time.sleep(5)
    finally:
        server.kill()
    assert [each["subject"] for each in webhook.messages[1:]] == ["small-1: Completed"]


def test_a_webhook_is_told_of_the_states_that_were_asked_for_until_it_is_removed(
    rollouts: Rollouts, server: ServerAddress, webhook: WebhookServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEAM_URL", webhook.url)
    said = ""
    for states in ("completed", "failed"):  # what is asked later is what counts
        code, output = rollouts.run("notify", "team", "--url-variable", "TEAM_URL", "--on", states, "--on", "promoted")
        assert code == 0, output
        said += output
    assert [each["text"] for each in webhook.messages] == [
        "From now on you get a message here when a run is completed or promoted.",
        "From now on you get a message here when a run is failed or promoted.",
    ]
    code, listed = rollouts.run("notify")
    assert (code, listed.splitlines()[-1]) == (0, "team: failed, promoted")
    automations = ask(server, "POST", "/automations/filter", {})
    assert SECRET not in said + listed + json.dumps(automations)

    others, mine = make_run(server, "theirs", flow="another-teams"), make_run(server, "small-1")
    set_state(server, others, "failed")
    set_state(server, mine, "completed")
    set_state(server, mine, "failed", "rl: out of {{ flow_run.id }} memory")
    set_state(server, mine, "completed", "better by 0.1", name="Promoted")
    wait_until(lambda: len(webhook.messages) == 4, what=f"two messages more than {webhook.messages}")
    failed, promoted = sorted(webhook.messages[2:], key=lambda message: message["subject"])
    assert (failed["subject"], promoted["subject"]) == ("small-1: Failed", "small-1: Promoted")
    # What a run says is text, not a template.
    assert failed["text"].startswith("The run small-1 of sft-rl is Failed. rl: out of {{ flow_run.id }} memory Its")
    assert failed["text"].endswith(f" {run_url(server, mine)}") and "better by 0.1" in promoted["text"]

    code, output = rollouts.run("notify", "team", "--remove")
    assert code == 0, output
    assert ask(server, "POST", "/automations/filter", {}) == []
    blocks = ask(server, "POST", "/block_documents/filter", {})
    assert [each["name"] for each in blocks if each["name"] == "team"] == []
    code, output = rollouts.run("notify", "team", "--remove")
    assert (code, "rollouts: team gets no messages; receivers: none" in output) == (2, True)


def test_a_decision_that_waits_is_told_with_the_link_of_its_page(
    rollouts: Rollouts, server: ServerAddress, webhook: WebhookServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEAM_URL", webhook.url)
    code, output = rollouts.run("notify", "team", "--url-variable", "TEAM_URL", "--on", "suspended")
    assert code == 0, output
    run = make_run(server, "small-1")
    set_state(server, run, "running")
    set_state(server, run, "paused", name="Suspended")
    wait_until(lambda: len(webhook.messages) > 1, what="the message")
    [told] = webhook.messages[1:]
    assert told["text"].startswith(
        "A decision is waiting: Resume in the menu of the page of small-1 puts its candidate"
    )
    assert told["text"].endswith(f" Its page: {run_url(server, run)}")
    assert rollouts.run("notify", "team", "--remove")[0] == 0


@pytest.mark.matrix
def test_a_promotion_and_a_rollback_by_hand_are_told(
    rollouts: Rollouts, server: ServerAddress, webhook: WebhookServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEAM_URL", webhook.url)
    for number in (1, 2):
        register(rollouts.store, number)
    code, output = rollouts.run("notify", "team", "--url-variable", "TEAM_URL")
    assert code == 0, output
    for arguments in (("promote", "small-1"), ("promote", "small-2", "--reason", "Ada likes it"), ("rollback",)):
        code, output = rollouts.run("models", *arguments)
        assert (code, len(output.splitlines())) == (0, 1), output
    assert [each["subject"] for each in webhook.messages[1:]] == [
        "small-1: Promoted",
        "small-2: Promoted",
        "small-1: Rolled back",
    ]
    texts = [each["text"] for each in webhook.messages[1:]]
    assert texts[1].startswith(f"small-2 is in production: {rollouts.store}/runs/small-2/checkpoint (by ")
    assert texts[1].endswith(": Ada likes it)")
    code, output = rollouts.run("notify", "team", "--url-variable", "TEAM_URL", "--on", "failed")
    assert code == 0, output
    assert rollouts.run("models", "promote", "small-2")[0] == 0
    assert webhook.messages[-1]["subject"] == "rollouts", "nobody asked for promotions any more"
    assert rollouts.run("notify", "team", "--remove")[0] == 0


@pytest.mark.matrix
def test_a_block_of_the_ui_is_told(rollouts: Rollouts, server: ServerAddress, webhook: WebhookServer) -> None:
    program = (
        "import sys; from prefect.blocks.notifications import MattermostWebhook as Block;"
        "Block(hostname='127.0.0.1', port=int(sys.argv[1]), secure=False, token='abcdefghijklmnop').save('night')"
    )
    # What somebody does in the UI, in a process of its own: prefect reads its environment once.
    environment = {**os.environ, **prefect_environment(rollouts.store, server)}
    subprocess.run([sys.executable, "-c", program, str(webhook.server_port)], env=environment, check=True)
    code, output = rollouts.run("notify", "mattermost-webhook/night")
    assert code == 0, output
    code, listed = rollouts.run("notify")
    assert (code, listed.splitlines()[-1]) == (0, f"mattermost-webhook/night: {', '.join(DEFAULT_STATES)}")
    set_state(server, make_run(server, "small-2"), "crashed", "the worker is gone")
    wait_until(lambda: len(webhook.messages) == 2, what="a message")
    assert "small-2: Crashed" in webhook.messages[1]["text"] and "the worker is gone" in webhook.messages[1]["text"]
    code, output = rollouts.run("notify", "mattermost-webhook/night", "--remove")
    assert code == 0, output
    blocks = ask(server, "POST", "/block_documents/filter", {})
    assert "night" in [each["name"] for each in blocks], "it is not ours to delete"


@pytest.mark.matrix
def test_an_address_of_another_kind_takes_the_place_of_the_old_one(
    rollouts: Rollouts, server: ServerAddress, webhook: WebhookServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "from prefect.blocks.notifications import SlackWebhook as Block;"
        "print(Block(url='https://hooks.slack.com/services/secret').save('team'))"
    )
    environment = {**os.environ, **prefect_environment(rollouts.store, server)}
    saved = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, check=True)
    slack = saved.stdout.decode().split()[-1]
    ask(server, "POST", "/automations/", render_automation("team", slack, (RunState.FAILED,)))
    monkeypatch.setenv("TEAM_URL", webhook.url)
    code, output = rollouts.run("notify", "team", "--url-variable", "TEAM_URL")
    assert code == 0, output
    [block] = [each for each in ask(server, "POST", "/block_documents/filter", {}) if each["name"] == "team"]
    assert block["id"] != slack and block["block_type"]["slug"] == "custom-webhook"
    assert rollouts.run("notify", "team", "--remove")[0] == 0
    assert "team" not in [each["name"] for each in ask(server, "POST", "/block_documents/filter", {})]


def test_a_notification_of_an_earlier_version_is_told_of_no_improvement_and_one_of_the_user_is_left_alone(
    server: ServerAddress, rollouts: Rollouts
) -> None:
    """Runs without improvement were told as failed ones; the server matches the states that an automation lists."""
    first, *later = EARLIER_BODIES
    own = "Look at {{ flow_run.name }}"
    earlier = {
        "night": (first, ("failed", "cancelled")),
        "day": (first, ("completed",)),
        **{f"later-{index}": (body, ("failed",)) for index, body in enumerate(later)},
        "own": (own, ("failed",)),
    }
    for name, (body, states) in earlier.items():
        automation = render_automation(name, str(uuid4()), tuple(map(RunState, states)))
        actions = [{**automation["actions"][0], "body": body}]
        ask(server, "POST", "/automations/", {**automation, "actions": actions, "enabled": name != "night"})
    assert renew_notifications(server) == ["night"]
    try:
        found = {each["name"]: each for each in find_automations(server, TAG)}
        assert len(found) == len(earlier)
        assert describe_notifications(server) == [
            "day: completed",
            *(f"later-{index}: failed" for index in range(len(later))),
            "night: failed, no-improvement, cancelled (paused in Prefect)",
            "own: failed",
        ]
        bodies = {name.removeprefix("notify "): each["actions"][0]["body"] for name, each in found.items()}
        assert bodies == dict.fromkeys(earlier, BODY) | {"own": own}
        assert renew_notifications(server) == []
    finally:
        for each in find_automations(server, TAG):
            delete_automation(server, each)


def test_what_cannot_be_told_is_one_sentence_and_changes_nothing(
    rollouts: Rollouts, server: ServerAddress, webhook: WebhookServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSED", webhook.url.replace(SECRET, "refuse"))
    for arguments, sentence in (
        (["team", "--url-variable", "REFUSED"], "team could not be notified"),
        (["team"], "expected TYPE/NAME of a block in Prefect, found team"),
        (["slack-webhook/nobody"], "there is no block slack-webhook/nobody in Prefect"),
    ):
        code, output = rollouts.run("notify", *arguments)
        assert code == 2 and f"rollouts: {sentence}" in output, output
        assert "refuse" not in output and "Traceback" not in output
    assert ask(server, "POST", "/automations/filter", {}) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--remove"], "expected the NAME of a receiver"),
        (["team", "--remove", "--on", "failed"], "--remove takes a NAME and no other option"),
        (["a/b", "--url-variable", "URL"], "expected a NAME of lowercase letters, digits and dashes for a new"),
        (["Team", "--url-variable", "URL"], "letters, digits and dashes for a new address, found Team"),
        (["my_team", "--url-variable", "URL"], "letters, digits and dashes for a new address, found my_team"),
        (["team", "--url-variable", "NOT_THERE"], "--url-variable NOT_THERE: the environment has no such variable"),
        (["team", "--url-variable", "URL"], "--url-variable URL: expected an address that begins with https://"),
    ],
)
def test_what_cannot_be_meant_is_said_before_a_server_is_started(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("URL", SECRET)
    result = CliRunner().invoke(app, ["notify", *arguments, "--store", str(tmp_path / "store")])
    assert result.exit_code == 2 and sentence in result.output, result.output
    assert SECRET not in result.output and not (tmp_path / "store").exists()


def test_an_unknown_state_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["notify", "team", "--on", "exploded", "--store", str(tmp_path / "store")])
    known = "cancelled, completed, crashed, failed, no-improvement, promoted, rejected, skipped, suspended"
    assert result.exit_code == 2
    assert result.output == f"rollouts: --on exploded: there is no such state; known are {known}\n"
    result = CliRunner().invoke(app, ["notify", "team", "--on", "complete", "--store", str(tmp_path / "store")])
    assert result.output == "rollouts: --on complete: there is no such state; did you mean completed?\n"
