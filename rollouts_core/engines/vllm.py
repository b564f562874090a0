"""Talk to a vLLM server. Completions use vLLM's completions API. Weights are loaded through its development endpoints.

Not here: what all clients share (client.py), starting the server (launch.py), restarts and retries (recovery.py),
publishing to several engines (weight_sync.py), sending weights to a server that reads no files (to_vllm.py).

The server must run with VLLM_SERVER_DEV_MODE=1 and `--logprobs-mode processed_logprobs`, and on a model whose output
head is not tied to its embedding. With a tied head, vLLM answers 200 to an update and keeps the old head. launch.py
sets these settings, and each update checks them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import anyio
import httpx
import torch

from rollouts_core.engine_kinds.spec import AdapterForm
from rollouts_core.engine_kinds.vllm import LOGPROBS_MODE, PARTS, RECEIVER
from rollouts_core.engines.client import EngineClient
from rollouts_core.engines.completion import Completion, GenerationRequest, left_out_tokens, logit_bias_against
from rollouts_core.engines.http import (
    CONNECT_TIMEOUT_S,
    RESUME_TIMEOUT,
    UPDATE_TIMEOUT,
    read_completion,
    read_logprob,
)
from rollouts_core.engines.scoring import ScoredTokens, ScoringRequest, read_scored_tokens
from rollouts_core.engines.transfer.adapters import AdaptedWeights
from rollouts_core.engines.transfer.checksums import (
    EMBEDDING,
    HEAD,
    HeldTensors,
    check_can_be_untied,
    check_same_model,
    is_tied,
    prefix_of_copies,
    write_untied,
)
from rollouts_core.engines.transfer.served_adapters import ServedAdapters
from rollouts_core.engines.transfer.to_vllm import VLLMWeightSender, count_ranks
from rollouts_core.engines.transfer.versions import SentWeights
from rollouts_core.errors import (
    EngineAnswerError,
    EngineError,
    EngineUnavailableError,
    OtherVersionError,
    WeightSyncError,
)
from rollouts_core.seeds import derive_seed
from rollouts_core.system.concurrency import gather, in_short_thread
from rollouts_core.system.open_files import request_places

MEMORY_TIMEOUT = httpx.Timeout(120.0, connect=CONNECT_TIMEOUT_S)
SLEEP_WITHOUT_COPY = 2
"""The sleep level at which vLLM keeps no copy of the weights in host memory, because vLLM gets new weights anyway."""
ADAPTED_LAYER = ".base_layer."
"""Text that vLLM inserts into the names of weights that adapters may change."""
MAX_BIASES = 1024
"""Largest number of biases per request. More biases fail in vLLM's newer runner (MAX_NUM_LOGIT_BIAS_TOKENS,
vllm/v1/worker/gpu/sample/logit_bias.py); vLLM's older runner has no limit. For more biases, this client sends none, and
each sample with an excluded token is invalid."""
DEFAULT_MAX_LOGPROBS = 20
"""vLLM's default limit of `prompt_logprobs`, which --max-logprobs changes."""
MAX_NAMED_TOKENS, MAX_PROMPTS = 128, 1024
"""vLLM's limits of `logprob_token_ids`, and of prompts in a call."""
PLAIN_SAMPLING = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling parameters to send with every request, because vLLM takes other defaults from a model's folder."""
TOKEN_ID_PREFIX = "token_id:"
"""Prefix of the token ids that vLLM returns in place of texts."""


