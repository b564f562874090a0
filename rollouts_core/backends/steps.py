"""Run optimizer steps without waiting for the GPU: queue a whole step, and read its losses and metrics afterwards.

    forward, add, backward --+
    forward, add, backward --+-> take: clip, AdamW unless a number is not finite     no call waits for the device
                                   |
                                   +-> look: read all numbers of the step in one transfer, then advance the schedule

On the CPU the numbers of each forward pass are checked at once, so a step ends at its first loss that is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from rollouts_core.algorithms.loss import LossMetrics, Metrics, read_metrics, stack_scalars
from rollouts_core.backends.protocol import ImmediateTrainFuture, LateTrainFuture, TrainFuture
from rollouts_core.errors import NonFiniteError
from rollouts_core.metrics import sum_metrics

Gather = Callable[[list[Metrics | None]], list[list[Metrics | None]]]
"""A function that every rank calls with its own list, and that returns the lists of all ranks."""


class Step:
    """The numbers (losses, metrics, gradient norm) of one optimizer step. The numbers stay on the device until
    `read`."""

    def __init__(self) -> None:
        self._unread: list[LossMetrics | None] = []
        self._metrics: list[Metrics] = []
        self._end: LossMetrics | None = None
        self._outcome: Metrics | None = None
        self.error: NonFiniteError | None = None
        """Error that names the step's first number that is not finite. `read` sets it."""

    @property
    def is_read(self) -> bool:
        """True if all numbers of the step were copied to host memory."""
        return not self._unread and (self._outcome is not None or self._end is None)

    def add(self, metrics: LossMetrics | None) -> int:
        """Add the metrics of a micro-batch (None on a rank without rows), and return the micro-batch's index in the
        step."""
        self._unread.append(metrics)
        return len(self._metrics) + len(self._unread) - 1

    def end(self, norm: Tensor, lr: float) -> None:
        """Add the norm of the step's gradient, and the learning rate."""
        self._end = {"grad_norm": norm, "lr": lr}

    def is_nonfinite(self, device: torch.device) -> Tensor:
        """A scalar on `device` for `found_inf` of optimizers: 1.0 if an unread number is not finite, else 0.0."""
        assert self._end is not None, "call end first"
        values = [each["loss"] for each in self._unread if each is not None] + [self._end["grad_norm"]]
        on_host = [value for value in values if not isinstance(value, Tensor)]
        if not all(map(math.isfinite, on_host)):
            return torch.ones((), device=device)
        on_device = stack_scalars([value.to(device) for value in values if isinstance(value, Tensor)])
        return (~torch.isfinite(on_device).all()).float()

    def read(self, gather: Gather, *, num_optim_steps: int) -> None:
        """Copy all unread numbers to host memory. This waits for the device.

        Args:
            num_optim_steps: number of earlier optimizer steps, for the error message.
        """
        if self.is_read:
            return
        unread, self._unread = self._unread, []
        *own, end = read_metrics([*(each or {} for each in unread), self._end or {}])
        if unread:
            by_rank = gather([None if each is None else read for each, read in zip(unread, own, strict=True)])
            by_place = zip(*by_rank, strict=True)
            self._metrics += [sum_metrics([each for each in of_ranks if each is not None]) for of_ranks in by_place]
        if self._end is not None:
            self._outcome = end
        numbers = [("loss", each["loss"]) for each in self._metrics]
        numbers += [("gradient norm", end["grad_norm"])] if end else []
        wrong = [(name, value) for name, value in numbers if not math.isfinite(value)]
        if wrong and self.error is None:
            self.error = nonfinite_error(*wrong[0], num_optim_steps=num_optim_steps)

    def metrics_of(self, place: int) -> Metrics:
        """The metrics of a micro-batch. Call `read` first.

        Raises:
            NonFiniteError: the micro-batch's loss is not finite.
        """
        metrics = self._metrics[place]
        if self.error is not None and not math.isfinite(metrics["loss"]):
            raise self.error
        return metrics

    def outcome(self) -> Metrics:
        """The gradient norm and the learning rate of the step. Call `read` first.

        Raises:
            NonFiniteError: a number of the step is not finite.
        """
        assert self._outcome is not None, "call `end` and `read` first"
        if self.error is not None:
            raise self.error
        return self._outcome


