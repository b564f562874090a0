"""RL on completions that outlive a publication, against the embedded engine: what it trains on, and what a stop leaves.

They do where generation is ahead of the trainer, and where those that over-sampling broke off are kept. Without these
tests a run could train on tokens that are older than allowed, take log-probs of one version for those of another, or
leave requests behind that nobody reads.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rollouts_core import rl
from rollouts_core.algorithms.loss import Metrics, create_policy_loss
from rollouts_core.backends.pytorch import PyTorchTrainingBackend, create_pytorch_backend
from rollouts_core.batch import build_batch, place_samples, split_by_sample
from rollouts_core.config import (
    InFlight,
    LoRAConfig,
    ModelConfig,
    PolicyConfig,
    RLOptimConfig,
    RLTrainingConfig,
    RolloutConfig,
    SamplingConfig,
    WeightTransfer,
)
from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.data.dataset import load_prompts_from_jsonl
from rollouts_core.embedded.scheduler import Scheduler
from rollouts_core.engines import InferenceEngine, InFlightEngine, PublishTarget, SGLangEngine, publish_weights
from rollouts_core.engines.completion import Completion, GenerationRequest
from rollouts_core.engines.protocol import SegmentAccess
from rollouts_core.errors import WeightSyncError
from rollouts_core.metrics import EventLog, read_json_lines
from rollouts_core.rewards import grade_group
from rollouts_core.rl import publish_version, run_rl_training, train_on_rollouts
from rollouts_core.rollout.generate import build_pending_group, create_engine_generate_fn
from rollouts_core.rollout.manager import AsyncRolloutManager
from rollouts_core.rollout.rollout_batch import convert_to_batch
from rollouts_core.stopping import TrainingStop
from rollouts_core.system.concurrency import in_short_thread
from rollouts_core.types import RolloutBatch, Sample, Status
from tests.rollouts_core.engines.transfer.test_rounding import FileReader
from tests.rollouts_core.histories import without_times
from tests.rollouts_core.served_engine import engine_url, served_engine

TRAINING = RLTrainingConfig(num_steps=5, checkpoint_every=2, optim=RLOptimConfig(lr=1e-3, schedule="constant"))
LONG = SamplingConfig(max_new_tokens=300)


def share_of_even_digits(sample: Sample) -> float:
    return sum(character in "02468" for character in sample.response) / (1 + len(sample.response))


ROLLOUT = RolloutConfig(
    batch_size=3, n_samples_per_prompt=4, sampling=SamplingConfig(max_new_tokens=8), reward_fn=share_of_even_digits
)


@dataclass
class Run:
    """A run in a directory; tells what it trained on."""

    base_model: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    directory: Path
    rollout: RolloutConfig = ROLLOUT
    training: RLTrainingConfig = TRAINING
    transfer: WeightTransfer = "auto"
    end_at: int = 0
    """Somebody has the training end after this step; 0 is nobody."""
    events: EventLog | None = None
    stop: TrainingStop | None = None
    batches: list[RolloutBatch] = field(default_factory=list)
    history: list[Metrics] = field(default_factory=list)
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Copies of the weights that were published."""

    def create_backend(self) -> PyTorchTrainingBackend:
        loss_fn = create_policy_loss(self.training.loss)
        training = self.training
        return create_pytorch_backend(
            self.base_model, training.optim, loss_fn, num_steps=training.num_steps, policy=training.policy
        )

    def create_manager(self, engines: Sequence[InferenceEngine]) -> AsyncRolloutManager:
        prompts = load_prompts_from_jsonl(Path(self.base_model.path).parent / "prompts.jsonl")
        generate_fn = create_engine_generate_fn(engines, self.tokenizer, self.rollout)
        return AsyncRolloutManager(DataBuffer(prompts), self.rollout, generate_fn=generate_fn)

    @property
    def target(self) -> PublishTarget:
        config = Path(self.base_model.path) / "config.json"
        return PublishTarget(
            weights_dir=self.directory / "weights", model_config=config, prefix="test", transfer=self.transfer
        )

    async def train(self, client: SGLangEngine, num_steps: int) -> PyTorchTrainingBackend:
        """Train up to a step, going on from what lies in the directory."""
        backend, engine = self.create_backend(), InFlightEngine(client, self.rollout.in_flight)
        manager = self.create_manager([engine])
        note_version = manager.weights_published

        def published(version: int) -> None:
            self.weights[version] = {name: value.clone() for name, value in backend.model.state_dict().items()}
            note_version(version)

        manager.weights_published = published  # type: ignore[method-assign]
        async with manager:
            self.history += await run_rl_training(
                backend,
                manager.data_buffer,
                manager,
                [engine],
                self.training.model_copy(update={"num_steps": num_steps}),
                target=self.target,
                checkpoint_dir=self.directory / "checkpoints",
                events=self.events,
                on_batch=lambda step, batch: self.batches.append(batch),
                is_end_asked=lambda: len(self.batches) == self.end_at,
                stop=self.stop,
            )
        return backend

    async def train_by_url(self, url: str, num_steps: int) -> PyTorchTrainingBackend:
        client = SGLangEngine(url)
        try:
            return await self.train(client, num_steps)
        finally:
            await client.aclose()

    def train_alone(self, num_steps: int) -> PyTorchTrainingBackend:
        """Train with an engine of its own."""
        if self.transfer == "gloo":
            with engine_url(Path(self.base_model.path)) as url:
                return asyncio.run(self.train_by_url(url, num_steps))
        with served_engine(Path(self.base_model.path)) as (client, _):
            return asyncio.run(self.train(client, num_steps))


