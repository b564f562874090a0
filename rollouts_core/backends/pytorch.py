"""Train a Hugging Face model in one process, on a CPU or one GPU: `PyTorchTrainingBackend`."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from rollouts_core.algorithms.loss import LossFn, Metrics, TokenScores, call_loss
from rollouts_core.backends.optim import (
    create_adamw_optimizer,
    create_warmup_cosine_scheduler,
    optimizer_tensors,
    restore_optimizer_tensors,
    restore_schedule,
)
from rollouts_core.backends.protocol import (
    ImmediateTrainFuture,
    LateTrainFuture,
    ThreadTrainFuture,
    TrainFuture,
    TrainingState,
    future_from,
    future_of,
)
from rollouts_core.backends.random_state import (
    get_random_tensors,
    get_random_values,
    seed_everything,
    set_random_state,
)
from rollouts_core.backends.snapshot import HostSnapshot
from rollouts_core.backends.steps import OptimizerSteps
from rollouts_core.backends.training_state import (
    WEIGHT_KEY,
    check_named_tensors,
    checkpoint_weights,
    own_weights,
    read_hf_weights,
    read_training_checkpoint,
    write_model_config,
    write_training_checkpoint,
)
from rollouts_core.batch import TrainBatch
from rollouts_core.config import PLAIN_POLICY, ModelConfig, OptimConfig, PolicyConfig
from rollouts_core.model.loading import check_vocabulary, count_token_ids, default_device, load_tokenizer
from rollouts_core.model.lora import (
    adapters_off,
    base_weights,
    is_adapter_weight,
    merged_weights,
    replace_weights,
    scaled_adapters,
)
from rollouts_core.model.policy import Policy, create_policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class PyTorchTrainingBackend:
    """A `TrainingBackend` that trains a policy on one device.

    Args:
        reference: frozen copy of the start policy, for `score(reference=True)`.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        scheduler: LambdaLR,
        loss_fn: LossFn,
        *,
        tokenizer: PreTrainedTokenizerBase,
        max_grad_norm: float,
        reference: Policy | None = None,
    ) -> None:
        self.policy = policy
        self.model: PreTrainedModel = policy.hf_model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.loss_fn = loss_fn
        self.tokenizer = tokenizer
        self.reference = reference
        self.device = self.model.device
        self._steps = OptimizerSteps(
            optimizer,
            scheduler,
            device=self.device,
            clip=lambda: torch.nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm),
            drop_gradient=partial(optimizer.zero_grad, set_to_none=True),
        )
        self._snapshot = HostSnapshot()
        self._copied = threading.Event()
        """Cleared while a save copies weights and optimizer state. Neither may change until it is set again."""
        self._copied.set()
        self._saving: TrainFuture[None] = ImmediateTrainFuture(None)

    @property
    def num_ranks(self) -> int:
        """Always 1: one process computes all rows."""
        return 1

    @property
    def num_tokens(self) -> int | None:
        """The softmax includes only token ids below this number, or all token ids of the model if None."""
        return self.policy.num_tokens

    @property
    def start_sample(self) -> Mapping[str, Tensor]:
        """The result of `sample_weights` for the start weights, or empty without `with_start_sample`."""
        return self.policy.start_sample

    @property
    def has_adapters(self) -> bool:
        """True if only adapters are trained."""
        return any(is_adapter_weight(name) for name, _ in self.model.named_parameters())

    @property
    def weight_version(self) -> int:
        """Number of optimizer steps so far."""
        self._steps.settle()
        return self._steps.num_done

    def forward_backward(self, batch: TrainBatch) -> TrainFuture[Metrics]:
        """Add the gradient of a micro-batch to the current step.

        Raises:
            NonFiniteError: the loss is not finite. The gradient of the whole step is dropped.
        """
        return future_from(lambda: self._forward_backward(batch))

    def _forward_backward(self, batch: TrainBatch) -> TrainFuture[Metrics]:
        self._steps.settle()
        on_device = batch.to(self.device)
        loss, metrics = call_loss(self.loss_fn, self.policy(on_device), on_device)
        future = self._steps.add(metrics)
        torch.autograd.backward(loss)
        return future

    def score(self, batch: TrainBatch, *, reference: bool = False) -> TrainFuture[TokenScores]:
        """Compute token scores by policy or reference, without gradient and dropout, and return them on the CPU."""
        return future_from(lambda: self._score(batch, reference=reference))

    @torch.no_grad()
    def _score(self, batch: TrainBatch, *, reference: bool) -> TrainFuture[TokenScores]:
        asked = self.reference if reference and self.reference else self.policy
        assert asked is self.reference or not reference or self.has_adapters, "create the backend with_reference=True"
        asked.eval()
        with adapters_off(self.model) if reference else nullcontext():
            scores: TokenScores = asked(batch.to(self.device))
        self.policy.train()
        return LateTrainFuture(lambda: scores.to(torch.device("cpu")), lambda: self.device.type == "cpu")

    def optim_step(self) -> TrainFuture[Metrics]:
        """Clip the gradient, update the weights, and advance the schedule.

        Raises:
            NonFiniteError: the gradient is not finite. The gradient is dropped, and the weights are unchanged.
        """
        return future_from(self._optim_step)

    def _optim_step(self) -> TrainFuture[Metrics]:
        self._steps.settle()
        return self._steps.take(before_change=self._copied.wait)

    def get_weights(self) -> ImmediateTrainFuture[dict[str, Tensor]]:
        """Return the weights by Hugging Face name, with tied weights only once. Weights with adapters are merged copies
        in host memory. Other weights are views of the parameters."""
        return ImmediateTrainFuture(merged_weights(self.model))

    def get_adapters(self) -> ImmediateTrainFuture[dict[str, Tensor]]:
        """Return copies of the adapters in host memory, with the scale in B, or empty if all weights are trained."""
        return ImmediateTrainFuture({name: tensor.cpu() for name, tensor in scaled_adapters(self.model)})

    def get_base_weights(self) -> ImmediateTrainFuture[dict[str, Tensor]]:
        """Return the frozen weights of the model, without the adapters."""
        return ImmediateTrainFuture(base_weights(self.model))

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        """Replace the weights and reset the adapters. The optimizer keeps its state.

        Raises:
            CheckpointError: names or shapes differ from those of the model. The weights are unchanged.
        """
        return future_of(lambda: self._load_weights(weights))

    def _load_weights(self, weights: Mapping[str, Tensor]) -> None:
        check_named_tensors(base_weights(self.model), weights)
        self._copied.wait()
        replace_weights(self.model, weights)

    def release_cache(self) -> TrainFuture[None]:
        """Free the GPU memory that torch caches but does not use."""
        return future_of(torch.cuda.empty_cache)  # does nothing without a GPU

    def save_model_config(self, path: Path) -> None:
        """Write the model's config.json to `path`."""
        write_model_config(path, self.model)

    def save_checkpoint(self, path: Path, state: TrainingState) -> ThreadTrainFuture[None]:
        """Write a checkpoint that engines can load and that training can resume exactly.

        A thread copies weights and optimizer state to host memory, then writes the copy. During the copy, forward and
        backward passes continue, and updates of the weights wait.
        """
        assert self._saving.done(), "only one save at a time: wait for the result of the last save"
        self._steps.settle()
        trainer = {
            "scheduler": deepcopy(self.scheduler.state_dict()),
            "num_optim_steps": self._steps.num_done,
            "random": get_random_values(),
            "loop": dict(state),
        }
        tensors = self._trainer_tensors()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # kernels of the last step may still be writing the tensors
        self._copied.clear()
        saving = ThreadTrainFuture(lambda: self._copy_and_write(path, trainer, tensors, state))
        self._saving = saving
        return saving

    def load_checkpoint(self, path: Path) -> TrainFuture[TrainingState]:
        """Load a checkpoint of this backend, and return the state of the training loop.

        Raises:
            CheckpointError: the checkpoint is damaged, belongs to another model, or has no trainer state.
        """
        return future_of(lambda: self._load_checkpoint(path))

    def _trainer_tensors(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint besides the weights in its Hugging Face files."""
        return {
            **{WEIGHT_KEY + name: value.detach() for name, value in own_weights(self.policy).items()},
            **optimizer_tensors(self.policy, self.optimizer),
            **get_random_tensors(),
        }

    def _copy_and_write(
        self, path: Path, trainer: Mapping[str, Any], tensors: Mapping[str, Tensor], state: TrainingState
    ) -> None:
        try:
            copied: dict[str, Tensor] = {}
            for name, tensor in checkpoint_weights(self.model):  # one by one, to save GPU memory
                copied |= self._snapshot.take({name: tensor})
            copied |= self._snapshot.take(tensors)
        finally:
            self._copied.set()
        self._write_checkpoint(path, json.dumps(trainer), copied, state)

    def _write_checkpoint(self, path: Path, trainer: str, copied: dict[str, Tensor], state: TrainingState) -> None:
        write_training_checkpoint(path, state, trainer, copied, model=self.model, tokenizer=self.tokenizer)

    def _load_checkpoint(self, path: Path) -> TrainingState:
        saved = read_training_checkpoint(path)
        self._steps.settle()
        self._copied.wait()
        own = own_weights(self.policy)
        check_named_tensors(own, saved.own_weights)
        if not self.has_adapters:  # with adapters, the model has its frozen weights already
            weights = read_hf_weights(path, self.model)
            check_named_tensors(base_weights(self.model), weights)
            replace_weights(self.model, weights)
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(saved.own_weights[name])
        restore_optimizer_tensors(self.policy, self.optimizer, saved.moments)
        restore_schedule(self.scheduler, saved.trainer["scheduler"])
        set_random_state(saved.random_tensors, saved.trainer["random"])
        self._steps.num_done = saved.trainer["num_optim_steps"]
        state: TrainingState = saved.trainer["loop"]
        return state


def create_pytorch_backend(
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
    device: str = "",
) -> PyTorchTrainingBackend:
    """Create a backend with model, AdamW, learning-rate schedule and loss.

    Args:
        device: device of the model. "" uses the first GPU, or the CPU on machines without GPUs.

    The other arguments are those of `create_backend`.
    """
    seed_everything(seed)
    place = device or default_device()
    tokenizer = load_tokenizer(model)
    create = partial(
        create_policy,
        model,
        device=place,
        temperature=temperature,
        num_tokens=count_token_ids(tokenizer) if within_tokenizer else None,
    )
    trained = create(
        policy, with_entropies=with_entropies, with_values=with_values, with_start_sample=with_start_sample
    )
    check_vocabulary(trained.hf_model.get_input_embeddings().weight.shape[0], tokenizer, model.path)
    reference = None
    if with_reference and policy.lora.rank == 0:
        frozen = policy.model_copy(update={"activation_checkpointing": False})
        reference = create(frozen).eval().requires_grad_(False)
    optimizer = create_adamw_optimizer(trained, optim)
    return PyTorchTrainingBackend(
        trained,
        optimizer,
        create_warmup_cosine_scheduler(optimizer, optim, num_steps=num_steps),
        loss_fn,
        tokenizer=tokenizer,
        max_grad_norm=optim.max_grad_norm,
        reference=reference,
    )
