"""Two processes train what one process trains, and stop, resume and fail together.

Without these tests gradients could be averaged instead of summed, a step could train on weights of the step before, or
one bad number could leave the other processes waiting for ever.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollouts_core.algorithms.loss import LossFn, LossMetrics, Metrics, TokenScores, cross_entropy_loss
from rollouts_core.backends import sharding
from rollouts_core.backends.fsdp import FSDPTrainingBackend, create_fsdp_backend
from rollouts_core.backends.protocol import TrainingBackend, TrainingState, adapters_of, base_weights_of
from rollouts_core.backends.pytorch import PyTorchTrainingBackend, create_pytorch_backend
from rollouts_core.backends.ranks import Ranks
from rollouts_core.batch import TrainBatch, build_batch, with_step_totals
from rollouts_core.checkpoint import verify_checkpoint
from rollouts_core.config import LoRAConfig, ModelConfig, OptimConfig, PolicyConfig, SFTTrainingConfig
from rollouts_core.embedded.adapters import UP, merge_published
from rollouts_core.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from rollouts_core.metrics import sum_metrics
from rollouts_core.model.policy import Policy, create_policy
from rollouts_core.optimizer_step import update_policy
from rollouts_core.quickstart import build_character_tokenizer, build_untrained_model
from rollouts_core.sft import run_sft_training
from tests.rollouts_core.backends.two_processes import TwoProcesses, two_processes
from tests.rollouts_core.histories import without_times
from tests.rollouts_core.make import (
    STATE_OF_ITS_OWN,
    TINY_SIZE,
    make_random_samples,
    write_model_with_own_code,
    write_padded_model,
)
from tests.rollouts_core.model.test_logit_transforms import make_model

pytestmark = pytest.mark.slow

OPTIM = OptimConfig(lr=0.01, num_warmup_steps=2, weight_decay=0.1, max_grad_norm=0.5)
"""The norms of the tiny model's first gradients are above 1: clipping is active."""
SAME: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-4}
"""Sums in another order, through a few steps of AdamW."""
LIMIT_S = 2.0

Work = Callable[[TrainingBackend], Any]  # Any: whatever a test wants to know
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def pair() -> Iterator[TwoProcesses]:
    """The two processes that the tests of this file share."""
    with two_processes() as started:
        yield started


def with_one(work: Work, model: ModelConfig, **options: Any) -> Any:  # Any: as the work has it
    """What `work` gives with a backend of one process."""
    settings = {"optim": OPTIM, "loss_fn": cross_entropy_loss, **options}
    return work(create_pytorch_backend(model, num_steps=10, device="cpu", **settings))


def with_two(pair: TwoProcesses, work: Work, model: ModelConfig, **options: Any) -> Any:  # Any: as the work has it
    """What `work` gives at the leader of a backend of two processes."""
    return pair.run(lead_or_follow, work, model, options)[0]


def lead_or_follow(
    ranks: Ranks, work: Work, model: ModelConfig, options: Mapping[str, Any]
) -> Any:  # Any: as the work has it
    settings = {"optim": OPTIM, "loss_fn": cross_entropy_loss, **options}
    is_late = settings.pop("is_late", False)
    backend = create_fsdp_backend(model, ranks=ranks, num_steps=10, **settings)
    backend._steps.is_late = is_late
    if not ranks.is_leader:
        return backend.follow()
    answer = work(backend)
    ranks.stop_followers()
    return answer


def make_step(seed: int) -> list[TrainBatch]:
    """The micro-batches of a step: four rows, one row that one rank has to do alone, and three packed ones."""
    samples = make_random_samples(13, seed=seed)
    rows = [[sample] for sample in samples[:5]] + [samples[5:8], samples[8:10], samples[10:]]
    batches = [build_batch(part, pad_id=0) for part in (rows[:4], rows[4:5], rows[5:])]
    return with_step_totals(batches, samples)


def take_steps(backend: TrainingBackend, seeds: Sequence[int]) -> list[Metrics]:
    """One optimizer step for each seed; returns the metrics."""
    history = []
    for seed in seeds:
        results = [asyncio.run(backend.forward_backward(batch).result()) for batch in make_step(seed)]
        history.append({**sum_metrics(results), **asyncio.run(backend.optim_step().result())})
        asyncio.run(backend.release_cache().result())
    return history


