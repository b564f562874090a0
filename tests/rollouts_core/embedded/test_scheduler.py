"""Pins: pauses, aborts and weight updates reach requests between two tokens, and no failure leaves anyone waiting.

Without it a rollout could carry logprobs of weights that did not sample it, or a training run could hang for ever.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.running import Completion, FinishReason, GenerationRequest, Partial
from rollouts_core.embedded.sampling import SamplingParams
from rollouts_core.embedded.scheduler import RequestError, Scheduler
from rollouts_core.errors import CheckpointError, EngineUnavailableError, NoMemoryError
from tests.rollouts_core.embedded.tiny_models import expected_logprobs, random_prompt

TIMEOUT_S = 20.0
PROMPT = random_prompt(5, seed=5)


@pytest.fixture
def scheduler(decoder: Decoder, model_dir: Path) -> Iterator[Scheduler]:
    with Scheduler(decoder, model_dir=model_dir, weight_version="1") as running:
        yield running


def request_of(request_id: str, num_new: int = 1500, *, prompt: list[int] = PROMPT, seed: int = 1) -> GenerationRequest:
    params = SamplingParams(max_new_tokens=num_new, ignore_eos=True, sampling_seed=seed)
    return GenerationRequest(request_id=request_id, input_ids=tuple(prompt), params=params)


def start(scheduler: Scheduler, request: GenerationRequest, *, num_tokens: int = 20) -> Future[Completion]:
    """Submit a request and return when it has this many tokens."""
    reached = threading.Event()

    def watch(partial: Partial) -> None:
        if len(partial.output_ids) >= num_tokens:
            reached.set()

    done = scheduler.submit(request, on_progress=watch)
    assert reached.wait(TIMEOUT_S), "the request makes no progress"
    return done


def logprob_errors(completion: Completion, model: PreTrainedModel) -> torch.Tensor:
    """Per token, how far the logprob is from the model's."""
    expected = expected_logprobs(model, PROMPT, completion.output_ids)
    return (torch.tensor(completion.output_logprobs) - expected).abs()


def test_requests_from_many_threads_all_complete(scheduler: Scheduler) -> None:
    results: dict[int, Completion] = {}

    def ask(index: int) -> None:
        results[index] = scheduler.submit(request_of(f"r{index}", 5 + index, seed=index)).result(TIMEOUT_S)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert {index: len(completion.output_ids) for index, completion in results.items()} == {
        index: 5 + index for index in range(20)
    }


def test_weights_of_a_training_that_diverged_end_requests_with_a_sentence_until_others_are_loaded(
    scheduler: Scheduler, model: PreTrainedModel, model_dir: Path, tmp_path: Path
) -> None:
    """Their numbers are finite, and what is computed from them is not; of that nothing may stay in the cache."""
    before = scheduler.submit(request_of("before", 40)).result(TIMEOUT_S)
    diverged = {name: tensor * 1e18 for name, tensor in load_file(model_dir / "model.safetensors").items()}
    save_file(diverged, tmp_path / "model.safetensors")
    scheduler.update_weights(tmp_path, weight_version="2").result(TIMEOUT_S)
    for name in "ab":
        with pytest.raises(RequestError, match=r"no finite numbers\. The training of these weights may have diverged"):
            scheduler.submit(request_of(name, 40, prompt=random_prompt(20, seed=1))).result(TIMEOUT_S)
    scheduler.update_weights(model_dir, weight_version="3").result(TIMEOUT_S)
    after = scheduler.submit(request_of("after", 40)).result(TIMEOUT_S)
    assert after.output_logprobs == before.output_logprobs


def test_an_aborted_request_keeps_what_it_has_and_others_go_on(scheduler: Scheduler) -> None:
    other = scheduler.submit(request_of("other", 60))
    aborted = start(scheduler, request_of("mine"))
    scheduler.abort("mine")
    completion = aborted.result(TIMEOUT_S)
    assert completion.finish_reason == FinishReason("abort", message="Aborted")
    assert 20 <= len(completion.output_ids) == len(completion.output_logprobs) < 1500
    assert len(other.result(TIMEOUT_S).output_ids) == 60


def test_an_abort_reaches_requests_that_wait_for_a_row(scheduler: Scheduler) -> None:
    running = [scheduler.submit(request_of(f"run{index}")) for index in range(8)]
    waiting = scheduler.submit(request_of("waiting"))
    scheduler.abort("waiting")
    assert waiting.result(TIMEOUT_S).output_ids == ()
    scheduler.abort_all()
    assert {done.result(TIMEOUT_S).finish_reason.kind for done in running} == {"abort"}