@pytest.fixture
def run(base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Run:
    return Run(base_model, tokenizer, tmp_path / "run")


def with_rollout(run: Run, name: str = "run", **settings: object) -> Run:
    rollout = ROLLOUT.model_copy(update=settings)
    return Run(run.base_model, run.tokenizer, run.directory.parent / name, rollout)


def assert_equal_weights(first: PyTorchTrainingBackend, second: PyTorchTrainingBackend) -> None:
    ours, theirs = first.model.state_dict(), second.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def versions_of(batch: RolloutBatch) -> set[int]:
    return {span.version for sample in batch.samples for span in sample.policy_versions}


def group_counts(batches: Sequence[RolloutBatch]) -> Counter[int]:
    return Counter(group[0].group_index for batch in batches for group in batch.groups)


async def train_in_turns(run: Run, client: SGLangEngine) -> tuple[PyTorchTrainingBackend, list[list[Sample]]]:
    """The synchronous loop written out: ask, grade, train, publish."""
    backend, manager = run.create_backend(), run.create_manager([client])
    await publish_weights(backend, [client], run.target)
    trained_on = []
    for step in range(run.training.num_steps):
        prompts = manager.data_buffer.get_prompts(ROLLOUT.batch_size)
        samples = []
        for place, prompt in enumerate(prompts):
            index = step * ROLLOUT.batch_size + place
            pending = build_pending_group(prompt, group_index=index, size=ROLLOUT.n_samples_per_prompt)
            generated = manager.generate_fn(pending)
            assert isinstance(generated, Awaitable)
            samples += await grade_group(await generated, share_of_even_digits)
        await train_on_rollouts(backend, convert_to_batch(samples), run.training, pad_id=0)
        await publish_weights(backend, [client], run.target)
        trained_on.append(samples)
    return backend, trained_on


def test_without_staleness_the_loop_equals_one_in_turns_bit_for_bit(run: Run) -> None:
    with served_engine(Path(run.base_model.path)) as (client, _):
        by_hand, trained_on = asyncio.run(train_in_turns(with_rollout(run, "by_hand"), client))
    assert_equal_weights(run.train_alone(5), by_hand)
    assert [list(batch.samples) for batch in run.batches] == trained_on
    assert {metrics["staleness_max"] for metrics in run.history} == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_where_publications_wait_each_batch_is_as_old_as_allowed_and_the_run_repeats_bit_for_bit(
    run: Run, max_staleness: int
) -> None:
    first, second = (with_rollout(run, name, max_staleness=max_staleness) for name in ("first", "second"))
    assert_equal_weights(first.train_alone(5), second.train_alone(5))
    assert [versions_of(batch) for batch in first.batches] == [{max(0, step - max_staleness)} for step in range(5)]
    assert [b.to_json() for b in first.batches] == [b.to_json() for b in second.batches]
    assert first.history[4]["staleness_mean"] == first.history[4]["staleness_max"] == max_staleness
    assert group_counts(first.batches) == Counter(range(15))


@pytest.mark.slow
def test_where_publications_wait_a_run_that_was_stopped_equals_one_that_was_not(run: Run) -> None:
    straight, stopped = (with_rollout(run, name, max_staleness=2) for name in ("straight", "stopped"))
    expected = straight.train_alone(5)
    stopped.train_alone(2)
    assert_equal_weights(stopped.train_alone(5), expected)
    assert [b.to_json() for b in stopped.batches] == [b.to_json() for b in straight.batches]


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_training_that_somebody_ends_goes_on_later_as_if_nobody_had(run: Run, max_staleness: int) -> None:
    straight, ended = (with_rollout(run, name, max_staleness=max_staleness) for name in ("straight", "ended"))
    for each in (straight, ended):
        each.training = each.training.model_copy(update={"checkpoint_every": 4})
    expected = straight.train_alone(5)
    ended.end_at = 2
    ended.train_alone(5)
    assert len(ended.history) == 2
    assert [path.name for path in (ended.directory / "checkpoints").iterdir()] == ["step_000002"]
    ended.end_at = 0
    assert_equal_weights(ended.train_alone(5), expected)
    assert [b.to_json() for b in ended.batches] == [b.to_json() for b in straight.batches]
    names = [sorted(path.name for path in (each.directory / "checkpoints").iterdir()) for each in (straight, ended)]
    assert names[0] == names[1] == ["step_000004", "step_000005"]


@pytest.mark.slow
@pytest.mark.parametrize(("max_staleness", "transfer"), [(0, "auto"), (2, "auto"), (0, "gloo"), (0, "files")], ids=str)
def test_a_training_that_is_ended_after_each_step_samples_from_the_versions_that_it_would_have(
    run: Run, monkeypatch: pytest.MonkeyPatch, max_staleness: int, transfer: str
) -> None:
    """Also between two publications, where the engines serve other weights than the checkpoint holds."""
    if transfer == "files":
        monkeypatch.setattr(SGLangEngine, "segment_access", no_access)
    straight, ended = (with_rollout(run, name, max_staleness=max_staleness) for name in ("straight", "ended"))
    for each in (straight, ended):
        each.training = each.training.model_copy(update={"num_steps": 8, "checkpoint_every": 7, "sync_every": 3})
        each.transfer = "gloo" if transfer == "gloo" else "auto"
    expected = straight.train_alone(8)
    for step in (1, 2, 4, 5, 7):
        ended.end_at = step
        ended.train_alone(8)
        assert len(ended.batches) == step
    ended.end_at = 0
    assert_equal_weights(ended.train_alone(8), expected)
    assert [b.to_json() for b in ended.batches] == [b.to_json() for b in straight.batches]
    assert without_times(ended.history) == without_times(straight.history)
    assert versions_of(straight.batches[5]) != {5}
    assert not list(ended.directory.rglob("served.safetensors"))


async def no_access(engine: SGLangEngine) -> SegmentAccess:
    """As an engine on another machine."""
    return SegmentAccess.NONE


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["abort", "continue"])
def test_completions_that_span_publications_keep_the_bound_and_their_logprobs(run: Run, in_flight: InFlight) -> None:
    for attempt in range(5):  # on a busy machine all completions may end between two publications
        mixed = with_rollout(run, f"attempt-{attempt}", max_staleness=2, in_flight=in_flight, sampling=LONG)
        backend = mixed.train_alone(5)
        for step, batch in enumerate(mixed.batches):
            assert min(versions_of(batch)) >= step - 2
        assert group_counts(mixed.batches) == Counter(range(15))
        if spanning := spans_several([sample for batch in mixed.batches for sample in batch.samples]):
            break
    assert spanning, "no publication fell into a completion"
    check_logprobs(mixed, backend, spanning[:20])