def get_weights(backend: TrainingBackend) -> Weights:
    """Copies of the weights."""
    return {name: value.clone() for name, value in asyncio.run(backend.get_weights().result()).items()}


def train(backend: TrainingBackend, *, seeds: Sequence[int] = range(4)) -> tuple[list[Metrics], Weights]:
    return take_steps(backend, seeds), get_weights(backend)


def assert_close(
    found: tuple[list[Metrics], Weights], expected: tuple[list[Metrics], Weights], **tolerance: Any
) -> None:
    """The same metrics step by step, and the same weights in the end."""
    for metrics, others in zip(found[0], expected[0], strict=True):
        assert metrics == pytest.approx(others, rel=tolerance.get("rtol", SAME["rtol"]))
    assert found[1].keys() == expected[1].keys()
    for name, value in found[1].items():
        torch.testing.assert_close(value, expected[1][name], **(tolerance or SAME))


def test_two_processes_train_what_one_trains(base_model: ModelConfig, pair: TwoProcesses) -> None:
    expected = with_one(train, base_model)
    found = with_two(pair, train, base_model)
    assert_close(found, expected)
    assert min(metrics["grad_norm"] for metrics in expected[0]) > OPTIM.max_grad_norm


@pytest.mark.parametrize(
    "policy",
    [
        PolicyConfig(activation_checkpointing=True),
        PolicyConfig(precision="bfloat16"),
        PolicyConfig(lora=LoRAConfig(rank=2, alpha=4)),
        PolicyConfig(precision="bfloat16", lora=LoRAConfig(rank=2, alpha=4), activation_checkpointing=True),
    ],
    ids=["recomputed", "bfloat16", "lora", "all"],
)
def test_every_way_to_compute_is_that_of_one_process(
    base_model: ModelConfig, pair: TwoProcesses, policy: PolicyConfig
) -> None:
    options = {"policy": policy, "with_values": True}
    expected = with_one(train, base_model, **options)
    found = with_two(pair, train, base_model, **options)
    if policy.precision == "float32":
        assert_close(found, expected)
    else:  # bfloat16 has 8 bits, and norms' weights are rounded to it
        assert_close(found, expected, atol=0.02, rtol=0.02)


def train_and_publish(backend: TrainingBackend) -> tuple[Weights, Weights, Weights]:
    """Merged weights after some steps, and the adapters and frozen weights that engines get instead."""
    _, merged = train(backend)
    adapters, base = asyncio.run(adapters_of(backend).result()), asyncio.run(base_weights_of(backend).result())
    return merged, adapters, {name: tensor.clone() for name, tensor in base.items()}


def test_two_processes_publish_whole_adapters(base_model: ModelConfig, pair: TwoProcesses) -> None:
    options = {"policy": PolicyConfig(lora=LoRAConfig(rank=3, alpha=5))}
    expected = with_one(train_and_publish, base_model, **options)
    merged, adapters, base = with_two(pair, train_and_publish, base_model, **options)
    for found, right in zip((merged, adapters, base), expected, strict=True):
        assert_close(([], found), ([], right))
    assert_close(([], merge_published({**base, **adapters})), ([], merged))
    assert any(tensor.any() for name, tensor in adapters.items() if name.endswith(UP))


def score_and_train(backend: TrainingBackend) -> tuple[list[TokenScores], tuple[list[Metrics], Weights]]:
    return score_all(backend), train(backend)


def test_two_processes_leave_out_the_ids_that_the_tokenizer_does_not_have(
    base_model: ModelConfig, pair: TwoProcesses, tmp_path: Path
) -> None:
    """Losses, probabilities of policy and reference, and weights are those of one process."""
    padded = write_padded_model(base_model, tmp_path / "model")
    options = {"within_tokenizer": True, "with_reference": True, "with_entropies": True}
    scores, trained = with_one(score_and_train, padded, **options)
    found_scores, found = with_two(pair, score_and_train, padded, **options)
    assert_close(found, trained)
    for ours, theirs in zip(found_scores, scores, strict=True):
        torch.testing.assert_close(ours.logprobs_BT, theirs.logprobs_BT, **SAME)
    of_all_ids = with_one(train, padded)
    assert of_all_ids[0][0]["loss"] > trained[0][0]["loss"] + 0.5, "the other ids have two thirds of the probability"


