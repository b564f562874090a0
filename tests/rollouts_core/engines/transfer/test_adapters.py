"""Pins that adapters reach the embedded engine as adapters, and that it samples from the policy that is trained.

Without it a lost scale, an adapter in another layer or an old version would show only as training that goes astray.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollouts_core.algorithms.loss import create_cross_entropy_loss, create_policy_loss
from rollouts_core.backends.pytorch import PyTorchTrainingBackend, create_pytorch_backend
from rollouts_core.config import (
    LoRAConfig,
    ModelConfig,
    OptimConfig,
    PolicyConfig,
    RLOptimConfig,
    RLTrainingConfig,
    RolloutConfig,
    SamplingConfig,
)
from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.data.dataset import load_prompts_from_jsonl
from rollouts_core.embedded.adapters import DOWN, UP, is_adapter, merge_published
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.scheduler import Scheduler
from rollouts_core.engine_kinds.spec import AdapterForm
from rollouts_core.engines import (
    GenerationRequest,
    PublishTarget,
    ScoringRequest,
    SGLangEngine,
    VLLMEngine,
    publish_weights,
)
from rollouts_core.engines.client import EngineClient
from rollouts_core.engines.protocol import SegmentAccess
from rollouts_core.engines.transfer.adapters import PEFT_PREFIX, AdaptedWeights, write_scaled_folder
from rollouts_core.engines.transfer.checksums import HeldTensors
from rollouts_core.engines.transfer.weight_sync import EarlierVersion, write_newest_version
from rollouts_core.errors import CheckpointError, WeightSyncError
from rollouts_core.model.lora import add_adapters, base_weights, merged_weights, scaled_adapters
from rollouts_core.rl import run_rl_training
from rollouts_core.rollout.generate import create_engine_generate_fn
from rollouts_core.rollout.manager import AsyncRolloutManager
from rollouts_core.types import RolloutBatch
from tests.rollouts_core.embedded.tiny_models import expected_logits, make_model, random_prompt, save_model
from tests.rollouts_core.model.test_policy import take_steps
from tests.rollouts_core.served_engine import engine_url, served_engine

TOLERANCE = 1e-4
README = PolicyConfig(precision="bfloat16", lora=LoRAConfig(rank=16, alpha=32))


class FileEngine(SGLangEngine):
    """The client of an embedded engine on another machine."""

    async def segment_access(self) -> SegmentAccess:
        """Files."""
        return SegmentAccess.FILES


class FolderEngine(SGLangEngine):
    """Takes adapters as SGLang and vLLM do, and lets the embedded engine behind it load what they amount to."""

    segment_access = EngineClient.segment_access
    loaded: list[str]

    async def adapter_form(self, rank: int) -> AdapterForm:
        """A folder."""
        return "folder"

    async def take_weights(self, path: Path, version: str) -> HeldTensors:
        """Also note the version. The checksums are of the files' number formats, so nothing is compared."""
        self.loaded.append(version)
        return replace(await super().take_weights(path, version), dtype=None)

    async def take_adapters(self, weights: AdaptedWeights, version: str) -> None:
        """Read the adapters from their folder."""
        files = load_file(weights.folder / "adapter_model.safetensors")
        adapters = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in files.items()}
        with TemporaryDirectory() as merged:
            replace(weights, adapters=adapters).write(Path(merged))
            await super().take_weights(Path(merged), version)
        self.loaded.append(version)


