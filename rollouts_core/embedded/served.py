"""The model that a server serves, with its tokenizer, and functions that submit, follow and abort requests.

Not here: the JSON of requests and answers (protocol.py, openai_api.py, anthropic_api.py), generation (scheduler.py).
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
from rollouts_core.embedded.protocol import GenerateCall
from rollouts_core.embedded.receiving import WeightReceiver
from rollouts_core.embedded.running import Completion, GenerationRequest, Partial
from rollouts_core.embedded.sampling import SamplingParams
from rollouts_core.embedded.scheduler import Scheduler
from rollouts_core.errors import EngineError

INCOMPLETE = "\ufffd"
"""Character that the tokenizer puts for incomplete UTF-8, for instance if a character's last token is still missing."""


ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A served model with its scheduler, tokenizer and chat template, for all endpoints."""

    scheduler: Scheduler
    """Runs the model in the generation thread."""
    receiver: WeightReceiver
    """Receives weights that a trainer sends."""
    tokenizer: Tokenizer | None
    """Converts text to token ids and back; None if the model directory has no tokenizer.json."""
    name: str
    """Name of the model in requests."""
    chat: ChatModel
    """The model's chat template."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Time at which serving began, in seconds since 1970."""
    encoding: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))
    """Limits tokenization to one request at a time, because it needs hundreds of bytes of memory per byte of text."""

    def encode(self) -> Callable[[str], list[int]] | None:
        """Return the function that converts text to token ids; None without a tokenizer."""
        if (tokenizer := self.tokenizer) is None:
            return None
        # This method releases the GIL for the event loop, and does not compute the positions of tokens in the text.
        return lambda text: list(tokenizer.encode_batch_fast([text])[0].ids)

    def check_name(self, name: str) -> None:
        """Raise UnknownModelError if `name` is not the name of the served model."""
        known = (self.name, str(self.scheduler.model_dir))
        if name not in known:
            raise UnknownModelError(f"The model {name[:200]!r} is not served here: ask for {self.name!r}.")

    def checked(self, call: GenerateCall) -> GenerateCall:
        """The call, if the model supports its requests. Checking JSON schemas and regular expressions is slow.

        Raises:
            RequestError: the model does not support a request.
        """
        for asked in call.requests:
            self.scheduler.check(asked)
        return call

    async def prepare(self, make: Callable[[], ResultT]) -> ResultT:
        """Run `make`, which tokenizes text, in a thread and return its result. Only one call runs at a time."""
        return await anyio.to_thread.run_sync(make, limiter=self.encoding)

    def text_of(self, token_ids: tuple[int, ...], params: SamplingParams) -> str:
        """Decode the token ids of a completion; empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=params.skip_special_tokens)

    def text_of_completion(self, completion: Completion, params: SamplingParams) -> str:
        """The text of a finished completion. The stop string or token is removed unless `no_stop_trim` is set."""
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
    """Submit all requests. If the scheduler refuses a request, abort the submitted requests and raise the error."""
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
    """Wait for completions without a time limit. If the client disconnects, abort the requests and return the
    unfinished completions."""
    disconnected = asyncio.ensure_future(_until_disconnected(request))
    loop, unfinished = asyncio.get_running_loop(), [*futures]

    def note_end(_: Future[Completion]) -> None:
        unfinished.pop()  # runs in the generation thread; only the last completion wakes the event loop
        if not unfinished:
            with suppress(RuntimeError):  # raised after the end of the event loop
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
    """Submit requests and wait for their completions. If the client disconnects, the completions are aborted."""
    return await wait_or_abort(request, scheduler, requests, submit_all(scheduler, requests))


async def follow(
    scheduler: Scheduler, requests: tuple[GenerationRequest, ...]
) -> AsyncGenerator[tuple[int, Partial | Completion], None]:
    """Yield (index of the request, its completion so far) as completions grow, then each finished completion.

    A slow caller misses intermediate states, so that memory does not grow for a client that reads slowly. If the
    caller stops early, the requests that still run are aborted.
    """
    loop = asyncio.get_running_loop()
    newest: dict[int, Partial | Future[Completion]] = {}
    has_news = asyncio.Event()

    def note(index: int, news: Partial | Future[Completion]) -> None:
        newest[index] = news
        has_news.set()

    def push(index: int, news: Partial | Future[Completion]) -> None:
        with suppress(RuntimeError):  # raised after the end of the event loop
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
                index = next(iter(newest))  # the request whose state has waited longest
                news = newest.pop(index)
                num_open -= isinstance(news, Future)
                yield index, news.result() if isinstance(news, Future) else news
    finally:
        abort_unfinished(scheduler, requests, futures)


def abort_unfinished(
    scheduler: Scheduler, requests: tuple[GenerationRequest, ...], futures: list[Future[Completion]]
) -> None:
    scheduler.give_up([asked.request_id for asked, future in zip(requests, futures, strict=False) if not future.done()])
