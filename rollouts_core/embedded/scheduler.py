"""Own the generation thread: a queue of requests, and pauses, weight updates and aborts between two steps.

Not here: the rows of the running batch (running.py), HTTP (server.py).

    any thread                              generation thread, one turn after the other
    submit()  -> incoming --+
    abort()   -+            +-> [commands] -> [updates, if paused or nothing runs] -> [admit and step] -+
    pause()    +-> commands +        ^                                                                  |
    update_weights() ...-+           +------------------------------------------------------------------+
                                        finished completions resolve the futures that submit() returned

An update without a pause lets the running requests end first and admits no other requests meanwhile. If the thread
fails, every pending future fails with the same error, and no further calls are accepted.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar

from tokenizers import Tokenizer
from torch import Tensor

from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.offline import check_request, choose_seed
from rollouts_core.embedded.running import (
    Completion,
    FinishReason,
    GenerationRequest,
    Partial,
    RunningBatch,
    complete,
    note_version_change,
)
from rollouts_core.embedded.segments import SegmentAddress
from rollouts_core.embedded.weights import tensor_digest
from rollouts_core.errors import CheckpointError, EngineError, EngineUnavailableError, NoMemoryError, RolloutsError

logger = logging.getLogger(__name__)

MAX_WAITING_REQUESTS = 65536
MAX_WAITING_UPDATES = 8
"""Highest number of weight updates that wait for running requests to end. Waiting updates may hold sent weights."""
CLOSE_TIMEOUT_S = 10.0
ABORTED = FinishReason("abort", message="Aborted")
SHUT_DOWN = FinishReason("abort", message="The engine is shutting down")

PauseMode = Literal["abort", "retract", "in_place"]
ResultT = TypeVar("ResultT")
ProgressListener = Callable[[Partial], None]


class RequestError(EngineError):
    """A request that the engine refuses; a retry of the same request does not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """Weights that wait to be loaded."""

    model_dir: Path
    """Directory with the safetensors files. For segments and sent weights, it needs only a config.json."""
    segments: tuple[SegmentAddress, ...] = ()
    """Addresses of the weights; empty if the weights are in the directory."""
    tensors: Mapping[str, Tensor] | None = None
    """The weights themselves, if a trainer sent them."""
    kept: frozenset[str] = frozenset()
    """Names of the weights that stay unchanged beside `tensors`."""
    weight_version: str | None
    """Name of the new weights; None keeps the old name."""
    done: Future[int]
    """Resolves to the number of paused requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The amount of work of the engine."""

    num_running: int
    """Number of running requests."""
    num_waiting: int
    """Number of requests that wait for a free row or for the end of a pause."""
    num_used_tokens: int
    """Number of tokens of the running requests, including prompts."""
    num_waiting_tokens: int
    """Number of tokens of the waiting requests."""
    is_paused: bool
    """True if nothing is generated until `resume`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    """A command to run between two steps."""

    run: Callable[[], None]
    """Runs the command and resolves its future; raises if the thread cannot continue."""
    refuse: Callable[[str], None]
    """Fails the future of the command with a reason."""


class Scheduler:
    """A generation thread over one decoder; use it with `with`.

    All methods may be called from any thread. Futures resolve in the generation thread.

    Raises:
        CheckpointError: the model directory's tokenizer.json cannot be read.
    """

    def __init__(self, decoder: Decoder, *, model_dir: Path, weight_version: str = "default") -> None:
        self.decoder = decoder
        self.model_dir = model_dir
        self.weight_version = weight_version
        self.is_paused = False
        self.failure: RolloutsError | None = None
        """The error that ended the thread. Every waiting and later call raises this error."""
        self.tokenizer = _load_tokenizer(model_dir)
        """Converts text to token ids and back; None if the model directory has no tokenizer.json."""
        self._batch = RunningBatch(decoder, self.tokenizer)
        self._waiting: deque[Partial] = deque()
        self._updates: deque[WeightUpdate] = deque()
        # The lock guards the attributes that other threads use: those below, and `failure`.
        self._wake = threading.Condition()
        self._incoming: deque[Partial] = deque()
        self._commands: deque[_Command] = deque()
        self._pending: dict[str, Future[Completion]] = {}
        self._listeners: dict[str, ProgressListener] = {}
        self._given_up: set[str] = set()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return self._batch.num_rows

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a free row or for the end of a pause."""
        return len(self._waiting) + len(self._incoming)

    @property
    def is_healthy(self) -> bool:
        """True if the generation thread runs and accepts requests."""
        return self.failure is None and not self._is_closing and self._thread.is_alive()

    def submit(self, request: GenerationRequest, *, on_progress: ProgressListener | None = None) -> Future[Completion]:
        """Queue a request. The future resolves to the completion, also after an abort.

        The future fails with RequestError if the search for the request's stop patterns takes too long, or if log-probs
        are not finite.

        Args:
            request: the request to queue.
            on_progress: called in the generation thread after every step, with the tokens so far.

        Raises:
            RequestError: the model cannot take this request.
            EngineUnavailableError: the engine is closing, failed or full.
        """
        self.check(request)
        done: Future[Completion] = Future()
        done.set_running_or_notify_cancel()
        partial = Partial(request=request, seed=choose_seed(request.params))
        with self._wake:
            self._check_open()
            if request.request_id in self._pending:
                raise RequestError(f"Duplicate request ID detected: {request.request_id}")
            if len(self._pending) >= MAX_WAITING_REQUESTS:
                raise EngineUnavailableError("The request queue is full.")
            self._pending[request.request_id] = done
            if on_progress is not None:
                self._listeners[request.request_id] = on_progress
            self._incoming.append(partial)
            self._wake.notify()
        return done

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestError if the model cannot take this request."""
        try:
            check_request(request, self.decoder, has_text=self.tokenizer is not None)
            self._batch.constraints.check(request.params)
        except ValueError as error:
            raise RequestError(str(error)) from error

    def abort(self, request_id: str) -> Future[None]:
        """End a request, or the requests `<request_id>_<n>` of a batch, with the tokens sampled so far.

        Unknown ids are ignored.
        """
        return self._between_steps(
            lambda: self._end(lambda found: found == request_id or found.startswith(f"{request_id}_"), ABORTED)
        )

    def give_up(self, request_ids: Collection[str]) -> None:
        """End requests for which no caller waits. Unknown ids are ignored, also after the engine has ended.

        The ids of all callers are collected and searched once, because a disconnected client may leave thousands of
        requests.
        """
        with self._wake:
            self._given_up.update(request_ids)
            self._wake.notify()

    def abort_all(self) -> Future[None]:
        """End all running and waiting requests with the tokens sampled so far."""
        return self._between_steps(lambda: self._end(lambda _: True, ABORTED))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop generating until `resume`, with SGLang's modes.

        abort ends all requests. retract puts running requests back into the queue, and computes their KV cache again.
        in_place keeps running requests with their KV cache, so after a weight update their logprobs belong to neither
        model.
        """
        return self._between_steps(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        """Continue after `pause`."""
        return self._between_steps(self._resume)

    def update_weights(
        self,
        model_dir: Path,
        *,
        weight_version: str | None,
        segments: tuple[SegmentAddress, ...] = (),
        tensors: Mapping[str, Tensor] | None = None,
        kept: frozenset[str] = frozenset(),
    ) -> Future[int]:
        """Load other weights, at once if paused, else when the running requests have ended.

        Args:
            segments: addresses of the weights; by default the weights are in the directory.
            tensors: the weights themselves, if a trainer sent them.
            kept: names of the weights that stay unchanged beside `tensors`.

        The future resolves to the number of paused requests. It fails with `CheckpointError` if the weights cannot be
        loaded; all old weights then stay. It fails with `EngineUnavailableError` if too many updates are waiting.
        """
        update = WeightUpdate(
            model_dir=model_dir,
            segments=segments,
            tensors=tensors,
            kept=kept,
            weight_version=weight_version,
            done=Future(),
        )
        update.done.set_running_or_notify_cancel()
        queued = self._between_steps(lambda: self._queue_update(update))
        queued.add_done_callback(lambda done: _pass_on_error(done, update.done))
        return update.done

    def set_weight_version(self, weight_version: str) -> Future[None]:
        """Change the version name of the current weights."""
        return self._between_steps(lambda: self._rename_weights(weight_version))

    def weight_digests(self, digest: Callable[[Tensor], str] = tensor_digest) -> Future[dict[str, str]]:
        """A digest of each tensor of the current weights, by the tensor's name in checkpoints."""
        return self._between_steps(lambda: self.decoder.weight_digests(digest))

    def load(self) -> Future[Load]:
        """The amount of work between two steps. An answer shows that the thread still runs."""
        return self._between_steps(self._measure_load)

    def close(self) -> None:
        """End all requests with the tokens sampled so far, then end the thread."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(timeout=CLOSE_TIMEOUT_S)

    def _between_steps(self, function: Callable[[], ResultT]) -> Future[ResultT]:
        """Run `function` in the generation thread and return the future of its result."""
        done: Future[ResultT] = Future()
        done.set_running_or_notify_cancel()

        def run() -> None:
            try:
                result = function()
            except RolloutsError as error:
                done.set_exception(error)
            except Exception as error:
                done.set_exception(EngineError(f"the engine failed: {error!r}"))
                raise
            else:
                done.set_result(result)

        def refuse(reason: str) -> None:
            done.set_exception(EngineUnavailableError(reason))

        with self._wake:
            self._check_open()
            self._commands.append(_Command(run=run, refuse=refuse))
            self._wake.notify()
        return done

    def _check_open(self) -> None:
        if self.failure is not None:
            raise _copy(self.failure)
        if self._is_closing:
            raise EngineUnavailableError(SHUT_DOWN.message)

    # Everything below runs in the generation thread.

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._turn()
            self._shut_down()
        except NoMemoryError as error:  # a restart would fail in the same way
            logger.error("%s", error)
            self._fail(error)
        except Exception as error:
            logger.exception("the generation thread failed")
            self._fail(EngineUnavailableError(f"the generation thread failed: {error!r}; restart the engine"))
        finally:
            self._batch.close()

    def _wait_for_work(self) -> bool:
        """Block until there is something to do; False when the engine closes."""
        with self._wake:
            while not (self._is_closing or self._has_orders() or self._can_generate()):
                self._wake.wait()
            return not self._is_closing

    def _has_orders(self) -> bool:
        return bool(self._commands or self._given_up or self._updates)

    def _can_generate(self) -> bool:
        return not self.is_paused and bool(self._incoming or self._waiting or self._batch.num_rows)

    def _turn(self) -> None:
        self._take_incoming()
        self._end_given_up()
        while self._commands:
            self._commands.popleft().run()
        while self._updates and (self.is_paused or self._batch.num_rows == 0):
            self._load_weights(self._updates.popleft())
        if self.is_paused:
            return
        count = 0 if self._updates else min(self._batch.num_free, len(self._waiting))
        self._finish(self._batch.step([self._waiting.popleft() for _ in range(count)]))
        self._report_progress()

    def _measure_load(self) -> Load:
        self._take_incoming()
        return Load(
            num_running=self._batch.num_rows,
            num_waiting=len(self._waiting),
            num_used_tokens=self._batch.num_tokens,
            num_waiting_tokens=sum(len(each.request.input_ids) + len(each.output_ids) for each in self._waiting),
            is_paused=self.is_paused,
        )

    def _take_incoming(self) -> None:
        with self._wake:
            self._waiting.extend(self._incoming)
            self._incoming.clear()

    def _pause(self, mode: PauseMode) -> None:
        self.is_paused = True
        if mode == "abort":
            self._end(lambda _: True, ABORTED)
        elif mode == "retract":
            self._waiting.extendleft(reversed(self._batch.remove(lambda _: True)))

    def _queue_update(self, update: WeightUpdate) -> None:
        if len(self._updates) >= MAX_WAITING_UPDATES:
            raise EngineUnavailableError(f"{MAX_WAITING_UPDATES} updates of the weights are waiting: try again later")
        self._updates.append(update)

    def _resume(self) -> None:
        self.is_paused = False

    def _load_weights(self, update: WeightUpdate) -> None:
        num_paused = self._batch.num_rows
        try:
            if update.tensors is not None:
                self.decoder.load_tensors(update.tensors, kept=update.kept)
            elif update.segments:
                self.decoder.load_segments(update.segments, model_dir=update.model_dir)
            else:
                self.decoder.load_weights(update.model_dir)
        except RolloutsError as error:
            update.done.set_exception(error)
            return
        except Exception as error:
            update.done.set_exception(EngineError(f"the engine failed while loading weights: {error!r}"))
            raise
        self.model_dir = update.model_dir
        if update.weight_version is not None:
            self._rename_weights(update.weight_version)
        logger.info("loaded weights %s from %s", self.weight_version, update.model_dir)
        update.done.set_result(num_paused)

    def _rename_weights(self, weight_version: str) -> None:
        self._batch.note_version_change(self.weight_version)
        self._waiting = deque(note_version_change(partial, self.weight_version) for partial in self._waiting)
        self.weight_version = weight_version

    def _end(self, is_chosen: Callable[[str], bool], reason: FinishReason) -> None:
        """Finish the chosen waiting and running requests with the tokens sampled so far."""
        self._take_incoming()
        ended = self._batch.remove(is_chosen)
        kept: deque[Partial] = deque()
        for partial in self._waiting:
            (ended if is_chosen(partial.request.request_id) else kept).append(partial)
        self._waiting = kept
        self._finish([(partial, reason) for partial in ended])

    def _end_given_up(self) -> None:
        with self._wake:
            given_up, self._given_up = self._given_up, set()
        if given_up:
            self._end(given_up.__contains__, ABORTED)

    def _finish(self, ended: list[tuple[Partial, FinishReason]]) -> None:
        for partial, reason in ended:
            with self._wake:
                done = self._pending.pop(partial.request.request_id)
                self._listeners.pop(partial.request.request_id, None)
            if reason.kind == "error":
                done.set_exception(RequestError(reason.message))
            else:
                done.set_result(complete(partial, reason, weight_version=self.weight_version))

    def _report_progress(self) -> None:
        with self._wake:
            listeners = list(self._listeners.items())
        for request_id, listener in listeners:
            row = self._batch.row_of(request_id)
            if row is not None:
                listener(self._batch.partial(row))

    def _shut_down(self) -> None:
        self._end(lambda _: True, SHUT_DOWN)
        self._fail(EngineUnavailableError(SHUT_DOWN.message))

    def _fail(self, failure: RolloutsError) -> None:
        """Refuse all further calls, and fail all waiting calls."""
        with self._wake:
            self.failure = failure
            pending, commands = list(self._pending.values()), list(self._commands)
            self._pending.clear()
            self._commands.clear()
        for command in commands:
            command.refuse(str(failure))
        for request_done in pending:
            request_done.set_exception(_copy(failure))
        while self._updates:
            self._updates.popleft().done.set_exception(_copy(failure))


def _load_tokenizer(model_dir: Path) -> Tokenizer | None:
    path = model_dir / "tokenizer.json"
    if not path.exists():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exceptions
        raise CheckpointError(f"{path} cannot be read as a tokenizer ({error}): copy the file again") from error
    # tokenizer.json stores the last used truncation and padding. Prompts are neither truncated nor padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _copy(error: RolloutsError) -> RolloutsError:
    """A copy of the error for another caller, which adds its own traceback."""
    return type(error)(str(error))


def _pass_on_error(source: Future[None], target: Future[int]) -> None:
    if (error := source.exception()) is not None:
        target.set_exception(error)