class OptimizerSteps:
    """Queues optimizer steps on a device, with an optimizer and its schedule.

    Args:
        device: device of the gradients and losses.
        clip: clips the gradient, and returns its norm before clipping, on the device.
        drop_gradient: discards the gradient of a step that ends early.
        gather: exchanges metrics between ranks.
        agree: sets a number on the device to its maximum over all ranks.
        look_together: calls `look` on every rank, or None with one rank.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: LambdaLR,
        *,
        device: torch.device,
        clip: Callable[[], Tensor],
        drop_gradient: Callable[[], None],
        gather: Gather = lambda own: [own],
        agree: Callable[[Tensor], None] = lambda number: None,
        look_together: Callable[[], None] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.num_done = 0
        """Number of optimizer steps known to have succeeded. A step counts after `look` has read its numbers."""
        self.is_late = device.type != "cpu"
        """True if numbers stay on the device until the `result` of their future is requested."""
        self._device = device
        self._clip, self._drop_gradient, self._gather, self._agree = clip, drop_gradient, gather, agree
        self._look_together = look_together or self.look
        self._current = Step()
        self._taken: Step | None = None

    def add(self, metrics: LossMetrics | None) -> TrainFuture[Metrics]:
        """Add the metrics of a micro-batch (None on a rank without rows), before its backward pass.

        Raises:
            NonFiniteError: the loss is not finite. On other devices than the CPU, the future raises the error.
        """
        assert self._taken is None, "call `settle` before the next step"
        step = self._current
        place = step.add(metrics)
        if self.is_late:
            return LateTrainFuture(partial(self._metrics_of, step, place), lambda: step.is_read)
        self.look()
        return ImmediateTrainFuture(step.metrics_of(place))

    def take(self, *, before_change: Callable[[], object] = lambda: None) -> TrainFuture[Metrics]:
        """Clip the gradient and update the weights. Waits for the device only if the optimizer does not support
        `found_inf`.

        Args:
            before_change: called before the weights change.

        Raises:
            NonFiniteError: a number is not finite. On other devices than the CPU, the future raises the error.
        """
        step, self._current = self._current, Step()
        step.end(self._clip(), float(self.optimizer.param_groups[0]["lr"]))
        self._taken = step
        before_change()
        if self.is_late and getattr(self.optimizer, "_step_supports_amp_scaling", False):
            self._step_unless(step.is_nonfinite(self._device))
        else:
            step.read(self._gather, num_optim_steps=self.num_done)
            if step.error is None:
                self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.is_late:
            return LateTrainFuture(partial(self._outcome_of, step), lambda: step.is_read)
        self.look()
        return ImmediateTrainFuture(step.outcome())

    def settle(self) -> None:
        """Wait until the numbers of the last step are read. With several ranks, only the leader calls this."""
        if self._taken is not None:
            self._look_together()

    def look(self) -> None:
        """Read the numbers of the step that `take` ended, and count the step if they are finite. If `take` ended no
        step, read the numbers of the current step, and drop its gradient if one is not finite."""
        step = self._taken or self._current
        step.read(self._gather, num_optim_steps=self.num_done)
        if step is self._taken:
            self._taken = None
            if step.error is None:
                self.scheduler.step()
                self.num_done += 1
        elif step.error is not None:
            self._current = Step()
            self._drop_gradient()

    def _metrics_of(self, step: Step, place: int) -> Metrics:
        if not step.is_read:
            self._look_together()
        return step.metrics_of(place)

    def _outcome_of(self, step: Step) -> Metrics:
        self.settle()
        return step.outcome()

    def _step_unless(self, is_nonfinite: Tensor) -> None:
        """Update the weights unless `is_nonfinite` is 1 on any rank. torch.amp.GradScaler uses the same mechanism."""
        self._agree(is_nonfinite)
        self.optimizer.found_inf = is_nonfinite  # type: ignore[attr-defined]  # torch sets it the same way
        try:
            self.optimizer.step()
        finally:
            del self.optimizer.found_inf  # type: ignore[attr-defined]


def nonfinite_error(quantity: str, value: float, *, num_optim_steps: int) -> NonFiniteError:
    """Create the error for a loss or gradient norm that is not finite."""
    return NonFiniteError(
        f"the {quantity} became {value} after {num_optim_steps} optimizer steps: lower the learning rate, or check the "
        "samples of this step"
    )
