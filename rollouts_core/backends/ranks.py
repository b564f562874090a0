"""Communication between the processes (ranks) that train one model together.

Rank 0 is the leader. Only the leader runs the training loop, calls engines and writes files. The other ranks, the
followers, have a part of the model and run tasks for the leader. Training loops are therefore the same for any number
of processes.

    leader     loop -> backend.forward_backward(batch) -> scatter -+-> its share  -> gather -> the batch's metrics
    followers  ......................................... waiting --+-> its share  -> gather -> waiting ...
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from io import BytesIO
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollouts_core.backends.launch import is_launched
from rollouts_core.config.messages import first_line
from rollouts_core.errors import ConfigError, InputError, NonFiniteError, TrainingError
from rollouts_core.user_code.failures import describe_raised

logger = logging.getLogger(__name__)

MAX_WAIT = timedelta(days=30)
"""Timeout of a follower that waits for the leader, which may be generating, evaluating or writing. If the leader's
process ends, its connections close, and followers notice the end at once."""


class LeaderGoneError(TrainingError):
    """The leader's process ended, so this follower has to end too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """An error on one rank, as reported to the other ranks."""

    sentence: str
    """Message with the number of the rank and its error."""
    is_of_input: bool
    """True if the user must change the input. Other ranks then raise ConfigError instead of TrainingError."""


class Ranks:
    """The rank of this process among the processes that torchrun started, with connections to the other ranks.

    Args:
        device: device of this process. "" uses the GPU of its local rank, or the CPU on machines without GPUs.

    Raises:
        TrainingError: torchrun did not start this process.
    """

    def __init__(self, *, device: str = "") -> None:
        if not is_launched():
            raise TrainingError("RANK and WORLD_SIZE are not set: start this program with torchrun")
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        has_gpu = torch.cuda.is_available()
        self.device = torch.device(device or (f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if has_gpu else "cpu"))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        # Ranks exchange small objects on the CPU, so this group uses gloo. A wait in NCCL would occupy the GPU and time
        # out.
        self._objects = dist.new_group(backend="gloo", timeout=MAX_WAIT)
        self._types: list[type] = [_Failure]
        self.followers_wait = True
        """True if every follower waits in `scatter`. The leader may send objects only then."""

    @property
    def is_leader(self) -> bool:
        """True if this process is rank 0, which runs the training loop."""
        return self.rank == 0

    @contextmanager
    def working(self) -> Iterator[None]:
        """A context for work that all ranks do together. Either all ranks complete the work, or NonFiniteError ends the
        work on all ranks."""
        self.followers_wait = False
        try:
            yield
        except NonFiniteError:
            self.followers_wait = True
            raise
        self.followers_wait = True

    def begin(self, value: object = True) -> Any:  # Any: the leader's object
        """Wait until all ranks have reached this call, before they create a model together.

        Returns:
            The leader's `value`, so that all ranks use the same settings.

        Raises:
            LeaderGoneError: the leader ended before it reached this call.
        """
        agreed = self.scatter([value] * self.size if self.is_leader else None)
        if agreed is None:
            raise LeaderGoneError("rank 0 ended before it began")
        self.followers_wait = False
        return agreed

    def scatter(self, objects: Sequence[object] | None = None) -> Any:  # Any: the leader's object
        """Send one object from the leader to each rank, and return this rank's object. Only the leader passes
        `objects`.

        Raises:
            LeaderGoneError: raised on a follower if the leader ended without stopping it.
        """
        assert (objects is not None) == self.is_leader, "only the leader passes objects"
        contents = None if objects is None else [_pack(each) for each in objects]
        try:
            return self._unpack(self._scatter_bytes(contents))
        except RuntimeError as error:
            if self.is_leader:
                raise
            raise LeaderGoneError(f"rank 0 is gone: {first_line(error)}") from error

    def gather(self, value: object) -> list[Any]:  # Any: the ranks' objects
        """Exchange objects, and return the objects of all ranks, in order, on every rank."""
        return [self._unpack(content) for content in self._gather_bytes(_pack(value))]

    def gather_unless_failed(self, value: object, error: Exception | None) -> list[Any]:  # Any: as in `gather`
        """Like `gather`, but if a rank failed, raise an error on every rank, so that no rank waits for the failed rank.

        Args:
            error: the error of this rank, or None if this rank did not fail.

        Raises:
            ConfigError, TrainingError: another rank failed. The message names the rank and its error.
        """
        failure = error and _Failure(
            sentence=f"rank {self.rank} {describe_raised(error)}", is_of_input=isinstance(error, InputError)
        )
        gathered = self.gather(failure or value)
        if error is not None:
            raise error
        for each in gathered:
            if isinstance(each, _Failure):
                raise (ConfigError if each.is_of_input else TrainingError)(each.sentence)
        return gathered

    def allow(self, *types: type) -> None:
        """Permit these types in received objects, besides tensors, numbers, strings and containers of these."""
        self._types.extend(types)

    def _unpack(self, content: Tensor) -> Any:  # Any: the sent object
        """Deserialize a received object. Connections are not authenticated, so only permitted types are constructed.

        Raises:
            TrainingError: the object has a type that is not permitted.
        """
        with torch.serialization.safe_globals([*self._types]):
            try:
                return torch.load(BytesIO(content.numpy().tobytes()), weights_only=True)
            except UnpicklingError as error:
                raise TrainingError(f"a rank received an unexpected object: {first_line(error)}") from error

    def _scatter_bytes(self, contents: Sequence[Tensor] | None) -> Tensor:
        sizes = torch.tensor([len(each) for each in contents] if contents else [0] * self.size)
        dist.broadcast(sizes, src=0, group=self._objects)
        received = torch.empty(int(sizes.max()), dtype=torch.uint8)
        padded = None if contents is None else [_pad(each, len(received)) for each in contents]
        dist.scatter(received, padded, src=0, group=self._objects)
        return received[: int(sizes[self.rank])]

    def _gather_bytes(self, content: Tensor) -> list[Tensor]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(content)]), group=self._objects)
        width = max(int(size) for size in sizes)
        gathered = [torch.empty(width, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(gathered, _pad(content, width), group=self._objects)
        return [each[: int(size)] for each, size in zip(gathered, sizes, strict=True)]

    def stop_followers(self) -> None:
        """Make `FSDPTrainingBackend.follow` return on all followers."""
        assert self.is_leader, "only the leader stops followers"
        self.scatter([None] * self.size)
        self.followers_wait = False


def _pack(value: object) -> Tensor:
    """Serialize an object in torch's format, which `Ranks._unpack` reads without running code."""
    buffer = BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _pad(content: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(content, (0, width - len(content)))


@contextmanager
def join_ranks(*, device: str = "") -> Iterator[Ranks]:
    """Connect to the other ranks for the duration of the `with` block.

    When the leader leaves the block, also by an error, `follow` returns on the followers. After an error inside
    `working`, followers may still wait for other ranks. The launcher then ends the followers. If the leader's process
    ended, a follower leaves the block without an error.
    """
    ranks = Ranks(device=device)
    try:
        yield ranks
    except LeaderGoneError as error:
        logger.info("rank %d ends: %s", ranks.rank, error)
        return
    except BaseException:
        if ranks.is_leader and ranks.followers_wait:
            with suppress(RuntimeError):  # the followers may have ended too
                ranks.stop_followers()
        raise
    if ranks.is_leader and ranks.followers_wait:
        ranks.stop_followers()
    dist.destroy_process_group()
