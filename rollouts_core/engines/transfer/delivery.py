"""Deliver weights to one server, and verify by digests, checksums or a canary that the server has these weights.

recovery.py decides when weights are delivered; servers' endpoints are in sglang.py and vllm.py.

    segments in shared memory   digests of all tensors                       -> compared
    a directory, or tensors     checksums, if they can be compared           -> compared
    that are sent               else: checksums of changed tensors differ    -> and a canary's log-probs are right
    adapters in a folder        the weights below as above, once             -> and a canary's log-probs are right
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rollouts_core.config.messages import first_line
from rollouts_core.embedded.weights import read_tensors
from rollouts_core.engines.completion import Completion, GenerationRequest
from rollouts_core.engines.scoring import ScoredTokens, ScoringRequest
from rollouts_core.engines.transfer.adapters import AdaptedWeights
from rollouts_core.engines.transfer.canary import Canary, prove, published_canary
from rollouts_core.engines.transfer.checksums import (
    EMPTY_DIGEST,
    HeldTensors,
    check_digests,
    find_left_behind,
    find_unproven,
    read_config,
    sample_content,
)
from rollouts_core.engines.transfer.shared_memory import SegmentedWeights
from rollouts_core.engines.transfer.versions import SentWeights, find_kept
from rollouts_core.errors import CheckpointError, EngineError, EngineUnavailableError, TrainingError, WeightSyncError
from rollouts_core.system.concurrency import in_short_thread

if TYPE_CHECKING:
    from rollouts_core.engines.protocol import Weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """The weights that a server must serve."""

    weights: Weights
    version: str
    canary: Canary | None
    """Verifies tensors without comparable checksums. If None, a forward pass of the published model verifies these
    tensors."""

    @property
    def model_dir(self) -> Path:
        """Directory with the model's config.json."""
        return self.weights if isinstance(self.weights, Path) else self.weights.model_dir


class ServerCalls(Protocol):
    """The methods of one server's client that deliver weights, as `EngineClient` describes them."""

    @property
    def name(self) -> str: ...

    async def complete(self, requests: Sequence[GenerationRequest]) -> list[Completion]: ...

    async def score_once(self, requests: Sequence[ScoringRequest]) -> list[ScoredTokens]: ...

    async def weight_version(self) -> str: ...

    async def check_model(self, path: Path) -> None: ...

    async def take_weights(self, path: Path, version: str) -> HeldTensors: ...

    async def take_sent(self, weights: SentWeights, version: str, kept: Collection[str]) -> HeldTensors: ...

    async def take_adapters(self, weights: AdaptedWeights, version: str) -> None: ...

    async def drop_adapters(self, *, kept: str) -> None: ...

    async def hand_over(self) -> None: ...

    async def take_back(self) -> None: ...

    async def end_pause(self) -> None: ...

    async def show_life(self) -> None: ...

    async def take_segments(self, weights: SegmentedWeights, version: str) -> Mapping[str, str]: ...