def adapted_model(family: str, config: LoRAConfig, **overrides: Any) -> PreTrainedModel:
    """A model whose adapters change much."""
    model = make_model(family, **overrides)
    add_adapters(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def published(model: PreTrainedModel) -> dict[str, Tensor]:
    return {**base_weights(model), **dict(scaled_adapters(model))}


def trained_backend(model: ModelConfig, policy: PolicyConfig = README) -> PyTorchTrainingBackend:
    """A backend whose adapters were trained."""
    loss_fn = create_cross_entropy_loss()
    optim = OptimConfig(lr=1e-2)
    backend = create_pytorch_backend(model, optim, loss_fn, num_steps=10, policy=policy, device="cpu")
    take_steps(backend, range(2))
    return backend


def target_of(model: ModelConfig, tmp_path: Path, **settings: Any) -> PublishTarget:
    config = Path(model.path) / "config.json"
    return PublishTarget(weights_dir=tmp_path / "weights", model_config=config, prefix="run", **settings)


async def sampled_gap(engine: SGLangEngine | VLLMEngine, backend: PyTorchTrainingBackend) -> float:
    """The largest difference between an engine's log-probs and the float32 policy's, over some completions.

    The engine computes them twice: as it samples the completions, and for the completions as given tokens.
    """
    sampling = SamplingConfig(max_new_tokens=12)
    prompts = [random_prompt(length, seed=length) for length in (3, 9, 9, 20)]
    prompts = [[token % 20 for token in prompt] for prompt in prompts]
    completions = await engine.generate(
        [
            GenerationRequest(prompt_tokens=prompt, sampling=sampling, stop_token_ids=(), seed=seed)
            for seed, prompt in enumerate(prompts)
        ]
    )
    given = [
        ScoringRequest(tokens=[*prompt, *completion.tokens], start=len(prompt))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    scored = await engine.score(given)
    exact = merge_published(published(backend.model))
    computed = [(each.versions, each.logprobs) for each in completions] + [
        (each.versions, each.logprobs) for each in scored
    ]
    gaps = []
    for request, (versions, logprobs) in zip([*given, *given], computed, strict=True):
        assert versions == {await engine.weight_version()}
        expected = logprobs_of(backend, exact, request.tokens)[-len(logprobs) :]
        gaps.append((torch.tensor(logprobs) - expected).abs().max())
    return float(max(gaps))


def logprobs_of(backend: PyTorchTrainingBackend, weights: Mapping[str, Tensor], tokens: Sequence[int]) -> Tensor:
    """Log-probs of all tokens but the first, in float32."""
    model = type(backend.model)(backend.model.config).float().eval()
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
    logprobs_TV = expected_logits(model, tokens).log_softmax(-1)
    return logprobs_TV[:-1].gather(-1, torch.tensor(tokens)[1:, None])[:, 0]


@pytest.mark.parametrize(
    ("family", "overrides", "targets"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, ()),
        ("qwen2", {"tie_word_embeddings": True}, ("q_proj", "v_proj")),
        ("qwen3", {}, ("k_proj", "o_proj", "up_proj", "down_proj")),
    ],
)
def test_the_decoder_computes_what_the_trainer_does(
    tmp_path: Path, family: str, overrides: dict[str, Any], targets: tuple[str, ...]
) -> None:
    model = adapted_model(family, LoRAConfig(rank=3, alpha=7, target_modules=targets), **overrides)
    decoder = Decoder(save_model(make_model(family, **overrides), tmp_path / "model"), num_slots=4)
    prompts = [random_prompt(length, seed=length) for length in (5, 12, 2)]
    plain = decoder.prefill(prompts)
    decoder.load_tensors(published(model))
    logits_BV = decoder.prefill(prompts)
    assert (logits_BV - plain).abs().max() > 0.1
    tokens = logits_BV.argmax(-1)
    after_BV = decoder.step(tokens, torch.tensor([len(prompt) for prompt in prompts]))
    for row, prompt in enumerate(prompts):
        expected = expected_logits(model, [*prompt, int(tokens[row])])[-2:]
        torch.testing.assert_close(torch.stack([logits_BV[row], after_BV[row]]), expected, atol=TOLERANCE, rtol=0)
        # Alone the same, but for rounding: on some CPUs MKL adds up small products by the number of rows.
        torch.testing.assert_close(decoder.prefill([prompt])[0], logits_BV[row], atol=1e-5, rtol=0)
    decoder.load_tensors(base_weights(model))
    assert torch.equal(decoder.prefill(prompts), plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name: {}, "lacks model.layers.0.self_attn.q_proj.lora_B.weight"),
        (lambda name: {name: torch.zeros(32, 5)}, "has shape (32, 5)"),
        (lambda name: {name: torch.full((64, 3), torch.nan)}, "not finite"),
        (lambda name: {name: torch.zeros(64, 3), f"other{DOWN}": torch.zeros(3, 32)}, f"other{DOWN}"),
    ],
)
def test_adapters_that_do_not_fit_leave_everything(tmp_path: Path, change: Any, message: str) -> None:
    model = adapted_model("qwen3", LoRAConfig(rank=3, alpha=7))
    decoder = Decoder(save_model(make_model("qwen3"), tmp_path / "model"), num_slots=2)
    tensors = published(model)
    decoder.load_tensors(tensors)
    before, digests = decoder.prefill([[2, 3, 4]]), decoder.weight_digests()
    name = f"model.layers.0.self_attn.q_proj{UP}"
    others = {each: tensor for each, tensor in tensors.items() if each != name}
    with pytest.raises(CheckpointError, match=message.replace("(", r"\(").replace(")", r"\)")):
        decoder.load_tensors({**{each: tensor * 2 for each, tensor in others.items()}, **change(name)})
    assert torch.equal(decoder.prefill([[2, 3, 4]]), before)
    assert decoder.weight_digests() == digests


