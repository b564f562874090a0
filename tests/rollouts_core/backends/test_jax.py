"""Pins that training with JAX is training with PyTorch up to rounding: losses, gradients, checkpoints, served weights.

Without it the two backends could drift apart, and a checkpoint of one could mean something else to the other.
"""

import asyncio
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # half the time to compile, the same results

import pytest
import torch
from torch import Tensor

pytest.importorskip("jax", reason="JAX is not installed: pip install 'rollouts[jax]'")

import jax
import jax.numpy as jnp

from rollouts_core.__main__ import main
from rollouts_core.algorithms.loss import LossFn, TokenScores, create_cross_entropy_loss, create_policy_loss
from rollouts_core.backends.create import create_backend
from rollouts_core.backends.jax import JAXTrainingBackend, create_jax_backend
from rollouts_core.backends.jax_model import bucket_size, pad_batch, score_in_pieces, to_params, to_weights
from rollouts_core.backends.protocol import TrainingBackend
from rollouts_core.backends.pytorch import PyTorchTrainingBackend, create_pytorch_backend
from rollouts_core.batch import TrainBatch, build_batch, with_step_totals
from rollouts_core.checkpoint import verify_checkpoint
from rollouts_core.config import (
    DeploymentConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    PolicyConfig,
    SFTTrainingConfig,
)
from rollouts_core.data.rows import digest_path
from rollouts_core.errors import CheckpointError, ConfigError, TrainingError
from rollouts_core.fingerprint import digest_model
from rollouts_core.job import InputDataset, InputModel, SFTJob
from rollouts_core.jobs.training_job import JAX_THREADS
from rollouts_core.metrics import read_json_lines
from rollouts_core.model import logprobs
from rollouts_core.model.loading import load_hf_model
from rollouts_core.model.policy import compute_logprobs
from rollouts_core.quickstart import build_character_tokenizer
from rollouts_core.types import Sample
from tests.rollouts_core.embedded.tiny_models import LLAMA3_ROPE, make_model, save_model
from tests.rollouts_core.make import make_groups, make_random_samples, make_sample

pytestmark = pytest.mark.slow

OPTIM = OptimConfig(lr=0.01, num_warmup_steps=2, weight_decay=0.1, eps=1e-4)
"""With the usual epsilon AdamW turns roundings of tiny gradients into whole steps, and no two libraries agree."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
}
NUM_STEPS = 10
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    """Every family with random weights; their padding token also occurs in the samples."""
    found = {}
    for name, overrides in MODELS.items():
        directory = tmp_path_factory.mktemp("model") / name
        save_model(make_model(name, initializer_range=0.05, **overrides), directory)
        build_character_tokenizer().save_pretrained(directory)
        found[name] = ModelConfig(path=str(directory))
    return found


@pytest.fixture(scope="module")
def qwen3(models: dict[str, ModelConfig]) -> ModelConfig:
    return models["qwen3"]


def create(model: ModelConfig, loss_fn: LossFn | None = None, **options: Any) -> JAXTrainingBackend:
    return create_jax_backend(model, OPTIM, loss_fn or create_cross_entropy_loss(), num_steps=NUM_STEPS, **options)


def make_step(seed: int, *, is_packed: bool) -> list[TrainBatch]:
    """Two micro-batches of four rows of at most 16 positions: one size to compile for."""
    rows: list[list[Sample]] = [[sample] for sample in make_random_samples(8, seed=seed)]
    if is_packed:
        rows = [[*row, make_sample([seed, b, 5, 7])] for b, row in enumerate(rows)]
    batches = [build_batch(rows[i : i + 4], pad_id=0) for i in (0, 4)]
    return with_step_totals(batches, [sample for row in rows for sample in row])


def take_steps(backend: TrainingBackend, steps: range) -> list[dict[str, float]]:
    """Optimizer steps on packed and unpacked rows in turn; returns loss, norm and learning rate of each."""
    history = []
    for step in steps:
        batches = make_step(step, is_packed=step % 2 == 1)
        losses = [asyncio.run(backend.forward_backward(batch).result())["loss"] for batch in batches]
        history.append({"loss": sum(losses), **asyncio.run(backend.optim_step().result())})
    return history


def copy_weights(backend: TrainingBackend) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in asyncio.run(backend.get_weights().result()).items()}


def assert_same_history(first: list[dict[str, float]], second: list[dict[str, float]]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one == pytest.approx(other, rel=ROUNDING)


def assert_equal_tensors(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Same names, same bits."""
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradient_norms_are_those_of_pytorch(name: str, models: dict[str, ModelConfig]) -> None:
    pytorch = create_pytorch_backend(
        models[name], OPTIM, create_cross_entropy_loss(), num_steps=NUM_STEPS, device="cpu"
    )
    backend = create(models[name])
    assert_same_history(take_steps(backend, range(5)), take_steps(pytorch, range(5)))
    torch.testing.assert_close(copy_weights(backend), copy_weights(pytorch), rtol=1e-4, atol=1e-5)


