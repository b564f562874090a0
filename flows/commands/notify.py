"""`rollouts notify`: messages when runs end, fail or wait for a person, by Prefect's own blocks and automations.

    rollouts notify                                      who is told what
    rollouts notify team --url-variable TEAM_URL         tell an address of Slack, or another webhook
    rollouts notify sendgrid-email/night --on failed     tell a block that was made in Prefect's UI
    rollouts notify team --remove                        no more

An address is often a secret, so it is read from the environment and kept as a block. The messages are sent by the
Prefect server, as long as it runs.
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
from rollouts.flows.commands.terminal import DEFAULT_STORE, Store, console
from rollouts.flows.own_server.lend import ServerAddress, ServerError, local_server, named_url, use_prefect
from rollouts.flows.prefect_api import RefusedError, ask
from rollouts.flows.preflight import check_writable
from rollouts_core.config.messages import closest_name, first_line
from rollouts_core.errors import ConfigError, InputError

if TYPE_CHECKING:
    from prefect.blocks.abstract import NotificationBlock


class RunState(StrEnum):
    """How runs end or wait, by the names that Prefect's UI shows."""

    COMPLETED = "completed"
    FAILED = "failed"
    NO_IMPROVEMENT = "no-improvement"
    """A run ended whose RL did not improve."""
    CRASHED = "crashed"
    CANCELLED = "cancelled"
    SUSPENDED = "suspended"
    """A retraining asks a person."""
    PROMOTED = "promoted"
    REJECTED = "rejected"
    SKIPPED = "skipped"

    @property
    def event(self) -> str:
        """The event of Prefect's that a run causes by coming into the state."""
        return f"prefect.flow-run.{''.join(map(str.capitalize, self.split('-')))}"


DEFAULT_STATES = tuple(state for state in RunState if state not in (RunState.CANCELLED, RunState.SKIPPED))
"""All but what a person did just now, and what a schedule does every day."""

TAG = "rollouts-notify"
"""Marks the automations of this command among those of others."""
NAME_PREFIX = "notify "
SLACK_HOST = "hooks.slack.com"
ADDRESS_NAME = re.compile(r"[a-z0-9-]+")
"""A reference to a block, as Prefect takes it."""

MENTIONS = "|replace('@', '@\u200b')"
"""Separates the sign from a name such as everyone."""
PLAIN = f"replace('<', '‹')|replace('>', '›')|replace('](', '] ('){MENTIONS}"
"""Filters of Jinja: names of runs and what machines said must be no links or mentions of a whole channel."""
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
"""The text of messages from before runs could end as NoImprovement; they ended as failed."""
EARLIER_BODIES = (
    FIRST_BODY,
    "{% if flow_run.state.name == 'Suspended' %}A decision is waiting: Resume on the page of {{ flow_run.name }}"
    " puts its candidate into production, or rejects it.{% else %}"
    "The run {{ flow_run.name }} of {{ flow.name }} is {{ flow_run.state.name }}.{% endif %}"
    "{% if flow_run.state.message %} {{ flow_run.state.message }}{% endif %} {{ flow_run|ui_url }}",
    BODY.replace(MENTIONS, ""),
)
"""Texts of earlier versions; any other text is the user's own."""
FIRST_MESSAGE = "From now on you are told here when a run is {states}."


def notify(
    block: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]",
            help="Receiver: a name for the address in --url-variable, or TYPE/NAME of a block in Prefect.",
        ),
    ] = "",
    url_variable: Annotated[
        str,
        typer.Option(
            metavar="VARIABLE",
            help="Environment variable with the address, https://hooks.slack.com/... or that of another webhook.",
        ),
    ] = "",
    on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STATE",
            help=f"State to tell of, of {', '.join(RunState)}; repeatable. Otherwise {', '.join(DEFAULT_STATES)}.",
        ),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Stop its messages.")] = False,
    store: Store = DEFAULT_STORE,
) -> None:
    """Have Prefect send a message when runs end, fail or wait for a person; without NAME, list what is sent to whom."""
    states = read_states(on or ())
    check_request(block, url_variable, states, remove=remove)
    url = read_url(url_variable) if url_variable else ""
    check_writable(store)
    with local_server(store) as address:
        use_prefect(store, address)
        if not block:
            for line in describe_notifications(address):
                typer.echo(line)
        elif remove:
            remove_notification(address, block)
            console.print(f"{block} is told nothing any more", markup=False)
        else:
            told_of = states or DEFAULT_STATES
            add_notification(address, block, url, told_of)
            console.print(f"told           {block}: a message is there now, and more when runs are", markup=False)
            console.print(f"               {join(told_of)}", markup=False)


def read_states(given: Sequence[str]) -> tuple[RunState, ...]:
    """The states of a command line; InputError for one that there is not."""
    known = [state.value for state in RunState]
    for name in given:
        if name not in known:
            raise InputError(f"--on {name}: there is no such state{closest_name(name, known)}")
    return tuple(RunState(name) for name in given)


def check_request(block: str, url_variable: str, states: tuple[RunState, ...], *, remove: bool) -> None:
    """Raise InputError for what cannot be meant, before any server is started."""
    if not block and (url_variable or states or remove):
        raise InputError("expected a NAME for whom to tell, as in: rollouts notify team --url-variable TEAM_URL")
    if remove and (url_variable or states):
        raise InputError("--remove goes with the NAME alone")
    if url_variable and not ADDRESS_NAME.fullmatch(block):
        raise InputError(f"expected a NAME of lowercase letters, digits and dashes for a new address, found {block}")


