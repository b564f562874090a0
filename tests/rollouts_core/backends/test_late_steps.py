"""Pins a step on a device that is only looked at when the step is under way in whole, as on a GPU.

Without it the host waits for the GPU in the middle of a step, or a step that is not finite changes weights. The CPU
stands for the GPU here: numbers stay in tensors until their future is asked.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rollouts_core.algorithms.loss import (
    LossFn,
    LossMetrics,
    Metrics,
    TokenScores,
    create_cross_entropy_loss,
    create_policy_loss,
    cross_entropy_loss,
)
from rollouts_core.backends.pytorch import PyTorchTrainingBackend, create_pytorch_backend
from rollouts_core.batch import TrainBatch, build_batch, with_step_totals
from rollouts_core.config import LossConfig, MismatchConfig, ModelConfig, OptimConfig, PolicyConfig
from rollouts_core.errors import NonFiniteError
from rollouts_core.model.varlen import use_sdpa_by_rows
from rollouts_core.optimizer_step import update_policy
from rollouts_core.stopping import TrainingStop
from tests.rollouts_core.make import make_random_samples

POISON, EXPLOSIVE = 24, 25
"""A loss over a batch with the first token is NaN, and the gradient of a loss over one with the second."""
OPTIM = OptimConfig(lr=0.01, num_warmup_steps=2, weight_decay=0.1, max_grad_norm=0.5)
READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique_consecutive", "_unique2"}
"""Operators whose results the host waits for."""


def poisoned_loss(scores: TokenScores, batch: TrainBatch) -> tuple[Tensor, LossMetrics]:
    """Cross entropy, but for poisoned and explosive batches."""
    loss, metrics = cross_entropy_loss(scores, batch)
    if (batch.targets_BT == EXPLOSIVE).any():
        loss.register_hook(lambda gradient: gradient * math.inf)
    poison = math.nan if (batch.targets_BT == POISON).any() else 1.0
    return loss * poison, {"loss": metrics["loss"] * poison}


def create(model: ModelConfig, *, late: bool) -> PyTorchTrainingBackend:
    """A backend of the poisoned loss."""
    backend = create_pytorch_backend(model, OPTIM, poisoned_loss, num_steps=10, device="cpu")
    backend._steps.is_late = late
    return backend


def make_update(seed: int, wrong: int | None = None, *, is_packed: bool = True) -> list[TrainBatch]:
    """Three micro-batches of two samples; the second one may hold a token that the loss cannot take."""
    samples = make_random_samples(6, vocabulary=POISON, seed=seed)
    if wrong is not None:
        samples[2].tokens[-1] = wrong
    advantages = [0.5, -1.0, 1.0, 1.5, -0.5, 2.0]
    parts = []
    for start in (0, 2, 4):
        pairs = list(zip(samples[start : start + 2], advantages[start : start + 2], strict=True))
        rows = [pairs] if is_packed else [[pair] for pair in pairs]
        of_rows = [[advantage for _, advantage in row] for row in rows]
        parts.append(build_batch([[sample for sample, _ in row] for row in rows], advantages=of_rows, pad_id=0))
    return with_step_totals(parts, samples)


def train(backend: PyTorchTrainingBackend, wrong: dict[int, int], *, stop: TrainingStop | None = None) -> list[Metrics]:
    """Four steps, of which some hold a token that the loss cannot take."""
    return [
        asyncio.run(update_policy(backend, make_update(seed, wrong.get(seed)), on_nonfinite="skip", stop=stop))
        for seed in range(4)
    ]


def state_of(backend: PyTorchTrainingBackend) -> dict[str, Tensor]:
    """Weights, moments and step counts."""
    weights = asyncio.run(backend.get_weights().result())
    kept = {name: value for name, value in backend._trainer_tensors().items() if not name.startswith("rng/")}
    return {name: value.clone() for name, value in {**weights, **kept}.items()}


@pytest.mark.parametrize("wrong", [{}, {1: POISON}, {1: EXPLOSIVE}, {1: POISON, 2: EXPLOSIVE, 3: POISON}])
def test_a_step_that_is_looked_at_late_ends_as_one_that_is_looked_at_at_once(
    base_model: ModelConfig, wrong: dict[int, int]
) -> None:
    late, at_once = create(base_model, late=True), create(base_model, late=False)
    assert train(late, wrong) == train(at_once, wrong)
    found, expected = state_of(late), state_of(at_once)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert late.weight_version == at_once.weight_version == 4 - len(wrong)
    assert late.scheduler.state_dict() == at_once.scheduler.state_dict()


@pytest.mark.parametrize("wrong", [{}, {0: POISON}, {1: EXPLOSIVE, 2: POISON}])
def test_a_long_step_that_is_looked_at_before_the_weights_change_ends_as_any_other(
    base_model: ModelConfig, wrong: dict[int, int]
) -> None:
    late, at_once = create(base_model, late=True), create(base_model, late=False)
    stop = watched_stop()
    assert train(late, wrong, stop=stop) == train(at_once, wrong)
    found, expected = state_of(late), state_of(at_once)
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert late.weight_version == at_once.weight_version == 4 - len(wrong)


@pytest.mark.parametrize("wrong", [POISON, EXPLOSIVE])
def test_the_first_step_can_be_the_one_that_is_skipped(base_model: ModelConfig, wrong: int) -> None:
    late, at_once = create(base_model, late=True), create(base_model, late=False)
    before = {name: value.clone() for name, value in late.model.named_parameters()}
    assert asyncio.run(update_policy(late, make_update(0, wrong), on_nonfinite="skip")) == {"num_nonfinite": 1.0}
    assert all(torch.equal(value, before[name]) for name, value in late.model.named_parameters())
    assert train(late, {}) == train(at_once, {})


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (POISON, r"^the loss became nan after 0 optimizer steps.*; samples: 0/0, 0/0$"),
        (EXPLOSIVE, r"^the gradient norm became nan after 0 optimizer steps"),
    ],
)
def test_the_error_is_the_same_and_names_the_same_samples(base_model: ModelConfig, wrong: int, sentence: str) -> None:
    messages = []
    for late in (True, False):
        with pytest.raises(NonFiniteError, match=sentence) as raised:
            asyncio.run(update_policy(create(base_model, late=late), make_update(0, wrong)))
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("failing", ["clip", "optimizer"])
def test_a_step_that_fails_raises_its_own_error_and_does_not_count(
    base_model: ModelConfig, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail() -> None:
        raise MemoryError(failing)

    backend = create(base_model, late=True)
    if failing == "clip":
        monkeypatch.setattr(backend._steps, "_clip", fail)
    else:
        monkeypatch.setattr(backend.optimizer, "step", fail)
    with pytest.raises(MemoryError, match=failing):
        asyncio.run(update_policy(backend, make_update(0)))
    assert backend._steps.num_done == 0


def test_results_may_be_asked_for_one_by_one_and_not_at_all(base_model: ModelConfig) -> None:
    late, at_once = create(base_model, late=True), create(base_model, late=False)
    for backend in (late, at_once):
        first, bad, last = make_update(0, POISON)
        asyncio.run(backend.forward_backward(first).result())
        with pytest.raises(NonFiniteError):  # the gradient of the first one is dropped with it
            asyncio.run(backend.forward_backward(bad).result())
        backend.forward_backward(last)
        backend.optim_step()
        asyncio.run(backend.forward_backward(first).result())
        asyncio.run(backend.optim_step().result())
    assert late.weight_version == at_once.weight_version == 2
    found, expected = state_of(late), state_of(at_once)
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_a_save_after_a_step_that_nobody_asked_about_counts_it(base_model: ModelConfig, tmp_path: Path) -> None:
    backend = create(base_model, late=True)
    backend.forward_backward(make_update(0)[0])
    backend.optim_step()
    asyncio.run(backend.save_checkpoint(tmp_path / "step_000001", {"step": 1}).result())
    resumed = create(base_model, late=True)
    asyncio.run(resumed.load_checkpoint(tmp_path / "step_000001").result())
    assert resumed.weight_version == 1


class _NotedStop(TrainingStop):
    """Notes what was done when it was held, and is let go at once."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self.is_watched = True
        self._note = note

    def hold(self) -> None:
        """Note, and hold nothing."""
        self._note()