class VLLMEngine(EngineClient):
    """The client of one vLLM server."""

    _weights_dtype: torch.dtype | None = None
    """The number format of the server's weights, or None before the server reported it."""
    _sender: VLLMWeightSender | None = None
    """The sender of weights, or None before the first weights were sent."""

    async def weights_dtype(self) -> torch.dtype | None:
        """The number format of the server's weights, or None if quantized, not reported, or the server is
        unreachable."""
        if self._weights_dtype is None:
            with suppress(EngineError):
                self._weights_dtype = _kept_in(await self._model_config())
        return self._weights_dtype

    @cached_property
    def _adapters(self) -> ServedAdapters:
        return ServedAdapters(self._connection, prefix="/v1")

    async def adapter_form(self, rank: int) -> AdapterForm:
        """The form in which the server takes adapters of this rank, or empty if it was started without adapters, or is
        unreachable."""
        try:
            info = await self._server_info()
            settings = self._field(self._field(info, "vllm_config"), "lora_config")
            takes_new = self._field(info, "vllm_env").get("VLLM_ALLOW_RUNTIME_LORA_UPDATING")
        except EngineError:
            return ""
        return "folder" if settings and takes_new and settings["max_lora_rank"] >= rank else ""

    async def end_running(self) -> None:
        """End all requests with the tokens sampled so far."""
        try:
            await self._call_development("POST", "/pause", params={"mode": "abort"})
        finally:  # the pause may have arrived even if the wait for its answer was cancelled
            await self.resume()

    async def pause(self) -> None:
        """Refuse to pause. vLLM would continue paused requests with the cache of the old weights, and reports no
        version of a token.

        Raises:
            EngineError: always.
        """
        raise EngineError(f'{self.name} is vLLM, which cannot go on with new weights: set rollout.in_flight = "abort"')

    async def end_pause(self) -> None:
        """Let the server generate again after a pause. Without this call, requests to a paused server would wait for
        ever."""
        with anyio.CancelScope(shield=True):
            await self._call_development("POST", "/resume", timeout=RESUME_TIMEOUT)

    async def show_life(self) -> None:
        """Return when the server has answered /is_paused, because this answer comes from the engine's core."""
        await self._connection.call("GET", "/is_paused", is_answered=False)

    async def hand_over(self) -> None:
        """Free weights and cache after all running requests have ended.

        Raises:
            EngineError: the server was started without --enable-sleep-mode.
        """
        if not (await self._model_config()).get("enable_sleep_mode"):
            raise EngineError(
                f"{self.name} was started without --enable-sleep-mode, so it keeps its GPU memory while the trainer "
                "trains: start it with that, or set deployment.colocated = false"
            )
        params = {"level": SLEEP_WITHOUT_COPY, "mode": "wait"}
        await self._call_development("POST", "/sleep", params=params, timeout=MEMORY_TIMEOUT)

    async def take_back(self) -> None:
        """Allocate all freed memory again. A request with tags would allocate only a part."""
        await self._call_development("POST", "/wake_up", timeout=MEMORY_TIMEOUT)

    async def complete(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Request completions once, with whichever weights the server has.

        vLLM's answers carry no weight version. The version is therefore requested before and after the calls.
        Completions during which the version changed get an unknown version.
        """
        # Each completion is a separate call, because vLLM takes one seed per call.
        answers, version = await self._sample_all(
            lambda adapter: [_render_request(each, self.vocab_size, adapter) for each in requests]
        )
        return [
            _parse_completion(answer, request, self.name, version=version, ends=self.ends)
            for answer, request in zip(answers, requests, strict=True)
        ]

    async def score_once(self, requests: Sequence[ScoringRequest]) -> list[ScoredTokens]:
        """Request log-probs once: one call per request, and more calls for its `token_ids`, or all its positions if the
        server was started for adapters.

        Raises:
            EngineError: the server returns fewer of the most likely tokens than a request wants.
        """
        config = self._field(await self._server_info(), "vllm_config")
        self._check_num_top(config, max((request.num_top for request in requests), default=0))
        # vLLM 0.32 applies the adapters of the sampled positions, or none, to the logits of all positions of a prompt.
        # On a CPU its process ends: "einsum(): subscript b has size 3 for operand 1 which does not broadcast".
        is_sampled = bool(config.get("lora_config"))
        calls = [_scoring_calls(request, is_sampled=is_sampled) for request in requests]
        answers, version = await self._sample_all(
            lambda adapter: [_with_adapter(call.body, adapter) for each in calls for call in each]
        )
        remaining = iter(answers)
        return [
            _parse_scored_tokens([(call, next(remaining)) for call in each], request, self.name, version=version)
            for each, request in zip(calls, requests, strict=True)
        ]

    def _check_num_top(self, config: dict[str, Any], num_top: int) -> None:  # Any: JSON
        """Raise EngineError if the server returns fewer of the most likely tokens."""
        limit = self._field(config, "model_config").get("max_logprobs", DEFAULT_MAX_LOGPROBS)
        if 0 <= limit < num_top:
            raise EngineError(
                f"{self.name} is vLLM, which was started to return at most {limit} of the most likely tokens, not "
                f"{num_top}: lower num_top, or start vLLM with --max-logprobs {num_top}"
            )

    async def _sample_all(
        self, render: Callable[[str], Sequence[dict[str, Any]]]
    ) -> tuple[list[Any], str]:  # Any: JSON both ways
        """The answers to some calls, and their weight version. If the version changed during the calls, the returned
        version matches no weights.

        Args:
            render: makes the bodies of the calls for an adapter. The function is called after the first request for the
                version, so that a later change of the adapter shows in the version.
        """
        before = await self._version_in_turn()
        answers = await gather([partial(self._sample, body) for body in render(self._adapters.current)])
        return answers, before if await self._version_in_turn() == before else f"{before}, replaced meanwhile"

    async def _sample(self, body: dict[str, Any]) -> Any:  # Any: JSON
        try:
            return await self._connection.sample("/v1/completions", body)
        except EngineError as error:
            raise await self._adapters.explain(error, body.get("model", "")) from error

    async def weight_version(self) -> str:
        return str(self._field(await self._call_development("GET", "/weight_info"), "weight_version"))

    async def _version_in_turn(self) -> str:
        """The version that the server reports. The process's limit of open connections limits the concurrent calls."""
        async with request_places().questions:
            return await self.weight_version()

    async def check_model(self, path: Path) -> None:
        check_same_model(self.name, Path(str((await self._model_config()).get("model", ""))), path)

    async def take_weights(self, path: Path, version: str) -> HeldTensors:
        """Load weights once and set the version. Running requests end before the load, on the old weights.

        Raises:
            WeightSyncError: the server serves a model of other shapes, or cannot be updated as it was started.
            CheckpointError: no vLLM could take new weights of this model.
        """
        await self._check_updatable(path)
        async with self._update(version), _untied(path) as loaded:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(loaded)}}
            await self._call_development("POST", "/collective_rpc", json=body, timeout=UPDATE_TIMEOUT)
            self._adapters.current = ""
        return await self._held_tensors(version)

    async def take_adapters(self, weights: AdaptedWeights, version: str) -> None:
        """See `EngineClient`.

        Raises:
            WeightSyncError: the server reports another version.
            EngineError: the server refused the adapters.
        """
        await self._adapters.load(weights, version)
        async with self._update(version):
            self._adapters.current = version
        if (served := await self.weight_version()) != version:
            raise OtherVersionError(f"{self.name} serves {served} after it was given {version}", served)

    async def drop_adapters(self, *, kept: str) -> None:
        await self._adapters.drop(kept=kept)

    async def take_sent(self, weights: SentWeights, version: str, kept: Collection[str]) -> HeldTensors:
        """Send weights once and set the version. Running requests end before the load, on the old weights.

        Args:
            kept: tensors that the server already has. The kept tensors are sent too, because vLLM loads whole layers.

        Raises:
            WeightSyncError: the server serves a model of other shapes, or cannot be updated as it was started.
            CheckpointError: no vLLM could take new weights of this model.
        """
        await self._check_updatable(weights.model_dir)
        parallel = await self._config_of("parallel_config")
        extension = str(parallel.get("worker_extension_cls") or "nothing")
        if extension != RECEIVER or weights.transfer == "tensors":
            raise WeightSyncError(
                f"{self.name} was started with {extension} as --worker-extension-cls, so it cannot be sent weights: "
                f"let the pipeline start it, or start it with {RECEIVER} and PYTHONPATH={PARTS}"
            )
        tensors = dict(weights.tensors)
        if is_tied(weights.model_dir) and HEAD not in tensors:
            tensors[HEAD] = tensors[EMBEDDING]
        self._sender = self._sender or VLLMWeightSender(self._connection)
        async with self._update(version):
            await self._sender.send(tensors, weights.transfer, num_ranks=count_ranks(parallel))
        return await self._held_tensors(version)

    async def aclose(self) -> None:
        if self._sender is not None:
            await self._sender.aclose()
        await super().aclose()

    async def _check_updatable(self, path: Path) -> None:
        """Raise WeightSyncError if the server would not use new weights, or if their use could not be verified."""
        await self.check_model(path)
        logprobs_mode = (await self._model_config()).get("logprobs_mode")
        if logprobs_mode != LOGPROBS_MODE:
            raise WeightSyncError(
                f"{self.name} gives {logprobs_mode}, not those of the distribution it samples "
                f"from: start it with --logprobs-mode {LOGPROBS_MODE}"
            )
        if is_tied(path) and HEAD not in await self._digests():
            check_can_be_untied(path)
            raise WeightSyncError(
                f"{self.name} serves a model whose output head is its embedding: vLLM would leave that head as it is. "
                "Start it on a copy with a head of its own (`rollouts_core.engines.transfer.checksums.write_untied`)"
            )

    @asynccontextmanager
    async def _update(self, version: str) -> AsyncIterator[None]:
        """Within the block, the weights change and the server samples nothing. After the block, the server reports
        `version`."""
        try:
            await self._call_development("POST", "/pause", params={"mode": "wait"}, timeout=UPDATE_TIMEOUT)
            # If the update fails halfway, later completions must not count as completions of the old version.
            await self._set_version(f"{version}, loading")
            yield
            await self._call_development("POST", "/reset_prefix_cache")  # cached keys and values come from old weights
            await self._set_version(version)
        finally:
            await self.resume()

    async def _held_tensors(self, version: str) -> HeldTensors:
        if (served := await self.weight_version()) != version:
            raise OtherVersionError(f"{self.name} serves {served} after it was given {version}", served)
        return HeldTensors(digests=await self._digests(), dtype=_kept_in(await self._model_config()))

    async def _set_version(self, version: str) -> None:
        await self._call_development("POST", "/update_weight_version", json={"new_version": version})

    async def _digests(self) -> dict[str, str]:
        """The checksums of a server's tensors, or {} for a server with several ranks, because each rank has parts of
        tensors."""
        answer = await self._call_development("POST", "/weight_checker", json={"action": "checksum"})
        checksums: dict[str, Any] = self._field(answer, "checksums")  # Any: JSON
        by_rank = {name.rpartition(":")[::2]: str(digest) for name, digest in checksums.items()}
        if len({rank for rank, _ in by_rank}) != 1:
            return {}
        return {name.replace(ADAPTED_LAYER, "."): digest for (_, name), digest in by_rank.items()}

    async def _model_config(self) -> dict[str, Any]:  # Any: JSON
        return await self._config_of("model_config")

    async def _config_of(self, part: str) -> dict[str, Any]:  # Any: JSON
        config: dict[str, Any] = self._field(self._field(await self._server_info(), "vllm_config"), part)  # Any: JSON
        return config

    async def _server_info(self) -> Any:  # Any: JSON
        return await self._call_development("GET", "/server_info", params={"config_format": "json"})

    def _field(self, answer: Any, name: str) -> Any:  # Any: JSON
        if not isinstance(answer, dict) or name not in answer:
            raise EngineError(f"{self.name} answered without {name}, is it vLLM 0.32 or newer? {str(answer)[:200]}")
        return answer[name]

    async def _call_development(self, method: str, path: str, **arguments: Any) -> Any:  # Any: JSON both ways
        try:
            return await self._connection.call(method, path, **arguments)
        except EngineUnavailableError:
            raise
        except EngineError as error:
            if "answered 404" not in str(error):
                raise
            raise EngineError(f"{self.name} has no {path}: start vLLM with VLLM_SERVER_DEV_MODE=1") from error