def spans_several(samples: Sequence[Sample]) -> list[Sample]:
    """Those whose tokens are of several versions."""
    return [sample for sample in samples if len({span.version for span in sample.policy_versions}) > 1]


def check_logprobs(run: Run, backend: PyTorchTrainingBackend, samples: Sequence[Sample]) -> None:
    """Assert that the log-probs of each span are those of its version's weights."""
    for sample in samples:
        for span in sample.policy_versions:
            backend.model.load_state_dict(run.weights[span.version])
            batch = build_batch([[sample]], pad_id=0)
            scores = asyncio.run(backend.score(batch).result()).logprobs_BT
            expected = split_by_sample(scores, [place_samples([sample])])[0][0][span.start - 1 : span.end - 1]
            found = torch.tensor(sample.rollout_log_probs)[span.start : span.end]
            assert torch.allclose(expected, found, atol=1e-4)


class Uneven(SGLangEngine):
    """Ends completions of the first three prompts after twenty tokens, and begins none of the seventh and later ones
    before it is told to end what is under way.

    The first three begin last, so that the fourth to sixth have some tokens when the first three end.
    """

    def __init__(self, client: SGLangEngine, prompts: Sequence[list[int]] = ()) -> None:
        vars(self).update(vars(client))
        self.prompts = [*prompts]
        """In the order in which they were asked for."""
        self.is_ending = asyncio.Event()
        self.are_six_known = asyncio.Event()

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        prompt = next((known for known in self.prompts if requests[0].prompt_tokens[: len(known)] == known), None)
        if prompt is None:
            self.prompts.append(prompt := requests[0].prompt_tokens)
        place = self.prompts.index(prompt)
        if len(self.prompts) >= 6:
            self.are_six_known.set()
        if place >= 6:
            await self.is_ending.wait()
        if place < 3:
            await self.are_six_known.wait()
        sampling = requests[0].sampling.model_copy(update={"max_new_tokens": 20})
        return await super().generate([replace(each, sampling=sampling) if place < 3 else each for each in requests])

    async def abort_running(self) -> None:
        self.is_ending.set()
        self.is_ending = asyncio.Event()
        await super().abort_running()


