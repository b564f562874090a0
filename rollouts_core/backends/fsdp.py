"""Train a Hugging Face model with several processes, each holding a part of every weight: FSDP2.

Not here: the processes (ranks.py, launch.py), which rows a process gets (shares.py), one process (pytorch.py).

    leader: a method of TrainingBackend -> scatter the task, with each rank's share of it -> every rank: the same task
                                                                                               |
            layer by layer: gather its weights, compute, drop them; sum and scatter its gradients

Weights, gradients and AdamW's moments are cut along their first dimension, one piece per rank. The losses of the shares
add up to the step's, so gradients are summed, not averaged. Results equal those of one process up to the order of
floating-point sums.
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
from rollouts_core.backends.shares import Share, join_scores, split_batch
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
from rollouts_core.errors import NonFiniteError
from rollouts_core.model.loading import check_vocabulary, count_token_ids, load_tokenizer
from rollouts_core.model.lora import adapters_off, base_weights, is_adapter_weight, merge_each, reset_adapters
from rollouts_core.model.policy import Policy
from rollouts_core.seeds import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """What the leader asks of a rank."""

    name: str
    """A key of `FSDPTrainingBackend._tasks`."""
    payload: Any = None
    """The rank's share of it, of the type that the task takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Restored:
    """What a checkpoint says that every rank must know; at the leader with the tensors themselves."""

    moments: dict[str, tuple[torch.Size, torch.dtype]]
    """The optimizer's tensors, in order."""
    scheduler: dict[str, Any]  # Any: JSON
    """State of the schedule."""
    num_optim_steps: int
    """Optimizer steps behind the weights."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Weights, adapters and value head by their names in the checkpoint, and the optimizer's tensors."""