@pytest.mark.parametrize("client", [SGLangEngine, FileEngine])
def test_an_engine_samples_from_the_trained_policy(
    base_model: ModelConfig, tmp_path: Path, client: type[SGLangEngine]
) -> None:
    backend, target = trained_backend(base_model), target_of(base_model, tmp_path)

    async def publish_two(engine: SGLangEngine) -> list[float]:
        await publish_weights(backend, [engine], target)
        gaps = [await sampled_gap(engine, backend)]
        await asyncio.to_thread(take_steps, backend, range(2, 4))
        gaps.append(await sampled_gap(engine, backend))
        await publish_weights(backend, [engine], target)
        return [*gaps, await sampled_gap(engine, backend)]

    with served_engine(Path(base_model.path), client=client) as (engine, _):
        first, before, after = asyncio.run(publish_two(engine))
    assert first < TOLERANCE and after < TOLERANCE
    assert before > 100 * TOLERANCE  # else the test could not tell one version from the next


def test_a_restarted_engine_gets_weights_and_adapters_again(base_model: ModelConfig, tmp_path: Path) -> None:
    backend, target = trained_backend(base_model), target_of(base_model, tmp_path)

    async def restart(engine: SGLangEngine, scheduler: Scheduler) -> float:
        await publish_weights(backend, [engine], target)
        start = scheduler.update_weights(Path(base_model.path), weight_version="default")
        await asyncio.wrap_future(start)
        return await sampled_gap(engine, backend)

    with served_engine(Path(base_model.path)) as (engine, scheduler):
        assert asyncio.run(restart(engine, scheduler)) < TOLERANCE


def test_a_refused_version_leaves_the_former_one(base_model: ModelConfig, tmp_path: Path) -> None:
    backend, target = trained_backend(base_model), target_of(base_model, tmp_path)

    async def diverge(engine: SGLangEngine, scheduler: Scheduler) -> None:
        await publish_weights(backend, [engine], target)
        digests = scheduler.weight_digests().result()
        await asyncio.to_thread(take_steps, backend, range(2, 3))
        with torch.no_grad():
            next(p for name, p in backend.model.named_parameters() if ".lora_A." in name).fill_(torch.inf)
        with pytest.raises(WeightSyncError, match="not finite"):
            await publish_weights(backend, [engine], target)
        assert (await engine.weight_version(), scheduler.weight_digests().result()) == ("run-2", digests)

    with served_engine(Path(base_model.path)) as (engine, scheduler):
        asyncio.run(diverge(engine, scheduler))