def test_an_abort_by_batch_id_reaches_its_members_only(scheduler: Scheduler) -> None:
    members = [scheduler.submit(request_of(f"batch_{index}")) for index in range(2)]
    other = scheduler.submit(request_of("batch2", 30))
    scheduler.abort("batch")
    assert [done.result(TIMEOUT_S).finish_reason.kind for done in members] == ["abort", "abort"]
    assert other.result(TIMEOUT_S).finish_reason.kind == "length"


def test_requests_that_nobody_waits_for_are_looked_for_once_however_many_callers_left_them(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk along the queue for each of thousands kept the engine silent for minutes."""
    scheduler.pause("retract").result(TIMEOUT_S)
    left = [scheduler.submit(request_of(f"left{index}")) for index in range(50)]
    other = scheduler.submit(request_of("left1_1", 3))
    num_walks = 0
    remove = scheduler._batch.remove

    def count_walks(is_chosen: Callable[[str], bool]) -> list[Partial]:
        nonlocal num_walks
        num_walks += 1
        return remove(is_chosen)

    monkeypatch.setattr(scheduler._batch, "remove", count_walks)
    is_busy, has_more = threading.Event(), threading.Event()

    def wait_for_more() -> bool:
        is_busy.set()
        return has_more.wait(TIMEOUT_S)

    busy = scheduler._between_steps(wait_for_more)
    assert is_busy.wait(TIMEOUT_S)
    for index in range(50):
        scheduler.give_up([f"left{index}"])
    has_more.set()
    assert busy.result(TIMEOUT_S)
    assert {future.result(TIMEOUT_S).finish_reason.kind for future in left} == {"abort"}
    assert num_walks == 1
    scheduler.resume()
    assert other.result(TIMEOUT_S).finish_reason.kind == "length"


def test_a_retracted_request_goes_on_with_the_new_weights_and_names_both(
    scheduler: Scheduler, model: PreTrainedModel, other_model: PreTrainedModel, other_dir: Path
) -> None:
    done = start(scheduler, request_of("r", 300))
    scheduler.pause("retract").result(TIMEOUT_S)
    scheduler.update_weights(other_dir, weight_version="2").result(TIMEOUT_S)
    scheduler.resume()
    completion = done.result(TIMEOUT_S)
    (old, _, switch), (new, start_of_new, end) = completion.weight_versions
    assert (old, new, start_of_new, end) == ("1", "2", switch, 300)
    assert logprob_errors(completion, model)[:switch].max() < 1e-4
    assert logprob_errors(completion, other_model)[switch:].max() < 1e-4


def test_a_retraction_without_an_update_changes_no_token(scheduler: Scheduler) -> None:
    undisturbed = scheduler.submit(request_of("a", 200)).result(TIMEOUT_S)
    done = start(scheduler, request_of("b", 200))
    scheduler.pause("retract").result(TIMEOUT_S)
    scheduler.resume()
    assert done.result(TIMEOUT_S).output_ids == undisturbed.output_ids
    assert done.result().weight_versions == (("1", 0, 200),)


def test_an_in_place_pause_keeps_the_old_cache_so_late_logprobs_are_of_neither_model(
    scheduler: Scheduler, other_model: PreTrainedModel, other_dir: Path
) -> None:
    done = start(scheduler, request_of("r", 300))
    scheduler.pause("in_place").result(TIMEOUT_S)
    assert scheduler.update_weights(other_dir, weight_version="2").result(TIMEOUT_S) == 1
    scheduler.resume()
    completion = done.result(TIMEOUT_S)
    assert [span.version for span in completion.weight_versions] == ["1", "2"]
    assert logprob_errors(completion, other_model)[completion.weight_versions[1].start :].max() > 1e-3


def test_an_abort_pause_ends_requests_and_holds_new_ones_until_resumed(scheduler: Scheduler) -> None:
    done = start(scheduler, request_of("r"))
    scheduler.pause("abort").result(TIMEOUT_S)
    assert done.result(TIMEOUT_S).finish_reason.kind == "abort"
    held = scheduler.submit(request_of("held", 3))
    scheduler.weight_digests().result(TIMEOUT_S)  # a command has passed, so the thread has seen the request
    assert not held.done()
    scheduler.resume()
    assert len(held.result(TIMEOUT_S).output_ids) == 3


def test_an_update_without_a_pause_waits_until_running_requests_end(
    scheduler: Scheduler, model: PreTrainedModel, other_dir: Path
) -> None:
    running = start(scheduler, request_of("r", 200))
    update = scheduler.update_weights(other_dir, weight_version="2")
    later = scheduler.submit(request_of("later", 3))
    assert update.result(TIMEOUT_S) == 0
    assert running.done(), "the update came before the running request ended"
    assert running.result().weight_versions == (("1", 0, 200),)
    assert logprob_errors(running.result(), model).max() < 1e-4
    assert later.result(TIMEOUT_S).weight_version == "2"


@pytest.mark.parametrize(
    ("config", "name", "words"),
    [
        (None, ".", "neither"),
        (None, "a" * 300, "cannot be read .*File name too long"),  # as one that this process may not open
        ({"architectures": ["Qwen3ForCausalLM"]}, ".", "is not a complete config of a model"),
        ({"architectures": ["Qwen3ForCausalLM"], "rope_parameters": "x"}, ".", "is not a complete config"),
    ],
)
def test_a_refused_update_keeps_weights_version_and_service(
    config: dict[str, Any] | None, name: str, words: str, scheduler: Scheduler, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    before = scheduler.weight_digests().result(TIMEOUT_S)
    with pytest.raises(CheckpointError, match=words):
        scheduler.update_weights(tmp_path / name, weight_version="2").result(TIMEOUT_S)
    assert scheduler.weight_digests().result(TIMEOUT_S) == before
    assert scheduler.submit(request_of("r", 3)).result(TIMEOUT_S).weight_version == "1"


def test_a_tokenizer_that_cannot_be_read_is_named(decoder: Decoder, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read as a tokenizer .*: copy the file again"):
        Scheduler(decoder, model_dir=tmp_path)


def test_a_failing_generation_thread_fails_everyone_who_waits(scheduler: Scheduler) -> None:
    running = start(scheduler, request_of("running"))
    scheduler.pause("in_place").result(TIMEOUT_S)
    waiting = scheduler.submit(request_of("waiting"))

    def broken_step(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("out of luck")

    scheduler.decoder.step = broken_step  # type: ignore[method-assign]
    scheduler.resume()
    for done in (running, waiting):
        with pytest.raises(EngineUnavailableError, match="out of luck"):
            done.result(TIMEOUT_S)
    assert not scheduler.is_healthy
    with pytest.raises(EngineUnavailableError, match="restart the engine"):
        scheduler.submit(request_of("late"))


def test_want_of_memory_fails_everyone_who_waits_with_its_own_sentence(scheduler: Scheduler) -> None:
    running = start(scheduler, request_of("running"))

    def step_without_memory(*_: object, **__: object) -> torch.Tensor:
        raise NoMemoryError("lower deployment.max_running_requests")

    scheduler.decoder.step = step_without_memory  # type: ignore[method-assign]
    for ask in (lambda: running, lambda: scheduler.submit(request_of("late"))):
        with pytest.raises(NoMemoryError, match=r"^lower deployment\.max_running_requests$"):
            ask().result(TIMEOUT_S)


def test_a_command_that_breaks_fails_itself_and_everyone_who_waits(scheduler: Scheduler) -> None:
    running = start(scheduler, request_of("running"))

    def broken_digests(digest: object = None) -> dict[str, str]:
        raise MemoryError

    scheduler.decoder.weight_digests = broken_digests  # type: ignore[method-assign]
    digests = scheduler.weight_digests()
    for done in (digests, running):
        assert "MemoryError" in str(done.exception(TIMEOUT_S))


def test_closing_ends_requests_with_what_they_have_and_refuses_later_ones(scheduler: Scheduler) -> None:
    running = start(scheduler, request_of("r"))
    scheduler.close()
    assert len(running.result(TIMEOUT_S).output_ids) >= 20
    assert running.result().finish_reason == FinishReason("abort", message="The engine is shutting down")
    with pytest.raises(EngineUnavailableError, match="shutting down"):
        scheduler.submit(request_of("late"))


def test_two_requests_in_flight_cannot_share_an_id(scheduler: Scheduler) -> None:
    start(scheduler, request_of("same"))
    with pytest.raises(RequestError, match="Duplicate request ID detected: same"):
        scheduler.submit(request_of("same"))


def test_renaming_the_version_splits_the_spans(scheduler: Scheduler) -> None:
    done = start(scheduler, request_of("r", 300))
    scheduler.set_weight_version("renamed").result(TIMEOUT_S)
    assert [span.version for span in done.result(TIMEOUT_S).weight_versions] == ["1", "renamed"]
