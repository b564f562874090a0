"""Build rollout batches by calling a user's synchronous generate function, without engines and filters."""

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
) -> Iterator[RolloutBatch]:  # Any: passed to the user's function
    """Yield batches without end; the user's synchronous `config.generate_fn` generates the completions of each batch.

    There is no engine and no filter. If the function returns interrupted samples (`Status.ABORTED`), it is called again
    with the same batch, so that it can continue them.

    Args:
        kwargs: extra keyword arguments of every call of `generate_fn`.

    Raises:
        ConfigError: `generate_fn` is a coroutine function.
        RewardError: `generate_fn` or the reward exceeded its time limit, the reward failed, or `generate_fn` did not
            return one sample for each sample that it was given.
        EngineError: `generate_fn` returned interrupted samples `MAX_INTERRUPTIONS` times for one batch.
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
) -> list[Sample]:  # Any: result of the user's function
    """Call the user's function until no sample is interrupted. Each call gets the samples of the previous call, with
    the tokens generated so far."""
    generated = pending
    for _ in range(MAX_INTERRUPTIONS):
        try:
            with interrupt_after(config.generate_timeout_s):
                answered: object = generate(generated)
        except BlockedError as error:
            raise failed_function_error("generation", generate.func, pending, error) from error
        assert not inspect.isawaitable(answered), "a plain generate_fn returned an awaitable"
        generated = check_generated(answered, generate.func, pending)
        if all(sample.status is not Status.ABORTED for sample in generated):
            return generated
    raise EngineError(
        f"{name_of_function(generate.func)} returned interrupted samples for one batch {MAX_INTERRUPTIONS} times"
    )


def _grade_now(sample: Sample, reward_fn: RewardFn, timeout_s: float) -> Sample:
    """Grade a sample in an event loop of its own. If this thread already runs an event loop (as in a notebook), a new
    thread grades the sample."""
    grade = partial(anyio.run, partial(grade_sample, sample, reward_fn, timeout_s=timeout_s))
    graded: Sample = start_short_thread(grade).result() if _has_event_loop() else grade()
    return graded


def _has_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