class WeightDelivery:
    """Delivers weights to one server, verifies each delivery, and remembers the last verified version."""

    def __init__(self, server: ServerCalls) -> None:
        self.server = server
        self._takes_parts = True
        """Whether to send only the changed tensors. False after sending only these failed."""
        self._proven: tuple[str, Mapping[str, str]] | None = None
        """The last version that a canary verified, and the server's checksums for this version."""
        self._proven_content: tuple[Mapping[str, tuple[str, ...]], Mapping[str, str]] = ({}, {})
        """Samples of the published tensors of the last verified version (`sample_content`), and the server's
        checksums."""

    async def deliver(
        self, served: ServedWeights, before: ServedWeights | None, *, can_sample: Callable[[], bool]
    ) -> None:
        """Let the server load weights once, and verify that the server has these weights.

        Args:
            before: the verified version that the server had until now, or None if unknown.
            can_sample: whether the server completes requests. A paused server does not, so a canary cannot verify its
                weights.

        Raises:
            EngineUnavailableError: the server vanished.
            WeightSyncError: the server refused, or serves another version or other tensors.
        """
        try:
            if isinstance(served.weights, SegmentedWeights):
                digests = await self.server.take_segments(served.weights, served.version)
                check_digests(self.server.name, served.version, digests, await served.weights.digests())
            elif isinstance(served.weights, SentWeights):
                await self._send(served.weights, served, await self._find_kept(served.weights, before), can_sample)
            elif isinstance(served.weights, AdaptedWeights):
                await self._deliver_adapters(served.weights, served, before, can_sample)
            else:
                held = await self.server.take_weights(served.weights, served.version)
                await self._prove(served.weights, served, held, can_sample)
        except (EngineUnavailableError, WeightSyncError):
            raise
        except EngineError as error:
            raise WeightSyncError(f"{self.server.name} refused {served.version}: {error}") from error
        except (OSError, CheckpointError) as error:
            raise WeightSyncError(f"{self.server.name} cannot be given {served.version}: {error}") from error
        except TrainingError:  # the trainer failed to compute log-probs of a canary, a text that tests the delivery
            raise
        except Exception as error:  # errors of torch (memory, ports) and safetensors have no common base
            problem = f"{type(error).__name__}: {first_line(error)}"
            raise WeightSyncError(f"{self.server.name} cannot be given {served.version}: {problem}") from error

    async def _deliver_adapters(
        self,
        weights: AdaptedWeights,
        served: ServedWeights,
        before: ServedWeights | None,
        can_sample: Callable[[], bool],
    ) -> None:
        """Deliver the frozen weights unless the server has them, then the adapters, and verify both by a canary."""
        if not can_sample():
            raise WeightSyncError(
                f"{self.server.name} must sample to prove the adapters of {served.version}, and it is paused: set "
                'rollout.in_flight = "finish" or "abort"'
            )
        if not await self._has_base(weights, before):
            held = await self.server.take_weights(weights.model_dir, weights.base_version)
            base = await in_short_thread(partial(read_tensors, weights.model_dir))
            await in_short_thread(partial(find_unproven, self.server.name, base, weights.base_version, held))
        await self.server.take_adapters(weights, served.version)
        gap = await prove(self.server.name, self.server.complete, served.canary or published_canary(weights))
        logger.info("%s: the log-probs of adapters %s are %.2g nats off", self.server.name, served.version, gap)
        await self.server.drop_adapters(kept=served.version)

    async def _has_base(self, weights: AdaptedWeights, before: ServedWeights | None) -> bool:
        """True if the server has the same frozen weights from an earlier version, and was not restarted since that
        version."""
        if before is None or not isinstance(before.weights, AdaptedWeights):
            return False
        is_same = (before.weights.model_dir, before.weights.base_version) == (weights.model_dir, weights.base_version)
        return is_same and await self.server.weight_version() == before.version

    async def _find_kept(self, weights: SentWeights, before: ServedWeights | None) -> Collection[str]:
        """The tensors that did not change since the verified version `before`, and that the server still has."""
        if before is None or not isinstance(before.weights, SentWeights) or not self._takes_parts:
            return ()
        kept = find_kept(weights, before.weights)
        return kept if kept and await self.server.weight_version() == before.version else ()

    async def _send(
        self, weights: SentWeights, served: ServedWeights, kept: Collection[str], can_sample: Callable[[], bool]
    ) -> None:
        """Send weights and verify the server's tensors. If sending only changed tensors fails, send all tensors."""
        try:
            held = await self.server.take_sent(weights, served.version, kept)
            await self._prove(weights, served, held, can_sample)
        except EngineUnavailableError:
            raise
        except EngineError as error:
            if not kept:
                raise
            logger.warning(
                "%s was sent only the changed tensors, which failed: %s; from now on all tensors are sent",
                self.server.name,
                error,
            )
            self._takes_parts = False
            held = await self.server.take_sent(weights, served.version, ())
            await self._prove(weights, served, held, can_sample)

    async def _prove(
        self, weights: Path | SentWeights, served: ServedWeights, held: HeldTensors, can_sample: Callable[[], bool]
    ) -> None:
        """Compare the server's tensors with the published tensors. Without enough checksums, use a canary."""

        def examine() -> tuple[list[str], dict[str, tuple[str, ...]]]:
            tensors = weights.tensors if isinstance(weights, SentWeights) else read_tensors(weights)
            unproven = find_unproven(self.server.name, tensors, served.version, held)
            is_quantized = "quantization_config" in read_config(served.model_dir)  # a small step may not change it
            return unproven, sample_content(tensors, held) if unproven and not is_quantized else {}

        unproven, sampled = await in_short_thread(examine)
        proof = (served.version, held.digests)
        # Missing checksums and checksums of empty tensors identify nothing, because they are equal for all weights.
        is_identified = bool(held.digests) and EMPTY_DIGEST not in held.digests.values()
        if not unproven or (is_identified and self._proven == proof):
            return
        content = (sampled, held.digests)
        # After a small training step, a canary would accept the previous weights as well.
        if left := find_left_behind(self._proven_content, content):
            raise WeightSyncError(
                f"{self.server.name} reports the version {served.version}, but its checksums of {len(left)} changed "
                f"tensors are those of the previous version, {left[0]} first: its update left them unchanged, so "
                "restart it"
            )
        if not can_sample():
            raise WeightSyncError(
                f"{self.server.name} has no comparable checksum of {unproven[0]}, so it must sample to verify "
                f'{served.version}, but it is paused: set rollout.in_flight = "finish" or "abort"'
            )
        gap = await prove(self.server.name, self.server.complete, served.canary or published_canary(weights))
        logger.info(
            "%s: %d tensors without a comparable checksum, %s first; its log-probs are %.2g nats off",
            self.server.name,
            len(unproven),
            unproven[0],
            gap,
        )
        self._proven, self._proven_content = proof, content
