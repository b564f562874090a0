"""Pins: neither the rollout manager nor the embedded server grows with the number of prompts that it has seen.

Without it a run of days would end when its machine has no memory left, hours after whatever kept the batches.
"""

from __future__ import annotations

import asyncio
import gc
import os
from contextlib import aclosing
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from rollouts_core.config import ModelConfig, RolloutConfig, SamplingConfig
from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.engines import SGLangEngine
from rollouts_core.rollout.generate import create_engine_generate_fn
from rollouts_core.rollout.manager import AsyncRolloutManager
from rollouts_core.types import Sample
from tests.rollouts_core.make import make_prompts
from tests.rollouts_core.served_engine import engine_url

PROMPTS_PER_BATCH, GROUP_SIZE = 50, 2
WARMUP_PROMPTS, MEASURED_PROMPTS = 2_000, 10_000
MAX_GROWTH_BYTES = 6 << 20
"""A sample takes two kibibytes: if the 20,000 measured ones were kept, it would be seven times as much."""


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def reward_length(sample: Sample) -> float:
    return float(len(sample.tokens) % 3)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_ten_thousand_prompts_leave_nothing_behind(base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    config = RolloutConfig(
        batch_size=PROMPTS_PER_BATCH,
        n_samples_per_prompt=GROUP_SIZE,
        sampling=SamplingConfig(max_new_tokens=3),
        reward_fn=reward_length,
    )

    async def generate(manager: AsyncRolloutManager, num_prompts: int) -> int:
        for _ in range(num_prompts // PROMPTS_PER_BATCH):
            batch = await manager.generate_batch()
            assert len(batch.samples) == PROMPTS_PER_BATCH * GROUP_SIZE
        return resident_bytes()

    async def growth(url: str) -> int:
        engine = SGLangEngine(url)
        generate_fn = create_engine_generate_fn([engine], tokenizer, config)
        manager = AsyncRolloutManager(DataBuffer(make_prompts(200)), config, generate_fn=generate_fn)
        async with aclosing(engine), manager:
            before = await generate(manager, WARMUP_PROMPTS)
            return await generate(manager, MEASURED_PROMPTS) - before

    with engine_url(Path(base_model.path), num_slots=64) as url:
        grown = asyncio.run(growth(url))
    assert grown < MAX_GROWTH_BYTES, f"{grown / 2**20:.1f} MiB more after {MEASURED_PROMPTS} prompts"