def test_tied_embeddings_stay_one_weight(tmp_path: Path, pair: TwoProcesses) -> None:
    tokenizer = build_character_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    model = build_untrained_model(tokenizer, TINY_SIZE, seed=0)
    model.config.tie_word_embeddings = True
    type(model)(model.config).save_pretrained(tmp_path)
    tied = ModelConfig(path=str(tmp_path))
    assert_close(with_two(pair, train, tied), with_one(train, tied))


@pytest.mark.parametrize("family", ["Gemma2", "Cohere", "Granite"])
def test_models_that_cap_or_scale_their_logits_train_as_in_one_process(
    tmp_path: Path, pair: TwoProcesses, family: str
) -> None:
    build_character_tokenizer().save_pretrained(tmp_path)
    make_model(family).save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    # Their large weights have some gradients near 0: with its usual epsilon AdamW makes steps of their rounding, and
    # large steps make other models of it.
    options = {"with_entropies": True, "optim": OPTIM.model_copy(update={"eps": 1e-3, "lr": 1e-3})}
    assert_close(with_two(pair, train, model, **options), with_one(train, model, **options))


def run_sft(backend: TrainingBackend, *, packing: bool) -> tuple[list[Metrics], Weights]:
    config = SFTTrainingConfig(
        num_steps=3, batch_size=6, micro_batch_size=2, max_length=32, packing=packing, eval_every=2, optim=OPTIM
    )
    samples = make_random_samples(40)
    history = asyncio.run(run_sft_training(backend, samples, config, eval_samples=samples[:7]))
    return without_times(history), get_weights(backend)


@pytest.mark.parametrize("packing", [True, False])
def test_the_sft_loop_runs_as_with_one_process(base_model: ModelConfig, pair: TwoProcesses, packing: bool) -> None:
    work = partial(run_sft, packing=packing)
    assert_close(with_two(pair, work, base_model), with_one(work, base_model))


def score_all(backend: TrainingBackend) -> list[TokenScores]:
    """Before and after a step, current and reference."""
    scores = [asyncio.run(backend.score(batch).result()) for batch in make_step(8)]
    take_steps(backend, [0, 1])
    scores += [asyncio.run(backend.score(batch).result()) for batch in make_step(8)]
    scores += [asyncio.run(backend.score(batch, reference=True).result()) for batch in make_step(8)]
    return scores


@pytest.mark.parametrize("rank", [0, 2], ids=["frozen copy", "adapters off"])
def test_scores_are_those_of_one_process_and_of_the_newest_weights(
    base_model: ModelConfig, pair: TwoProcesses, rank: int
) -> None:
    options = {
        "policy": PolicyConfig(lora=LoRAConfig(rank=rank)),
        "with_reference": True,
        "with_values": True,
        "with_entropies": True,
    }
    expected, found = with_one(score_all, base_model, **options), with_two(pair, score_all, base_model, **options)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.logprobs_BT, theirs.logprobs_BT, **SAME)
    for ours, theirs in zip(found[:6], expected[:6], strict=True):
        torch.testing.assert_close(ours.entropies_BT, theirs.entropies_BT, **SAME)
        torch.testing.assert_close(ours.values_BT, theirs.values_BT, **SAME)


def save(backend: TrainingBackend, path: Path, state: TrainingState) -> None:
    asyncio.run(backend.save_checkpoint(path, state).result())


def train_and_save(backend: TrainingBackend, *, path: Path) -> tuple[list[Metrics], Weights]:
    """Two steps, a checkpoint, and two more steps while it is written."""
    take_steps(backend, range(2))
    saving = backend.save_checkpoint(path, {"step": 2, "data": [1, 2]})
    later = train(backend, seeds=range(2, 4))
    asyncio.run(saving.result())
    return later


def resume(backend: TrainingBackend, *, path: Path) -> tuple[list[Metrics], Weights, TrainingState, int]:
    """Two steps after a checkpoint."""
    state = asyncio.run(backend.load_checkpoint(path).result())
    version = backend.weight_version
    return *train(backend, seeds=range(2, 4)), state, version


