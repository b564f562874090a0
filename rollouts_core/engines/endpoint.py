"""`Endpoint`: the address and the settings of an engine for completions. `connect` creates the engine's client.

async with connect(Endpoint(provider="vllm", url="http://127.0.0.1:8000")) as engine:
    completions = await engine.generate(endpoint.requests([prompt_tokens], stop_token_ids=(eos,)))
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path

from pydantic import Field

from rollouts_core.config import EngineKind, Record, SamplingConfig
from rollouts_core.engine_kinds import ENGINES
from rollouts_core.engines.client import EngineClient
from rollouts_core.engines.completion import GenerationRequest
from rollouts_core.engines.silence import SILENCE_TIMEOUT_S
from rollouts_core.keys import read_key


class Endpoint(Record):
    """Address and settings of an engine for completions."""

    provider: EngineKind = "embedded"
    """Kind of the server."""
    url: str = Field(pattern=r"^https?://[^/]+")
    """Base URL of the server."""
    model: str = ""
    """Folder of the model that the server must serve, to check shapes and token ids. An empty path checks nothing."""
    api_key_variable: str = ""
    """Name of the environment variable with the engine's API key, or empty to send no key."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling settings of each completion."""

    def requests(
        self, prompts: Sequence[list[int]], *, stop_token_ids: tuple[int, ...], seed: int = 0
    ) -> list[GenerationRequest]:
        """One request for each prompt of token ids, with consecutive seeds from `seed`."""
        return [
            GenerationRequest(prompt_tokens=prompt, sampling=self.sampling, stop_token_ids=stop_token_ids, seed=number)
            for number, prompt in enumerate(prompts, start=seed)
        ]


def create_engine(
    endpoint: Endpoint,
    *,
    request_timeout_s: float = 600.0,
    restart_timeout_s: float = 120.0,
    silence_timeout_s: float = SILENCE_TIMEOUT_S,
    start_timeout_s: float = 0.0,
) -> EngineClient:
    """Create the client of an endpoint. The caller must close the client.

    Raises:
        ConfigError: the environment variable with the key is not set.
    """
    module, _, name = ENGINES[endpoint.provider].client.partition(":")
    create: type[EngineClient] = getattr(import_module(module), name)
    return create(
        endpoint.url,
        request_timeout_s=request_timeout_s,
        restart_timeout_s=restart_timeout_s,
        silence_timeout_s=silence_timeout_s,
        start_timeout_s=start_timeout_s,
        model_dir=Path(endpoint.model) if endpoint.model else None,
        api_key=read_key(endpoint.api_key_variable, "endpoint"),
    )


@asynccontextmanager
async def connect(endpoint: Endpoint, *, timeout_s: float = 120.0) -> AsyncIterator[EngineClient]:
    """Yield the client of an endpoint once the endpoint answers, and close the client at the end of the block."""
    engine = create_engine(endpoint)
    try:
        await engine.wait_until_ready(timeout_s)
        yield engine
    finally:
        await engine.aclose()
