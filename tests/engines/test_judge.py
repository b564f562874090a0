"""Pins that engines can judge as they are served here: vLLM through its chat endpoint, the others in token ids.

Without it a judge of one's own would be a claim of the documentation.
"""

from __future__ import annotations

import asyncio

import pytest

from rollouts_core.config import RewardConfig
from rollouts_core.errors import EnvironmentUnavailableError
from rollouts_core.reward_services import create_judge_reward
from rollouts_core.types import Sample
from tests.engines.conftest import SavedModel
from tests.engines.servers import Server

pytestmark = pytest.mark.timeout(400)


def test_an_engine_is_asked_and_read_as_a_judge(server: Server, start: SavedModel) -> None:
    """A random model gives no score; that the sentence quotes what it wrote shows that it was asked and read."""
    is_vllm = server.job.engine.kind == "vllm"
    url = server.url + ("/v1" if is_vllm else "/generate")
    # vLLM calls a model by its folder, which is an untied copy of one with a tied head.
    model = str(server.run_dir / "served_model" if is_vllm else start.directory)
    config = RewardConfig(kind="judge", url=url, model=model, judge_prompt="{response}", max_retries=0)
    with pytest.raises(EnvironmentUnavailableError, match=r"no score from 0 to 10 in '.+'"):
        asyncio.run(create_judge_reward(config)(Sample(prompt="q", response="1+1=?")))