def test_the_rl_loss_with_entropies_values_and_a_reference_is_that_of_pytorch(qwen3: ModelConfig) -> None:
    loss_fn = create_policy_loss(LossConfig(entropy_coef=0.01, kl_coef=0.1, value_coef=0.5))
    options: dict[str, Any] = {"temperature": 0.7, "with_entropies": True, "with_values": True, "with_reference": True}
    pytorch = create_pytorch_backend(qwen3, OPTIM, loss_fn, num_steps=NUM_STEPS, device="cpu", **options)
    histories = []
    for backend in (pytorch, create(qwen3, loss_fn, **options)):
        history = []
        for step in range(3):
            for batch in make_step(step, is_packed=True):
                history.append(asyncio.run(backend.forward_backward(give_signal(backend, batch)).result()))
            history.append(asyncio.run(backend.optim_step().result()))
        histories.append(history)
    for one, other in zip(*histories, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


def give_signal(backend: TrainingBackend, batch: TrainBatch) -> TrainBatch:
    """The batch with advantages, returns, and the reference's log-probs."""
    generator = torch.Generator().manual_seed(0)
    reference = asyncio.run(backend.score(batch, reference=True).result())
    assert reference.values_BT is None
    current = asyncio.run(backend.score(batch).result())
    assert current.values_BT is not None and current.entropies_BT is not None
    return replace(
        batch,
        advantages_BT=torch.randn(batch.loss_mask_BT.shape, generator=generator),
        rollout_logprobs_BT=current.logprobs_BT + 0.1 * torch.randn(batch.loss_mask_BT.shape, generator=generator),
        ref_logprobs_BT=reference.logprobs_BT,
        old_values_BT=current.values_BT,
        returns_BT=torch.rand(batch.loss_mask_BT.shape, generator=generator),
    )


def test_a_restored_backend_takes_the_same_steps_bit_for_bit(qwen3: ModelConfig, tmp_path: Path) -> None:
    straight = create(qwen3)
    take_steps(straight, range(3))
    state = {"step": 3, "data_buffer": {"epoch_id": 1}}
    saving = straight.save_checkpoint(tmp_path / "step_000003", state)
    expected = take_steps(straight, range(3, 6))  # training goes on while the checkpoint is written
    asyncio.run(saving.result())
    restored = create(qwen3)
    assert asyncio.run(restored.load_checkpoint(tmp_path / "step_000003").result()) == state
    assert restored.weight_version == 3
    assert take_steps(restored, range(3, 6)) == expected
    assert_equal_tensors(copy_weights(restored), copy_weights(straight))


@pytest.mark.parametrize("order", ["jax to pytorch", "pytorch to jax"])
def test_each_backend_goes_on_from_the_others_checkpoint(qwen3: ModelConfig, tmp_path: Path, order: str) -> None:
    pytorch = create_pytorch_backend(qwen3, OPTIM, create_cross_entropy_loss(), num_steps=NUM_STEPS, device="cpu")
    backends: list[JAXTrainingBackend | PyTorchTrainingBackend] = [create(qwen3), pytorch]
    if order == "pytorch to jax":
        backends.reverse()
    first, second = backends
    take_steps(first, range(3))
    asyncio.run(first.save_checkpoint(tmp_path / "step_000003", {"step": 3}).result())
    asyncio.run(second.load_checkpoint(tmp_path / "step_000003").result())
    assert second.weight_version == 3
    assert_equal_tensors(copy_weights(second), copy_weights(first))
    assert_same_history(take_steps(second, range(3, 5)), take_steps(first, range(3, 5)))


def test_a_value_head_goes_from_pytorch_to_jax_and_back(qwen3: ModelConfig, tmp_path: Path) -> None:
    pytorch = create_pytorch_backend(
        qwen3, OPTIM, create_cross_entropy_loss(), num_steps=NUM_STEPS, device="cpu", with_values=True
    )
    value_head = pytorch.policy.value_head
    assert value_head is not None
    torch.nn.init.constant_(value_head.weight, 0.25)
    take_steps(pytorch, range(1))  # without a gradient for the value head, so that it has no moving averages yet
    asyncio.run(pytorch.save_checkpoint(tmp_path / "step_000001", {"step": 1}).result())
    backend = create(qwen3, with_values=True)
    asyncio.run(backend.load_checkpoint(tmp_path / "step_000001").result())
    asyncio.run(backend.save_checkpoint(tmp_path / "step_000002", {"step": 2}).result())
    torch.nn.init.zeros_(value_head.weight)
    asyncio.run(pytorch.load_checkpoint(tmp_path / "step_000002").result())
    assert value_head.weight.tolist() == [[0.25] * 32]


def write_sft_job(directory: Path, model: ModelConfig, data: Path, backend: str, *, num_threads: int) -> Path:
    """The job.json of two steps of SFT."""
    job = SFTJob(
        model=InputModel(name="base", model=model, digest=digest_model(model)),
        data=(InputDataset(path=str(data), digest=digest_path(data)),),
        training=SFTTrainingConfig(
            num_steps=2, batch_size=2, max_length=64, log_every=1, policy=PolicyConfig(backend=backend)
        ),
        deployment=DeploymentConfig(trainer_threads=num_threads),
    )
    directory.mkdir()
    (directory / "job.json").write_text(job.model_dump_json())
    return directory / "job.json"


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc, which only Linux has")
def test_a_job_computes_with_as_many_threads_as_it_is_told(
    base_model: ModelConfig, quickstart_dir: Path, tmp_path: Path
) -> None:
    """In a process of its own: JAX makes its threads once. One more than there are cores, which it takes by itself."""
    num_threads = (os.cpu_count() or 1) + 1
    job = write_sft_job(tmp_path / "job", base_model, quickstart_dir / "sft.jsonl", "jax", num_threads=num_threads)
    code = (
        "import sys\nfrom pathlib import Path\nfrom rollouts_core.__main__ import main\n"
        "assert main(['sft', sys.argv[1]]) == 0\n"
        "names = [path.read_text() for path in Path('/proc/self/task').glob('*/comm')]\n"
        "print(sum('XLAEigen' in name for name in names))"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(job)], capture_output=True, text=True, check=True)
    assert ended.stdout.split()[-1] == str(num_threads)


