"""`rollouts notify`: make Prefect send notifications when runs end, fail or wait for approval.

    rollouts notify                                      list the receivers, and what they get messages about
    rollouts notify team --url-variable TEAM_URL         notify the URL of Slack or of another webhook
    rollouts notify sendgrid-email/night --on failed     notify through a block that was created in Prefect's UI
    rollouts notify team --remove                        stop the notifications

A webhook's URL is often a secret, so it is read from the environment and stored in a Prefect block. An automation of
the Prefect server sends the messages, as long as the server runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from rollouts.flows.automations import EACH_RUN_OF_OURS, Automation, delete_automation, find_automations, put_automation
from rollouts.flows.commands.terminal import DEFAULT_STORE, AsJson, Store, console, tell
from rollouts.flows.own_server.lend import ServerAddress, ServerError, local_server, named_url, use_prefect
from rollouts.flows.prefect_api import RefusedError, ask
from rollouts.flows.preflight import check_writable
from rollouts_core.config.messages import closest_name, first_line
from rollouts_core.errors import ConfigError, InputError

if TYPE_CHECKING:
    from prefect.blocks.abstract import NotificationBlock


class RunState(StrEnum):
    """Names of states in which runs end or wait, as options of this command."""

    COMPLETED = "completed"
    FAILED = "failed"
    NO_IMPROVEMENT = "no-improvement"
    """The run ended, but RL did not improve the model."""
    CRASHED = "crashed"
    CANCELLED = "cancelled"
    SUSPENDED = "suspended"
    """A retraining waits for approval."""
    PROMOTED = "promoted"
    REJECTED = "rejected"
    SKIPPED = "skipped"

    @property
    def event(self) -> str:
        """The name of Prefect's event for a run that enters the state."""
        return f"prefect.flow-run.{''.join(map(str.capitalize, self.split('-')))}"


DEFAULT_STATES = tuple(state for state in RunState if state not in (RunState.CANCELLED, RunState.SKIPPED))
"""All states except cancelled and skipped. A user knows of a cancellation, and a schedule may skip runs every day."""

TAG = "rollouts-notify"
"""Tag of the automations that this command creates."""
NAME_PREFIX = "notify "
SLACK_HOST = "hooks.slack.com"
ADDRESS_NAME = re.compile(r"[a-z0-9-]+")
"""Names that Prefect accepts for a block."""

MENTIONS = "|replace('@', '@\u200b')"
"""Jinja filter that disables mentions such as @everyone by an invisible space after the @."""
PLAIN = f"replace('<', '‹')|replace('>', '›')|replace('](', '] ('){MENTIONS}"
"""Jinja filters that disable links and mentions in names of runs and in state messages."""
SUBJECT = f"{{{{ flow_run.name|{PLAIN} }}}}: {{{{ flow_run.state.name }}}}"
BODY = (
    "{% if flow_run.state.name == 'Suspended' %}A decision is waiting: Resume in the menu of the page of "
    f"{{{{ flow_run.name|{PLAIN} }}}} puts its candidate into production, or rejects it.{{% else %}}"
    f"The run {{{{ flow_run.name|{PLAIN} }}}} of {{{{ flow.name }}}} is {{{{ flow_run.state.name }}}}.{{% endif %}}"
    f"{{% if flow_run.state.message %}} {{{{ flow_run.state.message|{PLAIN} }}}}{{% endif %}} "
    "Its page: {{ flow_run|ui_url }}"
)
FIRST_BODY = (
    "The run {{ flow_run.name }} of {{ flow.name }} is {{ flow_run.state.name }}."
    "{% if flow_run.state.message %} {{ flow_run.state.message }}{% endif %} {{ flow_run|ui_url }}"
)
"""Message text of an earlier version. In that version, runs without improvement ended as failed."""
EARLIER_BODIES = (
    FIRST_BODY,
    "{% if flow_run.state.name == 'Suspended' %}A decision is waiting: Resume on the page of {{ flow_run.name }}"
    " puts its candidate into production, or rejects it.{% else %}"
    "The run {{ flow_run.name }} of {{ flow.name }} is {{ flow_run.state.name }}.{% endif %}"
    "{% if flow_run.state.message %} {{ flow_run.state.message }}{% endif %} {{ flow_run|ui_url }}",
    BODY.replace(MENTIONS, ""),
)
"""Message texts of earlier versions. If an automation has another text, the user has changed the text."""
FIRST_MESSAGE = "From now on you get a message here when a run is {states}."


