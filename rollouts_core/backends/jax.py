"""Train Llama and Qwen models with JAX, with the same losses and checkpoint format as the PyTorch backend.

The losses are PyTorch functions of a few scores per token. JAX computes the scores. PyTorch computes the loss and its
gradient with respect to the scores. JAX propagates this gradient to the weights:

    weights --JAX--> TokenScores --PyTorch--> loss
    gradient <--JAX-- gradient of the scores <--'
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from rollouts_core.algorithms.loss import LossFn, Metrics, TokenScores, call_loss, read_metrics
from rollouts_core.backends.jax_architecture import load_jax_architecture
from rollouts_core.backends.jax_model import (
    ALL_LAYERS,
    EMBEDDING,
    HEAD,
    VALUE_BIAS,
    VALUE_WEIGHT,
    ModelSettings,
    PaddedBatch,
    Params,
    Scores,
    pad_batch,
    score_batch,
    to_params,
    to_weights,
)
from rollouts_core.backends.optim import lr_ratio
from rollouts_core.backends.protocol import (
    ImmediateTrainFuture,
    ThreadTrainFuture,
    TrainFuture,
    TrainingState,
    future_of,
)
from rollouts_core.backends.random_state import get_random_tensors, get_random_values, seed_everything, set_random_state
from rollouts_core.backends.steps import nonfinite_error
from rollouts_core.backends.training_state import (
    HF_KEY,
    POLICY_PREFIX,
    WEIGHT_KEY,
    check_named_tensors,
    read_training_checkpoint,
    write_training_checkpoint,
)
from rollouts_core.batch import TrainBatch
from rollouts_core.config import PLAIN_POLICY, ModelConfig, OptimConfig, PolicyConfig
from rollouts_core.embedded.architecture import tensor_shapes
from rollouts_core.embedded.weights import check_tensors, read_tensors
from rollouts_core.errors import CheckpointError
from rollouts_core.model.loading import check_vocabulary, count_token_ids, load_tokenizer
from rollouts_core.model.weight_sample import sample_weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VALUE_HEAD = (VALUE_WEIGHT, VALUE_BIAS)
MOMENTS = ("exp_avg", "exp_avg_sq")
"""PyTorch's names of the two moving averages of AdamW."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Writes a model's Hugging Face files into a checkpoint, in place of a transformers model."""

    model_dir: Path
    """Folder with the model's config.json."""

    def save_pretrained(self, save_directory: Path, *, state_dict: dict[str, Tensor]) -> None:
        """Write the weights and config.json as float32, and copy generation_config.json."""
        save_file(state_dict, save_directory / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((self.model_dir / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)  # name of the setting `dtype` in older versions of transformers
        (save_directory / "config.json").write_text(
            json.dumps({**config, "dtype": "float32"}, indent=2) + "\n", encoding="utf-8"
        )
        if (self.model_dir / "generation_config.json").is_file():
            shutil.copyfile(self.model_dir / "generation_config.json", save_directory / "generation_config.json")


class JAXTrainingBackend:
    """A `TrainingBackend` that trains a model on JAX's default device.

    Args:
        weights: the weights by Hugging Face name, and the value head if it is trained. Tied weights appear once.
        model_dir: folder of the model. Its configuration files are copied into checkpoints.
        num_steps: number of optimizer steps of the whole schedule.
        with_reference: keep a copy of the start weights, for `score(reference=True)`.
        with_start_sample: keep a sample of the start weights, with which RL measures rounding in engines.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        settings: ModelSettings,
        loss_fn: LossFn,
        *,
        model_dir: Path,
        tokenizer: PreTrainedTokenizerBase,
        optim: OptimConfig,
        num_steps: int,
        with_reference: bool = False,
        with_start_sample: bool = True,
    ) -> None:
        self.settings = settings
        self.loss_fn = loss_fn
        self.model_dir = model_dir
        self.tokenizer = tokenizer
        self.optim = optim
        self.num_steps = num_steps
        self.start_sample = sample_weights(_without_value_head(weights)) if with_start_sample else {}
        """The result of `sample_weights` for the start weights, or empty without `with_start_sample`."""
        self._params = to_params(weights)
        self._moments = _zero_moments(self._params)
        self._grads: Params | None = None
        self._num_optim_steps = 0
        self._saving: TrainFuture[None] = ImmediateTrainFuture(None)
        # The reference is a copy, because the optimizer step reuses the memory of the weights.
        self._reference = to_params(_without_value_head(weights)) if with_reference else None

    @property
    def num_tokens(self) -> int | None:
        """The softmax includes only token ids below this number, or all token ids of the model if None."""
        return self.settings.num_tokens

    @property
    def num_ranks(self) -> int:
        """Always 1: one process computes all rows on one device."""
        return 1

    @property
    def weight_version(self) -> int:
        """Number of optimizer steps so far."""
        return self._num_optim_steps

    def forward_backward(self, batch: TrainBatch) -> TrainFuture[Metrics]:
        """Add the gradient of a micro-batch to the current step.

        Raises:
            NonFiniteError: the loss is not finite. The gradient of the whole step is dropped.
        """
        return future_of(lambda: self._forward_backward(batch))

    def _forward_backward(self, batch: TrainBatch) -> Metrics:
        scores, pull_back = _score_with_pull_back(self._params, pad_batch(batch), self.settings)
        leaves = Scores(*(None if s is None else _cut_to(batch, s).requires_grad_() for s in scores))
        loss, of_loss = call_loss(self.loss_fn, _token_scores(leaves), batch)
        [metrics] = read_metrics([of_loss])
        if not math.isfinite(metrics["loss"]):
            self._grads = None
            raise nonfinite_error("loss", metrics["loss"], num_optim_steps=self._num_optim_steps)
        torch.autograd.backward(loss)
        gradient = Scores(*(None if s is None else _padded_gradient(t, s) for s, t in zip(scores, leaves, strict=True)))
        grads = _pull_back(pull_back, gradient)
        self._grads = grads if self._grads is None else _add(self._grads, grads)
        return metrics

    def score(self, batch: TrainBatch, *, reference: bool = False) -> TrainFuture[TokenScores]:
        """Compute token scores by the policy or the reference, without gradient, and return them on the CPU."""
        return future_of(lambda: self._score(batch, reference=reference))

    def _score(self, batch: TrainBatch, *, reference: bool) -> TokenScores:
        params = self._reference if reference else self._params
        assert params is not None, "create the backend with_reference=True"
        scores = _score(params, pad_batch(batch), self.settings)
        return _token_scores([None if s is None else _cut_to(batch, s) for s in scores])

    def optim_step(self) -> TrainFuture[Metrics]:
        """Clip the gradient, update the weights, and advance the schedule.

        Raises:
            NonFiniteError: the gradient is not finite. The gradient is dropped, and the weights are unchanged.
        """
        return future_of(self._optim_step)

    def _optim_step(self) -> Metrics:
        assert self._grads is not None, "call forward_backward before optim_step"
        grads, self._grads = self._grads, None
        norm = float(_norm(grads))
        if not math.isfinite(norm):
            raise nonfinite_error("gradient norm", norm, num_optim_steps=self._num_optim_steps)
        lr = self.optim.lr * lr_ratio(self._num_optim_steps, config=self.optim, num_steps=self.num_steps)
        self._num_optim_steps += 1
        beta1, beta2 = self.optim.betas
        self._params, self._moments = _step(
            self._params,
            self._moments,
            grads,
            optim=self.optim,
            scale=min(1.0, self.optim.max_grad_norm / (norm + 1e-6)),
            lr=lr,
            step_size=lr / (1 - beta1**self._num_optim_steps),
            root_correction=math.sqrt(1 - beta2**self._num_optim_steps),
        )
        return {"grad_norm": norm, "lr": lr}

    def get_weights(self) -> ImmediateTrainFuture[dict[str, Tensor]]:
        """Return a copy of the weights by Hugging Face name. Tied weights appear once."""
        return ImmediateTrainFuture(_without_value_head(to_weights(self._params)))

    def release_cache(self) -> ImmediateTrainFuture[None]:
        """Do nothing: JAX keeps its memory. Variables such as XLA_PYTHON_CLIENT_PREALLOCATE limit its memory."""
        return ImmediateTrainFuture(None)

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        """Replace the weights. The optimizer keeps its state.

        Raises:
            CheckpointError: names or shapes differ from those of the model. The weights are unchanged.
        """
        return future_of(lambda: self._load_weights(weights))

    def _load_weights(self, weights: Mapping[str, Tensor]) -> None:
        own = to_weights(self._params)
        check_named_tensors(_without_value_head(own), weights)
        self._params = to_params({**own, **weights})

    def save_model_config(self, path: Path) -> None:
        """Write the model's config.json to `path`."""
        shutil.copyfile(self.model_dir / "config.json", path)

    def save_checkpoint(self, path: Path, state: TrainingState) -> ThreadTrainFuture[None]:
        """Write a checkpoint in the format of the PyTorch backend. Engines can load the checkpoint, and both backends
        can resume it.

        The call copies weights and optimizer state to host memory. Then a thread writes the files.
        """
        assert self._saving.done(), "only one save at a time: wait for the result of the last save"
        trainer = {
            "scheduler": {"last_epoch": self._num_optim_steps, "_step_count": self._num_optim_steps + 1},
            "num_optim_steps": self._num_optim_steps,
            "random": get_random_values(),
            "loop": dict(state),
        }
        weights = to_weights(self._params)
        tensors = {
            **{WEIGHT_KEY + name: weights[name] for name in VALUE_HEAD if name in weights},
            **self._optimizer_tensors(),
            **get_random_tensors(),
        }
        copied = {HF_KEY + name: value for name, value in _without_value_head(weights).items()} | tensors
        write = partial(write_training_checkpoint, model=ModelFiles(self.model_dir), tokenizer=self.tokenizer)
        saving = ThreadTrainFuture(lambda: write(path, state, json.dumps(trainer), copied))
        self._saving = saving
        return saving

    def load_checkpoint(self, path: Path) -> TrainFuture[TrainingState]:
        """Load a checkpoint of this backend, or of the PyTorch backend without adapters.

        Raises:
            CheckpointError: the checkpoint is damaged, belongs to another model, or has no trainer state.
        """
        return future_of(lambda: self._load_checkpoint(path))

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        """The state of AdamW under the names of the PyTorch backend, or empty before the first step."""
        if self._num_optim_steps == 0:
            return {}
        named: dict[str, Tensor] = {}
        for quantity in MOMENTS:
            for name, value in to_weights(self._moments[quantity]).items():
                named[f"{_policy_name(name)}/{quantity}"] = value
                named[f"{_policy_name(name)}/step"] = torch.tensor(float(self._num_optim_steps))
        return named

    def _load_checkpoint(self, path: Path) -> TrainingState:
        saved = read_training_checkpoint(path)
        weights = {**read_weights(path, self.settings), **saved.own_weights}
        check_named_tensors(to_weights(self._params), weights)
        self._moments = self._moments_of(saved.moments)
        self._params = to_params(weights)
        self._grads = None
        set_random_state(saved.random_tensors, saved.trainer["random"])
        self._num_optim_steps = saved.trainer["num_optim_steps"]
        state: TrainingState = saved.trainer["loop"]
        return state

    def _moments_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Params]:
        """AdamW's moving averages from a checkpoint, or 0 for weights without a gradient, which PyTorch does not
        save."""
        return {
            quantity: to_params(
                {
                    name: tensors.get(f"{_policy_name(name)}/{quantity}", torch.zeros_like(weight))
                    for name, weight in to_weights(self._params).items()
                }
            )
            for quantity in MOMENTS
        }


def create_jax_backend(
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
) -> JAXTrainingBackend:
    """Create a JAX backend with model, AdamW, learning-rate schedule and loss. Arguments: see `create_backend`.

    Raises:
        ConfigError: the model is not in a local folder, or it has dropout, which this backend does not support.
        CheckpointError: the folder has no readable model, or a model of an unsupported family.
    """
    seed_everything(seed)
    model_dir = Path(model.path)
    architecture = load_jax_architecture(model)
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(model)
    settings = ModelSettings(
        architecture=architecture,
        num_tokens=count_token_ids(tokenizer) if within_tokenizer else None,
        compute_dtype=policy.precision,
        temperature=temperature,
        with_entropies=with_entropies,
        recompute_layers=policy.activation_checkpointing,
        untrained_input_id=config.get("pad_token_id"),
    )
    check_vocabulary(architecture.vocab_size, tokenizer, model_dir)
    weights = read_weights(model_dir, settings)
    if with_values:
        weights |= {VALUE_WEIGHT: torch.zeros(1, architecture.hidden_size), VALUE_BIAS: torch.zeros(1)}
    return JAXTrainingBackend(
        weights,
        settings,
        loss_fn,
        model_dir=model_dir,
        tokenizer=tokenizer,
        optim=optim,
        num_steps=num_steps,
        with_reference=with_reference,
        with_start_sample=with_start_sample,
    )


def read_weights(model_dir: Path, settings: ModelSettings) -> dict[str, Tensor]:
    """Read the weights in a model's folder. Tied weights appear once.

    Raises:
        CheckpointError: a tensor is missing, unexpected, not finite, or has a wrong shape.
    """
    tensors = read_tensors(model_dir)
    tied = tensors.pop(HEAD, None) if settings.architecture.ties_embeddings else None
    if tied is not None and not torch.equal(tied, tensors.get(EMBEDDING, torch.empty(0))):
        raise CheckpointError(f"{model_dir}: {HEAD} differs from {EMBEDDING}, but its config.json ties them")
    check_tensors(tensors, tensor_shapes(settings.architecture), source=str(model_dir))
    return tensors


def global_norm(grads: Params) -> jax.Array:
    """The Euclidean norm of the gradient of all weights."""
    return jnp.sqrt(sum(jnp.square(grad).sum() for grad in grads.values()))


def adamw_step(
    params: Params,
    moments: dict[str, Params],
    grads: Params,
    *,
    optim: OptimConfig,
    scale: float,
    lr: float,
    step_size: float,
    root_correction: float,
) -> tuple[Params, dict[str, Params]]:
    """Compute weights and moving averages after one AdamW step, with the arithmetic of `torch.optim.AdamW`.

    Args:
        scale: factor by which clipping scales the gradient.
        step_size: lr / (1 - beta1 ** step).
        root_correction: sqrt(1 - beta2 ** step).

    Source: arXiv:1711.05101.
    """
    beta1, beta2 = optim.betas
    first, second = (moments[quantity] for quantity in MOMENTS)
    scaled = {name: grad * scale for name, grad in grads.items()}
    new_first = {name: beta1 * first[name] + (1 - beta1) * grad for name, grad in scaled.items()}
    new_second = {name: beta2 * second[name] + (1 - beta2) * jnp.square(grad) for name, grad in scaled.items()}
    new_params = {}
    for name, value in params.items():
        decayed = value * (1 - lr * optim.weight_decay) if _is_matrix(name, value) else value
        root = jnp.sqrt(new_second[name]) / root_correction + optim.eps
        new_params[name] = decayed - step_size * new_first[name] / root
    return new_params, dict(zip(MOMENTS, (new_first, new_second), strict=True))


def _score_and_pull_back(
    params: Params, batch: PaddedBatch, settings: ModelSettings
) -> tuple[Scores, Callable[[Scores], tuple[Params]]]:
    """Return the scores, and a function from the loss's gradient with respect to scores to its gradient with respect to
    weights."""
    scores, pull_back = jax.vjp(lambda p: score_batch(p, batch, settings), params)
    return scores, pull_back


def _add_up(first: Params, second: Params) -> Params:
    return {name: grad + second[name] for name, grad in first.items()}


# JAX compiles these functions once per combination of settings and padded batch size, for the whole process.
_score = jax.jit(score_batch, static_argnames="settings")
_score_with_pull_back = jax.jit(_score_and_pull_back, static_argnames="settings")
_pull_back = jax.jit(lambda pull_back, gradient: pull_back(gradient)[0])
_add = jax.jit(_add_up, donate_argnums=0)
_norm = jax.jit(global_norm)
_step = jax.jit(adamw_step, static_argnames="optim", donate_argnames=("params", "moments"))


def _is_matrix(name: str, value: jax.Array) -> bool:
    """True if a weight is a matrix, to which weight decay applies. Stacked layers have one more dimension."""
    return bool(value.ndim - name.startswith(ALL_LAYERS) > 1)


def _zero_moments(params: Params) -> dict[str, Params]:
    return {quantity: {name: jnp.zeros_like(value) for name, value in params.items()} for quantity in MOMENTS}


def _without_value_head(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if name not in VALUE_HEAD}


def _policy_name(name: str) -> str:
    """The name of a weight in the PyTorch policy."""
    return name if name in VALUE_HEAD else POLICY_PREFIX + name


def _cut_to(batch: TrainBatch, scores_BT: jax.Array) -> Tensor:
    """Copy padded scores to a PyTorch tensor of the batch's shape, without the padding."""
    num_rows, length = batch.inputs_BT.shape
    return torch.from_numpy(np.array(scores_BT)[:num_rows, :length].copy())


def _padded_gradient(leaf: Tensor, scores_BT: jax.Array) -> jax.Array:
    """The gradient of the loss with respect to padded scores, or 0 if the loss does not depend on these scores."""
    padded_BT = np.zeros(scores_BT.shape, dtype=np.float32)
    if leaf.grad is not None:
        padded_BT[: leaf.shape[0], : leaf.shape[1]] = leaf.grad.numpy()
    return jnp.asarray(padded_BT)


def _token_scores(scores: Sequence[Tensor | None]) -> TokenScores:
    logprobs_BT, entropies_BT, values_BT = scores
    assert logprobs_BT is not None, "scores always have log-probs"
    return TokenScores(logprobs_BT=logprobs_BT, entropies_BT=entropies_BT, values_BT=values_BT)
