"""Refuse the commonest mistakes of a copied loop, each in the first step in which it shows."""

from collections.abc import Set
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator

from trainkit.optim import BY_STEP
from trainkit.private import prepared_optimizers, prepared_schedulers, watch


class Mistakes:
    """What the body of run.steps(...) has called so far; nothing here waits for a device.

    Attributes:
        backward: accelerator.backward was called in this micro-batch.
        zeroed: the optimizers whose zero_grad() was called since their last step.
        gradients: of each optimizer, the gradient of its smallest weight in its last step.
        positions: of each schedule, how often it had been stepped when this step began.
        unmoved: the same for the first step since run.steps(...) was called, [] before it.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.backward = False
        self.zeroed: set[torch.optim.Optimizer] = set()
        self.gradients: dict[torch.optim.Optimizer, torch.Tensor | None] = {}
        self.smallest: dict[torch.optim.Optimizer, torch.Tensor] = {}
        self.positions: list[int] = []
        self.unmoved: list[int] = []
        watch(accelerator, "backward", self._note_backward)
        for prepared in prepared_optimizers(accelerator):
            optimizer = prepared.optimizer
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            self.smallest[optimizer] = min(weights, key=torch.numel)
            watch(optimizer, "zero_grad", partial(self.zeroed.add, optimizer))

    def _note_backward(self) -> None:
        self.backward = True

    def start_epoch(self) -> None:
        """Forget where the schedules were in the epoch before."""
        self.unmoved = []

    def start_step(self) -> None:
        """Remember where the schedules are."""
        self.positions = self._positions()

    def start_micro_batch(self) -> None:
        """Forget the backward pass of the micro-batch before."""
        self.backward = False

    def finish_micro_batch(self) -> None:
        """Raise RuntimeError if the loss was backpropagated without Accelerate."""
        if not self.backward:
            raise RuntimeError(
                "accelerator.backward(loss) was not called: loss.backward() gives gradients that "
                "are --accumulate times too large, and under fp16 not scaled; call "
                "accelerator.backward(loss) instead"
            )

    def check_zeroed(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError if the gradients of the last step are still in those of this one."""
        gradient = self.smallest[optimizer].grad
        left = gradient is not None and gradient is self.gradients.get(optimizer)
        if left and optimizer not in self.zeroed:
            raise RuntimeError(
                "optimizer.zero_grad() is missing: the gradients of all earlier steps are still in "
                "those of this one; call it after optimizer.step()"
            )
        self.gradients[optimizer] = gradient
        self.zeroed.discard(optimizer)

    def check_schedules(self, stepped: Set[torch.optim.Optimizer]) -> None:
        """Raise RuntimeError if a schedule of make_scheduler was not stepped with its optimizer."""
        self.unmoved = self.unmoved or self.positions
        for schedule, before in zip(self._schedules(), self.positions, strict=True):
            is_due = schedule in BY_STEP and schedule.optimizer in stepped
            if is_due and schedule.last_epoch == before:
                raise RuntimeError(
                    "scheduler.step() is missing, so the learning rate would stay as it is: call "
                    "it after optimizer.step()"
                )

    def check_epoch(self) -> None:
        """Raise RuntimeError if a schedule was not stepped at all in an epoch that has ended."""
        for schedule, before in zip(self._schedules(), self.unmoved, strict=False):
            if schedule.last_epoch == before:
                raise RuntimeError(
                    f"the schedule {type(schedule).__name__} was not stepped in this epoch, so the "
                    "learning rate would stay as it is: call scheduler.step() after "
                    "optimizer.step(), or before run.end_epoch(...) if it goes by epochs"
                )

    def _schedules(self) -> list[Any]:
        return [prepared.scheduler for prepared in prepared_schedulers(self.accelerator)]

    def _positions(self) -> list[int]:
        return [schedule.last_epoch for schedule in self._schedules()]