def notify(
    block: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]",
            help="Receiver: a name for the URL in --url-variable, or TYPE/NAME of a block in Prefect.",
        ),
    ] = "",
    url_variable: Annotated[
        str,
        typer.Option(
            metavar="VARIABLE",
            help="Environment variable with the webhook's URL, for example https://hooks.slack.com/...",
        ),
    ] = "",
    on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STATE",
            help=f"Send a message for this state: {', '.join(RunState)}. Repeatable. "
            f"Default: {', '.join(DEFAULT_STATES)}.",
        ),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Stop the messages to this receiver.")] = False,
    store: Store = DEFAULT_STORE,
    as_json: AsJson = False,
) -> None:
    """Make Prefect send a message when runs end, fail or wait for approval. Without NAME, list the receivers, each
    with the states of runs that it gets messages about."""
    states = read_states(on or ())
    check_request(block, url_variable, states, remove=remove)
    url = read_url(url_variable) if url_variable else ""
    check_writable(store)
    with local_server(store) as address:
        use_prefect(store, address)
        if not block:
            for line in describe_notifications(address):
                tell(line, as_json=as_json)
        elif remove:
            remove_notification(address, block)
            console.print(f"{block} gets no more messages", markup=False)
        else:
            told_of = states or DEFAULT_STATES
            add_notification(address, block, url, told_of)
            console.print(f"notified       {block}: a test message was sent; more follow when runs are", markup=False)
            console.print(f"               {join(told_of)}", markup=False)


def read_states(given: Sequence[str]) -> tuple[RunState, ...]:
    """Read the names of states on the command line, and raise InputError for an unknown name."""
    known = [state.value for state in RunState]
    for name in given:
        if name not in known:
            raise InputError(f"--on {name}: there is no such state{closest_name(name, known)}")
    return tuple(RunState(name) for name in given)


def check_request(block: str, url_variable: str, states: tuple[RunState, ...], *, remove: bool) -> None:
    """Raise InputError for contradicting options, before a server is started."""
    if not block and (url_variable or states or remove):
        raise InputError("expected the NAME of a receiver, as in: rollouts notify team --url-variable TEAM_URL")
    if remove and (url_variable or states):
        raise InputError("--remove takes a NAME and no other option")
    if url_variable and not ADDRESS_NAME.fullmatch(block):
        raise InputError(f"expected a NAME of lowercase letters, digits and dashes for a new address, found {block}")


def read_url(variable: str) -> str:
    """Read a webhook's URL from an environment variable.

    Raises:
        ConfigError: the variable holds no URL. The message does not repeat the value, which may be a secret.
    """
    url = os.environ.get(variable, "").strip()
    if not url:
        raise ConfigError(f"--url-variable {variable}: the environment has no such variable, or it is empty")
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(
            f"--url-variable {variable}: expected an address that begins with https://; for mail and other services "
            "save a block in Prefect's UI, and give its TYPE/NAME, as in sendgrid-email/team"
        )
    return url


def add_notification(address: ServerAddress, name: str, url: str, states: tuple[RunState, ...]) -> None:
    """Send a test message, and create the automation that sends a message whenever a run enters one of the states.

    Raises:
        ConfigError: the block does not exist, or the test message could not be sent. Prefect is then unchanged.
    """
    from prefect.blocks.abstract import NotificationBlock  # importing prefect reads the environment

    block = make_block(name, url) if url else load_block(name)
    assert isinstance(block, NotificationBlock), "both functions return such blocks"
    try:
        with block.raise_on_failure():
            block.notify(FIRST_MESSAGE.format(states=join(states)), subject="rollouts")  # type: ignore[unused-coroutine]
    except Exception as error:
        raise ConfigError(f"{name} could not be notified: {describe_failure(error)}") from error
    previous = _blocks_of(find_automations(address, TAG, name=NAME_PREFIX + name))
    document_id = str(block.save(name, overwrite=True) if url else block._block_document_id)
    put_automation(address, render_automation(name, document_id, states))
    if url:  # a URL of another service is saved as a new block
        _delete_blocks(address, previous - {document_id})


def make_block(name: str, url: str) -> NotificationBlock:
    """Make a block for the URL: Prefect's Slack block, or its webhook block with the URL as a secret."""
    from prefect.blocks.notifications import CustomWebhookNotificationBlock, SlackWebhook

    if urlsplit(url).hostname == SLACK_HOST:
        return SlackWebhook(url=url)
    content = {"subject": "{{subject}}", "text": "{{body}}"}
    return CustomWebhookNotificationBlock(name=name, url="{{url}}", json_data=content, secrets={"url": url})


def load_block(name: str) -> NotificationBlock:
    """Load a block that a user saved in Prefect.

    Raises:
        ConfigError: the block does not exist, or it cannot send notifications.
    """
    from prefect.blocks.abstract import NotificationBlock
    from prefect.blocks.core import Block

    if "/" not in name:
        raise ConfigError(
            f"expected TYPE/NAME of a block in Prefect, found {name}: save one under Blocks in the UI, for instance "
            f"slack-webhook/{name}, or give an address with --url-variable"
        )
    try:
        block = Block.load(name)
    except ValueError as error:
        raise ConfigError(f"there is no block {name} in Prefect: save it under Blocks in the UI") from error
    if not isinstance(block, NotificationBlock):
        raise ConfigError(
            f"the block {name} cannot send messages: expected a notification block, such as slack-webhook/NAME"
        )
    return block


