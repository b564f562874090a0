"""Pins the order of demonstrations, and that a stopped and resumed training is the one that never stopped.

Without it a resumed run would repeat or skip rows, and nobody could tell its curve from a straight one.
"""

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from rollouts_core.algorithms.loss import (
    LossMetrics,
    Metrics,
    TokenScores,
    create_cross_entropy_loss,
    cross_entropy_loss,
)
from rollouts_core.backends.pytorch import PyTorchTrainingBackend, create_pytorch_backend
from rollouts_core.batch import TrainBatch
from rollouts_core.checkpoint import list_checkpoints, load_manifest, verify_checkpoint
from rollouts_core.config import DatasetConfig, ModelConfig, OptimConfig, SFTTrainingConfig
from rollouts_core.data.dataset import SFTDataset, load_sft_dataset, open_datasets, sample_rules
from rollouts_core.data.steps import Samples
from rollouts_core.errors import DataError, NonFiniteError, StoppedByRuleError
from rollouts_core.metrics import EventLog, JSONLLogger, read_json_lines, read_metrics
from rollouts_core.sft import prepare_sft_batch, run_sft_training
from rollouts_core.types import Sample
from tests.rollouts_core.histories import without_times
from tests.rollouts_core.make import make_random_samples

NUM_STEPS = 6
CONFIG = SFTTrainingConfig(
    num_steps=NUM_STEPS,
    batch_size=4,
    micro_batch_size=2,
    max_length=64,
    checkpoint_every=2,
    log_every=4,
    optim=OptimConfig(lr=0.01, num_warmup_steps=2),
)