def test_completions_under_way_when_a_batch_is_full_go_on_from_their_tokens(run: Run) -> None:
    """Groups 0 to 2 are short, so that 3 to 5 are broken off, which then end before 6 to 8."""
    kept = with_rollout(run, over_sampling_factor=2.0, max_partial_staleness=3, sampling=LONG)
    with served_engine(Path(run.base_model.path), num_slots=32) as (client, scheduler):
        backend = asyncio.run(kept.train(Uneven(client), 2))
        assert_idle(scheduler)
    assert [sorted(group_counts([batch])) for batch in kept.batches] == [[0, 1, 2], [3, 4, 5]]
    spanning = spans_several(kept.batches[1].samples)
    assert spanning, "some of the twelve were begun before the publication and ended after it"
    assert versions_of(kept.batches[1]) == {0, 1}
    check_logprobs(kept, backend, spanning)
    assert kept.history[1]["staleness_max"] == 1.0


def with_rounding(run: Run, *, max_staleness: int = 0, **training: object) -> Run:
    """A run of adapters, of whose updates engines in bfloat16 round most away."""
    rounded = with_rollout(run, max_staleness=max_staleness)
    policy = PolicyConfig(precision="bfloat16", lora=LoRAConfig(rank=4))
    optim = run.training.optim.model_copy(update={"lr": 1e-5})
    rounded.training = run.training.model_copy(update={"policy": policy, "optim": optim, **training})
    return rounded


def test_a_step_after_a_resume_that_publishes_nothing_says_nothing_of_rounding(run: Run) -> None:
    rounded = with_rounding(run, sync_every=2)
    with served_engine(Path(run.base_model.path), dtype=torch.bfloat16, client=FileReader) as (client, _):
        asyncio.run(rounded.train(client, 2))
        asyncio.run(rounded.train(client, 4))
    assert ["update_arrived_share" in metrics for metrics in rounded.history] == [False, True, False, True]


