"""Pins a step of the one-process backend and that its checkpoints go on exactly where they were written.

Without it gradients of one step could leak into the next, or a resumed run would train with a fresh optimizer.
"""

import asyncio
import json
import math
import random
import shutil
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rollouts_core.algorithms.loss import create_cross_entropy_loss
from rollouts_core.backends.optim import lr_ratio
from rollouts_core.backends.protocol import TrainingState
from rollouts_core.backends.pytorch import PyTorchTrainingBackend, create_pytorch_backend
from rollouts_core.backends.snapshot import HostSnapshot
from rollouts_core.batch import TrainBatch, build_batch
from rollouts_core.checkpoint import load_manifest, new_checkpoint, verify_checkpoint
from rollouts_core.config import ModelConfig, OptimConfig
from rollouts_core.errors import CheckpointError, TrainingError
from rollouts_core.quickstart import build_character_tokenizer, build_untrained_model
from tests.rollouts_core.make import TINY_SIZE, make_random_samples, write_model_with_own_code
from tests.rollouts_core.model.test_logit_transforms import make_model

TINY_VOCABULARY = len(build_character_tokenizer())
OPTIM = OptimConfig(lr=0.01, num_warmup_steps=2, weight_decay=0.1)


def create_backend(model: ModelConfig, optim: OptimConfig = OPTIM) -> PyTorchTrainingBackend:
    """A backend that trains by cross entropy on the CPU."""
    return create_pytorch_backend(model, optim, create_cross_entropy_loss(), num_steps=10, device="cpu")


def make_batch(seed: int = 0) -> TrainBatch:
    """Four random samples, a row each."""
    return build_batch([[sample] for sample in make_random_samples(4, seed=seed)], pad_id=0)


def take_steps(backend: PyTorchTrainingBackend, seeds: range) -> list[dict[str, float]]:
    """One optimizer step for each seed's batch; returns the metrics."""
    history = []
    for seed in seeds:
        loss = asyncio.run(backend.forward_backward(make_batch(seed)).result())
        history.append({**loss, **asyncio.run(backend.optim_step().result())})
    return history


def copy_weights(backend: PyTorchTrainingBackend) -> dict[str, Tensor]:
    """The weights as they are now."""
    return {name: value.clone() for name, value in asyncio.run(backend.get_weights().result()).items()}