POLICIES = {"all weights": PolicyConfig(), "lora": PolicyConfig(lora=LoRAConfig(rank=2))}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_a_checkpoint_of_two_is_resumed_by_two_bit_for_bit_and_by_one(
    base_model: ModelConfig, pair: TwoProcesses, tmp_path: Path, policy: PolicyConfig
) -> None:
    path = tmp_path / "step_000002"
    options = {"policy": policy, "with_values": True}
    history, weights = with_two(pair, partial(train_and_save, path=path), base_model, **options)
    again, weights_again, state, version = with_two(pair, partial(resume, path=path), base_model, **options)
    assert (again, state, version) == (history, {"step": 2, "data": [1, 2]}, 2)
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)
    by_one = with_one(partial(resume, path=path), base_model, **options)
    assert_close(by_one[:2], (history, weights))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_a_checkpoint_of_one_is_resumed_by_two(
    base_model: ModelConfig, pair: TwoProcesses, tmp_path: Path, policy: PolicyConfig
) -> None:
    path = tmp_path / "step_000002"
    options = {"policy": policy, "with_values": True}
    expected = with_one(partial(train_and_save, path=path), base_model, **options)
    found = with_two(pair, partial(resume, path=path), base_model, **options)
    assert_close(found[:2], expected)
    assert found[2:] == ({"step": 2, "data": [1, 2]}, 2)


def test_a_model_whose_code_lies_beside_it_is_resumed(
    base_model: ModelConfig, pair: TwoProcesses, tmp_path: Path
) -> None:
    path = tmp_path / "step_000002"
    model = write_model_with_own_code(base_model, tmp_path / "own_of_two")
    expected = with_one(partial(train_and_save, path=path), model)
    found = with_two(pair, partial(resume, path=path), model)
    assert_close(found[:2], expected)


def knows_of_mixed_samples(ranks: Ranks, model: ModelConfig) -> bool:
    return sharding.create_sharded_policy(model, PolicyConfig(), ranks).mixes_samples


def test_every_process_refuses_what_the_trial_of_a_models_own_code_found(
    base_model: ModelConfig, pair: TwoProcesses, tmp_path: Path
) -> None:
    stateful = write_model_with_own_code(base_model, tmp_path / "own_mixing_two", further_code=STATE_OF_ITS_OWN)
    assert pair.run(knows_of_mixed_samples, stateful) == [True, True]
    assert pair.run(knows_of_mixed_samples, base_model) == [False, False]


BFLOAT16_ADAPTERS = PolicyConfig(precision="bfloat16", lora=LoRAConfig(rank=2))


def just_save(backend: TrainingBackend, *, path: Path) -> Weights:
    save(backend, path, {"step": 1})
    return get_weights(backend)


@pytest.mark.parametrize("policy", [PolicyConfig(), BFLOAT16_ADAPTERS], ids=["all weights", "adapters on bfloat16"])
def test_a_checkpoint_of_two_has_the_files_of_one(
    base_model: ModelConfig, pair: TwoProcesses, tmp_path: Path, policy: PolicyConfig
) -> None:
    one, two = tmp_path / "one" / "step_000001", tmp_path / "two" / "step_000001"
    with_one(partial(just_save, path=one), base_model, policy=policy)
    weights = with_two(pair, partial(just_save, path=two), base_model, policy=policy)
    first, second = verify_checkpoint(one).files, verify_checkpoint(two).files
    if policy is BFLOAT16_ADAPTERS:  # new ones take random numbers, on each rank by itself
        assert first.pop("trainer/tensors.safetensors") != second.pop("trainer/tensors.safetensors")
        assert "adapter/adapter_model.safetensors" in second
    assert first == second  # nothing was trained yet: not even a rounding error differs
    loaded = AutoModelForCausalLM.from_pretrained(two)
    assert all(torch.equal(value, weights[name].float()) for name, value in loaded.named_parameters())


def start_sample(backend: TrainingBackend) -> Weights:
    assert isinstance(backend, FSDPTrainingBackend | PyTorchTrainingBackend)
    return dict(backend.start_sample)


