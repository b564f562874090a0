"""Train a Hugging Face model in several processes with FSDP2. Every process has a part of every weight.

    leader: a method of TrainingBackend -> scatter the task and a share of the batch per rank -> every rank: same task
                                                                                               |
            for each layer: gather its weights, compute, drop them; sum and scatter its gradients

Weights, gradients and AdamW's moments are split along their first dimension, one part per rank. The loss of a step is
the sum of all ranks' losses, so gradients are summed, not averaged. Results equal those of one process, except for the
order of floating-point sums. Not here: starting processes (`launch.py`), their communication (`ranks.py`), shares of a
batch (`split_batch.py`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR

from rollouts_core.algorithms.loss import LossFn, LossMetrics, Metrics, TokenScores, call_loss
from rollouts_core.backends.optim import (
    create_adamw_optimizer,
    create_warmup_cosine_scheduler,
    optimizer_tensors,
    restore_schedule,
)
from rollouts_core.backends.protocol import (
    ImmediateTrainFuture,
    ThreadTrainFuture,
    TrainFuture,
    TrainingState,
    future_from,
    future_of,
)
from rollouts_core.backends.random_state import get_random_tensors, get_random_values, seed_everything, set_random_state
from rollouts_core.backends.ranks import Ranks
from rollouts_core.backends.sharding import create_sharded_policy
from rollouts_core.backends.snapshot import HostSnapshot
from rollouts_core.backends.split_batch import Share, join_scores, split_batch
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
from rollouts_core.errors import NonFiniteError
from rollouts_core.model.loading import check_vocabulary, count_token_ids, load_tokenizer
from rollouts_core.model.lora import (
    adapters_off,
    base_weights,
    is_adapter_weight,
    merge_each,
    reset_adapters,
    scaled_adapters,
)
from rollouts_core.model.policy import Policy
from rollouts_core.seeds import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A task that the leader sends to a rank."""

    name: str
    """A key of `FSDPTrainingBackend._tasks`."""
    payload: Any = None
    """Input of the task for this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Restored:
    """The training state from a checkpoint, which the leader sends to every rank without the tensors."""

    moments: dict[str, tuple[torch.Size, torch.dtype]]
    """Shape and dtype of each optimizer tensor by name, in the order in which all ranks fill the tensors."""
    scheduler: dict[str, Any]  # Any: JSON
    """State of the learning-rate schedule."""
    num_optim_steps: int
    """Number of optimizer steps before this checkpoint."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """On the leader: weights, adapters, value head and optimizer tensors by their names in the checkpoint."""


class FSDPTrainingBackend:
    """Trains a policy that is sharded over ranks. The leader's object implements `TrainingBackend`.

    Args:
        policy: sharded policy from `create_sharded_policy`, which every rank calls.
        ranks: connections to the other ranks. The leader calls the backend's methods, and other ranks call `follow`.
        reference: frozen and sharded copy of the start policy, for `score(reference=True)`.
        seed: seed of dropout on all ranks except the leader.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        scheduler: LambdaLR,
        loss_fn: LossFn,
        *,
        ranks: Ranks,
        tokenizer: PreTrainedTokenizerBase,
        max_grad_norm: float,
        reference: Policy | None = None,
        seed: int = 0,
    ) -> None:
        self.policy = policy
        self.model: PreTrainedModel = policy.hf_model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.loss_fn = loss_fn
        self.ranks = ranks
        self.tokenizer = tokenizer
        self.reference = reference
        self.seed = seed
        self.has_adapters = any(is_adapter_weight(name) for name, _ in self.model.named_parameters())
        self._steps = OptimizerSteps(
            optimizer,
            scheduler,
            device=ranks.device,
            clip=lambda: _whole(torch.nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)),
            drop_gradient=self._drop_gradient,
            gather=ranks.gather,
            agree=partial(dist.all_reduce, op=dist.ReduceOp.MAX),
            look_together=lambda: self._together("look"),
        )
        self._snapshot = HostSnapshot()
        self._saving: TrainFuture[None] = ImmediateTrainFuture(None)
        self._tasks: dict[str, Callable[[Any], Any]] = {  # Any: depends on the task
            "forward_backward": self._forward_backward,
            "score": self._score,
            "score_reference": self._score_reference,
            "optim_step": lambda _: self._steps.take(),
            "look": lambda _: self._steps.look(),
            "gather_weights": self._gather_weights,
            "gather_adapters": self._gather_adapters,
            "gather_base": self._gather_base,
            "load_weights": self._load_weights,
            "release_cache": lambda _: torch.cuda.empty_cache(),
            "gather_checkpoint": self._gather_checkpoint,
            "load_checkpoint": self._load_checkpoint,
        }
        self._start_random_stream()
        ranks.allow(_Task, _Restored, Share, TrainBatch, TokenScores)
        ranks.followers_wait = True

    def follow(self) -> None:
        """Run the tasks that the leader sends to this rank, until the leader stops this rank.

        Raises:
            LeaderGoneError: the leader ended without stopping this rank. `join_ranks` handles this error.
        """
        while (task := self.ranks.scatter()) is not None:
            with suppress(NonFiniteError), self.ranks.working():  # the leader raises the error
                self._tasks[task.name](task.payload)

    def _together(
        self, name: str, payloads: Sequence[object] | None = None, *, at_leader: object = None
    ) -> Any:  # Any: depends on the task
        """Run a task on every rank, and return the leader's result.

        Args:
            payloads: input of the task for each rank.
            at_leader: input of the task on the leader, so that the leader sends no copy to itself.
        """
        with self.ranks.working():
            tasks = [_Task(name=name, payload=payload) for payload in payloads or [None] * self.num_ranks]
            own = self.ranks.scatter(tasks)
            return self._tasks[name](own.payload if at_leader is None else at_leader)

    @property
    def num_tokens(self) -> int | None:
        """The softmax includes only token ids below this number, or all token ids of the model if None."""
        return self.policy.num_tokens

    @property
    def start_sample(self) -> Mapping[str, Tensor]:
        """On the leader, the result of `sample_weights` for the start weights, or empty on other ranks."""
        return self.policy.start_sample

    @property
    def num_ranks(self) -> int:
        """Number of processes that share the rows of each micro-batch."""
        return self.ranks.size

    @property
    def weight_version(self) -> int:
        """Number of optimizer steps so far."""
        self._steps.settle()
        return self._steps.num_done

    def forward_backward(self, batch: TrainBatch) -> TrainFuture[Metrics]:
        """Add the gradient of a micro-batch to the current step. Each rank computes its share of the rows.

        Raises:
            NonFiniteError: the loss of a rank is not finite. All ranks drop the gradient of the whole step.
        """
        return future_from(lambda: self._share_out("forward_backward", batch))

    def _share_out(self, name: str, batch: TrainBatch) -> Any:  # Any: depends on the task
        self._steps.settle()
        return self._together(name, split_batch(batch, self.num_ranks))

    def _forward_backward(self, share: Share) -> TrainFuture[Metrics]:
        batch = share.batch.to(self.ranks.device)
        scores = self.policy(batch)
        error: Exception | None = None
        loss: Tensor = torch.zeros(())
        own_metrics: LossMetrics = {}
        try:
            loss, own_metrics = call_loss(self.loss_fn, scores, batch)
        except Exception as raised:  # noqa: BLE001 - `gather_unless_failed` raises the error of a user's function
            error = raised
        # Exchange errors before the backward pass, in which other ranks would wait for the gradients of a failed rank.
        self.ranks.gather_unless_failed(None, error)
        future = self._steps.add(None if share.is_idle else own_metrics)
        torch.autograd.backward(loss * self.num_ranks)  # FSDP averages over the ranks
        return future

    def score(self, batch: TrainBatch, *, reference: bool = False) -> TrainFuture[TokenScores]:
        """Compute token scores by policy or reference, without gradient and dropout, and return them on the CPU."""
        name = "score_reference" if reference else "score"
        return future_of(lambda: join_scores(self._together(name, split_batch(batch, self.num_ranks)), batch))

    def _score(self, share: Share) -> list[TokenScores]:
        return self._ask(self.policy, share)

    def _score_reference(self, share: Share) -> list[TokenScores]:
        assert self.reference or self.has_adapters, "create the backend with_reference=True"
        with nullcontext() if self.reference else adapters_off(self.model):
            return self._ask(self.reference or self.policy, share)

    @torch.no_grad()
    def _ask(self, asked: Policy, share: Share) -> list[TokenScores]:
        """Compute the scores of this rank's share, and return the scores of all ranks."""
        asked.eval()
        scores: TokenScores = asked(share.batch.to(self.ranks.device)).to(torch.device("cpu"))
        # FSDP's root module keeps its gathered weights for a backward pass. Scoring has no backward pass, so the
        # weights would stay and become outdated.
        _reshard(asked)
        self.policy.train()
        return self.ranks.gather(scores)

    def optim_step(self) -> TrainFuture[Metrics]:
        """Clip the gradient by its norm over all ranks, update the weights, and advance the schedule.

        Raises:
            NonFiniteError: the gradient is not finite. The gradient is dropped, and the weights are unchanged.
        """
        return future_from(self._ask_for_step)

    def _ask_for_step(self) -> TrainFuture[Metrics]:
        self._steps.settle()
        future: TrainFuture[Metrics] = self._together("optim_step")
        return future

    def _drop_gradient(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        _reshard(self.policy)

    def get_weights(self) -> TrainFuture[dict[str, Tensor]]:
        """Return unsharded weights in host memory by Hugging Face name, adapters merged. Tied weights appear once."""
        return future_of(lambda: self._together("gather_weights"))

    def get_adapters(self) -> TrainFuture[dict[str, Tensor]]:
        """Return unsharded adapters in host memory, with the scale in B, or empty if the backend trains all weights."""
        return future_of(lambda: self._together("gather_adapters"))

    def get_base_weights(self) -> TrainFuture[dict[str, Tensor]]:
        """Return the unsharded frozen weights, without the adapters, in host memory."""
        return future_of(lambda: self._together("gather_base"))

    def release_cache(self) -> TrainFuture[None]:
        """On every rank, free the GPU memory that torch caches but does not use."""
        return future_of(lambda: self._together("release_cache"))

    def _gather_weights(self, _: None) -> dict[str, Tensor]:
        return self._gather_to_leader(merge_each(self.model))

    def _gather_adapters(self, _: None) -> dict[str, Tensor]:
        return self._gather_to_leader(scaled_adapters(self.model))

    def _gather_base(self, _: None) -> dict[str, Tensor]:
        return self._gather_to_leader(base_weights(self.model).items())

    def _gather_to_leader(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return {name: tensor.to("cpu") for name, tensor in self._gather(tensors) if self.ranks.is_leader}

    def _gather(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the unsharded tensors on every rank, one by one, so that only one takes memory at a time."""
        return ((name, _whole(tensor)) for name, tensor in tensors)

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        """Replace the weights and reset the adapters. The optimizer keeps its state.

        Raises:
            CheckpointError: names or shapes differ from those of the model. The weights are unchanged.
        """
        return future_of(lambda: self._spread_weights(weights))

    def _spread_weights(self, weights: Mapping[str, Tensor]) -> None:
        check_named_tensors(base_weights(self.model), weights)
        self._together("load_weights", at_leader=weights)

    def _load_weights(self, weights: Mapping[str, Tensor] | None) -> None:
        self._fill_all(base_weights(self.model), weights or {})
        reset_adapters(self.model)

    def save_model_config(self, path: Path) -> None:
        """Write the model's config.json to `path`."""
        write_model_config(path, self.model)

    def save_checkpoint(self, path: Path, state: TrainingState) -> ThreadTrainFuture[None]:
        """Write a checkpoint that engines can load and that any number of processes can resume.

        The call gathers weights and optimizer state in the leader's host memory. A thread of the leader then writes the
        files.
        """
        assert self._saving.done(), "only one save at a time: wait for the result of the last save"
        self._steps.settle()
        trainer = {
            "scheduler": self.scheduler.state_dict(),
            "num_optim_steps": self._steps.num_done,
            "random": get_random_values(),
            "loop": dict(state),
        }
        copied = self._together("gather_checkpoint")
        saving = ThreadTrainFuture(
            lambda: write_training_checkpoint(
                path, state, json.dumps(trainer), copied, model=self.model, tokenizer=self.tokenizer
            )
        )
        self._saving = saving
        return saving

    def _gather_checkpoint(self, _: None) -> dict[str, Tensor]:
        tensors = itertools.chain(
            checkpoint_weights(self.model),
            ((WEIGHT_KEY + name, value.detach()) for name, value in own_weights(self.policy).items()),
            optimizer_tensors(self.policy, self.optimizer).items(),
        )
        copied = {
            name: self._snapshot.keep(name, whole) for name, whole in self._gather(tensors) if self.ranks.is_leader
        }
        self._start_random_stream()
        return copied | get_random_tensors(own_gpu_only=True)

    def _start_random_stream(self) -> None:
        """Seed the random state of this rank, unless this rank is the leader.

        The seed is set at each save and load, so that a resumed run draws the same numbers as an uninterrupted run. The
        leader's random state is in the checkpoint.
        """
        if not self.ranks.is_leader:
            torch.manual_seed(derive_seed(self.seed, "rank", self.ranks.rank, self._steps.num_done))

    def load_checkpoint(self, path: Path) -> TrainFuture[TrainingState]:
        """Load a checkpoint of any number of processes, and return the loop's state. Only the leader reads files.

        Raises:
            CheckpointError: the checkpoint is damaged, belongs to another model, or has no trainer state.
        """
        return future_of(lambda: self._spread_checkpoint(path))

    def _spread_checkpoint(self, path: Path) -> TrainingState:
        saved = read_training_checkpoint(path)
        self._steps.settle()
        check_named_tensors(own_weights(self.policy), saved.own_weights)
        weights: dict[str, Tensor] = {}
        if not self.has_adapters:  # with adapters, the model has its frozen weights already
            weights = read_hf_weights(path, self.model)
            check_named_tensors(base_weights(self.model), weights)
        restored = _Restored(
            moments={name: (tensor.shape, tensor.dtype) for name, tensor in saved.moments.items()},
            scheduler=saved.trainer["scheduler"],
            num_optim_steps=saved.trainer["num_optim_steps"],
        )
        tensors = {**weights, **{WEIGHT_KEY + name: t for name, t in saved.own_weights.items()}, **saved.moments}
        self._together("load_checkpoint", [restored] * self.num_ranks, at_leader=replace(restored, tensors=tensors))
        set_random_state(saved.random_tensors, saved.trainer["random"])
        state: TrainingState = saved.trainer["loop"]
        return state

    def _load_checkpoint(self, restored: _Restored) -> None:
        if not self.has_adapters:
            self._fill_all(base_weights(self.model), restored.tensors)
        own = {WEIGHT_KEY + name: parameter.detach() for name, parameter in own_weights(self.policy).items()}
        self._fill_all(own, restored.tensors)
        self._restore_moments(restored)
        restore_schedule(self.scheduler, restored.scheduler)
        self._steps.num_done = restored.num_optim_steps
        self._start_random_stream()

    @torch.no_grad()
    def _restore_moments(self, restored: _Restored) -> None:
        parameters = dict(self.policy.named_parameters())
        self.optimizer.state.clear()
        for key, (shape, dtype) in restored.moments.items():
            name, quantity = key.rsplit("/", 1)
            parameter = parameters[name]
            is_spread = shape == parameter.shape
            moment = (
                torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                if is_spread
                else torch.empty(shape, dtype=dtype, device=parameter.device)
            )
            _fill(moment, restored.tensors.get(key))
            self.optimizer.state[parameter][quantity] = moment

    def _fill_all(self, targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Fill sharded tensors with the leader's values. `values` is empty on other ranks."""
        for name, target in targets.items():
            _fill(target, values.get(name))


@torch.no_grad()
def _fill(target: Tensor, value: Tensor | None) -> None:
    """Fill a sharded tensor with the leader's value, which is None on other ranks."""
    own = torch.empty(target.shape) if value is None else value
    whole = own.to(target.device, target.dtype)
    if isinstance(target, DTensor):
        target.copy_(distribute_tensor(whole, target.device_mesh, target.placements))
    else:
        dist.broadcast(whole, src=0)
        target.copy_(whole)


def _whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered from all ranks if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _reshard(policy: Policy) -> None:
    """Free the gathered weights that FSDP's root module keeps between forward and backward pass."""
    assert isinstance(policy, FSDPModule), "`create_sharded_policy` returns an FSDPModule"
    policy.reshard()


def create_fsdp_backend(
    model: ModelConfig,
    optim: OptimConfig,
    loss_fn: LossFn,
    *,
    ranks: Ranks,
    num_steps: int,
    policy: PolicyConfig = PLAIN_POLICY,
    temperature: float = 1.0,
    with_entropies: bool = False,
    with_values: bool = False,
    with_reference: bool = False,
    within_tokenizer: bool = False,
    with_start_sample: bool = True,
    seed: int = 0,
) -> FSDPTrainingBackend:
    """Create a backend for several processes, with model, AdamW, learning-rate schedule and loss.

    Every rank calls this function. Then the leader runs the training loop, and the other ranks call `follow`.

    Args:
        ranks: connections to the other ranks.

    The other arguments are those of `create_backend`. Only the leader reads the model's weight files.
    """
    recomputes = ranks.begin(policy.activation_checkpointing)  # less_memory.py lowers only the leader's settings
    agreed = policy.model_copy(update={"activation_checkpointing": recomputes})
    seed_everything(seed)
    tokenizer = load_tokenizer(model)
    num_tokens = count_token_ids(tokenizer) if within_tokenizer else None
    create = partial(create_sharded_policy, model, ranks=ranks, temperature=temperature, num_tokens=num_tokens)
    trained = create(
        agreed, with_entropies=with_entropies, with_values=with_values, with_start_sample=with_start_sample
    )
    check_vocabulary(trained.hf_model.get_input_embeddings().weight.shape[0], tokenizer, model.path)
    reference = None
    if with_reference and policy.lora.rank == 0:
        frozen = policy.model_copy(update={"activation_checkpointing": False})
        reference = create(frozen).eval().requires_grad_(False)
    optimizer = create_adamw_optimizer(trained, optim)
    return FSDPTrainingBackend(
        trained,
        optimizer,
        create_warmup_cosine_scheduler(optimizer, optim, num_steps=num_steps),
        loss_fn,
        ranks=ranks,
        tokenizer=tokenizer,
        max_grad_norm=optim.max_grad_norm,
        reference=reference,
        seed=seed,
    )
