"""Talk to a server that speaks SGLang's HTTP API: SGLang itself, or the embedded engine.

Not here: what all clients share (client.py), starting the server (launch.py), restarts and retries (recovery.py),
publishing to several engines (weight_sync.py), sending weights to a server that reads no files (to_sglang.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import torch

from rollouts_core.embedded.segments import memory_scope
from rollouts_core.engine_kinds.spec import AdapterForm
from rollouts_core.engines.client import EngineClient
from rollouts_core.engines.completion import Completion, GenerationRequest, left_out_tokens, logit_bias_against
from rollouts_core.engines.http import (
    CONNECT_TIMEOUT_S,
    RESUME_TIMEOUT,
    UPDATE_TIMEOUT,
    read_completion,
    read_logprob,
)
from rollouts_core.engines.protocol import SegmentAccess
from rollouts_core.engines.scoring import ScoredTokens, ScoringRequest, read_scored_tokens
from rollouts_core.engines.transfer.adapters import AdaptedWeights
from rollouts_core.engines.transfer.checksums import HeldTensors, check_same_model
from rollouts_core.engines.transfer.served_adapters import ServedAdapters
from rollouts_core.engines.transfer.shared_memory import SegmentedWeights
from rollouts_core.engines.transfer.to_sglang import WeightSender
from rollouts_core.engines.transfer.versions import SentWeights
from rollouts_core.errors import (
    EngineAnswerError,
    EngineError,
    EngineUnavailableError,
    OtherVersionError,
    WeightSyncError,
)

IDLE_TIMEOUT_S = 60.0
MEMORY_TIMEOUT = httpx.Timeout(120.0, connect=CONNECT_TIMEOUT_S)
MEMORY_TAGS = ["kv_cache", "weights", "cuda_graph"]


class SGLangEngine(EngineClient):
    """The client of one SGLang server, or of the embedded engine."""

    _segment_access: SegmentAccess | None = None
    """The access to segments, or None before the server's first answer."""
    _weights_dtype: torch.dtype | None = None
    """The number format of the server's weights, or None before the server reported it."""
    _sender: WeightSender | None = None
    """The sender of weights, or None before the first weights were sent."""

    async def segment_access(self) -> SegmentAccess:
        """Full access for an embedded engine on this machine, and no access for SGLang or a server that does not
        answer."""
        if self._segment_access is None:
            try:
                server = await self._connection.call("GET", "/server_info")
            except EngineError:
                return SegmentAccess.NONE
            scope = server.get("memory_scope") if isinstance(server, dict) else None
            if scope is None:
                self._segment_access = SegmentAccess.NONE
            else:
                is_here = scope != "" and scope == memory_scope()
                self._segment_access = SegmentAccess.MEMORY if is_here else SegmentAccess.FILES
        return self._segment_access

    async def weights_dtype(self) -> torch.dtype | None:
        """The number format of the server's weights, or None if quantized, not reported, or the server is
        unreachable."""
        if self._weights_dtype is None:
            with suppress(EngineError):
                self._weights_dtype = _kept_in(await self._connection.call("GET", "/server_info"))
        return self._weights_dtype

    async def adapter_form(self, rank: int) -> AdapterForm:
        """The form in which the server takes adapters of this rank, or empty if it takes none, or is unreachable."""
        try:
            server = await self._connection.call("GET", "/server_info")
        except EngineError:
            return ""
        if not isinstance(server, dict):
            return ""
        if server.get("takes_adapters"):
            return "beside"
        return "folder" if server.get("enable_lora") and (server.get("max_lora_rank") or 0) >= rank else ""

    @cached_property
    def _adapters(self) -> ServedAdapters:
        return ServedAdapters(self._connection)

    async def end_running(self) -> None:
        """End all requests with the tokens sampled so far."""
        await self._connection.call("POST", "/abort_request", json={"abort_all": True}, is_answered=False)

    async def pause(self) -> None:
        """Stop generating. Requests keep their tokens, and the server computes their cache again after `resume`."""
        await self._connection.call("POST", "/pause_generation", json={"mode": "retract"})
        self._keeper.note_pause()

    async def end_pause(self) -> None:
        """Let the server generate again after `pause`."""
        await self._connection.call("POST", "/continue_generation", json={}, timeout=RESUME_TIMEOUT)

    async def show_life(self) -> None:
        """Return when the server has answered /server_info, because a part of this answer comes from the scheduler."""
        await self._connection.call("GET", "/server_info", is_answered=False)

    async def hand_over(self) -> None:
        """Free weights, cache and CUDA graphs after all running requests have ended.

        Raises:
            EngineError: the server was started without --enable-memory-saver. Without this argument, SGLang would
                answer 200 and free nothing.
        """
        server = await self._connection.call("GET", "/server_info")
        if server.get("enable_memory_saver") is False:  # the embedded engine lacks this field
            raise EngineError(
                f"{self.name} was started without --enable-memory-saver, so it keeps its GPU memory while the trainer "
                "trains: start it with that, or set deployment.colocated = false"
            )
        # SGLang's process ends if memory is released while it still tracks requests that were already answered.
        idle = {"timeout": int(IDLE_TIMEOUT_S)}
        await self._connection.call("POST", "/flush_cache", params=idle, timeout=MEMORY_TIMEOUT, is_answered=False)
        await self._move_memory("/release_memory_occupation")

    async def take_back(self) -> None:
        """Allocate the freed memory again."""
        await self._move_memory("/resume_memory_occupation")

    async def _move_memory(self, path: str) -> None:
        await self._connection.call("POST", path, json={"tags": MEMORY_TAGS}, timeout=MEMORY_TIMEOUT)

    async def complete(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Make the request once, with whichever weights the server has."""
        leaves_out = any(left_out_tokens(request, self.vocab_size) for request in requests)
        is_embedded = leaves_out and await self.segment_access() is not SegmentAccess.NONE
        body = _render_requests(requests, vocab_size=self.vocab_size, is_embedded=is_embedded)
        answers, adapter = await self._generate(body, len(requests))
        completions = [
            parse_completion(answer, request, self.name, self.ends)
            for answer, request in zip(answers, requests, strict=True)
        ]
        return [self._of_adapter(each, adapter) for each in completions] if adapter else completions

    async def score_once(self, requests: Sequence[ScoringRequest]) -> list[ScoredTokens]:
        """Make the request once, with whichever weights the server has."""
        body = {
            "input_ids": [request.tokens for request in requests],
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": [request.start - 1 for request in requests],  # the first token has no log-prob
            "top_logprobs_num": [request.num_top for request in requests],
            "token_ids_logprob": [request.token_ids for request in requests],
        }
        answers, adapter = await self._generate(body, len(requests))
        scored = [
            _parse_scored_tokens(answer, request, self.name) for answer, request in zip(answers, requests, strict=True)
        ]
        return [
            replace(each, version=adapter) if adapter and self._is_of_adapter(each.versions, adapter) else each
            for each in scored
        ]

    async def _generate(self, body: dict[str, Any], count: int) -> tuple[list[Any], str]:  # Any: JSON
        """The answers to `count` prompts, and the name of the adapter that computed them, or "" without adapters."""
        adapter = self._adapters.current
        try:
            answers = await self._connection.sample("/generate", body | ({"lora_path": adapter} if adapter else {}))
        except EngineError as error:
            raise await self._adapters.explain(error, adapter) from error
        if not isinstance(answers, list) or len(answers) != count:
            raise EngineAnswerError(f"{self.name} answered {count} prompts with {str(answers)[:200]}")
        return answers, adapter

    def _of_adapter(self, completion: Completion, adapter: str) -> Completion:
        """The completion with the version of the adapter that its request named."""
        if not self._is_of_adapter(completion.versions, adapter):
            return completion
        return replace(completion, version_spans=((adapter, 0, len(completion.tokens)),))

    def _is_of_adapter(self, versions: Collection[str], adapter: str) -> bool:
        """Whether the adapter that a request named can have computed the answer. The server reports the version that it
        has at the end of the answer."""
        return {*versions} <= {adapter, self._adapters.current}

    async def weight_version(self) -> str:
        return str((await self._model_info())["weight_version"])

    async def check_model(self, path: Path) -> None:
        check_same_model(self.name, Path(str((await self._model_info()).get("model_path", ""))), path)

    async def take_weights(self, path: Path, version: str) -> HeldTensors:
        """Load weights once and check the version. Running requests end before the load, on the old weights.

        Raises:
            WeightSyncError: the server refused, serves a model of other shapes, or reports another version.
        """
        await self.check_model(path)
        body = {"model_path": str(path), "weight_version": version, "flush_cache": True}
        answer = await self._connection.call("POST", "/update_weights_from_disk", json=body, timeout=UPDATE_TIMEOUT)
        if not answer.get("success"):
            raise WeightSyncError(f"{self.name} refused {version}: {answer.get('message', answer)}")
        self._adapters.current = ""
        if (served := await self.weight_version()) != version:
            raise OtherVersionError(f"{self.name} serves {served} after it was given {version}", served)
        return await self._held_tensors()

    async def take_adapters(self, weights: AdaptedWeights, version: str) -> None:
        """See `EngineClient`.

        Raises:
            WeightSyncError: the server reports another version.
            EngineError: the server refused the adapters.
        """
        await self._adapters.load(weights, version)
        body = {"new_version": version, "abort_all_requests": False}
        await self._connection.call("POST", "/update_weight_version", json=body)
        self._adapters.current = version
        if (served := await self.weight_version()) != version:
            raise OtherVersionError(f"{self.name} serves {served} after it was given {version}", served)

    async def drop_adapters(self, *, kept: str) -> None:
        await self._adapters.drop(kept=kept)

    async def take_segments(self, weights: SegmentedWeights, version: str) -> Mapping[str, str]:
        """Load segments once, set the version, and return the `tensor_digest` of every tensor that the server has after
        the load.

        Raises:
            WeightSyncError: the server refused, or serves another version.
        """
        body = {"model_path": str(weights.model_dir), "weight_version": version, "segments": weights.addresses()}
        path = "/update_weights_from_segments"
        answer = await self._connection.call("POST", path, json=body, timeout=UPDATE_TIMEOUT)
        if (served := answer.get("weight_version")) != version:
            raise WeightSyncError(f"{self.name} serves {served} after it was given {version}")
        digests: Mapping[str, str] = answer.get("checksums", {})
        return digests

    async def take_sent(self, weights: SentWeights, version: str, kept: Collection[str]) -> HeldTensors:
        """Send weights once and set the version. Running requests end before the load, on the old weights.

        Args:
            kept: tensors that the server already has and that need not be sent.

        Raises:
            WeightSyncError: the server refused, serves a model of other shapes, or reports another version.
        """
        await self.check_model(weights.model_dir)
        self._sender = self._sender or WeightSender(self._connection)
        await self._sender.send(weights, version, kept, is_paused=self._keeper.is_paused)
        if (served := await self.weight_version()) != version:
            raise OtherVersionError(f"{self.name} serves {served} after it was sent {version}", served)
        return await self._held_tensors()

    async def aclose(self) -> None:
        if self._sender is not None:
            await self._sender.aclose()
        await super().aclose()

    async def _held_tensors(self) -> HeldTensors:
        answer = await self._connection.call("POST", "/weights_checker", json={"action": "checksum"})
        server = await self._connection.call("GET", "/server_info")
        ranks = answer.get("ranks") if isinstance(answer, dict) else None
        digests = ranks[0].get("checksums", {}) if ranks and len(ranks) == 1 else {}
        # On a GPU, SGLang computes checksums by its own kernel, so this process cannot compute them.
        dtype = _dtype_of(server) if server.get("device") == "cpu" else None
        return HeldTensors(digests=digests, dtype=dtype, kept_in=_kept_in(server))

    async def _model_info(self) -> dict[str, Any]:  # Any: JSON
        info = await self._connection.call("GET", "/model_info")
        if not isinstance(info, dict) or "weight_version" not in info:
            raise EngineError(f"{self.name} answered /model_info without weight_version: is it SGLang 0.5.23 or newer?")
        return info


def _dtype_of(server: Mapping[str, Any]) -> torch.dtype | None:  # Any: JSON
    """A server's number format by its `/server_info`, or None for "auto", or if the server does not report it."""
    dtype = getattr(torch, str(server.get("dtype")), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _kept_in(server: Mapping[str, Any]) -> torch.dtype | None:  # Any: JSON
    """The number format of a server's weights, or None if the weights are quantized."""
    return None if server.get("quantization") else _dtype_of(server)


def _render_requests(
    requests: Sequence[GenerationRequest], *, vocab_size: int | None, is_embedded: bool
) -> dict[str, Any]:  # Any: JSON
    each = [render_request(request, vocab_size=vocab_size, is_embedded=is_embedded) for request in requests]
    return {
        "input_ids": [body["input_ids"] for body in each],
        "sampling_params": [body["sampling_params"] for body in each],
        "return_logprob": True,
    }


def render_request(
    request: GenerationRequest, *, vocab_size: int | None = None, is_embedded: bool = False
) -> dict[str, Any]:  # Any: JSON
    """The body of a request for one completion.

    Args:
        vocab_size: number of token ids of the model, if known.
        is_embedded: whether the server is the embedded engine, which excludes token ids by itself. SGLang needs a bias
            for each excluded id.
    """
    left_out = left_out_tokens(request, vocab_size)
    own = {"custom_params": {"num_tokens": request.num_tokens}} if left_out else {}
    return {
        "input_ids": request.prompt_tokens,
        "sampling_params": {
            "temperature": request.sampling.temperature,
            "top_p": 1.0,  # overrides the defaults in a model's folder
            "top_k": -1,
            "max_new_tokens": request.sampling.max_new_tokens,
            "stop_token_ids": list(request.stop_token_ids),
            "sampling_seed": request.seed,
            **(own if is_embedded else logit_bias_against(left_out)),
        },
        "return_logprob": True,
    }


def parse_completion(
    answer: Mapping[str, Any], request: GenerationRequest, name: str, ends: Collection[int]
) -> Completion:  # Any: JSON
    """The completion in an answer to one prompt.

    Args:
        ends: tokens of the server's model that end a completion, besides the stop tokens of the request.

    Raises:
        EngineError: a field of the answer is missing or unusable.
    """
    try:
        meta = answer["meta_info"]
        tokens = [int(token) for token in answer["output_ids"]]
        logprobs = [read_logprob(entry[0]) for entry in meta["output_token_logprobs"]]
        finish_reason = str(meta["finish_reason"]["type"])
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(tokens)}]
        version_spans = tuple((str(s["version"]), int(s["start"]), int(s["end"])) for s in spans)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineAnswerError(f"{name} answered a completion without {error}: {str(answer)[:300]}") from error
    return read_completion(
        name,
        request,
        tokens=tokens,
        logprobs=logprobs,
        finish_reason=finish_reason,
        version_spans=version_spans,
        ends=ends,
    )


def _parse_scored_tokens(answer: Mapping[str, Any], request: ScoringRequest, name: str) -> ScoredTokens:  # Any: JSON
    try:
        meta = answer["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            raise EngineUnavailableError(f"{name} aborted a request for log-probs")
        return read_scored_tokens(
            name,
            request,
            # Ids are not compared: SGLang writes 0 for the last token of the vocabulary (logprob_result_processor.py).
            logprobs=[read_logprob(entry[0]) for entry in meta["input_token_logprobs"][1:]],
            top=_read_rows(meta["input_top_logprobs"]) if request.num_top else [],
            named=_read_rows(meta["input_token_ids_logprobs"]) if request.token_ids else [],
            version=str(meta["weight_version"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EngineAnswerError(f"{name} answered log-probs without {error}: {str(answer)[:300]}") from error


def _read_rows(rows: Sequence[Any]) -> list[dict[int, float]]:  # Any: JSON
    """Log-probs by token id at each position after the first position, which has no log-probs."""
    return [{int(token): read_logprob(logprob) for logprob, token, _ in row} for row in rows[1:]]
