"""Talk to a server that speaks SGLang's HTTP API: SGLang itself, or the embedded engine.

Not here: starting the server (infra/engines.py), publishing to several engines (weight_sync.py).

The client knows which weights its server must serve. A server that died and came back serves its start weights
again; the client notices by the version, loads the right ones and asks again, so no completion of old weights is
ever returned:

    generate -> connection lost | other version -> wait until it answers -> load weights again -> generate
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import httpx
from httpx_aiohttp import AiohttpTransport

from rollouts_core.checkpoint import tensor_digests
from rollouts_core.engines.protocol import Completion, GenerationRequest
from rollouts_core.errors import EngineError, EngineUnavailableError, WeightSyncError
from rollouts_core.messages import first_line
from rollouts_core.types import Status

MAX_ATTEMPTS = 3
POLL_INTERVAL_S = 0.1
CONNECT_TIMEOUT_S = 10.0
UPDATE_TIMEOUT_S = 600.0
STATUS_OF_FINISH = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """The weights that a server was last told to serve."""

    path: Path
    version: str


class SGLangEngine:
    """The client of one server; owns its connections.

    Args:
        restart_timeout_s: how long a server that vanished may take to answer again.
    """

    def __init__(
        self,
        url: str,
        *,
        request_timeout_s: float = 600.0,
        restart_timeout_s: float = 120.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.restart_timeout_s = restart_timeout_s
        self._loaded: LoadedWeights | None = None
        self._recovering = asyncio.Lock()
        self._client = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(request_timeout_s, connect=CONNECT_TIMEOUT_S),
            transport=transport or create_transport(),
        )

    @property
    def name(self) -> str:
        """The server's URL."""
        return self.url

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions of the requests in their order, from the weights that were loaded last.

        Raises:
            EngineUnavailableError: the server stayed away.
            EngineError: it refused the request, or answered something unusable.
        """
        for _ in range(MAX_ATTEMPTS):
            try:
                completions = await self._generate_once(requests)
            except EngineUnavailableError:
                await self._recover()
                continue
            if self._loaded is None or all(_served_only(c, self._loaded.version) for c in completions):
                return completions
            await self._recover()
        raise EngineUnavailableError(f"{self.url} did not serve {self._expected()} in {MAX_ATTEMPTS} attempts")

    async def load_weights(self, checkpoint_path: Path, version: str) -> None:
        """Serve the weights of a directory; returns when the server proved that it does.

        Raises:
            WeightSyncError: it refused, or serves another version or other tensors.
            EngineUnavailableError: it vanished and stayed away.
        """
        async with self._recovering:
            await self._load_and_verify(LoadedWeights(checkpoint_path, version))

    async def weight_version(self) -> str:
        """The version that the server reports."""
        return str((await self._call("GET", "/model_info"))["weight_version"])

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Return when the server answers.

        Raises:
            EngineUnavailableError: it did not before the deadline.
        """
        with anyio.move_on_after(timeout_s):
            while True:
                try:
                    await self._call("GET", "/model_info")
                except EngineUnavailableError:
                    await anyio.sleep(POLL_INTERVAL_S)
                    continue
                return
        raise EngineUnavailableError(f"{self.url} did not answer within {timeout_s:g} s")

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _generate_once(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        answers = await self._call("POST", "/generate", json=_render_requests(requests))
        if not isinstance(answers, list) or len(answers) != len(requests):
            raise EngineError(f"{self.url} answered {len(requests)} prompts with {str(answers)[:200]}")
        return [_parse_completion(answer, self.url) for answer in answers]

    async def _recover(self) -> None:
        """Wait for the server, and load the weights it must serve if it came back with others."""
        async with self._recovering:
            await self.wait_until_ready(self.restart_timeout_s)
            if self._loaded is not None and await self.weight_version() != self._loaded.version:
                await self._load_and_verify(self._loaded)

    async def _load_and_verify(self, weights: LoadedWeights) -> None:
        """Load and prove; begins again when the server vanished meanwhile, since loading twice is loading once."""
        for _ in range(MAX_ATTEMPTS):
            try:
                await self._load_and_verify_once(weights)
            except EngineUnavailableError:
                await self.wait_until_ready(self.restart_timeout_s)
                continue
            self._loaded = weights
            return
        raise EngineUnavailableError(f"{self.url} vanished in each of {MAX_ATTEMPTS} loads of {weights.version}")

    async def _load_and_verify_once(self, weights: LoadedWeights) -> None:
        body = {"model_path": str(weights.path), "weight_version": weights.version, "flush_cache": True}
        answer = await self._call("POST", "/update_weights_from_disk", json=body, timeout=UPDATE_TIMEOUT_S)
        if not answer.get("success"):
            raise WeightSyncError(f"{self.url} refused {weights.version}: {answer.get('message', answer)}")
        served = await self.weight_version()
        if served != weights.version:
            raise WeightSyncError(f"{self.url} serves {served} after it was given {weights.version}")
        checksums = _find_checksums(await self._call("POST", "/weights_checker", json={"action": "checksum"}))
        published = tensor_digests(weights.path)
        compared = published.keys() & checksums.keys()
        if not compared:
            raise WeightSyncError(f"{self.url} says it serves {weights.version}, but no tensor could be compared")
        if stale := sorted(name for name in compared if checksums[name] != published[name]):
            raise WeightSyncError(
                f"{self.url} says it serves {weights.version}, but {len(stale)} tensors differ, {stale[0]} first"
            )

    async def _call(self, method: str, path: str, **arguments: Any) -> Any:  # Any: JSON both ways
        try:
            response = await self._client.request(method, path, **arguments)
        except httpx.TransportError as error:
            raise EngineUnavailableError(f"{self.url}{path}: {str(error) or type(error).__name__}") from error
        except aiohttp.ClientError as error:  # what the transport has no httpx error for
            raise EngineError(f"{self.url}{path} answered no HTTP, is it an engine? {first_line(error)}") from error
        if response.status_code in (429, 502, 503, 504):
            raise EngineUnavailableError(f"{self.url}{path} answered {response.status_code}: {response.text[:200]}")
        if response.status_code != 200:
            raise EngineError(f"{self.url}{path} answered {response.status_code}: {response.text[:500]}")
        try:
            return response.json()
        except json.JSONDecodeError as error:
            raise EngineError(f"{self.url}{path} answered no JSON: {response.text[:200]!r}") from error

    def _expected(self) -> str:
        return self._loaded.version if self._loaded else "its weights"


def create_transport() -> httpx.AsyncBaseTransport:
    """Connections for as many requests at a time as there are.

    Those of aiohttp: httpx's own pool looks at every connection whenever a request begins or ends. With 128 requests
    under way that costs 20 times the processor time.
    """
    return AiohttpTransport(limits=httpx.Limits(max_connections=0))  # 0: no limit; None would be aiohttp's default


def _render_requests(requests: Sequence[GenerationRequest]) -> dict[str, Any]:  # Any: JSON
    return {
        "input_ids": [request.prompt_tokens for request in requests],
        "sampling_params": [
            {
                "temperature": request.sampling.temperature,
                "max_new_tokens": request.sampling.max_new_tokens,
                "stop_token_ids": list(request.stop_token_ids),
                "sampling_seed": request.seed,
            }
            for request in requests
        ],
        "return_logprob": True,
    }


def _parse_completion(answer: Mapping[str, Any], url: str) -> Completion:  # Any: JSON
    try:
        meta = answer["meta_info"]
        tokens = [int(token) for token in answer["output_ids"]]
        logprobs = [float(entry[0]) for entry in meta["output_token_logprobs"]]
        finish_reason = str(meta["finish_reason"]["type"])
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(tokens)}]
        version_spans = tuple((str(s["version"]), int(s["start"]), int(s["end"])) for s in spans)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"{url} answered a completion without {error}: {str(answer)[:300]}") from error
    if len(logprobs) != len(tokens):
        raise EngineError(f"{url} answered {len(tokens)} tokens with {len(logprobs)} logprobs")
    return Completion(
        tokens=tokens,
        logprobs=logprobs,
        status=STATUS_OF_FINISH.get(finish_reason, Status.FAILED),
        finish_reason=finish_reason,
        version_spans=version_spans,
    )


def _served_only(completion: Completion, version: str) -> bool:
    return all(served == version for served, _, _ in completion.version_spans)


def _find_checksums(answer: Any) -> dict[str, str]:  # Any: JSON
    """The checksum of each tensor in an answer of /weights_checker: those of all ranks together."""
    ranks = answer.get("ranks") if isinstance(answer, dict) else None
    tables = [rank.get("checksums", {}) for rank in ranks or [] if isinstance(rank, dict)]
    return {name: str(value) for table in tables for name, value in table.items()}
