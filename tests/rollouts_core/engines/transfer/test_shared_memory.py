"""Pins that weights published in segments are served, whole and proved, and that nothing of them outlives its holders.

Without it an engine could serve a mixture of two versions after a delta, or every trainer that is killed would leave
the size of its model in the machine's memory.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load, load_file
from torch import Tensor

from rollouts_core import create_pytorch_backend
from rollouts_core.algorithms.loss import create_policy_loss
from rollouts_core.backends.pytorch import PyTorchTrainingBackend
from rollouts_core.config import LoRAConfig, LossConfig, ModelConfig, PolicyConfig, RLOptimConfig
from rollouts_core.embedded import decoder as decoder_module
from rollouts_core.embedded.scheduler import Scheduler
from rollouts_core.embedded.segments import SegmentAddress, memory_scope, read_segment
from rollouts_core.embedded.weights import tensor_digest
from rollouts_core.engines import EnginePool, PublishTarget, SGLangEngine, publish_weights, sglang
from rollouts_core.engines.client import EngineClient
from rollouts_core.engines.protocol import SegmentAccess
from rollouts_core.engines.transfer.shared_memory import (
    Segment,
    SegmentedWeights,
    SegmentStore,
    count_bytes,
    is_same,
    render_safetensors,
)
from rollouts_core.errors import CheckpointError, WeightSyncError
from tests.rollouts_core.served_engine import served_engine

pytestmark = pytest.mark.skipif(not memory_scope(), reason="no memory can be shared by its path in /proc here")

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
ResultT = TypeVar("ResultT")


@pytest.fixture
def model_dir(quickstart_dir: Path) -> Path:
    return quickstart_dir / "base_model"


@pytest.fixture
def weights(model_dir: Path) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in load_file(model_dir / "model.safetensors").items()}


@pytest.fixture
def target(model_dir: Path, tmp_path: Path) -> PublishTarget:
    return PublishTarget(weights_dir=tmp_path / "weights", model_config=model_dir / "config.json", prefix="run")


@pytest.fixture
def loaded_names(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The tensors that engines take out of segments, a set for each segment that they open."""
    seen: list[set[str]] = []

    def watch(segment: SegmentAddress, names: list[str]) -> dict[str, Tensor]:
        seen.append(set(names))
        return read_segment(segment, names)

    monkeypatch.setattr(decoder_module, "read_segment", watch)
    return seen


def served(model_dir: Path, use: Callable[[SGLangEngine, Scheduler], Coroutine[Any, Any, ResultT]]) -> ResultT:
    """What `use` returns of an engine on the model."""
    with served_engine(model_dir) as (engine, scheduler):
        return asyncio.run(use(engine, scheduler))


def make_backend(model_dir: Path, *, lora_rank: int = 0) -> PyTorchTrainingBackend:
    return create_pytorch_backend(
        ModelConfig(path=str(model_dir)),
        RLOptimConfig(),
        create_policy_loss(LossConfig()),
        num_steps=10,
        policy=PolicyConfig(lora=LoRAConfig(rank=lora_rank)),
        device="cpu",
    )


def step(backend: PyTorchTrainingBackend) -> None:
    """An update of whatever is trained, with the gradient of its squared norm after a push away from 0."""
    for parameter in backend.policy.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    asyncio.run(backend.optim_step().result())