def assert_equal_tensors(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Same names, same bits."""
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_a_step_lowers_the_loss_of_its_batch(base_model: ModelConfig) -> None:
    backend = create_backend(base_model)
    losses = [metrics["loss"] for metrics in (take_steps(backend, range(1))[0] for _ in range(5))]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.1


def test_the_first_loss_of_an_untrained_model_is_near_the_log_of_the_vocabulary(base_model: ModelConfig) -> None:
    [metrics] = take_steps(create_backend(base_model), range(1))
    assert metrics["loss"] == pytest.approx(math.log(TINY_VOCABULARY), abs=0.2)


def test_gradients_add_up_until_the_step_and_are_cleared_by_it(base_model: ModelConfig) -> None:
    backend = create_backend(base_model)
    backend.forward_backward(make_batch())
    once = {name: p.grad.clone() for name, p in backend.model.named_parameters()}
    backend.forward_backward(make_batch())
    for name, p in backend.model.named_parameters():
        torch.testing.assert_close(p.grad, 2 * once[name])
    backend.optim_step()
    assert all(p.grad is None for p in backend.model.parameters())


def test_the_reported_norm_is_that_before_clipping(base_model: ModelConfig) -> None:
    backend = create_backend(base_model, OPTIM.model_copy(update={"max_grad_norm": 1e-3}))
    backend.forward_backward(make_batch())
    expected = math.sqrt(sum(float((p.grad**2).sum()) for p in backend.model.parameters()))
    metrics = asyncio.run(backend.optim_step().result())
    assert metrics["grad_norm"] == pytest.approx(expected, rel=1e-5)


def test_the_learning_rate_of_each_step_follows_the_schedule(base_model: ModelConfig) -> None:
    history = take_steps(create_backend(base_model), range(3))
    # the peak at step 1, then 8 intervals of cosine down to a tenth: 0.1 + 0.9 * (1 + cos(pi / 8)) / 2 = 0.965745
    assert [metrics["lr"] for metrics in history] == pytest.approx([0.005, 0.01, 0.00965745])


def test_the_weight_version_counts_optimizer_steps(base_model: ModelConfig) -> None:
    backend = create_backend(base_model)
    versions = [backend.weight_version]
    for seed in range(3):
        take_steps(backend, range(seed, seed + 1))
        versions.append(backend.weight_version)
    assert versions == [0, 1, 2, 3]


def test_a_loss_that_is_not_a_number_is_an_error(base_model: ModelConfig) -> None:
    backend = create_backend(base_model)
    with torch.no_grad():
        backend.model.lm_head.weight.fill_(math.nan)
    with pytest.raises(TrainingError, match="the loss became nan after 0 optimizer steps"):
        asyncio.run(backend.forward_backward(make_batch()).result())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_leaves_the_weights(base_model: ModelConfig, value: float) -> None:
    backend = create_backend(base_model)
    backend.forward_backward(make_batch())
    before = copy_weights(backend)
    next(backend.model.parameters()).grad.fill_(value)
    with pytest.raises(TrainingError, match="the gradient norm became"):
        asyncio.run(backend.optim_step().result())
    assert_equal_tensors(copy_weights(backend), before)
    assert backend.weight_version == 0


def test_loaded_weights_are_those_that_were_given(base_model: ModelConfig) -> None:
    backend, trained = create_backend(base_model), create_backend(base_model)
    take_steps(trained, range(2))
    backend.load_weights(copy_weights(trained))
    assert_equal_tensors(copy_weights(backend), copy_weights(trained))


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_weights_of_another_model_are_refused_whole(base_model: ModelConfig, change: str) -> None:
    backend = create_backend(base_model)
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


def save(backend: PyTorchTrainingBackend, path: Path, state: TrainingState) -> None:
    """Write a checkpoint and wait for it."""
    asyncio.run(backend.save_checkpoint(path, state).result())


def load(backend: PyTorchTrainingBackend, path: Path) -> TrainingState:
    """Go on from a checkpoint."""
    return asyncio.run(backend.load_checkpoint(path).result())


def test_a_restored_backend_takes_the_same_steps_bit_for_bit(base_model: ModelConfig, tmp_path: Path) -> None:
    straight = create_backend(base_model)
    take_steps(straight, range(3))
    save(straight, tmp_path / "step_000003", {"step": 3})
    restored = create_backend(base_model)
    load(restored, tmp_path / "step_000003")
    assert restored.weight_version == 3
    assert take_steps(restored, range(3, 6)) == take_steps(straight, range(3, 6))
    assert_equal_tensors(copy_weights(restored), copy_weights(straight))


def test_a_model_whose_code_lies_beside_it_is_resumed(base_model: ModelConfig, tmp_path: Path) -> None:
    model = write_model_with_own_code(base_model, tmp_path / "own_of_one")
    trained, restored = create_backend(model), create_backend(model)
    take_steps(trained, range(1))
    save(trained, tmp_path / "step_000001", {"step": 1})
    assert (tmp_path / "step_000001" / "modeling_own.py").is_file()
    assert load(restored, tmp_path / "step_000001") == {"step": 1}
    assert_equal_tensors(copy_weights(restored), copy_weights(trained))


def test_the_random_state_of_every_library_is_restored(base_model: ModelConfig, tmp_path: Path) -> None:
    backend = create_backend(base_model)
    np.random.standard_normal()  # half of a pair: the other one is part of the state
    save(backend, tmp_path / "step_000001", {"step": 1})
    draws = [[torch.rand(3).tolist(), np.random.standard_normal(3).tolist(), random.random(), random.gauss(0, 1)]]
    load(backend, tmp_path / "step_000001")
    draws += [[torch.rand(3).tolist(), np.random.standard_normal(3).tolist(), random.random(), random.gauss(0, 1)]]
    assert draws[0] == draws[1]


def test_the_configuration_alone_is_that_of_a_checkpoint(base_model: ModelConfig, tmp_path: Path) -> None:
    backend = create_backend(base_model)
    save(backend, tmp_path / "step_000001", {"step": 1})
    backend.save_model_config(tmp_path / "config.json")
    assert (tmp_path / "config.json").read_text() == (tmp_path / "step_000001" / "config.json").read_text()


def test_every_file_of_a_checkpoint_has_the_mode_of_a_new_file(base_model: ModelConfig, tmp_path: Path) -> None:
    """A published checkpoint keeps the modes: weights that only their owner may read would be of no use to a team."""
    asyncio.run(create_backend(base_model).save_checkpoint(tmp_path / "step_000000", {"step": 0}).result())
    (tmp_path / "new").write_text("")
    files = [path for path in (tmp_path / "step_000000").rglob("*") if path.is_file()]
    assert {path.stat().st_mode for path in files} == {(tmp_path / "new").stat().st_mode}


def test_a_checkpoint_is_of_the_moment_of_the_call(base_model: ModelConfig, tmp_path: Path) -> None:
    backend = create_backend(base_model)
    take_steps(backend, range(2))
    before = copy_weights(backend)
    saving = backend.save_checkpoint(tmp_path / "step_000002", {"step": 2})
    later = take_steps(backend, range(2, 5))
    asyncio.run(saving.result())
    restored = create_backend(base_model)
    load(restored, tmp_path / "step_000002")
    assert_equal_tensors(copy_weights(restored), before)
    assert take_steps(restored, range(2, 5)) == later


class SlowSnapshot(HostSnapshot):
    """Copies only when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_copy = threading.Event()

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert self.may_copy.wait(10)
        return super().take(tensors)


@pytest.mark.parametrize("change", ["optim_step", "load_weights"])
def test_what_changes_weights_waits_until_a_save_has_copied_them(
    base_model: ModelConfig, tmp_path: Path, change: str
) -> None:
    backend = create_backend(base_model)
    take_steps(backend, range(1))
    before = copy_weights(backend)
    backend._snapshot = SlowSnapshot()
    saving = backend.save_checkpoint(tmp_path / "step_000001", {"step": 1})
    backend.forward_backward(make_batch(1))  # does not wait
    zeros = {name: torch.zeros_like(weight) for name, weight in before.items()}
    threading.Timer(0.1, backend._snapshot.may_copy.set).start()
    backend.optim_step() if change == "optim_step" else backend.load_weights(zeros)
    asyncio.run(saving.result())
    restored = create_backend(base_model)
    load(restored, tmp_path / "step_000001")
    assert_equal_tensors(copy_weights(restored), before)
    assert not torch.equal(copy_weights(backend)["lm_head.weight"], before["lm_head.weight"])


def test_training_goes_on_after_a_copy_that_failed(
    base_model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = create_backend(base_model)
    monkeypatch.setattr(backend, "_snapshot", None)  # stands for memory that ran out
    saving = backend.save_checkpoint(tmp_path / "step_000001", {"step": 1})
    take_steps(backend, range(1))
    with pytest.raises(AttributeError):
        asyncio.run(saving.result())


def test_a_second_checkpoint_does_not_change_the_first(base_model: ModelConfig, tmp_path: Path) -> None:
    backend = create_backend(base_model)
    for step in (1, 2):  # both are copied through the same host memory
        take_steps(backend, range(step, step + 1))
        save(backend, tmp_path / f"step_00000{step}", {"step": step})
    first, second = (load_manifest(tmp_path / f"step_00000{step}").digest for step in (1, 2))
    assert first != second
    verify_checkpoint(tmp_path / "step_000001")


def test_a_second_save_during_the_first_is_a_mistake(
    base_model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = create_backend(base_model)
    may_write = threading.Event()
    monkeypatch.setattr(backend, "_write_checkpoint", lambda *_: may_write.wait(10))  # a slow disk
    saving = backend.save_checkpoint(tmp_path / "step_000001", {"step": 1})
    with pytest.raises(AssertionError, match="one save at a time"):
        backend.save_checkpoint(tmp_path / "step_000002", {"step": 2})
    may_write.set()
    asyncio.run(saving.result())


def test_an_error_of_the_writer_arrives_at_result(base_model: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    saving = create_backend(base_model).save_checkpoint(tmp_path / "file" / "step_000001", {"step": 1})
    with pytest.raises(OSError, match="file"):
        asyncio.run(saving.result())


def test_a_trained_value_head_is_in_the_checkpoint(base_model: ModelConfig, tmp_path: Path) -> None:
    first, second = (
        create_pytorch_backend(base_model, OPTIM, create_cross_entropy_loss(), num_steps=10, with_values=True)
        for _ in range(2)
    )
    head, other_head = first.policy.value_head, second.policy.value_head
    assert head is not None and other_head is not None
    torch.nn.init.constant_(head.weight, 0.25)
    save(first, tmp_path / "step_000001", {"step": 1})
    load(second, tmp_path / "step_000001")
    assert torch.equal(other_head.weight, head.weight)
    AutoModelForCausalLM.from_pretrained(tmp_path / "step_000001")


def test_settings_are_in_the_manifest(base_model: ModelConfig, tmp_path: Path) -> None:
    save(create_backend(base_model), tmp_path / "step_000001", {"step": 1, "settings": {"batch_size": 4}})
    assert load_manifest(tmp_path / "step_000001").settings == {"batch_size": 4}


def test_the_schedule_of_a_longer_training_goes_on_at_the_saved_step(base_model: ModelConfig, tmp_path: Path) -> None:
    first = create_backend(base_model)
    take_steps(first, range(4))
    save(first, tmp_path / "step_000004", {"step": 4})
    longer = create_pytorch_backend(base_model, OPTIM, create_cross_entropy_loss(), num_steps=20)
    load(longer, tmp_path / "step_000004")
    lrs = [metrics["lr"] for metrics in take_steps(longer, range(2))]
    assert lrs == [OPTIM.lr * lr_ratio(step, config=OPTIM, num_steps=20) for step in (4, 5)]


def test_the_loops_state_comes_back(base_model: ModelConfig, tmp_path: Path) -> None:
    state = {"step": 4, "data_buffer": {"epoch_id": 1, "prompts_digest": "d"}}
    backend = create_backend(base_model)
    save(backend, tmp_path / "step_000004", state)
    assert load(backend, tmp_path / "step_000004") == state


def test_a_checkpoint_has_a_manifest_of_all_its_files(base_model: ModelConfig, tmp_path: Path) -> None:
    save(create_backend(base_model), tmp_path / "step_000004", {"step": 4})
    manifest = verify_checkpoint(tmp_path / "step_000004")
    assert manifest.step == 4
    assert {"config.json", "model.safetensors", "tokenizer.json", "trainer/state.json"} <= manifest.files.keys()


def test_a_checkpoint_loads_as_a_hugging_face_model(base_model: ModelConfig, tmp_path: Path) -> None:
    backend = create_backend(base_model)
    take_steps(backend, range(2))
    save(backend, tmp_path / "step_000002", {"step": 2})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "step_000002", dtype=torch.float32)
    assert_equal_tensors({name: p.detach() for name, p in model.named_parameters()}, copy_weights(backend))
    assert len(AutoTokenizer.from_pretrained(tmp_path / "step_000002")) == TINY_VOCABULARY


def test_a_damaged_checkpoint_is_refused_and_nothing_changes(base_model: ModelConfig, tmp_path: Path) -> None:
    trained, backend = create_backend(base_model), create_backend(base_model)
    take_steps(trained, range(1))
    save(trained, tmp_path / "step_000001", {"step": 1})
    tensors = tmp_path / "step_000001" / "trainer" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-4])
    before = copy_weights(backend)
    with pytest.raises(CheckpointError, match="truncated or changed"):
        load(backend, tmp_path / "step_000001")
    assert_equal_tensors(copy_weights(backend), before)


def test_a_checkpoint_without_trainer_state_cannot_be_resumed(base_model: ModelConfig, tmp_path: Path) -> None:
    with new_checkpoint(tmp_path / "step_000001", step=1) as directory:
        shutil.copytree(base_model.path, directory, dirs_exist_ok=True)
    with pytest.raises(CheckpointError, match="has no trainer state"):
        load(create_backend(base_model), tmp_path / "step_000001")


def test_a_checkpoint_of_another_model_is_refused(base_model: ModelConfig, tmp_path: Path) -> None:
    tokenizer = build_character_tokenizer()
    tokenizer.save_pretrained(tmp_path / "wider")
    build_untrained_model(tokenizer, replace(TINY_SIZE, hidden_size=32), seed=0).save_pretrained(tmp_path / "wider")
    wider = create_backend(ModelConfig(path=str(tmp_path / "wider")))
    save(wider, tmp_path / "step_000001", {"step": 1})
    with pytest.raises(CheckpointError, match="has shape"):
        load(create_backend(base_model), tmp_path / "step_000001")


def test_a_checkpoint_of_a_model_of_another_class_is_refused(base_model: ModelConfig, tmp_path: Path) -> None:
    build_character_tokenizer().save_pretrained(tmp_path / "other")
    make_model("Granite").save_pretrained(tmp_path / "other")
    save(create_backend(ModelConfig(path=str(tmp_path / "other"))), tmp_path / "step_000001", {"step": 1})
    backend = create_backend(base_model)
    before = copy_weights(backend)
    with pytest.raises(CheckpointError, match="another model: they lack 4 tensors of a Qwen3ForCausalLM"):
        load(backend, tmp_path / "step_000001")
    assert_equal_tensors(copy_weights(backend), before)


def test_a_state_that_is_no_json_leaves_no_checkpoint(base_model: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        save(create_backend(base_model), tmp_path / "step_000001", {"step": 1, "bad": object()})
    assert list(tmp_path.iterdir()) == []


def test_the_trainers_state_is_readable_json(base_model: ModelConfig, tmp_path: Path) -> None:
    backend = create_backend(base_model)
    take_steps(backend, range(2))
    save(backend, tmp_path / "step_000002", {"step": 2})
    trainer = json.loads((tmp_path / "step_000002" / "trainer" / "state.json").read_text())
    assert trainer["num_optim_steps"] == load_manifest(tmp_path / "step_000002").step == 2


@pytest.mark.parametrize(("eos_token", "eos_token_id", "expected"), [("<|end|>", 1, 1), ("<|pad|>", 0, [0, 1])])
def test_whoever_serves_a_checkpoint_stops_where_the_template_ends_a_turn(
    base_model: ModelConfig, tmp_path: Path, eos_token: str, eos_token_id: int, expected: int | list[int]
) -> None:
    """A base model's own end of sequence may be one that no conversation has."""
    folder = tmp_path / "base"
    shutil.copytree(base_model.path, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    for name, end in (
        ("config.json", {"eos_token_id": eos_token_id}),
        ("tokenizer_config.json", {"eos_token": eos_token}),
    ):
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **end}))
    backend = create_backend(ModelConfig(path=str(folder)))
    asyncio.run(backend.save_checkpoint(tmp_path / "step_000001", {"step": 1}).result())
    assert GenerationConfig.from_pretrained(tmp_path / "step_000001").eos_token_id == expected


def test_a_generation_config_that_names_no_end_gets_those_of_config_json(
    base_model: ModelConfig, tmp_path: Path
) -> None:
    """Whoever serves a model asks config.json only where there is no generation_config.json."""
    folder = tmp_path / "base"
    shutil.copytree(base_model.path, folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "do_sample": True}))
    backend = create_backend(ModelConfig(path=str(folder)))
    asyncio.run(backend.save_checkpoint(tmp_path / "step_000001", {"step": 1}).result())
    written = GenerationConfig.from_pretrained(tmp_path / "step_000001")
    assert (written.eos_token_id, written.temperature) == ([1], 0.6)