def watched_stop() -> TrainingStop:
    """A stop that may give up any step: it knows of none how long it takes, and nothing holds it for long."""
    return _NotedStop(lambda: None)


@pytest.mark.parametrize(
    ("step_times", "is_read"),
    [([], True), ([0.1, 60.0, 0.1], True), ([0.1], False)],
    ids=["the first step", "long steps", "short steps"],
)
def test_a_long_step_can_be_given_up_until_the_device_has_done_all_but_the_change(
    base_model: ModelConfig, step_times: list[float], is_read: bool
) -> None:
    backend, found = create(base_model, late=True), []
    stop = _NotedStop(lambda: found.append(not backend._steps._current._unread))
    for seconds in step_times:
        stop.note_step(seconds)
    asyncio.run(update_policy(backend, make_update(0), stop=stop))
    assert found == [is_read]


def test_a_loss_that_is_not_finite_leaves_the_step_whole(base_model: ModelConfig) -> None:
    backend, holds = create(base_model, late=True), []
    with pytest.raises(NonFiniteError, match="samples: 0/0, 0/0"):
        asyncio.run(update_policy(backend, make_update(0, POISON), stop=_NotedStop(lambda: holds.append(1))))
    assert not holds


def test_only_a_stop_that_is_watched_and_not_held_asks_for_a_look() -> None:
    stop = TrainingStop()
    found = [stop.may_give_up_step]
    stop.is_watched = True
    found.append(stop.may_give_up_step)
    stop.hold()
    found.append(stop.may_give_up_step)  # in the second update of a step of RL
    stop.let_go(None)
    found.append(stop.may_give_up_step)
    stop.note_step(9.0)
    found.append(stop.may_give_up_step)
    assert found == [False, True, False, True, False]