def test_an_sft_job_gives_the_losses_of_the_pytorch_job(
    base_model: ModelConfig, quickstart_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(JAX_THREADS, "1")  # the job sets it in this process
    data = quickstart_dir / "sft.jsonl"
    losses = []
    for name in ("jax", "pytorch"):
        job = write_sft_job(tmp_path / name, base_model, data, name, num_threads=1)
        assert main(["sft", str(job)]) == 0
        losses.append([row["loss"] for row in read_json_lines(tmp_path / name / "metrics.jsonl")])
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=ROUNDING)


def test_the_weights_that_training_started_from_are_those_of_pytorch(qwen3: ModelConfig) -> None:
    loss_fn = create_cross_entropy_loss()
    expected = create_pytorch_backend(qwen3, OPTIM, loss_fn, num_steps=NUM_STEPS, device="cpu").start_sample
    assert_equal_tensors(dict(create(qwen3).start_sample), dict(expected))


def test_the_configuration_alone_is_that_of_the_model(qwen3: ModelConfig, tmp_path: Path) -> None:
    create(qwen3).save_model_config(tmp_path / "config.json")
    assert (tmp_path / "config.json").read_text() == (Path(qwen3.path) / "config.json").read_text()


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_checkpoint_loads_as_a_hugging_face_model_with_the_same_logprobs(
    name: str, models: dict[str, ModelConfig], tmp_path: Path
) -> None:
    backend = create(models[name])
    take_steps(backend, range(2))
    asyncio.run(backend.save_checkpoint(tmp_path / "step_000002", {"step": 2}).result())
    manifest = verify_checkpoint(tmp_path / "step_000002")
    assert manifest.step == 2
    assert {"config.json", "model.safetensors", "tokenizer.json", "trainer/state.json"} <= manifest.files.keys()
    model = load_hf_model(ModelConfig(path=str(tmp_path / "step_000002")))
    assert_equal_tensors({name: p.detach() for name, p in model.named_parameters()}, copy_weights(backend))
    for batch in make_step(7, is_packed=True):
        scores = asyncio.run(backend.score(batch).result())
        with torch.no_grad():
            torch.testing.assert_close(scores.logprobs_BT, compute_logprobs(model, batch), rtol=ROUNDING, atol=ROUNDING)


