"""A served model for the endpoints: its tokenizer, and functions that submit, follow and abort requests.

Not here: the form of requests and answers (protocol.py, openai_api.py, anthropic_api.py), generation (scheduler.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import anyio
from starlette.requests import Request
from tokenizers import Tokenizer

from rollouts_core.embedded.chat_model import ChatModel
from rollouts_core.embedded.exchange import UnknownModelError
from rollouts_core.embedded.receiving import WeightReceiver
from rollouts_core.embedded.running import Completion, GenerationRequest, Partial
from rollouts_core.embedded.sampling import SamplingParams
from rollouts_core.embedded.scheduler import Scheduler
from rollouts_core.errors import EngineError

INCOMPLETE = "\ufffd"
"""Replaces an incomplete character in a text, for example until the token with the rest of its bytes."""


ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The parts of a served model that the endpoints use."""

    scheduler: Scheduler
    """The generation thread, which owns the weights."""
    receiver: WeightReceiver
    """Receives sent weights."""
    tokenizer: Tokenizer | None
    """Converts text to token ids and back; None if the model directory has no tokenizer.json."""
    name: str
    """Name of the model in requests."""
    chat: ChatModel
    """Its chat template."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Start of serving, in seconds since 1970."""
    encoding: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))
    """Limits tokenizing to one request at a time, because it takes hundreds of bytes per byte of text."""

    def encode(self) -> Callable[[str], list[int]] | None:
        """The function from text to token ids; None without a tokenizer."""
        if (tokenizer := self.tokenizer) is None:
            return None
        # The method for batches lets the event loop run meanwhile, and it skips the tokens' positions in the text.
        return lambda text: list(tokenizer.encode_batch_fast([text])[0].ids)

    def check_name(self, name: str) -> None:
        """Raise UnknownModelError for another name than the model's name or folder."""
        known = (self.name, str(self.scheduler.model_dir))
        if name not in known:
            raise UnknownModelError(f"The model {name[:200]!r} is not served here: ask for {self.name!r}.")

    async def prepare(self, make: Callable[[], ResultT]) -> ResultT:
        """The result of `make`, which converts text to token ids. Runs in a thread, one call at a time."""
        return await anyio.to_thread.run_sync(make, limiter=self.encoding)

    def text_of(self, token_ids: tuple[int, ...], params: SamplingParams) -> str:
        """The text of a completion; empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=params.skip_special_tokens)

    def text_of_completion(self, completion: Completion, params: SamplingParams) -> str:
        """The text of a completion, without its stop string or token unless `no_stop_trim` is set, as in SGLang."""
        reason = completion.finish_reason
        ends_in_token = reason.kind == "stop" and not reason.string
        if params.no_stop_trim or not ends_in_token:
            text = self.text_of(completion.output_ids, params)
        else:
            text = self.text_of(completion.output_ids[:-1], params)
        before, found, _ = text.partition(reason.string) if reason.string else (text, "", "")
        return before + found if params.no_stop_trim else before


def submit_all(
    scheduler: Scheduler,
    requests: tuple[GenerationRequest, ...],
    listener_of: Callable[[int], Callable[[Partial], None]] | None = None,
) -> list[Future[Completion]]:
    """Submit all of the requests, or none if one is refused."""
    futures: list[Future[Completion]] = []
    for index, asked in enumerate(requests):
        try:
            futures.append(scheduler.submit(asked, on_progress=listener_of(index) if listener_of else None))
        except EngineError:
            scheduler.give_up([submitted.request_id for submitted in requests[:index]])
            raise
    return futures


async def wait_or_abort(
    request: Request,
    scheduler: Scheduler,
    requests: tuple[GenerationRequest, ...],
    futures: list[Future[Completion]],
) -> list[Completion]:
    """The completions. They end early if the client disconnects; there is no other time limit."""
    disconnected = asyncio.ensure_future(_until_disconnected(request))
    loop, unfinished = asyncio.get_running_loop(), [*futures]

    def note_end(_: Future[Completion]) -> None:
        unfinished.pop()  # in the generation thread: wakes the loop only once
        if not unfinished:
            with suppress(RuntimeError):  # the server and its loop have ended meanwhile
                loop.call_soon_threadsafe(disconnected.cancel)

    for future in futures:
        future.add_done_callback(note_end)
    try:
        await asyncio.wait([disconnected])
    finally:
        abort_unfinished(scheduler, requests, futures)
        disconnected.cancel()
    return await asyncio.gather(*map(asyncio.wrap_future, futures))


async def _until_disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def complete_all(
    request: Request, scheduler: Scheduler, requests: tuple[GenerationRequest, ...]
) -> list[Completion]:
    """The completions of a request's call. They end early if the client disconnects."""
    return await wait_or_abort(request, scheduler, requests, submit_all(scheduler, requests))


async def follow(
    scheduler: Scheduler, requests: tuple[GenerationRequest, ...]
) -> AsyncGenerator[tuple[int, Partial | Completion], None]:
    """Yield each completion so far as it grows, then the complete one, with the number of its request.

    If the caller is slow, intermediate states are skipped, so memory does not grow for a client that reads slowly.
    Requests that are still running when the caller ends are aborted.
    """
    loop = asyncio.get_running_loop()
    newest: dict[int, Partial | Future[Completion]] = {}
    has_news = asyncio.Event()

    def note(index: int, news: Partial | Future[Completion]) -> None:
        newest[index] = news
        has_news.set()

    def push(index: int, news: Partial | Future[Completion]) -> None:
        with suppress(RuntimeError):  # the server and its loop have ended meanwhile
            loop.call_soon_threadsafe(note, index, news)

    futures: list[Future[Completion]] = []
    try:
        futures += submit_all(scheduler, requests, lambda index: partial(push, index))
        for index, future in enumerate(futures):
            future.add_done_callback(partial(push, index))
        num_open = len(futures)
        while num_open:
            await has_news.wait()
            has_news.clear()
            while newest:
                index = next(iter(newest))  # has waited longest
                news = newest.pop(index)
                num_open -= isinstance(news, Future)
                yield index, news.result() if isinstance(news, Future) else news
    finally:
        abort_unfinished(scheduler, requests, futures)


def abort_unfinished(
    scheduler: Scheduler, requests: tuple[GenerationRequest, ...], futures: list[Future[Completion]]
) -> None:
    scheduler.give_up([asked.request_id for asked, future in zip(requests, futures, strict=False) if not future.done()])