def _kept_in(model_config: Mapping[str, Any]) -> torch.dtype | None:  # Any: JSON
    """The number format of a server's weights, or None if the weights are quantized."""
    dtype = getattr(torch, str(model_config.get("dtype")).removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) and not model_config.get("quantization") else None


@asynccontextmanager
async def _untied(directory: Path) -> AsyncIterator[Path]:
    """Yield a directory with the weights of `directory` and a separate output head. If a copy is needed, the copy
    exists only within the block."""
    if not is_tied(directory):
        yield directory
        return
    with TemporaryDirectory(dir=directory.parent, prefix=prefix_of_copies(directory)) as target:
        await in_short_thread(partial(write_untied, directory, Path(target)))
        yield Path(target)


def _render_request(
    request: GenerationRequest, vocab_size: int | None, adapter: str = ""
) -> dict[str, Any]:  # Any: JSON
    left_out = left_out_tokens(request, vocab_size)
    # vLLM restarts a request's random numbers from its seed, whatever the prompt. With the same seed, the rest of an
    # interrupted completion would use the same random numbers as its beginning.
    is_rest = request.num_continued > 0
    return {
        **({"model": adapter} if adapter else {}),
        "prompt": request.prompt_tokens,
        "max_tokens": request.sampling.max_new_tokens,
        "temperature": request.sampling.temperature,
        **PLAIN_SAMPLING,
        "stop_token_ids": list(request.stop_token_ids),
        "seed": derive_seed(request.seed, "rest", request.num_continued) if is_rest else request.seed,
        "logprobs": 0,
        "return_token_ids": True,
        **(logit_bias_against(left_out) if len(left_out) <= MAX_BIASES else {}),
    }