def digests_of(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_what_is_written_is_a_safetensors_file(dtype: torch.dtype) -> None:
    tensors = {
        "matrix": torch.arange(6).reshape(2, 3).to(dtype),
        "transposed": torch.arange(6).reshape(2, 3).to(dtype).T,
        "number": torch.tensor(3).to(dtype),
        "none": torch.empty(0, 4, dtype=dtype),
        "bits": torch.tensor([True, False, True]),
    }
    read = load(b"".join(render_safetensors(tensors)))
    assert read.keys() == tensors.keys()
    assert all(is_same(read[name], tensor.contiguous()) for name, tensor in tensors.items())


def test_bytes_decide_what_changed() -> None:
    assert is_same(torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 1.0]))
    assert not is_same(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert not is_same(torch.zeros(4), torch.zeros(2, 2))
    assert not is_same(torch.zeros(4), torch.zeros(4, dtype=torch.int32))


def test_a_publish_in_memory_is_served_and_proved_and_writes_no_weights(model_dir: Path, target: PublishTarget) -> None:
    backend = make_backend(model_dir)
    step(backend)

    async def publish(engine: SGLangEngine, scheduler: Scheduler) -> tuple[str, dict[str, str], str]:
        await publish_weights(backend, [engine], target)
        return await engine.weight_version(), scheduler.weight_digests().result(), str(scheduler.model_dir)

    version, digests, served_dir = served(model_dir, publish)
    assert version == "run-1"
    assert digests == digests_of(asyncio.run(backend.get_weights().result()))
    assert served_dir == str(target.weights_dir), "a later run recognises the engine by a folder of its store"
    assert [path.name for path in target.weights_dir.iterdir()] == ["config.json"]


def test_a_damaged_config_of_an_earlier_attempt_is_replaced(model_dir: Path, target: PublishTarget) -> None:
    """Engines read it at every publication, so no attempt would come further."""
    target.weights_dir.mkdir()
    (target.weights_dir / "config.json").write_bytes(b"")

    async def publish(engine: SGLangEngine, scheduler: Scheduler) -> str:
        await publish_weights(make_backend(model_dir), [engine], target)
        return await engine.weight_version()

    assert served(model_dir, publish) == "run-0"
    assert (target.weights_dir / "config.json").read_bytes() == target.model_config.read_bytes()


def test_an_embedded_engine_on_another_machine_is_given_what_changed_in_files(
    model_dir: Path, target: PublishTarget, loaded_names: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "memory_scope", lambda: "another machine")
    target.weights_dir.mkdir()
    (target.weights_dir / "segment-of-a-killed-trainer.safetensors").write_bytes(b"")
    backend = make_backend(model_dir)
    backend.model.get_input_embeddings().weight.requires_grad_(False)
    names = set(asyncio.run(backend.get_weights().result()))

    async def publish_four(engine: SGLangEngine, scheduler: Scheduler) -> dict[str, str]:
        for _ in range(4):
            await asyncio.to_thread(step, backend)
            await publish_weights(backend, [engine], target)
        return scheduler.weight_digests().result()

    digests = served(model_dir, publish_four)
    assert digests == digests_of(asyncio.run(backend.get_weights().result()))
    assert [each for each in loaded_names if each][-2:] == [names - {EMBEDDING}] * 2
    files = [set(load_file(path)) for path in target.weights_dir.glob("segment-*.safetensors")]
    assert sorted(files, key=len) == [{EMBEDDING}, names - {EMBEDDING}]


def test_an_engine_that_takes_no_segments_is_given_a_model_directory(
    model_dir: Path, target: PublishTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SGLangEngine, "segment_access", EngineClient.segment_access)

    async def publish(engine: SGLangEngine, scheduler: Scheduler) -> None:
        await publish_weights(make_backend(model_dir), [engine], target)
        assert await engine.weight_version() == "run-0"

    served(model_dir, publish)
    assert (target.weights_dir / "run-0" / "model.safetensors").exists()


def test_a_pool_has_access_to_what_all_its_engines_have(model_dir: Path) -> None:
    async def ask(engine: SGLangEngine, scheduler: Scheduler) -> tuple[SegmentAccess, SegmentAccess]:
        gone = SGLangEngine("http://127.0.0.1:9", restart_timeout_s=0.1)
        async with EnginePool([engine]) as alone, EnginePool([engine, gone]) as mixed:
            return await alone.segment_access(), await mixed.segment_access()

    assert served(model_dir, ask) == (SegmentAccess.MEMORY, SegmentAccess.NONE)


def test_a_frozen_embedding_is_written_and_loaded_once(
    model_dir: Path, target: PublishTarget, loaded_names: list[set[str]]
) -> None:
    backend = make_backend(model_dir)
    backend.model.get_input_embeddings().weight.requires_grad_(False)
    names = set(asyncio.run(backend.get_weights().result()))

    async def publish_three(engine: SGLangEngine, scheduler: Scheduler) -> dict[str, str]:
        for _ in range(3):
            await publish_weights(backend, [engine], target)
            await asyncio.to_thread(step, backend)
        return scheduler.weight_digests().result()

    digests = served(model_dir, publish_three)
    trained = names - {EMBEDDING}
    # With the second version, which replaces nearly all of the first, the embedding moves, and the first can go.
    assert [each for each in loaded_names if each] == [names, {EMBEDDING}, trained, trained]
    assert digests == digests_of_newest(target)


def digests_of_newest(target: PublishTarget) -> dict[str, str]:
    """Those of what was published last."""
    return digests_of({name: placed.segment.tensors[name] for name, placed in target.segments._newest.items()})


def test_with_adapters_only_these_are_sent_again(
    model_dir: Path, target: PublishTarget, loaded_names: list[set[str]]
) -> None:
    backend = make_backend(model_dir, lora_rank=2)

    async def publish_three(engine: SGLangEngine, scheduler: Scheduler) -> dict[str, str]:
        for _ in range(2):
            await publish_weights(backend, [engine], target)
            await asyncio.to_thread(step, backend)
        loaded_names.clear()
        await publish_weights(backend, [engine], target)
        return scheduler.weight_digests().result()

    digests = served(model_dir, publish_three)
    adapters = asyncio.run(backend.get_adapters().result())
    assert [each for each in loaded_names if each] == [adapters.keys()]
    assert digests == digests_of({**asyncio.run(backend.get_base_weights().result()), **adapters})


def test_an_engine_that_came_back_takes_everything_as_it_was_published(
    model_dir: Path, tmp_path: Path, weights: dict[str, Tensor], loaded_names: list[set[str]]
) -> None:
    memory = SegmentStore()

    async def lose_and_return(engine: SGLangEngine, scheduler: Scheduler) -> dict[str, str]:
        await engine.load_weights(await memory.publish(weights, version="v1", model_dir=model_dir), "v1")
        weights[HEAD] += 1
        published = await memory.publish(weights, version="v2", model_dir=model_dir)
        await engine.load_weights(published, "v2")
        expected = digests_of(weights)
        await asyncio.wrap_future(scheduler.update_weights(model_dir, weight_version="default"))  # it came back
        loaded_names.clear()
        weights[EMBEDDING] += 1  # the trainer has gone on
        await memory.publish(weights, version="v3", model_dir=model_dir)
        await engine._keeper._recover()
        assert await engine.weight_version() == "v2"
        assert scheduler.weight_digests().result() == expected
        return expected

    served(model_dir, lose_and_return)
    assert sorted(map(len, loaded_names)) == [1, len(weights) - 1]


@pytest.mark.parametrize("name", [HEAD, EMBEDDING])
def test_the_proof_covers_tensors_that_were_not_sent(model_dir: Path, weights: dict[str, Tensor], name: str) -> None:
    memory = SegmentStore()

    async def spoil_one(engine: SGLangEngine, scheduler: Scheduler) -> None:
        await engine.load_weights(await memory.publish(weights, version="v1", model_dir=model_dir), "v1")
        scheduler.decoder._weights.by_name[name][0, 0] += 1
        weights["model.norm.weight"] += 1
        published = await memory.publish(weights, version="v2", model_dir=model_dir)
        with pytest.raises(WeightSyncError, match=rf"v2, but 1 of {len(weights)} tensors differ, {name} first"):
            await engine.load_weights(published, "v2")

    served(model_dir, spoil_one)


@pytest.mark.parametrize(("value", "words"), [(torch.nan, "not finite"), (torch.inf, "not finite")])
def test_weights_that_are_no_numbers_are_refused_and_the_old_ones_stay(
    model_dir: Path, weights: dict[str, Tensor], value: float, words: str
) -> None:
    memory = SegmentStore()

    async def publish_nan(engine: SGLangEngine, scheduler: Scheduler) -> None:
        before = scheduler.weight_digests().result()
        weights["model.norm.weight"][0] = value
        published = await memory.publish(weights, version="v1", model_dir=model_dir)
        with pytest.raises(
            WeightSyncError, match=rf"refused v1: .*the published segments: model\.norm\.weight.*{words}"
        ):
            await engine.load_weights(published, "v1")
        assert scheduler.weight_digests().result() == before

    served(model_dir, publish_nan)


HOLDER = """
import sys, torch
from rollouts_core.engines.transfer.shared_memory import Segment
segment = Segment({"weight": torch.ones(1_000_000)})
print(segment.path, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_killed_trainer_leaves_no_memory_behind() -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    with process.stdout, process.stdin:
        address = SegmentAddress(id="a", path=process.stdout.readline().strip(), names=("weight",))
        assert address.path.startswith(f"/proc/{process.pid}/fd/")
        assert str(Path(address.path).readlink()).startswith("/memfd:rollouts-weights")
        mapped = read_segment(address, ["weight"])["weight"]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert float(mapped.sum()) == 1_000_000, "who had mapped it keeps it"
    with pytest.raises(CheckpointError, match="the trainer has ended, or replaced them with newer weights"):
        read_segment(address, ["weight"])


@pytest.mark.slow
def test_segments_end_with_the_last_version_that_needs_them() -> None:
    async def publish_many() -> list[int]:
        memory, weights = SegmentStore(), {name: torch.zeros(1000) for name in "abcd"}
        held = []
        for number in range(12):
            weights["abcd"[number % 4]] += 1  # each time another one: what was replaced lies between what is kept
            published = await memory.publish(weights, version=str(number), model_dir=Path())
            assert published.addresses()
            held.append(sum(segment_bytes(published)))
        return held

    def segment_bytes(published: SegmentedWeights) -> list[int]:
        segments = {tensor.segment for tensor in published.placed.values()}
        return [count_bytes(segment.tensors.values()) for segment in segments]

    gc.collect()
    gc.disable()  # they end with their last holder, not some time later
    try:
        descriptors = num_memory_descriptors()
        assert max(asyncio.run(publish_many())) <= 1.5 * 4 * 4000
        deadline = time.monotonic() + 30.0
        while num_memory_descriptors() != descriptors and time.monotonic() < deadline:
            time.sleep(0.01)  # the thread of the last digests holds what it reads
        assert num_memory_descriptors() == descriptors
    finally:
        gc.enable()


def num_memory_descriptors() -> int:
    """How many of this process's open files are published weights."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(path.readlink()))
        except OSError:  # that of the listing itself
            continue
    return sum("rollouts-weights" in link for link in links)


def test_a_segment_does_not_change_with_the_tensors_it_was_made_of() -> None:
    tensor = torch.zeros(3)
    segment = Segment({"a": tensor})
    tensor += 1
    assert segment.tensors["a"].tolist() == [0.0, 0.0, 0.0]