def test_the_leader_knows_the_weights_that_training_started_from(base_model: ModelConfig, pair: TwoProcesses) -> None:
    found = with_two(pair, start_sample, base_model, policy=BFLOAT16_ADAPTERS)
    expected = with_one(start_sample, base_model, policy=BFLOAT16_ADAPTERS)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def config_alone(backend: FSDPTrainingBackend, *, path: Path) -> str:
    backend.save_model_config(path)
    return path.read_text()


def test_the_configuration_alone_is_that_of_a_checkpoint(
    base_model: ModelConfig, pair: TwoProcesses, tmp_path: Path
) -> None:
    with_two(pair, partial(just_save, path=tmp_path / "checkpoint"), base_model)
    alone = with_two(pair, partial(config_alone, path=tmp_path / "config.json"), base_model)
    assert alone == (tmp_path / "checkpoint" / "config.json").read_text()


def load_weights(backend: TrainingBackend, *, weights: Weights) -> tuple[str, TokenScores, Weights]:
    """The error of weights that do not fit, and the scores and weights after loading ones that do."""
    batch = make_step(0)[0]
    asyncio.run(backend.score(batch).result())
    try:
        asyncio.run(backend.load_weights({**weights, "extra": torch.zeros(1)}).result())
    except CheckpointError as error:
        message = str(error)
    asyncio.run(backend.load_weights(weights).result())
    return message, asyncio.run(backend.score(batch).result()), get_weights(backend)


def test_loaded_weights_are_those_that_were_given(base_model: ModelConfig, pair: TwoProcesses) -> None:
    _, weights = with_one(train, base_model)
    work = partial(load_weights, weights=weights)
    _, expected_scores, _ = with_one(work, base_model)
    message, scores, found = with_two(pair, work, base_model)
    assert "extra" in message
    torch.testing.assert_close(scores.logprobs_BT, expected_scores.logprobs_BT, **SAME)
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def fail_once(backend: TrainingBackend) -> tuple[str, tuple[list[Metrics], Weights]]:
    """A micro-batch that one rank finds infinite in the middle of a step, and what is trained after it."""
    good, bad, _ = make_step(5)
    mask_BT = bad.loss_mask_BT if len(bad.loss_mask_BT) > 1 else good.loss_mask_BT.clone()
    mask_BT[1] *= math.inf  # the second row is the second rank's
    asyncio.run(backend.forward_backward(good).result())
    try:
        asyncio.run(backend.forward_backward(replace(good, loss_mask_BT=mask_BT)).result())
    except NonFiniteError as error:
        message = str(error)
    return message, train(backend)


@pytest.mark.timeout(60)
def test_a_loss_of_one_rank_that_is_not_finite_is_an_error_of_all(base_model: ModelConfig, pair: TwoProcesses) -> None:
    message, after = with_two(pair, fail_once, base_model)
    assert message.startswith("the loss became")
    assert_close(after, with_one(train, base_model))  # the gradient of that step is gone


def refuse_on_follower(scores: TokenScores, batch: TrainBatch) -> tuple[Tensor, LossMetrics]:
    """A user's loss that raises on the second rank alone, as one does that cannot take the rows there."""
    if dist.get_rank() == 1:
        raise KeyError("margin")
    return cross_entropy_loss(scores, batch)


def refuse_on_leader(scores: TokenScores, batch: TrainBatch) -> tuple[Tensor, LossMetrics]:
    if dist.get_rank() == 0:
        raise ConfigError("the loss has no margin")
    return cross_entropy_loss(scores, batch)


def error_of_step(ranks: Ranks, model: ModelConfig, loss_fn: LossFn) -> str:
    """The error that a step ends with on this rank."""
    backend = create_fsdp_backend(model, ranks=ranks, num_steps=10, optim=OPTIM, loss_fn=loss_fn)
    try:
        if ranks.is_leader:
            asyncio.run(backend.forward_backward(make_step(0)[0]).result())
        else:
            backend.follow()
    except Exception as error:  # noqa: BLE001 - whichever: it is compared
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("loss_fn", "expected"),
    [
        (refuse_on_follower, ["TrainingError: rank 1 raised KeyError: 'margin'", "KeyError: 'margin'"]),
        (
            refuse_on_leader,
            [
                "ConfigError: the loss has no margin",
                "ConfigError: rank 0 raised ConfigError: the loss has no margin",
            ],
        ),
    ],
)
def test_an_error_of_a_loss_on_one_rank_ends_every_rank_with_its_sentence(
    base_model: ModelConfig, pair: TwoProcesses, loss_fn: LossFn, expected: list[str]
) -> None:
    said = pair.run(error_of_step, base_model, loss_fn)
    assert [each.partition(" (")[0] for each in said] == expected