def test_a_step_whose_publication_a_resume_completes_says_what_was_rounded_away(
    run: Run,
) -> None:
    rounded = with_rounding(run, checkpoint_every=5)
    rounded.stop = stop = TrainingStop()
    stop.is_watched = True

    async def stand_still(*place: Any, **options: Any) -> int:
        if rounded.batches:  # a stop outlasts the grace period here
            await in_short_thread(stop.save_last_whole)
            stop._held.release()
            raise WeightSyncError("stopped")
        return await publish_version(*place, **options)

    with served_engine(Path(run.base_model.path), dtype=torch.bfloat16, client=FileReader) as (client, _):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rl, "publish_version", stand_still)
            with pytest.raises(WeightSyncError, match=r"^stopped$"):
                asyncio.run(rounded.train(client, 2))
        rounded.stop = None
        asyncio.run(rounded.train(client, 2))
    assert ["update_arrived_share" in metrics for metrics in rounded.history] == [True, True]
    assert len(rounded.batches) == 2


def test_a_run_says_once_what_bfloat16_engines_round_away_of_its_updates(run: Run, tmp_path: Path) -> None:
    told = with_rounding(run, max_staleness=1)
    with (
        served_engine(Path(run.base_model.path), dtype=torch.bfloat16, client=FileReader) as (client, _),
        EventLog(tmp_path / "events.jsonl") as told.events,
    ):
        asyncio.run(told.train(client, 3))
    shares = [metrics["update_arrived_share"] for metrics in told.history]
    assert len(shares) == 3 and 0 <= shares[0] < 0.9
    assert all(0 < metrics["weights_changed_share"] < 1 for metrics in told.history[1:])
    [warning] = [line["message"] for line in read_json_lines(tmp_path / "events.jsonl") if line["event"] == "warning"]
    assert warning.startswith(f"step 1: {shares[0]:.0%} of RL's change of the weights arrived in the engines")


def test_completions_under_way_when_a_batch_is_full_begin_anew_where_no_age_is_allowed(run: Run) -> None:
    anew = with_rollout(run, over_sampling_factor=2.0, sampling=LONG)
    with served_engine(Path(run.base_model.path), num_slots=32) as (client, _):
        asyncio.run(anew.train(Uneven(client), 2))
    assert [versions_of(batch) for batch in anew.batches] == [{0}, {1}]


def test_tokens_that_were_kept_survive_a_restart(run: Run) -> None:
    kept = with_rollout(run, over_sampling_factor=2.0, max_partial_staleness=3, sampling=LONG)
    kept.training = kept.training.model_copy(update={"checkpoint_every": 1})
    with served_engine(Path(run.base_model.path), num_slots=32) as (client, _):
        asyncio.run(kept.train(first := Uneven(client), 1))
        asyncio.run(kept.train(Uneven(client, first.prompts), 2))
    assert sorted(group_counts(kept.batches[1:])) == [3, 4, 5]
    assert versions_of(kept.batches[1]) == {0, 1}


def test_completions_that_have_more_tokens_than_a_lower_limit_allows_end_there(run: Run) -> None:
    kept = with_rollout(run, over_sampling_factor=2.0, max_partial_staleness=3, sampling=LONG)
    allowed = ("rollout.sampling.max_new_tokens",)
    kept.training = kept.training.model_copy(update={"checkpoint_every": 1, "allow_changed": allowed})
    with served_engine(Path(run.base_model.path), num_slots=32) as (client, _):
        asyncio.run(kept.train(first := Uneven(client), 1))
        kept.rollout = kept.rollout.model_copy(update={"sampling": SamplingConfig(max_new_tokens=1)})
        asyncio.run(kept.train(Uneven(client, first.prompts), 2))
    begun = [sample for sample in kept.batches[1].samples if sum(sample.loss_mask) > 1]
    assert begun and {span.version for sample in begun for span in sample.policy_versions} == {0}
    assert Status.TRUNCATED in {sample.status for sample in begun}


