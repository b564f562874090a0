"""Create the training backend that the setting `policy.backend` selects."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rollouts_core.algorithms.loss import LossFn
from rollouts_core.backends.protocol import TrainingBackend
from rollouts_core.backends.pytorch import create_pytorch_backend
from rollouts_core.backends.ranks import Ranks
from rollouts_core.config import PLAIN_POLICY, ModelConfig, OptimConfig, PolicyConfig
from rollouts_core.errors import ConfigError


def create_backend(
    model: ModelConfig,
    optim: OptimConfig,
    loss_fn: LossFn,
    *,
    num_steps: int,
    policy: PolicyConfig = PLAIN_POLICY,
    temperature: float = 1.0,
    with_entropies: bool = False,
    with_values: bool = False,
    with_reference: bool = False,
    within_tokenizer: bool = False,
    with_start_sample: bool = True,
    seed: int = 0,
    ranks: Ranks | None = None,
) -> TrainingBackend:
    """Create the backend `policy.backend` with model, optimizer, learning-rate schedule and loss.

    Args:
        num_steps: number of optimizer steps of the whole schedule.
        temperature: divisor of the logits: the sampling temperature of rollouts in RL, 1 in SFT.
        with_entropies: compute the policy's entropy at each token, besides the log-probs.
        with_values: train a value head.
        with_reference: keep a copy of the start weights, for `score(reference=True)`.
        within_tokenizer: exclude token ids that the tokenizer does not have from the softmax, as engines do in RL.
        with_start_sample: keep a sample of the start weights, with which RL measures rounding in engines.
        seed: seed of the random numbers of all libraries.
        ranks: connections to the other processes that train together, or None if this process trains alone.

    Raises:
        ConfigError: the backend does not support a setting, or is not installed.
        CheckpointError: the model cannot be loaded.
    """
    create: Callable[..., TrainingBackend]
    if ranks is None:
        create = _find_jax() if policy.backend == "jax" else create_pytorch_backend
    elif policy.backend == "pytorch":
        from rollouts_core.backends.fsdp import create_fsdp_backend  # the import takes half a second

        create = partial(create_fsdp_backend, ranks=ranks)
    else:
        raise ConfigError(f'backend "{policy.backend}" trains in one process: use one GPU, or set backend = "pytorch"')
    return create(
        model,
        optim,
        loss_fn,
        num_steps=num_steps,
        policy=policy,
        temperature=temperature,
        with_entropies=with_entropies,
        with_values=with_values,
        with_reference=with_reference,
        within_tokenizer=within_tokenizer,
        with_start_sample=with_start_sample,
        seed=seed,
    )


def _find_jax() -> Callable[..., TrainingBackend]:
    try:
        from rollouts_core.backends.jax import create_jax_backend
    except ImportError as error:
        raise ConfigError("backend = jax is set but JAX is not installed: run pip install 'rollouts[jax]'") from error
    return create_jax_backend
