"""Pins that engines can judge as they are served here: vLLM through its chat endpoint, the others in token ids.

Without it a judge of one's own would be a claim of the documentation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rollouts_core.config import RewardConfig
from rollouts_core.errors import EnvironmentUnavailableError
from rollouts_core.reward_services import create_judge_reward
from rollouts_core.types import Sample
from tests.engines.models import SavedModel, make, save
from tests.engines.servers import Server, serving

pytestmark = pytest.mark.timeout(400)

SPOKEN, END = 21, 1
SCORE = "score: 7"


def judge(server: Server, model_dir: Path) -> float | None:
    """What an engine says of a sample."""
    is_vllm = server.job.engine.kind == "vllm"
    url = server.url + ("/v1" if is_vllm else "/generate")
    # vLLM calls a model by its folder, which is an untied copy of one with a tied head.
    model = str(server.run_dir / "served_model" if is_vllm else model_dir)
    config = RewardConfig(kind="judge", url=url, model=model, judge_prompt="{response}", max_retries=0)
    return asyncio.run(create_judge_reward(config)(Sample(prompt="q", response="1+1=?")))


def test_an_engine_is_asked_and_read_as_a_judge(server: Server, start: SavedModel) -> None:
    """A random model gives no score; that the sentence quotes what it wrote shows that it was asked and read."""
    with pytest.raises(EnvironmentUnavailableError, match=r"no score from 0 to 10 in '.+'"):
        judge(server, start.directory)


@torch.no_grad()
def make_judge() -> PreTrainedModel:
    """A model that says the token `SPOKEN` and ends, whatever it reads: each layer adds nothing but the last one's MLP,
    which turns what any token is (axis 0) into what is spoken (1), and that into the end (2)."""
    model = make(0)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        for projection in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            projection.weight.zero_()
        layer.post_attention_layernorm.weight.fill_(1.0)
    model.model.norm.weight.fill_(1.0)
    embedding, mlp = model.model.embed_tokens.weight, model.model.layers[-1].mlp
    embedding.zero_()
    embedding[:, 0] = 1.0
    for axis, token in ((1, SPOKEN), (2, END)):
        embedding[token, 0] = 0.0
        embedding[token, axis] = 1.0
    for axis in (0, 1):
        mlp.gate_proj.weight[axis, axis] = mlp.up_proj.weight[axis, axis] = 1.0
        mlp.down_proj.weight[axis + 1, axis] = 10.0
    return model


@pytest.fixture
def judging(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Server, Path]]:
    """A server of that kind, whose model gives a score, and the model's folder."""
    directory = save(make_judge(), tmp_path / "judge").directory
    tokenizer = directory / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('";"', f'"{SCORE}"'))
    with serving(request.param, directory, tmp_path / "run") as server:
        yield server, directory


@pytest.mark.parametrize(
    "judging",
    [
        pytest.param("embedded", marks=pytest.mark.slow),
        # Asked as the embedded engine is.
        pytest.param("sglang", marks=[pytest.mark.engine, pytest.mark.matrix]),
        pytest.param("vllm", marks=[pytest.mark.engine, pytest.mark.matrix]),
    ],
    indirect=True,
)
def test_the_score_that_an_engine_writes_is_the_reward(judging: tuple[Server, Path]) -> None:
    assert judge(*judging) == 0.7
