"""Chat with one or two models in the terminal or through a pipe. Each line of standard input is a message.

Not here: finding the checkpoints (serve.py), generating an answer (rollouts_core/embedded/chatting.py).

    you            >  a line, or /reset, /system TEXT, /set NAME=VALUE, /help, /quit
    one model      its answer is printed as it is generated
    two models     both generate at once; the second answer is printed after the first
"""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rollouts.flows.commands.terminal import console, emit
from rollouts_core.embedded.chatting import Chat, follow_chat, loaded_model, prepare_chat
from rollouts_core.embedded.openai_api import split_pieces
from rollouts_core.embedded.running import Completion
from rollouts_core.embedded.served import ServedModel
from rollouts_core.errors import RolloutsError

if TYPE_CHECKING:
    from rollouts_core.types import Message

HELP = """/reset            forget the conversation
/system TEXT      another system prompt; forgets the conversation
/set NAME=VALUE   temperature, top_p, max_tokens or seed; without NAME=VALUE shows them
/quit             end, as Ctrl-D does"""
THINKING = "(thinking) "


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The system prompt and the sampling settings of a chat."""

    system: str = ""
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None
    """Most tokens of an answer (None: as many as fit into the context)."""
    seed: int | None = None


@dataclass(slots=True, kw_only=True)
class Talker:
    """A model and its conversation so far."""

    model: ServedModel
    messages: list[Message] = field(default_factory=list)


def talk(folders: Mapping[str, Path], settings: Settings, *, threads: int, as_json: bool = False) -> None:
    """Send each line of standard input to the models, and print their answers, until the input ends.

    Args:
        as_json: print each whole answer as an object of the kind `answer`.
    """
    with ExitStack() as stack:
        models = [
            stack.enter_context(loaded_model(folder, name, num_threads=threads)) for name, folder in folders.items()
        ]
        talkers = [Talker(model=model) for model in models]
        console.print(f"{' and '.join(folders)}: /help shows the commands, Ctrl-D ends", markup=False)
        for line in _lines():
            if line == "/quit":
                return
            if line.startswith("/"):
                settings = obey(line, settings, talkers)
            elif line:
                _answer(line, settings, talkers, as_json=as_json)


def _lines() -> Iterator[str]:
    """Read the lines of standard input. On a terminal, print "> " before each line."""
    is_terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # input may contain bytes that are not UTF-8
    while True:
        try:
            line = input("> ") if is_terminal else sys.stdin.readline()
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print("\n/quit or Ctrl-D ends")
            continue
        if not is_terminal and not line:
            return
        yield line.strip()


def obey(line: str, settings: Settings, talkers: list[Talker]) -> Settings:
    """Execute a command of the user, such as /set, and return the changed settings."""
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    if command in ("/reset", "/system"):
        for talker in talkers:
            talker.messages.clear()
        console.print("started a new conversation")
        return replace(settings, system=rest) if command == "/system" else settings
    if command == "/set":
        return _set(rest, settings)
    console.print(HELP if command == "/help" else f"{command} is not a command:\n{HELP}", markup=False)
    return settings


def _set(rest: str, settings: Settings) -> Settings:
    kinds = {"temperature": float, "top_p": float, "max_tokens": int, "seed": int}
    name, _, value = (part.strip() for part in rest.partition("="))
    try:
        changed = replace(settings, **{name: kinds[name](value)}) if rest else settings
    except (KeyError, ValueError):
        console.print(f"{rest} is not a setting: give one of {', '.join(kinds)} as NAME=VALUE", markup=False)
        return settings
    changed = replace(changed, max_tokens=changed.max_tokens or None)  # 0 means no limit, as in --max-tokens
    shown = (f"{each.name}={getattr(changed, each.name)}" for each in fields(changed) if each.name in kinds)
    console.print(", ".join(shown), markup=False)
    return changed


def _answer(line: str, settings: Settings, talkers: list[Talker], *, as_json: bool) -> None:
    """Let all models generate at once, and print their answers one after another."""
    try:
        asyncio.run(_answer_all(line, settings, talkers, as_json=as_json))
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        console.print("the answer was interrupted; /reset forgets the conversation")
    except BrokenPipeError:
        sys.stdout = None  # the program that read the output has ended
        raise SystemExit(1) from None


async def _answer_all(line: str, settings: Settings, talkers: list[Talker], *, as_json: bool) -> None:
    parts: list[asyncio.Queue[str | None]] = [asyncio.Queue() for _ in talkers]
    num_before = {talker.model.name: len(talker.messages) for talker in talkers}
    tasks = [
        asyncio.create_task(_say(line, settings, talker, queue)) for talker, queue in zip(talkers, parts, strict=True)
    ]
    try:
        for talker, queue in zip(talkers, parts, strict=True):
            if as_json:
                while await queue.get() is not None:
                    pass
                name = talker.model.name
                for message in talker.messages[num_before[name] + 1 :]:  # empty if the model failed
                    emit([{"kind": "answer", "model": name, "prompt": line, "message": message}])
                continue
            if len(talkers) > 1:
                sys.stdout.write(f"[{talker.model.name}]\n")
            while (part := await queue.get()) is not None:
                sys.stdout.write(part)
                sys.stdout.flush()
            sys.stdout.write("\n")
            sys.stdout.flush()
        await asyncio.gather(*tasks)  # raises an unexpected error of a task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _say(line: str, settings: Settings, talker: Talker, parts: asyncio.Queue[str | None]) -> None:
    """Put each new piece of a model's answer into a queue, and the whole answer into the model's conversation."""
    asked: list[Message] = [*talker.messages, {"role": "user", "content": line}]
    system: list[Message] = [{"role": "system", "content": settings.system}] if settings.system else []
    sampling = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_new_tokens": settings.max_tokens,
        "sampling_seed": settings.seed,
    }
    chat = Chat(messages=[*system, *asked], tools=(), template_values={}, fields={"sampling_params": sampling})
    answer = thoughts = ""
    try:
        async for news in follow_chat(talker.model, prepare_chat(talker.model, chat)):
            said, thought, _ = split_pieces(news.pieces)
            if thought:
                parts.put_nowait(thought if thoughts else THINKING + thought)
            if said:
                parts.put_nowait("\n\n" + said if thoughts and not answer else said)
            answer, thoughts = answer + said, thoughts + thought
            if isinstance(news.found, Completion) and news.found.finish_reason.kind == "length":
                parts.put_nowait(" [...]")
    except RolloutsError as error:
        console.print(f"{talker.model.name}: {error}", markup=False)
        return
    finally:
        if answer or thoughts:
            turn = {"role": "assistant", "content": answer} | ({"reasoning_content": thoughts} if thoughts else {})
            talker.messages = [*asked, cast("Message", turn)]
        parts.put_nowait(None)