def render_automation(name: str, document_id: str, states: tuple[RunState, ...]) -> Automation:
    """The automation as JSON for Prefect's API: when a run of this project enters one of the states, notify the
    block."""
    return {
        "name": NAME_PREFIX + name,
        "description": f"Made by `rollouts notify`: notifies {name} of runs that are {join(states)}.",
        "tags": [TAG],
        "trigger": {
            **EACH_RUN_OF_OURS,
            "posture": "Reactive",
            "expect": [state.event for state in states],
            "within": 0,
        },
        "actions": [
            {"type": "send-notification", "block_document_id": document_id, "subject": SUBJECT, "body": BODY},
        ],
    }


def describe_notifications(address: ServerAddress) -> list[str]:
    """A line per receiver: its name and its states."""
    lines = []
    for each in find_automations(address, TAG):
        ordered = [state for state in RunState if state.event in each["trigger"]["expect"]]
        paused = "" if each["enabled"] else " (paused in Prefect)"
        lines.append(f"{each['name'].removeprefix(NAME_PREFIX)}: {', '.join(ordered)}{paused}")
    return lines or ["no messages are sent: rollouts notify NAME --url-variable VARIABLE adds an address"]


def renew_notifications(address: ServerAddress) -> list[str]:
    """Replace automations that an earlier version made, and return the receivers that now get messages for more states.

    An automation stays as it is if the user changed its text.

    Raises:
        ServerError: the server does not answer.
    """
    renewed = []
    for each in find_automations(address, TAG):
        action = each["actions"][0]
        if action.get("body") not in EARLIER_BODIES:
            continue
        states = [state for state in RunState if state.event in each["trigger"]["expect"]]
        name = each["name"].removeprefix(NAME_PREFIX)
        if action["body"] == FIRST_BODY and RunState.FAILED in states:
            states.append(RunState.NO_IMPROVEMENT)
            renewed.append(name)
        fresh = render_automation(
            name, action["block_document_id"], tuple(state for state in RunState if state in states)
        )
        put_automation(address, {**fresh, "enabled": each["enabled"]})
    return renewed


def tell_by_hand(store: Path, state: RunState, subject: str, body: str) -> None:
    """Notify all receivers of this state about a change that a user made with a command.

    If a message cannot be sent, only a warning is printed, because the change itself succeeded.
    """
    if not named_url() and not (store / "prefect" / "prefect.db").is_file():
        return  # a store without a database has no receivers
    try:
        with local_server(store) as address:
            told = [
                each
                for each in find_automations(address, TAG)
                if each["enabled"] and state.event in each["trigger"]["expect"]
            ]
            if told:
                use_prefect(store, address)
            for each in told:
                _tell(each, subject, body)
    except ServerError as error:
        console.print(f"no message     is sent: {error}", markup=False)


def _tell(automation: Automation, subject: str, body: str) -> None:
    from prefect.blocks.abstract import NotificationBlock  # importing prefect reads the environment
    from prefect.blocks.core import Block

    name = automation["name"].removeprefix(NAME_PREFIX)
    try:
        block = Block.load_from_ref({"block_document_id": automation["actions"][0]["block_document_id"]})
        assert isinstance(block, NotificationBlock), "automations notify only such blocks"
        with block.raise_on_failure():
            block.notify(body, subject=subject)  # type: ignore[unused-coroutine]
    except Exception as error:  # noqa: BLE001 - the change succeeded, so no error of the service may fail it
        console.print(f"no message     was sent to {name}: {describe_failure(error)}", markup=False)


def remove_notification(address: ServerAddress, name: str) -> None:
    """Delete a receiver's automation, and the receiver's block if this command created the block.

    Raises:
        ConfigError: no automation sends messages to this receiver.
    """
    automations = find_automations(address, TAG, name=NAME_PREFIX + name)
    if not automations:
        told = [each["name"].removeprefix(NAME_PREFIX) for each in find_automations(address, TAG)]
        known = ", ".join(told) or "none"
        raise ConfigError(f"{name} gets no messages; receivers: {known}")
    for each in automations:
        delete_automation(address, each)
    if "/" not in name:
        _delete_blocks(address, _blocks_of(automations))


def _blocks_of(automations: Iterable[Automation]) -> set[str]:
    return {str(each["actions"][0]["block_document_id"]) for each in automations}


def _delete_blocks(address: ServerAddress, document_ids: Iterable[str]) -> None:
    for document_id in document_ids:
        with suppress(RefusedError):  # a user deleted the block in the UI
            ask(address, "DELETE", f"/block_documents/{document_id}")


def join(states: tuple[RunState, ...]) -> str:
    """The names of the states, joined by commas and "or"."""
    return " or ".join((", ".join(states[:-1]), states[-1]) if len(states) > 1 else states)


def describe_failure(error: Exception) -> str:
    """The service's answer, without its URL, which may be a secret."""
    log = getattr(error, "log", "")
    return first_line(RuntimeError(log)) if log else type(error).__name__
