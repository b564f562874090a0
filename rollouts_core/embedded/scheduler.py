"""Own the generation thread. Between two decoding steps it admits, aborts and pauses requests, and updates weights.

Not here: the rows of the running batch (running.py), HTTP (server.py).

    any thread                              generation thread, in a loop
    submit()  -> incoming --+
    abort()   -+            +-> [commands] -> [updates, if paused or nothing runs] -> [admit and step] -+
    pause()    +-> commands +        ^                                                                  |
    update_weights() ...-+           +------------------------------------------------------------------+
                                        finished completions resolve the futures that submit() returned

Without a pause, a weight update waits until all running requests have ended. No requests are admitted during this wait.
If the thread fails, all pending futures fail with its error, and further calls are refused.
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
"""Highest number of weight updates that wait for running requests to end. Each update may have a copy of the
weights."""
CLOSE_TIMEOUT_S = 10.0
ABORTED = FinishReason("abort", message="Aborted")
SHUT_DOWN = FinishReason("abort", message="The engine is shutting down")

PauseMode = Literal["abort", "retract", "in_place"]
ResultT = TypeVar("ResultT")
ProgressListener = Callable[[Partial], None]


class RequestError(EngineError):
    """The engine refuses a request. Sending the same request again does not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """A weight update that waits until no request runs or generation is paused."""

    model_dir: Path
    """Directory with the safetensors files. With `segments` or `tensors`, it needs only a config.json."""
    segments: tuple[SegmentAddress, ...] = ()
    """Addresses of published weights; empty if the weights are not in segments."""
    tensors: Mapping[str, Tensor] | None = None
    """The weights in memory, if a trainer sent the weights; else None."""
    kept: frozenset[str] = frozenset()
    """Names of the weights that `tensors` does not replace."""
    weight_version: str | None
    """Version name of the new weights; None keeps the current version name."""
    done: Future[int]
    """Future that resolves after loading, to the number of requests that were paused during the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Numbers of running and waiting requests and tokens of the engine."""

    num_running: int
    num_waiting: int
    """Number of requests that wait for a free row in the batch or for the end of a pause."""
    num_used_tokens: int
    """Number of tokens of the running requests, including prompts."""
    num_waiting_tokens: int
    """Number of tokens of the waiting requests."""
    is_paused: bool
    """True if generation is paused until `resume`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    """A function for the generation thread to run between two decoding steps."""

    run: Callable[[], None]
    """Runs the function and resolves the caller's future. Raises an error if the generation thread must end."""
    refuse: Callable[[str], None]
    """Fails the caller's future with this message."""


class Scheduler:
    """Runs a decoder in a generation thread. Use it as a context manager.

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
        """The error that ended the generation thread. All waiting and later calls raise a copy of it."""
        self.tokenizer = _load_tokenizer(model_dir)
        """Converts text to token ids and back; None if the model directory has no tokenizer.json."""
        self._batch = RunningBatch(decoder, self.tokenizer)
        self._waiting: deque[Partial] = deque()
        self._updates: deque[WeightUpdate] = deque()
        # `_wake` is the lock of `failure` and of the following attributes, which other threads use too.
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
        """Queue a request. The returned future resolves to the completion. After an abort, the completion is partial.

        The future fails with RequestError if the search for stop patterns takes too long, or if log-probs are not
        finite.

        Args:
            request: the request to queue.
            on_progress: called in the generation thread after every decoding step, with the tokens so far.

        Raises:
            RequestError: the model does not support this request, or its id is in use.
            EngineUnavailableError: the engine is closing, has failed, or has too many waiting requests.
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
        """Raise RequestError if the model does not support this request."""
        try:
            check_request(request, self.decoder, has_text=self.tokenizer is not None)
            self._batch.constraints.check(request.params)
        except ValueError as error:
            raise RequestError(str(error)) from error

    def abort(self, request_id: str) -> Future[None]:
        """End a request, or all requests `<request_id>_<n>`, with the tokens sampled so far.

        Unknown ids are ignored.
        """
        return self._between_steps(
            lambda: self._end(lambda found: found == request_id or found.startswith(f"{request_id}_"), ABORTED)
        )

    def give_up(self, request_ids: Collection[str]) -> None:
        """End requests whose caller no longer waits. Unknown ids are ignored. A closed engine raises no error.

        A disconnected client may leave thousands of requests. The ids are therefore collected, and the generation
        thread searches the queue once for all ids.
        """
        with self._wake:
            self._given_up.update(request_ids)
            self._wake.notify()

    def abort_all(self) -> Future[None]:
        """End all running and waiting requests with the tokens sampled so far."""
        return self._between_steps(lambda: self._end(lambda _: True, ABORTED))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Pause generation until `resume`. The modes are those of SGLang.

        abort     ends all requests
        retract   returns running requests to the queue; their KV cache is computed again after the pause
        in_place  keeps running requests and their KV cache; after a weight update, their log-probs mix keys and
                  values of the old weights with the new weights
        """
        return self._between_steps(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        """Continue generation after `pause`."""
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
        """Load new weights: at once if generation is paused, else after the running requests have ended.

        Args:
            segments: addresses of published weights. Without `segments` and `tensors`, `model_dir` has the weights.
            tensors: the weights in memory, if a trainer sent them.
            kept: names of the weights that `tensors` does not replace.

        The returned future resolves to the number of requests that were paused during the update. The future fails with
        `CheckpointError` if the weights cannot be loaded; all old weights then stay. The future fails with
        `EngineUnavailableError` if too many updates are waiting.
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
        return self._between_steps(lambda: self._rename_weights(weight_version))

    def weight_digests(self, digest: Callable[[Tensor], str] = tensor_digest) -> Future[dict[str, str]]:
        """A digest of each tensor of the current weights, by the tensor's name in checkpoints."""
        return self._between_steps(lambda: self.decoder.weight_digests(digest))

    def load(self) -> Future[Load]:
        """The engine's load, measured by the generation thread. A result proves that the generation thread still
        runs."""
        return self._between_steps(self._measure_load)

    def close(self) -> None:
        """End all requests with the tokens sampled so far, then end the generation thread."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(timeout=CLOSE_TIMEOUT_S)

    def _between_steps(self, function: Callable[[], ResultT]) -> Future[ResultT]:
        """Run `function` in the generation thread between two decoding steps; returns the future of its result."""
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
        except NoMemoryError as error:  # logged without a traceback: a restart would fail in the same way
            logger.error("%s", error)
            self._fail(error)
        except Exception as error:
            logger.exception("the generation thread failed")
            self._fail(EngineUnavailableError(f"the generation thread failed: {error!r}; restart the engine"))
        finally:
            self._batch.close()

    def _wait_for_work(self) -> bool:
        """Block until the thread has work. Returns False if the engine closes."""
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
            raise EngineUnavailableError(f"{MAX_WAITING_UPDATES} weight updates are already waiting: try again later")
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
        """Fail all pending requests, commands and weight updates with this error, and refuse further calls."""
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
    except Exception as error:  # the tokenizers library raises plain Exceptions
        raise CheckpointError(f"{path} cannot be read as a tokenizer ({error}): copy the file again") from error
    # tokenizer.json may contain truncation and padding settings. Prompts must not be truncated or padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _copy(error: RolloutsError) -> RolloutsError:
    """A copy of an error for one caller. Raising the same object for several callers would mix their tracebacks."""
    return type(error)(str(error))


def _pass_on_error(source: Future[None], target: Future[int]) -> None:
    if (error := source.exception()) is not None:
        target.set_exception(error)