def explode(scores: TokenScores, batch: TrainBatch) -> tuple[Tensor, LossMetrics]:
    """A finite loss, whose gradient is not where a row holds the token 3."""
    loss, metrics = cross_entropy_loss(scores, batch)
    return loss + torch.sqrt((scores.logprobs_BT * (batch.targets_BT == 3)).sum().abs() * 0.0), metrics


def fail_to_step(backend: TrainingBackend) -> tuple[str, int]:
    asyncio.run(backend.forward_backward(make_step(0)[0]).result())
    try:
        asyncio.run(backend.optim_step().result())
    except NonFiniteError as error:
        return str(error), backend.weight_version
    return "", backend.weight_version


@pytest.mark.timeout(60)
def test_a_gradient_that_is_not_finite_is_an_error_of_all(base_model: ModelConfig, pair: TwoProcesses) -> None:
    message, version = with_two(pair, fail_to_step, base_model, loss_fn=explode)
    assert message.startswith("the gradient norm became nan")
    assert version == 0


def skip_some(backend: TrainingBackend) -> tuple[list[Metrics], Weights]:
    """Updates of which the first and the third have an infinite loss on the second rank alone."""
    history = []
    for seed in range(5):
        first, *others = make_step(seed)
        mask_BT = first.loss_mask_BT.clone()
        mask_BT[1] *= math.inf if seed in (0, 2) else 1.0
        update = [replace(first, loss_mask_BT=mask_BT), *others]
        history.append(asyncio.run(update_policy(backend, update, on_nonfinite="skip")))
    asyncio.run(backend.forward_backward(first).result())
    backend.optim_step()  # nobody asks how it ended
    history.append({"version": backend.weight_version})
    return history, get_weights(backend)


@pytest.mark.timeout(60)
def test_steps_that_are_looked_at_late_end_as_those_that_are_looked_at_at_once(
    base_model: ModelConfig, pair: TwoProcesses
) -> None:
    at_once = with_two(pair, skip_some, base_model)
    late = with_two(pair, skip_some, base_model, is_late=True)
    assert late[0] == at_once[0]
    assert [metrics.get("num_nonfinite") for metrics in late[0]] == [1, 0, 1, 0, 0, None]
    assert late[0][-1] == {"version": 4}
    assert all(torch.equal(late[1][name], weight) for name, weight in at_once[1].items())


def count_rows(scores: TokenScores, batch: TrainBatch) -> tuple[Tensor, LossMetrics]:
    """A loss with metrics that can be predicted: the rows of a share, and its longest row."""
    loss, metrics = cross_entropy_loss(scores, batch)
    return loss, {**metrics, "rows": float(len(batch.inputs_BT)), "longest_max": -float(batch.inputs_BT.shape[1])}


def metrics_of_one_row(backend: TrainingBackend) -> list[Metrics]:
    return [asyncio.run(backend.forward_backward(batch).result()) for batch in make_step(0)]


def test_metrics_of_ranks_without_rows_do_not_count(base_model: ModelConfig, pair: TwoProcesses) -> None:
    found = with_two(pair, metrics_of_one_row, base_model, loss_fn=count_rows)
    assert [metrics["rows"] for metrics in found] == [4, 1, 3]
    # An idle rank has one position: -1 would be the largest.
    assert found[1]["longest_max"] == -make_step(0)[1].inputs_BT.shape[1]


DROPOUT = PolicyConfig(lora=LoRAConfig(rank=2, dropout=0.5))


