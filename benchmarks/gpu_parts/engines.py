"""Engines in processes of their own: they take the trainer's weights, and give its log-probs of what they sample.

Not here: the embedded engine's check, which starts in seconds and is one of backends.py.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import torch
from inputs import EOS_ID, PAD_ID
from side_by_side import REPOSITORY, worker_environment

from gpu_parts.checking import Check, Place, hold
from gpu_parts.models import create_backend, sft_step, take_step, write_small_model
from gpu_parts.record import Figures
from rollouts_core import PyTorchTrainingBackend, Sample, build_batch
from rollouts_core.config import EngineConfig, EngineKind, ModelConfig, SamplingConfig
from rollouts_core.engines import Endpoint, PublishTarget, connect, publish_weights
from rollouts_core.fingerprint import digest_model
from rollouts_core.job import InputModel, ServeJob
from rollouts_core.system.listening import bind_port

PROMPT = [5, 6, 7, 8]
ENGINE_START_S = {"embedded": 60.0, "sglang": 150.0, "vllm": 150.0}
ENGINE_TOLERANCE = {"embedded": 1e-3, "sglang": 0.1, "vllm": 0.1}
"""Nats by which an engine's log-probs may differ from the trainer's in float32; SGLang and vLLM compute in bfloat16."""
LOG_TAIL = 4000
"""Characters of an engine's log that are shown after an error."""


def publish_to_engine(kind: EngineKind, place: Place) -> Figures:
    """An engine is given trained weights, and its log-probs of what it samples are the trainer's."""
    model = write_small_model(place)
    backend = create_backend(model, place.device)
    for seed in range(2):
        take_step(backend, sft_step(seed))
    with served(kind, model, place) as url:
        return asyncio.run(compare_logprobs(kind, url, backend, model, place))


@contextmanager
def served(kind: EngineKind, model: ModelConfig, place: Place) -> Iterator[str]:
    """The URL of an engine in a process of its own, which is started as the pipeline starts it.

    If the block raises, the end of the engine's log goes to standard error: the log itself is deleted with the folder.
    """
    with closing(bind_port("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    served_model = InputModel(name="base", model=model, digest=digest_model(model))
    job = ServeJob(model=served_model, port=port, context_length=128, engine=EngineConfig(kind=kind))
    folder = place.folder / f"serve-{kind}"
    folder.mkdir()
    (folder / "job.json").write_text(job.model_dump_json())
    log_path = folder / "log.txt"
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rollouts_core", "serve", str(folder / "job.json")],
            cwd=REPOSITORY,
            env=worker_environment(1),
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    except BaseException:  # the interrupt at the part's limit, too
        sys.stderr.write(f"the end of the log of {kind}:\n{log_path.read_text(errors='replace')[-LOG_TAIL:]}\n")
        raise
    finally:
        process.terminate()
        process.wait(30)


async def compare_logprobs(
    kind: EngineKind, url: str, backend: PyTorchTrainingBackend, model: ModelConfig, place: Place
) -> Figures:
    """Publish, sample, and score the samples with the trainer."""
    sampling = SamplingConfig(max_new_tokens=16)
    endpoint = Endpoint(provider=kind, url=url, model=model.path, sampling=sampling)
    target = PublishTarget(
        weights_dir=place.folder / "weights", model_config=Path(model.path) / "config.json", prefix="check"
    )
    async with connect(endpoint, timeout_s=ENGINE_START_S[kind]) as engine:
        began = time.perf_counter()
        version = await publish_weights(backend, [engine], target)
        published_s = time.perf_counter() - began
        (completion,) = await engine.generate(endpoint.requests([PROMPT], stop_token_ids=(EOS_ID,)))
    hold(
        all(span[0] == version for span in completion.version_spans),
        f"the completion is of {completion.version_spans}, published was {version}",
    )
    num_new = len(completion.tokens)
    sample = Sample(tokens=[*PROMPT, *completion.tokens], loss_mask=[0.0] * len(PROMPT) + [1.0] * num_new)
    scores = await backend.score(build_batch([[sample]], pad_id=PAD_ID)).result()
    own = scores.logprobs_BT[0, len(PROMPT) - 1 :][:num_new]
    difference = float((own - torch.tensor(completion.logprobs)).abs().max())
    limit = ENGINE_TOLERANCE[kind]
    hold(difference <= limit, f"log-probs differ by {difference:.3g} nats, at most {limit:g}")
    return {"largest difference, nats": difference, "tolerance": limit, "publication, s": published_s}


CHECKS = [
    Check(name="SGLang takes weights", run=partial(publish_to_engine, "sglang"), needs=("sglang",), needs_gpu=True),
    Check(name="vLLM takes weights", run=partial(publish_to_engine, "vllm"), needs=("vllm",), needs_gpu=True),
]