class _Operators(TorchDispatchMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func._schema.name.removeprefix("aten::")) in READS:
            self._note(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counting_reads() -> Iterator[list[str]]:
    """The names of everything in the block for which a host would wait for its GPU, in order.

    `tolist` and `numpy` of a tensor in host memory go past the dispatcher: they are noted by their methods.
    """
    reads: list[str] = []
    with pytest.MonkeyPatch.context() as patch, _Operators(reads.append):
        for name in ("tolist", "numpy", "cpu"):
            method = getattr(Tensor, name)

            def noted(tensor: Tensor, *args: Any, _name: str = name, _method: Any = method, **options: Any) -> Any:
                reads.append(_name)
                return _method(tensor, *args, **options)

            patch.setattr(Tensor, name, noted)
        yield reads


EVERYTHING = LossConfig(
    kl_coef=0.1,
    entropy_coef=0.01,
    drift_mask=0.5,
    ratio_base="old",
    aggregation="sequence_mean",
    mismatch=MismatchConfig(weight="sequence", weight_high=2.0, mask="geometric", mask_high=2.0),
)


def read_amid(scores: TokenScores, batch: TrainBatch) -> tuple[Tensor, LossMetrics]:
    """A loss function that makes a number of a tensor, as it must not."""
    loss, _ = cross_entropy_loss(scores, batch)
    return loss, {"loss": loss.item()}


def with_layouts(batches: list[TrainBatch], monkeypatch: pytest.MonkeyPatch) -> list[TrainBatch]:
    """The batches with what the host knows of them: `to`, which finds it on the host, is not what is counted."""
    scored = [replace(batch, ref_logprobs_BT=batch.rollout_logprobs_BT - 0.1) for batch in batches]
    moved = [batch.to(torch.device("cpu")) for batch in scored]
    monkeypatch.setattr(TrainBatch, "to", lambda batch, device: batch)
    return moved


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize(
    ("loss_fn", "num_reads_amid"),
    [(create_cross_entropy_loss(), 0), (create_policy_loss(EVERYTHING), 0), (read_amid, 3)],
)
def test_a_step_reads_once(
    base_model: ModelConfig, monkeypatch: pytest.MonkeyPatch, loss_fn: LossFn, num_reads_amid: int, is_packed: bool
) -> None:
    policy = PolicyConfig(activation_checkpointing=True)
    backend = create_pytorch_backend(
        base_model,
        OPTIM,
        loss_fn,
        num_steps=10,
        policy=policy,
        with_entropies=True,
        temperature=0.9,
        within_tokenizer=True,
        device="cpu",
    )
    backend._steps.is_late = True
    use_sdpa_by_rows(backend.model)
    update = with_layouts(make_update(0, is_packed=is_packed), monkeypatch)
    with counting_reads() as reads:
        asyncio.run(update_policy(backend, update))
    assert reads == ["_local_scalar_dense"] * num_reads_amid + ["tolist"]


def test_what_a_policy_scores_is_read_after_all_was_asked_for(
    base_model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = create(base_model, late=True)
    update = with_layouts(make_update(0), monkeypatch)
    with counting_reads() as reads:
        futures = [backend.score(batch) for batch in update]
    assert reads == []
    assert all(asyncio.run(future.result()).logprobs_BT.any() for future in futures)