@pytest.fixture(scope="module")
def demonstrations(quickstart_dir: Path, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """The quickstart's demonstrations of the tiny size."""
    return load_sft_dataset(quickstart_dir / "sft.jsonl", tokenizer, max_length=CONFIG.max_length)


def train(
    model: ModelConfig, samples: Samples, checkpoint_dir: Path | None = None, **changes: object
) -> tuple[PyTorchTrainingBackend, list[Metrics]]:
    """A fresh backend trained for as many steps as there are left."""
    backend = create_pytorch_backend(
        model, CONFIG.optim, create_cross_entropy_loss(), num_steps=NUM_STEPS, device="cpu"
    )
    config = CONFIG.model_copy(update=changes)
    return backend, asyncio.run(run_sft_training(backend, samples, config, checkpoint_dir=checkpoint_dir))


def assert_same_files(first: Path, second: Path) -> None:
    """Two checkpoints with the same weights, optimizer state, schedule and cursor, bit for bit."""
    assert verify_checkpoint(first).files == verify_checkpoint(second).files


@pytest.mark.parametrize("packing", [True, False])
def test_a_resumed_training_is_the_straight_one_bit_for_bit(
    base_model: ModelConfig, demonstrations: list[Sample], tmp_path: Path, packing: bool
) -> None:
    _, straight = train(base_model, demonstrations, tmp_path / "straight", packing=packing)
    _, first = train(base_model, demonstrations, tmp_path / "resumed", packing=packing, num_steps=3)
    torch.manual_seed(99)  # a new process begins with another random state
    _, second = train(base_model, demonstrations, tmp_path / "resumed", packing=packing)
    assert without_times([*first, *second]) == without_times(straight)
    assert_same_files(tmp_path / "resumed" / "step_000006", tmp_path / "straight" / "step_000006")


@pytest.mark.parametrize("first_streams", [True, False])
def test_a_training_may_be_stopped_and_go_on_with_streamed_data(
    base_model: ModelConfig,
    quickstart_dir: Path,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    first_streams: bool,
) -> None:
    parts = [DatasetConfig(path=str(quickstart_dir / "sft.jsonl"), repeat=0.7)]
    kept, streamed = (
        SFTDataset(parts, open_datasets(parts), tokenizer, sample_rules(CONFIG), streaming=each)
        for each in (False, True)
    )
    _, straight = train(base_model, kept, tmp_path / "straight")
    _, first = train(base_model, streamed if first_streams else kept, tmp_path / "resumed", num_steps=3)
    _, second = train(base_model, kept if first_streams else streamed, tmp_path / "resumed")
    assert without_times([*first, *second]) == without_times(straight)
    assert_same_files(tmp_path / "resumed" / "step_000006", tmp_path / "straight" / "step_000006")


def test_a_damaged_newest_checkpoint_is_passed_over_and_trained_again(
    base_model: ModelConfig, demonstrations: list[Sample], tmp_path: Path
) -> None:
    _, straight = train(base_model, demonstrations, tmp_path / "straight")
    train(base_model, demonstrations, tmp_path / "resumed", num_steps=4)
    weights = tmp_path / "resumed" / "step_000004" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    _, second = train(base_model, demonstrations, tmp_path / "resumed")
    assert without_times(second) == without_times(straight)[2:]
    for name in ("step_000004", "step_000006"):
        assert_same_files(tmp_path / "resumed" / name, tmp_path / "straight" / name)


def test_two_runs_with_one_seed_are_identical(base_model: ModelConfig, demonstrations: list[Sample]) -> None:
    first, again = (train(base_model, demonstrations, num_steps=3)[1] for _ in range(2))
    assert without_times(first) == without_times(again)


def test_another_seed_trains_in_another_order(base_model: ModelConfig, demonstrations: list[Sample]) -> None:
    first, other = (train(base_model, demonstrations, num_steps=2, seed=seed)[1] for seed in (0, 1))
    assert without_times(first) != without_times(other)


def test_a_finished_training_does_nothing_more(
    base_model: ModelConfig, demonstrations: list[Sample], tmp_path: Path
) -> None:
    train(base_model, demonstrations, tmp_path, num_steps=2)
    _, history = train(base_model, demonstrations, tmp_path, num_steps=2)
    assert history == []


def test_micro_batches_of_any_size_give_the_same_training(
    base_model: ModelConfig, demonstrations: list[Sample]
) -> None:
    # float32 sums in another order: 1e-4 after three steps at a learning rate of 0.01
    runs = [train(base_model, demonstrations, num_steps=3, batch_size=8, micro_batch_size=size)[1] for size in (1, 8)]
    for first, second in zip(*(without_times(history) for history in runs), strict=True):
        assert first == pytest.approx(second, abs=1e-4)


def test_training_lowers_the_loss(base_model: ModelConfig, demonstrations: list[Sample]) -> None:
    _, history = train(base_model, demonstrations)
    assert history[-1]["loss"] < history[0]["loss"] - 0.2


def test_checkpoints_come_at_their_interval_and_at_the_end(
    base_model: ModelConfig, demonstrations: list[Sample], tmp_path: Path
) -> None:
    train(base_model, demonstrations, tmp_path, num_steps=5)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000002", "step_000004", "step_000005"]


def test_only_the_newest_checkpoints_are_kept(
    base_model: ModelConfig, demonstrations: list[Sample], tmp_path: Path
) -> None:
    train(base_model, demonstrations, tmp_path, num_steps=5, checkpoint_every=1, keep_checkpoints=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000004", "step_000005"]


def test_the_last_checkpoint_holds_the_trained_weights(
    base_model: ModelConfig, demonstrations: list[Sample], tmp_path: Path
) -> None:
    backend, _ = train(base_model, demonstrations, tmp_path, num_steps=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "step_000002", dtype=torch.float32)
    for name, p in backend.model.named_parameters():
        assert torch.equal(model.get_parameter(name), p), name


def test_adams_moments_are_in_the_checkpoint(
    base_model: ModelConfig, demonstrations: list[Sample], tmp_path: Path
) -> None:
    backend, _ = train(base_model, demonstrations, tmp_path, num_steps=2)
    saved = load_file(tmp_path / "step_000002" / "trainer" / "tensors.safetensors")
    for name, p in backend.model.named_parameters():
        assert torch.equal(saved[f"hf_model.{name}/exp_avg_sq"], backend.optimizer.state[p]["exp_avg_sq"]), name


def test_metrics_are_logged_first_last_and_at_their_interval(
    base_model: ModelConfig, demonstrations: list[Sample], tmp_path: Path
) -> None:
    backend = create_pytorch_backend(base_model, CONFIG.optim, create_cross_entropy_loss(), num_steps=6, device="cpu")
    with JSONLLogger(tmp_path / "m.jsonl") as logger:
        history = asyncio.run(run_sft_training(backend, demonstrations, CONFIG, logger))
    lines = read_metrics(tmp_path / "m.jsonl")
    assert [line["step"] for line in lines] == [1, 4, 6]
    assert [line["loss"] for line in lines] == [history[i]["loss"] for i in (0, 3, 5)]


def test_checkpoints_and_resuming_are_events(
    base_model: ModelConfig, demonstrations: list[Sample], tmp_path: Path
) -> None:
    for num_steps in (2, 4):
        backend = create_pytorch_backend(
            base_model, CONFIG.optim, create_cross_entropy_loss(), num_steps=6, device="cpu"
        )
        config = CONFIG.model_copy(update={"num_steps": num_steps})
        with EventLog(tmp_path / "e.jsonl") as events:
            asyncio.run(run_sft_training(backend, demonstrations, config, checkpoint_dir=tmp_path / "c", events=events))
    written = [(line["event"], line["step"]) for line in read_json_lines(tmp_path / "e.jsonl")]
    assert written == [("checkpoint", 2), ("resumed", 2), ("extended", 2), ("checkpoint", 4)]


def test_a_stream_that_ends_early_is_an_error(base_model: ModelConfig, demonstrations: list[Sample]) -> None:
    with pytest.raises(DataError, match="the samples ended after 2 of 6 steps"):
        train(base_model, iter(demonstrations[:11]), packing=False)


def test_a_resumed_stream_goes_on_behind_what_was_trained_on(
    base_model: ModelConfig, demonstrations: list[Sample], tmp_path: Path
) -> None:
    _, straight = train(base_model, iter(demonstrations), packing=False)
    train(base_model, iter(demonstrations), tmp_path, packing=False, num_steps=2)
    _, second = train(base_model, iter(demonstrations), tmp_path, packing=False)
    assert without_times(second) == without_times(straight)[2:]


def test_every_micro_batch_knows_the_totals_of_its_step() -> None:
    rows = [[sample] for sample in make_random_samples(4)]
    batches = prepare_sft_batch(rows, CONFIG, pad_id=0)
    total = sum(sum(row[0].loss_mask) for row in rows)
    assert [len(batch.inputs_BT) for batch in batches] == [2, 2]
    assert {batch.num_loss_tokens for batch in batches} == {total}
    assert {batch.num_samples for batch in batches} == {4}


def test_a_loss_that_rises_is_warned_of_and_ends_the_training_if_the_settings_say_so(
    base_model: ModelConfig, demonstrations: list[Sample], tmp_path: Path
) -> None:
    """The learning rate rises until the training diverges."""
    config = CONFIG.model_copy(update={"num_steps": 100, "checkpoint_every": 100, "stop_on": ("loss_risen",)})
    optim = OptimConfig(lr=3.0, num_warmup_steps=100, max_grad_norm=1e9)

    def train_on(config: SFTTrainingConfig) -> list[Metrics]:
        loss = create_cross_entropy_loss()
        backend = create_pytorch_backend(base_model, optim, loss, num_steps=100, device="cpu")
        with EventLog(tmp_path / "events.jsonl") as events:
            return asyncio.run(
                run_sft_training(backend, demonstrations, config, checkpoint_dir=tmp_path / "run", events=events)
            )

    with pytest.raises(StoppedByRuleError, match=r"mean loss of 10 steps rose from .* out of training\.sft\.stop_on"):
        train_on(config)
    [warning] = [line for line in read_json_lines(tmp_path / "events.jsonl") if line["event"] == "warning"]
    assert warning["rule"] == "loss_risen" and 20 <= warning["step"] < 100
    [saved] = list_checkpoints(tmp_path / "run")
    assert saved.name == f"step_{warning['step']:06d}"
    rest = train_on(config.model_copy(update={"stop_on": ()}))
    assert len(rest) == 100 - warning["step"], "a resumed training continues with the rule taken out"


def test_a_loss_that_rises_rolls_the_training_back_if_the_settings_say_so(
    base_model: ModelConfig, demonstrations: list[Sample], tmp_path: Path
) -> None:
    kept = {"checkpoint_every": 5, "eval_every": 5, "keep_checkpoints": 1, "keep_best": 1}
    config = CONFIG.model_copy(update={"num_steps": 60, "roll_back_on": ("loss_risen",), **kept})
    optim = OptimConfig(lr=3.0, num_warmup_steps=40, max_grad_norm=1e9)

    def train_on() -> list[Metrics]:
        loss = create_cross_entropy_loss()
        backend = create_pytorch_backend(base_model, optim, loss, num_steps=60, device="cpu")
        return asyncio.run(
            run_sft_training(
                backend,
                demonstrations,
                config,
                checkpoint_dir=tmp_path / "run",
                eval_samples=demonstrations[:2],
                events=events,
            )
        )

    with EventLog(tmp_path / "events.jsonl") as events:
        history = train_on()
        assert train_on() == [], "a second attempt trains no further step"
    losses = {step: metrics["eval_loss"] for step, metrics in enumerate(history, 1) if "eval_loss" in metrics}
    best = min(losses, key=losses.__getitem__)
    told = [line for line in read_json_lines(tmp_path / "events.jsonl") if line["event"] == "rolled_back"]
    assert [(line["from_step"], line["step"], line["value"]) for line in told] == [
        (len(history), best, losses[best])
    ] * 2
    assert 20 <= len(history) < 60 and best < len(history)
    saved = [load_manifest(path).step for path in list_checkpoints(tmp_path / "run")]
    assert {best, len(history)} <= {*saved}


def never_finite(scores: TokenScores, batch: TrainBatch) -> tuple[torch.Tensor, LossMetrics]:
    """A loss that is not a number."""
    loss, metrics = cross_entropy_loss(scores, batch)
    return loss * float("nan"), {**metrics, "loss": float("nan")}


def skip_always(model: ModelConfig, samples: list[Sample], checkpoint_dir: Path, **changes: object) -> list[Metrics]:
    """A training of which every update is skipped."""
    backend = create_pytorch_backend(model, CONFIG.optim, never_finite, num_steps=NUM_STEPS, device="cpu")
    config = CONFIG.model_copy(update={"on_nonfinite": "skip", **changes})
    return asyncio.run(run_sft_training(backend, samples, config, checkpoint_dir=checkpoint_dir))


def test_a_training_that_only_skips_ends_at_the_limit(
    base_model: ModelConfig, demonstrations: list[Sample], tmp_path: Path
) -> None:
    with pytest.raises(NonFiniteError, match="step 4: 4 updates in a row were skipped"):
        skip_always(base_model, demonstrations, tmp_path, max_skipped_updates=3)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000002"]
    assert len(skip_always(base_model, demonstrations, tmp_path / "free", max_skipped_updates=0)) == NUM_STEPS


def test_a_resumed_training_goes_on_counting_what_it_skips(
    base_model: ModelConfig, demonstrations: list[Sample], tmp_path: Path
) -> None:
    skip_always(base_model, demonstrations, tmp_path, num_steps=2)
    with pytest.raises(NonFiniteError, match="step 4: 4 updates in a row were skipped"):
        skip_always(base_model, demonstrations, tmp_path, max_skipped_updates=3)