def reward_of_one(sample: Sample) -> float:
    return 1.0


def test_what_was_ready_is_graded_again_where_a_run_goes_on_with_another_reward(run: Run) -> None:
    ahead = with_rollout(run, max_staleness=1)
    ahead.training = ahead.training.model_copy(update={"checkpoint_every": 1, "allow_changed": ("rollout.reward_fn",)})
    ahead.train_alone(2)
    ahead.rollout = ahead.rollout.model_copy(update={"reward_fn": reward_of_one})
    ahead.train_alone(3)
    assert ahead.batches[2].rewards == [1.0] * 12


def test_what_was_ready_is_not_graded_again_where_only_the_attention_kernel_is_another(run: Run) -> None:
    ahead = with_rollout(run, max_staleness=1)
    half = PolicyConfig(precision="bfloat16")
    ahead.training = ahead.training.model_copy(update={"checkpoint_every": 1, "policy": half})
    ahead.train_alone(2)
    eager = half.model_copy(update={"attention": "eager"})
    ahead.training = ahead.training.model_copy(update={"policy": eager})
    regraded: list[bool] = []
    load = AsyncRolloutManager.load_state_dict

    def note(manager: AsyncRolloutManager, state: Mapping[str, Any], *, is_regraded: bool = False) -> None:
        regraded.append(is_regraded)
        load(manager, state, is_regraded=is_regraded)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncRolloutManager, "load_state_dict", note)
        ahead.train_alone(3)
    assert regraded == [False]


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["finish", "abort", "continue"])
@pytest.mark.parametrize("stop_at", [1, 2, 3, 4])
def test_a_run_that_is_cancelled_and_goes_on_trains_each_prompt_once(
    run: Run, in_flight: InFlight, stop_at: int
) -> None:
    asynchronous = with_rollout(run, max_staleness=2, in_flight=in_flight, sampling=LONG)

    async def train_until_cancelled(client: SGLangEngine) -> None:
        task = asyncio.create_task(asynchronous.train(client, 5))
        while len(asynchronous.batches) < stop_at:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with served_engine(Path(run.base_model.path)) as (client, scheduler):
        asyncio.run(train_until_cancelled(client))
        assert_idle(scheduler)
    num_saved = max((int(path.name[5:]) for path in (run.directory / "checkpoints").glob("step_*")), default=0)
    asynchronous.batches = asynchronous.batches[:num_saved]
    asynchronous.train_alone(5)
    assert group_counts(asynchronous.batches) == Counter(range(15))
    assert len(asynchronous.batches) == 5


def assert_idle(scheduler: Scheduler) -> None:
    """Assert that the engine has no request left, after the step that it was in."""
    scheduler.set_weight_version("idle?").result()
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


def test_an_error_in_training_leaves_no_request_behind(run: Run) -> None:
    asynchronous = with_rollout(run, max_staleness=2, sampling=LONG)

    async def train_until_error(url: str) -> None:
        backend, engine = asynchronous.create_backend(), InFlightEngine(SGLangEngine(url))

        def fail(step: int, batch: RolloutBatch) -> None:
            raise ZeroDivisionError("no batch is good enough")

        async with aclosing(engine), asynchronous.create_manager([engine]) as manager:
            await run_rl_training(
                backend, manager.data_buffer, manager, [engine], TRAINING, target=run.target, on_batch=fail
            )

    with engine_url(Path(run.base_model.path)) as url:
        with pytest.raises(ZeroDivisionError, match="no batch is good enough"):
            asyncio.run(train_until_error(url))
        deadline = time.monotonic() + 5.0
        while any(running := requests_of(url)):
            assert time.monotonic() < deadline, f"{running} requests run and wait for nobody"


def requests_of(url: str) -> tuple[int, int]:
    """How many requests a server has running and waiting."""
    [state] = httpx.get(f"{url}/server_info", timeout=60.0).json()["internal_states"]
    return state["num_running_reqs"], state["num_waiting_reqs"]