def test_a_sample_is_scored_the_same_whatever_shares_its_row(qwen3: ModelConfig) -> None:
    backend = create(qwen3)
    first = make_sample([3, 8, 2, 9, 4])
    rows = [[first, make_sample([b, 7, b + 2, 5])] for b in range(4)]
    scores = asyncio.run(backend.score(build_batch(rows, pad_id=0)).result())
    assert all(torch.equal(scores.logprobs_BT[b, :4], scores.logprobs_BT[0, :4]) for b in range(1, 4))
    swapped = asyncio.run(backend.score(build_batch([row[::-1] for row in rows], pad_id=0)).result())
    torch.testing.assert_close(swapped.logprobs_BT[:, 3:7], scores.logprobs_BT[:, :4], rtol=ROUNDING, atol=ROUNDING)


def test_completions_share_a_prompt_as_in_pytorch(qwen3: ModelConfig) -> None:
    batch = build_batch([make_groups(1, 4), make_groups(2, 2, seed=1)], pad_id=0, share_prompts=True)
    assert not torch.equal(batch.prompt_ids_BT, batch.segment_ids_BT)
    scores = asyncio.run(create(qwen3).score(batch).result())
    with torch.no_grad():
        expected_BT = compute_logprobs(load_hf_model(qwen3), batch)
    torch.testing.assert_close(scores.logprobs_BT, expected_BT, rtol=ROUNDING, atol=ROUNDING)


def test_weights_that_were_loaded_are_those_that_are_served(models: dict[str, ModelConfig]) -> None:
    backend = create(models["qwen2"])
    weights = {name: value + 1 for name, value in copy_weights(backend).items()}
    assert "lm_head.weight" not in weights
    asyncio.run(backend.load_weights(weights).result())
    assert_equal_tensors(copy_weights(backend), weights)


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_weights_of_another_model_are_refused_whole(qwen3: ModelConfig, change: str) -> None:
    backend = create(qwen3)
    before = copy_weights(backend)
    weights = {name: value + 1 for name, value in before.items()}
    if change == "missing":
        del weights["lm_head.weight"]
    elif change == "unknown":
        weights["extra"] = torch.zeros(1)
    else:
        weights["lm_head.weight"] = torch.zeros(2, 2)
    with pytest.raises(CheckpointError, match="extra" if change == "unknown" else r"lm_head\.weight"):
        asyncio.run(backend.load_weights(weights).result())
    assert_equal_tensors(copy_weights(backend), before)


def test_a_loss_that_is_not_a_number_arrives_at_result(qwen3: ModelConfig) -> None:
    backend = create(qwen3)
    broken = {**copy_weights(backend), "model.norm.weight": torch.full((32,), math.nan)}
    asyncio.run(backend.load_weights(broken).result())
    future = backend.forward_backward(make_step(0, is_packed=False)[0])
    with pytest.raises(TrainingError, match="the loss became nan after 0 optimizer steps"):
        asyncio.run(future.result())