class FSDPTrainingBackend:
    """A policy that is spread over ranks, with its optimizer and schedule; implements `TrainingBackend` at the leader.

    Args:
        policy: what `create_sharded_policy` gave, on every rank.
        ranks: this process among the others. The leader calls the methods; the others call `follow`.
        reference: the frozen policy that `score(reference=True)` asks, spread in the same way.
        seed: of the random numbers that ranks other than the leader take for dropout.
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
        self._tasks: dict[str, Callable[[Any], Any]] = {  # Any: as each task has it
            "forward_backward": self._forward_backward,
            "score": self._score,
            "score_reference": self._score_reference,
            "optim_step": lambda _: self._steps.take(),
            "look": lambda _: self._steps.look(),
            "gather_weights": self._gather_weights,
            "load_weights": self._load_weights,
            "release_cache": lambda _: torch.cuda.empty_cache(),
            "gather_checkpoint": self._gather_checkpoint,
            "load_checkpoint": self._load_checkpoint,
        }
        self._start_random_stream()
        ranks.allow(_Task, _Restored, Share, TrainBatch, TokenScores)
        ranks.followers_wait = True

    def follow(self) -> None:
        """Do what the leader asks of this rank until it says stop.

        Raises:
            LeaderGoneError: it ended without a word; `join_ranks` takes that for an end.
        """
        while (task := self.ranks.scatter()) is not None:
            with suppress(NonFiniteError), self.ranks.working():  # the leader raises the same one
                self._tasks[task.name](task.payload)

    def _together(
        self, name: str, payloads: Sequence[object] | None = None, *, at_leader: object = None
    ) -> Any:  # Any: as the task has it
        """Let every rank do a task; returns what it gave at the leader.

        Args:
            payloads: one for each rank.
            at_leader: the leader's payload instead of one of those: it is not copied.
        """
        with self.ranks.working():
            tasks = [_Task(name=name, payload=payload) for payload in payloads or [None] * self.num_ranks]
            own = self.ranks.scatter(tasks)
            return self._tasks[name](own.payload if at_leader is None else at_leader)

    @property
    def num_tokens(self) -> int | None:
        """The softmax is over the token ids below it; None if over all that the model has."""
        return self.policy.num_tokens

    @property
    def start_sample(self) -> Mapping[str, Tensor]:
        """`sample_weights` of the weights that training started from, at the leader; else empty."""
        return self.policy.start_sample

    @property
    def num_ranks(self) -> int:
        """Processes that share the rows of each batch."""
        return self.ranks.size

    @property
    def weight_version(self) -> int:
        """The number of optimizer steps that the weights have taken."""
        self._steps.settle()
        return self._steps.num_done

    def forward_backward(self, batch: TrainBatch) -> TrainFuture[Metrics]:
        """Add the batch's gradient to that of its step; each rank computes its rows.

        Raises:
            NonFiniteError: the loss is not a finite number on some rank; the gradient of the step is dropped on all.
        """
        return future_from(lambda: self._share_out("forward_backward", batch))

    def _share_out(self, name: str, batch: TrainBatch) -> Any:  # Any: as the task has it
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
        except Exception as raised:  # noqa: BLE001 - a user's function: the others learn of it, then it is raised
            error = raised
        # Before the backward pass: a rank that left it out would let the others wait for its gradients.
        self.ranks.gather_unless_failed(None, error)
        future = self._steps.add(None if share.is_idle else own_metrics)
        torch.autograd.backward(loss * self.num_ranks)  # FSDP averages over the ranks
        return future

    def score(self, batch: TrainBatch, *, reference: bool = False) -> TrainFuture[TokenScores]:
        """What the policy, or the reference, says about the batch, without a gradient or dropout, on the CPU."""
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
        """The scores of every rank."""
        asked.eval()
        scores: TokenScores = asked(share.batch.to(self.ranks.device)).to(torch.device("cpu"))
        # The root keeps its gathered weights for a backward pass; without one they would be there, and old, next time.
        _reshard(asked)
        self.policy.train()
        return self.ranks.gather(scores)

    def optim_step(self) -> TrainFuture[Metrics]:
        """Clip the gradient by its norm over all ranks, step, and move the learning rate on.

        Raises:
            NonFiniteError: the gradient is not finite; it is dropped, and the weights are as before.
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
        """The whole weights by their Hugging Face names, tied ones once, adapters merged in, in host memory."""
        return future_of(lambda: self._together("gather_weights"))

    def release_cache(self) -> TrainFuture[None]:
        """Give memory of every rank's GPU back that holds nothing."""
        return future_of(lambda: self._together("release_cache"))

    def _gather_weights(self, _: None) -> dict[str, Tensor]:
        whole = self._gather(merge_each(self.model))
        return {name: tensor.to("cpu") for name, tensor in whole if self.ranks.is_leader}

    def _gather(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Each tensor in whole, one after another, on every rank: there is room for one of them everywhere."""
        return ((name, _whole(tensor)) for name, tensor in tensors)

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        """Replace the weights by whole ones; the optimizer keeps its state, and adapters start again from 0.

        Raises:
            CheckpointError: a name or shape that is not the model's; the weights are as before.
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
        """Write a directory that engines load as it is and that any number of processes resumes from.

        The call gathers everything in the leader's host memory, as much as weights and optimizer take; a thread
        writes it.
        """
        assert self._saving.done(), "one save at a time: wait for the last one's result"
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
        """Give a follower random numbers of its own, the same ones after a save as after resuming from it.

        The leader's random state is in the checkpoint.
        """
        if not self.ranks.is_leader:
            torch.manual_seed(derive_seed(self.seed, "rank", self.ranks.rank, self._steps.num_done))

    def load_checkpoint(self, path: Path) -> TrainFuture[TrainingState]:
        """Go on from a checkpoint, whatever the number of processes that wrote it; returns the loop's state.

        Only the leader reads it.

        Raises:
            CheckpointError: it is damaged, of another model, or has no trainer state.
        """
        return future_of(lambda: self._spread_checkpoint(path))

    def _spread_checkpoint(self, path: Path) -> TrainingState:
        saved = read_training_checkpoint(path)
        self._steps.settle()
        check_named_tensors(own_weights(self.policy), saved.own_weights)
        weights: dict[str, Tensor] = {}
        if not self.has_adapters:  # with them the frozen weights are those that training started from
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
        """Give every rank its pieces of the leader's values; those of the other ranks are empty."""
        for name, target in targets.items():
            _fill(target, values.get(name))


@torch.no_grad()
def _fill(target: Tensor, value: Tensor | None) -> None:
    """Give every rank its piece of the leader's value."""
    own = torch.empty(target.shape) if value is None else value
    whole = own.to(target.device, target.dtype)
    if isinstance(target, DTensor):
        target.copy_(distribute_tensor(whole, target.device_mesh, target.placements))
    else:
        dist.broadcast(whole, src=0)
        target.copy_(whole)


def _whole(tensor: Tensor) -> Tensor:
    """The tensor, gathered from all ranks where it is spread over them."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _reshard(policy: Policy) -> None:
    """Drop the gathered weights that the root keeps between its forward and its backward pass."""
    assert isinstance(policy, FSDPModule), "create_sharded_policy makes one"
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
    """Model, AdamW, schedule and loss as a backend that is spread over ranks: `create_pytorch_backend` for several.

    Every rank calls it. Then the leader runs a loop, and the others call `follow`.

    Args:
        ranks: this process among the others.

    The other arguments are those of `create_pytorch_backend`. Only the leader reads the model's weights.
    """
    ranks.begin()
    seed_everything(seed)
    tokenizer = load_tokenizer(model)
    num_tokens = count_token_ids(tokenizer) if within_tokenizer else None
    create = partial(create_sharded_policy, model, ranks=ranks, temperature=temperature, num_tokens=num_tokens)
    trained = create(
        policy, with_entropies=with_entropies, with_values=with_values, with_start_sample=with_start_sample
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