def test_a_resumed_training_with_dropout_is_the_one_that_never_stopped(
    base_model: ModelConfig, pair: TwoProcesses, tmp_path: Path
) -> None:
    path = tmp_path / "step_000002"
    history, weights = with_two(pair, partial(train_and_save, path=path), base_model, policy=DROPOUT)
    again, weights_again, _, _ = with_two(pair, partial(resume, path=path), base_model, policy=DROPOUT)
    assert again == history
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)
    without, _ = with_two(pair, train, base_model, policy=PolicyConfig(lora=LoRAConfig(rank=2)))
    assert without[3] != history[1]  # dropout does something


def extremes_of_ranks(scores: TokenScores, batch: TrainBatch) -> tuple[Tensor, LossMetrics]:
    """Cross entropy with the smallest and the largest of the ranks' losses."""
    loss, metrics = cross_entropy_loss(scores, batch)
    return loss, {**metrics, "largest_max": metrics["loss"], "minus_smallest_max": -metrics["loss"]}


def score_one_row_on_both(backend: TrainingBackend) -> list[Metrics]:
    """What training on the same row on each rank gives, after steps that gave the adapters an effect, and again."""
    take_steps(backend, range(3))
    sample = make_random_samples(1, seed=5)[0]
    [batch] = with_step_totals([build_batch([[sample], [sample]], pad_id=0)], [sample, sample])
    return [asyncio.run(backend.forward_backward(batch).result()) for _ in range(2)]


@pytest.mark.parametrize("dropout", [0.5, 0.0])
def test_each_rank_drops_other_inputs_than_the_others(
    base_model: ModelConfig, pair: TwoProcesses, dropout: float
) -> None:
    options = {"policy": PolicyConfig(lora=LoRAConfig(rank=2, dropout=dropout)), "loss_fn": extremes_of_ranks}
    for metrics in with_two(pair, score_one_row_on_both, base_model, **options):
        assert (metrics["largest_max"] == -metrics["minus_smallest_max"]) == (dropout == 0)


def draw(ranks: Ranks, model: ModelConfig, seed: int) -> list[float]:
    """The random numbers that a rank would draw first."""
    backend = create_fsdp_backend(model, OPTIM, cross_entropy_loss, ranks=ranks, num_steps=10, seed=seed)
    drawn: list[float] = torch.rand(4).tolist()
    ranks.stop_followers() if ranks.is_leader else backend.follow()
    return drawn


def test_the_seed_decides_what_every_rank_draws(base_model: ModelConfig, pair: TwoProcesses) -> None:
    first, again, other = (pair.run(draw, base_model, seed) for seed in (0, 0, 1))
    assert first == again
    assert len({tuple(drawn) for drawn in [*first, *other]}) == 4


def refuse(ranks: Ranks, model: ModelConfig) -> str:
    try:
        create_fsdp_backend(model, OPTIM, cross_entropy_loss, ranks=ranks, num_steps=10)
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.matrix
def test_a_tokenizer_of_another_model_is_refused_by_every_rank(
    base_model: ModelConfig, pair: TwoProcesses, tmp_path: Path
) -> None:
    shutil.copytree(base_model.path, tmp_path / "model")
    tokenizer = build_character_tokenizer()
    tokenizer.add_tokens(["a word", "another"])
    tokenizer.save_pretrained(tmp_path / "model")
    refusals = pair.run(refuse, ModelConfig(path=str(tmp_path / "model")))
    assert ["use the tokenizer that belongs to the model" in refusal for refusal in refusals] == [True, True]


def create_slowly(ranks: Ranks, model: ModelConfig) -> int:
    """Create a backend where the leader takes twice as long to load the model as an exchange may take."""
    group = dist.group.WORLD
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT_S), group)

    def load_slowly(*arguments: Any, **options: Any) -> Policy:  # Any: those of create_policy
        if options["device"] != "meta":
            time.sleep(2 * LIMIT_S)
        return create_policy(*arguments, **options)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sharding, "create_policy", load_slowly)
            return lead_or_follow(ranks, get_weights, model, {"with_reference": True}) is not None
    finally:
        dist.distributed_c10d._set_pg_timeout(dist.constants.default_pg_timeout, group)


def test_the_other_ranks_wait_for_a_leader_that_loads_for_long(base_model: ModelConfig, pair: TwoProcesses) -> None:
    """A large model on a slow disk takes longer than the ten minutes that NCCL gives an exchange."""
    assert pair.run(create_slowly, base_model) == [True, False]