def test_a_gradient_that_is_not_finite_leaves_the_weights(qwen3: ModelConfig) -> None:
    def endless_slope(scores: TokenScores, batch: TrainBatch) -> tuple[Tensor, dict[str, float]]:
        return (scores.logprobs_BT * math.inf).sum(), {"loss": 1.0}

    backend = create(qwen3, endless_slope)
    before = copy_weights(backend)
    asyncio.run(backend.forward_backward(make_step(0, is_packed=False)[0]).result())
    with pytest.raises(TrainingError, match="the gradient norm became"):
        asyncio.run(backend.optim_step().result())
    assert_equal_tensors(copy_weights(backend), before)
    assert backend.weight_version == 0


def test_bfloat16_products_and_recomputed_layers_change_little(qwen3: ModelConfig) -> None:
    policy = PolicyConfig(backend="jax", precision="bfloat16", activation_checkpointing=True)
    backend = create_backend(qwen3, OPTIM, create_cross_entropy_loss(), num_steps=NUM_STEPS, policy=policy)
    rounded, exact = take_steps(backend, range(2)), take_steps(create(qwen3), range(2))
    assert [step["loss"] for step in rounded] == pytest.approx([step["loss"] for step in exact], rel=1e-2)
    assert [step["grad_norm"] for step in rounded] == pytest.approx([step["grad_norm"] for step in exact], rel=3e-2)
    assert rounded != exact
    assert {value.dtype for value in copy_weights(backend).values()} == {torch.float32}


def test_a_head_in_pieces_gives_the_same_scores_and_gradients(
    qwen3: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = create(qwen3, with_entropies=True, temperature=0.7).settings
    head_VH = jax.random.normal(jax.random.key(0), (61, 32))
    hidden_NH = jax.random.normal(jax.random.key(1), (50, 32))
    targets_N = jnp.arange(50)

    def total(params: dict[str, jax.Array], hidden: jax.Array) -> jax.Array:
        scored = score_in_pieces(params, hidden, targets_N, jnp.int32(19), settings)
        return sum((scores[:19] * jnp.arange(1.0, 20.0)).sum() for scores in scored)

    params = {"model.embed_tokens.weight": head_VH, "lm_head.weight": head_VH}
    whole = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(params, hidden_NH)
    monkeypatch.setattr(logprobs, "MAX_PIECE_BYTES", 4 * 61 * 8)  # pieces of 8: three with a scored position of seven
    in_pieces = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(params, hidden_NH)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(in_pieces), strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=ROUNDING, atol=ROUNDING)
    assert not in_pieces[1][1][19:].any()


def test_rows_are_padded_to_few_sizes() -> None:
    assert [bucket_size(count) for count in (1, 7, 8, 9, 17, 100, 1000, 4095)] == [1, 7, 8, 10, 20, 112, 1024, 4096]
    assert len({bucket_size(count) for count in range(1, 4097)}) == 8 + 9 * 4
    assert all(count <= bucket_size(count) <= 1.25 * count for count in range(1, 4097))


def test_a_padded_batch_lists_the_scored_positions_first() -> None:
    batch = pad_batch(build_batch([[make_sample([5, 7, 9], [0, 0, 1])], [make_sample([1, 2], [0, 1])]], pad_id=0))
    assert batch.inputs_BT.shape == (2, 16)
    assert int(batch.num_scored) == 2
    assert batch.order_N[:3].tolist() == [1, 16, 0]


def test_weights_come_back_from_their_stacks() -> None:
    weights = {
        "model.embed_tokens.weight": torch.rand(3, 2),
        "model.layers.0.mlp.up_proj.weight": torch.rand(4, 2),
        "model.layers.1.mlp.up_proj.weight": torch.rand(4, 2),
    }
    params = to_params(weights)
    assert params["model.layers.*.mlp.up_proj.weight"].shape == (2, 4, 2)
    assert_equal_tensors(to_weights(params), weights)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
    ],
)
def test_a_model_that_it_would_compute_wrongly_is_refused(
    changes: dict[str, Any], found: str, qwen3: ModelConfig, tmp_path: Path
) -> None:
    config = json.loads((Path(qwen3.path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises((CheckpointError, ConfigError), match=f'"jax" does not support .*{found}.*"pytorch"'):
        create(ModelConfig(path=str(tmp_path)))


def test_a_model_that_is_no_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match="reads models from folders, not some/model"):
        create(ModelConfig(path="some/model"))
