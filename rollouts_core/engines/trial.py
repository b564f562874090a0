"""Test whether an installed engine works: let the engine serve a tiny model, and request one completion.

    RUN_DIR/job.json {"kind", "python", "start_timeout_s"} ──> a random model ── server ── completion ──> result.json

Run as `python -m rollouts_core.engines.trial RUN_DIR`. Not here: installing engines (infra), starting engines of a run.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from rollouts_core.config import DeploymentConfig, EngineConfig, ModelConfig, RolloutConfig, SamplingConfig
from rollouts_core.engines.child import started_engines
from rollouts_core.engines.completion import GenerationRequest
from rollouts_core.errors import RolloutsError
from rollouts_core.job import InputModel
from rollouts_core.quickstart import QuickstartSize, build_character_tokenizer, build_untrained_model
from rollouts_core.run_directory import RunDirectory

SIZE = QuickstartSize(hidden_size=256, num_layers=2)
"""Size of the tiny model: four heads of width 64, which the kernels of every engine support."""
PROMPT, NUM_TOKENS, MAX_TOKENS = [5, 6, 7], 8, 64


def write_tiny_model(folder: Path) -> None:
    """Write a model with random weights, and its tokenizer."""
    tokenizer = build_character_tokenizer()
    tokenizer.save_pretrained(folder)
    build_untrained_model(tokenizer, SIZE, seed=0).save_pretrained(folder)


async def ask_for_completion(engine: EngineConfig, model_dir: Path, directory: RunDirectory) -> int:
    """Request one completion, and return the number of tokens that the engine sampled.

    Raises:
        RolloutsError: the engine could not be started, or gave no completion.
    """
    model = InputModel(name="trial", model=ModelConfig(path=str(model_dir)), digest="")
    request = GenerationRequest(
        prompt_tokens=PROMPT, sampling=SamplingConfig(max_new_tokens=NUM_TOKENS), stop_token_ids=(), seed=0
    )
    started = started_engines(model, RolloutConfig(engine=engine), DeploymentConfig(), directory, max_tokens=MAX_TOKENS)
    async with started as pool:
        [completion] = await pool.generate([request])
    return len(completion.tokens)


def main() -> int:
    """Test the engine that job.json names."""
    directory = RunDirectory(Path(sys.argv[1]))
    job = json.loads(directory.job.read_text(encoding="utf-8"))
    engine = EngineConfig(kind=job["kind"], python=job["python"], start_timeout_s=job["start_timeout_s"])
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder))
        try:
            num_tokens = asyncio.run(ask_for_completion(engine, Path(folder), directory))
        except RolloutsError as error:
            sys.stdout.write(f"{error}\n")
            return 1
    directory.write_result({"num_tokens": num_tokens, "seconds": time.monotonic() - began})
    return 0


if __name__ == "__main__":
    sys.exit(main())
