"""Batches from a plain function that is called once for each: no engine, no filter, nothing at the same time.

Not here: groups in parallel, filters and what is generated ahead (manager.py).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import anyio

from rollouts_core.config import RolloutConfig, name_of_function
from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.errors import ConfigError, EngineError
from rollouts_core.rewards import RewardFn, grade_sample
from rollouts_core.rollout.generate import MAX_INTERRUPTIONS, build_pending_group
from rollouts_core.rollout.resolve import resolve_generate_fn, resolve_reward_fn
from rollouts_core.rollout.rollout_batch import apply_sample_transforms, convert_to_batch
from rollouts_core.system.concurrency import start_short_thread
from rollouts_core.system.time_limits import BlockedError, interrupt_after
from rollouts_core.types import RolloutBatch, Sample, Status
from rollouts_core.user_code.failures import check_generated, failed_function_error


def generate_rollout_batches(
    data_buffer: DataBuffer, config: RolloutConfig, **kwargs: Any
) -> Iterator[RolloutBatch]:  # Any: handed through to the user's function
    """Batches without end from a plain `config.generate_fn`, one call per batch; no filter, no engine.

    A batch of which some samples come back as `Status.ABORTED` is handed in again, as groups are elsewhere.

    Args:
        kwargs: handed to `generate_fn` with each call.

    Raises:
        RewardError: a function took longer than the settings allow, a reward function failed, or `generate_fn` returned
            something else than samples of all the places that it was given.
        EngineError: it broke off samples again and again.
    """
    generate_fn, reward_fn = resolve_generate_fn(config), resolve_reward_fn(config)
    timeout_s = config.reward_timeout_s
    if inspect.iscoroutinefunction(generate_fn):
        raise ConfigError("rollout.generate_fn is a coroutine function: use AsyncRolloutManager with it")
    while True:
        first_index = data_buffer.num_drawn
        pending = [
            sample
            for i, prompt in enumerate(data_buffer.get_prompts(config.batch_size))
            for sample in build_pending_group(prompt, group_index=first_index + i, size=config.n_samples_per_prompt)
        ]
        yield convert_to_batch(
            apply_sample_transforms(
                _generate_whole(partial(generate_fn, **kwargs), pending, config),
                [lambda sample: _grade_now(sample, reward_fn, timeout_s)],
            ),
            metadata={"epoch_id": data_buffer.epoch_id},
        )


def _generate_whole(
    generate: partial[Any], pending: list[Sample], config: RolloutConfig
) -> list[Sample]:  # Any: the user's function made it
    """The samples with whole completions: those that were broken off are asked for again from their tokens."""
    generated = pending
    for _ in range(MAX_INTERRUPTIONS):
        try:
            with interrupt_after(config.generate_timeout_s):
                answered: object = generate(generated)
        except BlockedError as error:
            raise failed_function_error("generation", generate.func, pending, error) from error
        assert not inspect.isawaitable(answered), "a plain generate_fn returned something to wait for"
        generated = check_generated(answered, generate.func, pending)
        if all(sample.status is not Status.ABORTED for sample in generated):
            return generated
    raise EngineError(f"{name_of_function(generate.func)} broke a batch off {MAX_INTERRUPTIONS} times: it ends nothing")


def _grade_now(sample: Sample, reward_fn: RewardFn, timeout_s: float) -> Sample:
    """The graded sample; where an event loop has this thread, as in a notebook, another thread grades meanwhile."""
    grade = partial(anyio.run, partial(grade_sample, sample, reward_fn, timeout_s=timeout_s))
    graded: Sample = start_short_thread(grade).result() if _has_event_loop() else grade()
    return graded


def _has_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