def test_sent_adapters_go_without_the_weights_that_they_belong_to(
    base_model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = trained_backend(base_model)
    target = target_of(base_model, tmp_path, transfer="gloo")
    loaded: list[set[str]] = []
    load = Decoder.load_tensors

    def note(self: Decoder, tensors: Mapping[str, Tensor], **options: Any) -> None:
        loaded.append(set(tensors))
        load(self, tensors, **options)

    monkeypatch.setattr(Decoder, "load_tensors", note)

    async def publish_two(url: str) -> float:
        async with SGLangEngine(url) as engine:
            await publish_weights(backend, [engine], target)
            await asyncio.to_thread(take_steps, backend, range(2, 4))
            await publish_weights(backend, [engine], target)
            return await sampled_gap(engine, backend)

    with engine_url(Path(base_model.path)) as url:
        assert asyncio.run(publish_two(url)) < TOLERANCE
    names = published(backend.model).keys()
    assert loaded == [names, set(filter(is_adapter, names))]


def test_an_earlier_version_is_kept_and_published_as_adapters(base_model: ModelConfig, tmp_path: Path) -> None:
    backend, target = trained_backend(base_model), target_of(base_model, tmp_path)

    async def go_back(engine: SGLangEngine, scheduler: Scheduler) -> None:
        await publish_weights(backend, [engine], target)
        expected = scheduler.weight_digests().result()
        file = write_newest_version(target)
        assert file is not None and all(map(is_adapter, load_file(file)))
        kept = EarlierVersion(number=2, file=Path(shutil.copy(file, tmp_path / "served.safetensors")))
        await asyncio.to_thread(take_steps, backend, range(2, 4))
        resumed = target_of(base_model, tmp_path / "resumed")
        assert await publish_weights(backend, [engine], resumed, earlier=kept) == "run-2"
        assert scheduler.weight_digests().result() == expected
        assert await publish_weights(backend, [engine], resumed) == "run-4"
        assert await sampled_gap(engine, backend) < TOLERANCE

    with served_engine(Path(base_model.path)) as (engine, scheduler):
        asyncio.run(go_back(engine, scheduler))


@pytest.mark.slow
def test_rl_with_adapters_samples_from_the_policy_that_it_trains(
    base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rollout = RolloutConfig(
        batch_size=2,
        n_samples_per_prompt=4,
        sampling=SamplingConfig(max_new_tokens=8),
        reward_fn=lambda sample: sum(character in "02468" for character in sample.response) / 8,
    )
    training = RLTrainingConfig(num_steps=3, optim=RLOptimConfig(lr=1e-2, schedule="constant"), policy=README)
    loss_fn = create_policy_loss(training.loss)
    backend = create_pytorch_backend(base_model, training.optim, loss_fn, num_steps=3, policy=README, device="cpu")
    prompts = load_prompts_from_jsonl(Path(base_model.path).parent / "prompts.jsonl")
    gaps: list[float] = []

    def compare(step: int, batch: RolloutBatch) -> None:
        """Before the step's update the trainer has the weights that were published."""
        exact = merge_published(published(backend.model))
        for sample in batch.samples:
            assert sample.rollout_log_probs is not None
            sampled = [place for place, trained in enumerate(sample.loss_mask) if trained]
            expected = logprobs_of(backend, exact, sample.tokens)[torch.tensor(sampled) - 1]
            found = torch.tensor([sample.rollout_log_probs[place] for place in sampled])
            gaps.append(float((found - expected).abs().max()))

    with served_engine(Path(base_model.path)) as (engine, _):
        generate_fn = create_engine_generate_fn([engine], tokenizer, rollout)
        buffer = DataBuffer(prompts)
        manager = AsyncRolloutManager(buffer, rollout, generate_fn=generate_fn)
        target = target_of(base_model, tmp_path)
        history = asyncio.run(
            run_rl_training(backend, buffer, manager, [engine], training, target=target, on_batch=compare)
        )
    assert len(gaps) == 3 * 8 and max(gaps) < TOLERANCE
    changed = dict(scaled_adapters(backend.model))
    assert any(tensor.any() for name, tensor in changed.items() if name.endswith(UP))  # it has learned
    for metrics in history:
        assert 0 < metrics["mismatch_mean"] <= metrics["mismatch_p99_max"] < 0.2  # the trainer's bfloat16


@pytest.mark.slow
def test_the_weights_below_go_once_and_old_folders_are_removed(base_model: ModelConfig, tmp_path: Path) -> None:
    backend, target = trained_backend(base_model), target_of(base_model, tmp_path)

    async def publish_three(engine: FolderEngine, scheduler: Scheduler) -> None:
        engine.loaded = []
        for step in range(2, 5):
            await publish_weights(backend, [engine], target)
            assert await sampled_gap(engine, backend) < TOLERANCE
            await asyncio.to_thread(take_steps, backend, range(step, step + 1))
        assert engine.loaded == ["run-base", "run-2", "run-3", "run-4"]
        assert sorted(path.name for path in target.weights_dir.glob("run-*")) == ["run-3", "run-4", "run-base"]
        await asyncio.wrap_future(scheduler.update_weights(Path(base_model.path), weight_version="default"))
        with pytest.raises(AssertionError):  # the trainer has gone on
            assert await sampled_gap(engine, backend) < TOLERANCE
        assert engine.loaded[4:] == ["run-base", "run-4"]
        file = write_newest_version(target)
        assert file is not None and load_file(file).keys() == dict(scaled_adapters(backend.model)).keys()
        earlier = EarlierVersion(number=4, file=Path(shutil.copy(file, tmp_path / "served.safetensors")))
        await publish_weights(backend, [engine], target, earlier=earlier)
        assert await engine.weight_version() == "run-4"

    with served_engine(Path(base_model.path), client=FolderEngine) as (engine, scheduler):
        assert isinstance(engine, FolderEngine)
        asyncio.run(publish_three(engine, scheduler))


def test_peft_loads_the_folder_that_engines_get(base_model: ModelConfig, tmp_path: Path) -> None:
    backend = trained_backend(base_model)
    weights = published(backend.model)
    write_scaled_folder(tmp_path / "adapter", dict(scaled_adapters(backend.model)))
    plain = type(backend.model)(backend.model.config).float().eval()
    plain.load_state_dict({name: tensor.float() for name, tensor in base_weights(backend.model).items()}, strict=False)
    adapted = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    prompt = [3, 5, 7, 9]
    expected = logprobs_of(backend, merge_published(weights), prompt)
    found = expected_logits(adapted, prompt).log_softmax(-1)[:-1].gather(-1, torch.tensor(prompt)[1:, None])[:, 0]
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_published_weights_with_merged_adapters_are_the_trainers(base_model: ModelConfig) -> None:
    backend = trained_backend(base_model)
    expected = merged_weights(backend.model)
    merged = merge_published(published(backend.model))
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name])