def read_url(variable: str) -> str:
    """The address that an environment variable holds.

    Raises:
        ConfigError: it holds none; what it holds is not repeated.
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
    """Send a first message, and have the server send one whenever a run comes into one of the states.

    Raises:
        ConfigError: there is no such block, or it cannot be told; nothing is changed then.
    """
    from prefect.blocks.abstract import NotificationBlock  # imports prefect, which reads the environment

    block = make_block(name, url) if url else load_block(name)
    assert isinstance(block, NotificationBlock), "both know nothing else"
    try:
        with block.raise_on_failure():
            block.notify(FIRST_MESSAGE.format(states=join(states)), subject="rollouts")  # type: ignore[unused-coroutine]
    except Exception as error:
        raise ConfigError(f"{name} could not be told: {describe_failure(error)}") from error
    previous = _blocks_of(find_automations(address, TAG, name=NAME_PREFIX + name))
    document_id = str(block.save(name, overwrite=True) if url else block._block_document_id)
    put_automation(address, render_automation(name, document_id, states))
    if url:  # one of another kind of address is another block
        _delete_blocks(address, previous - {document_id})


def make_block(name: str, url: str) -> NotificationBlock:
    """A block for the address: Slack's, or that of other webhooks, which keeps the address as a secret."""
    from prefect.blocks.notifications import CustomWebhookNotificationBlock, SlackWebhook

    if urlsplit(url).hostname == SLACK_HOST:
        return SlackWebhook(url=url)
    content = {"subject": "{{subject}}", "text": "{{body}}"}
    return CustomWebhookNotificationBlock(name=name, url="{{url}}", json_data=content, secrets={"url": url})


def load_block(name: str) -> NotificationBlock:
    """A block that a user saved in Prefect.

    Raises:
        ConfigError: there is none, or it is no block that can be told something.
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
        raise ConfigError(f"the block {name} sends no messages: expected one that does, such as slack-webhook/NAME")
    return block


def render_automation(name: str, document_id: str, states: tuple[RunState, ...]) -> Automation:
    """The automation as the server takes it: when a run of ours comes into one of the states, tell the block."""
    return {
        "name": NAME_PREFIX + name,
        "description": f"Made by `rollouts notify`: tells {name} of runs that are {join(states)}.",
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
    """A line for each that is told something."""
    lines = []
    for each in find_automations(address, TAG):
        ordered = [state for state in RunState if state.event in each["trigger"]["expect"]]
        paused = "" if each["enabled"] else " (paused in Prefect)"
        lines.append(f"{each['name'].removeprefix(NAME_PREFIX)}: {', '.join(ordered)}{paused}")
    return lines or ["nobody is told anything: rollouts notify NAME --url-variable VARIABLE adds an address"]


def renew_notifications(address: ServerAddress) -> list[str]:
    """Replace automations that an earlier version made; returns the name of each that is told of more states now.

    An automation whose text the user changed stays as it is.

    Raises:
        ServerError: the server cannot be asked.
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
    """Send a message about what a person changed by hand to all that are told of such a state.

    A message that cannot be sent is a warning: the change is made.
    """
    if not named_url() and not (store / "prefect" / "prefect.db").is_file():
        return  # nobody can have asked for messages
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
    from prefect.blocks.abstract import NotificationBlock  # imports prefect, which reads the environment
    from prefect.blocks.core import Block

    name = automation["name"].removeprefix(NAME_PREFIX)
    try:
        block = Block.load_from_ref({"block_document_id": automation["actions"][0]["block_document_id"]})
        assert isinstance(block, NotificationBlock), "the server sends its messages by nothing else"
        with block.raise_on_failure():
            block.notify(body, subject=subject)  # type: ignore[unused-coroutine]
    except Exception as error:  # noqa: BLE001 - whatever a service raises: the change was made
        console.print(f"no message     was sent to {name}: {describe_failure(error)}", markup=False)


def remove_notification(address: ServerAddress, name: str) -> None:
    """Delete the automation, and the block of an address that this command made.

    Raises:
        ConfigError: it is told nothing.
    """
    automations = find_automations(address, TAG, name=NAME_PREFIX + name)
    if not automations:
        told = [each["name"].removeprefix(NAME_PREFIX) for each in find_automations(address, TAG)]
        known = ", ".join(told) or "nobody"
        raise ConfigError(f"{name} is told nothing: told is {known}")
    for each in automations:
        delete_automation(address, each)
    if "/" not in name:
        _delete_blocks(address, _blocks_of(automations))


def _blocks_of(automations: Iterable[Automation]) -> set[str]:
    return {str(each["actions"][0]["block_document_id"]) for each in automations}


def _delete_blocks(address: ServerAddress, document_ids: Iterable[str]) -> None:
    for document_id in document_ids:
        with suppress(RefusedError):  # a user deleted it in the UI
            ask(address, "DELETE", f"/block_documents/{document_id}")


def join(states: tuple[RunState, ...]) -> str:
    """The states as words of a sentence."""
    return " or ".join((", ".join(states[:-1]), states[-1]) if len(states) > 1 else states)


def describe_failure(error: Exception) -> str:
    """The service's answer, without its address."""
    log = getattr(error, "log", "")
    return first_line(RuntimeError(log)) if log else type(error).__name__