def _parse_completion(
    answer: Mapping[str, Any], request: GenerationRequest, name: str, *, version: str, ends: Collection[int]
) -> Completion:  # Any: JSON
    try:
        choice = answer["choices"][0]
        tokens = [int(token) for token in choice["token_ids"]]
        logprobs = [read_logprob(logprob) for logprob in choice["logprobs"]["token_logprobs"]]
        finish_reason = str(choice["finish_reason"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineAnswerError(
            f"{name} answered with a completion that cannot be read ({type(error).__name__}: {error}): "
            f"{str(answer)[:300]}"
        ) from error
    return read_completion(
        name,
        request,
        tokens=tokens,
        logprobs=logprobs,
        finish_reason=finish_reason,
        version_spans=((version, 0, len(tokens)),),
        ends=ends,
    )


class _ScoringCall(NamedTuple):
    """A call for log-probs at some positions of a request, and the log-probs that it gives."""

    body: dict[str, Any]  # Any: JSON
    positions: range
    gives: tuple[str, ...]
    """"own" (the log-probs of the request's tokens), "top" and "named"."""


def _with_adapter(body: dict[str, Any], adapter: str) -> dict[str, Any]:  # Any: JSON
    return {**body, "model": adapter} if adapter else body


def _scoring_calls(request: ScoringRequest, *, is_sampled: bool) -> list[_ScoringCall]:
    """The calls for the log-probs of a request.

    Args:
        is_sampled: take all log-probs from sampled positions, as those of named tokens, with one prompt per position.
    """
    positions = range(request.start, len(request.tokens))
    if not is_sampled:
        body = {"prompt": request.tokens, "max_tokens": 1, "prompt_logprobs": request.num_top}  # 1: the smallest number
        named = [_ScoringCall(_render_sampled(request, positions, request.token_ids), positions, ("named",))]
        return [_ScoringCall(body, positions, ("own", "top")), *(named if request.token_ids else [])]
    calls = []
    while positions:
        wanted = list(dict.fromkeys(request.token_ids))
        count = 0
        for position in positions[:MAX_PROMPTS]:
            if request.tokens[position] not in wanted:
                if count and len(wanted) >= MAX_NAMED_TOKENS:
                    break
                wanted.append(request.tokens[position])
            count += 1
        now, positions = positions[:count], positions[count:]
        calls.append(_ScoringCall(_render_sampled(request, now, wanted), now, ("own", "named")))
        if request.num_top:
            calls.append(_ScoringCall(_render_sampled(request, now, (), request.num_top), now, ("top",)))
    return calls


def _render_sampled(
    request: ScoringRequest, positions: range, token_ids: Sequence[int], num_top: int = 0
) -> dict[str, Any]:  # Any: JSON
    """The body of a call with one prompt per position, because vLLM returns log-probs of named tokens only when it
    samples."""
    return {
        "prompt": [request.tokens[:position] for position in positions],
        "max_tokens": 1,
        "temperature": 1.0,
        **PLAIN_SAMPLING,
        "logprobs": num_top,
        **({"logprob_token_ids": token_ids} if token_ids else {}),
        "return_tokens_as_token_ids": True,
    }


def _parse_scored_tokens(
    answers: Sequence[tuple[_ScoringCall, Any]], request: ScoringRequest, name: str, *, version: str
) -> ScoredTokens:  # Any: JSON
    rows: dict[str, list[dict[int, float]]] = {"own": [], "top": [], "named": []}
    try:
        for call, answer in answers:
            choices = sorted(answer["choices"], key=lambda each: each.get("index", 0))
            if any(each["finish_reason"] == "abort" for each in choices):
                raise EngineUnavailableError(f"{name} aborted a request for log-probs")
            found = _read_prompt_rows(choices[0], request) if "prompt_logprobs" in call.body else _read_rows(choices)
            for kind in call.gives:
                rows[kind] += found
        logprobs = [row[token] for row, token in zip(rows["own"], request.tokens[request.start :], strict=False)]
        return read_scored_tokens(
            name, request, logprobs=logprobs, top=rows["top"], named=rows["named"], version=version
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        shown = str([answer for _, answer in answers])[:300]
        raise EngineAnswerError(f"{name} answered log-probs without {error}: {shown}") from error


def _read_prompt_rows(choice: Any, request: ScoringRequest) -> list[dict[int, float]]:  # Any: JSON
    """Log-probs by token id at each position of a prompt from `start` on."""
    return [
        {int(token): read_logprob(found["logprob"]) for token, found in row.items()}
        for row in choice["prompt_logprobs"][request.start :]
    ]


def _read_rows(choices: Sequence[Any]) -> list[dict[int, float]]:  # Any: JSON
    """Log-probs by token id at the sampled position of each prompt."""
    return [
        {
            int(token.removeprefix(TOKEN_ID_PREFIX)): read_logprob(logprob)
            for token, logprob in each["logprobs"]["top_logprobs"][0].items()
        }
        for each in choices
    ]
