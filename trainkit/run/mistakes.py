"""Refuse the commonest mistakes of a copied loop, in the first steps of a run, where they show."""

from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from trainkit.errors import UsageError
from trainkit.numbers.optim import BY_STEP, weights_of
from trainkit.repairs.fixes import unwatch, watch
from trainkit.repairs.names import is_in_use, prepared_optimizers, prepared_schedulers
from trainkit.run.losses import Losses
from trainkit.run.unused import Unused
from trainkit.run.variables import variables_of_script

NUM_WATCHED = 3  # steps: every body of a loop has then shown what it forgets


class Mistakes:
    """What the body of run.steps(...) has called so far.

    Args:
        wrapped: what accelerator.prepare returned for each model.
        say: prints a note on the main process.

    Attributes:
        num_left: steps that are still watched.
        losses: what was done to the loss.
        unused: the weights that got no gradient.
        backward: accelerator.backward was called in this micro-batch.
        in_window: the step has earlier micro-batches, and its gradients were not clipped yet.
        zeroed: the optimizers whose zero_grad() was called since their last step.
        gradients: of each optimizer, the gradient of its smallest weight in its last step.
        positions: of each schedule, how often it had been stepped before this step.
        unmoved: the same before the first step of the epoch, [] before that.
        scalers: the GradScalers of the script by name that had scaled nothing before the steps.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        accumulate: int,
        wrapped: Sequence[nn.Module],
        say: Callable[[str], object],
    ):
        self.accelerator = accelerator
        self.say = say
        weights = weights_of(*prepared_optimizers(accelerator))
        self.losses = Losses(accelerator, weights, accumulate, say)
        self.unused = Unused(accelerator, wrapped)
        self.num_left = NUM_WATCHED
        self.backward = self.in_window = False
        self.zeroed: set[torch.optim.Optimizer] = set()
        self.gradients: dict[torch.optim.Optimizer, torch.Tensor | None] = {}
        self.smallest: dict[torch.optim.Optimizer, torch.Tensor] = {}
        self.said: set[str] = set()
        self.positions: list[int | None] = []
        self.unmoved: list[int | None] = []
        self.scalers: dict[str, torch.amp.GradScaler] = {}
        watch(accelerator, "backward", self._note_backward, self.losses.end_backward)
        for prepared in prepared_optimizers(accelerator):
            optimizer = prepared.optimizer
            weights = weights_of(optimizer)
            trained = [weight for weight in weights if weight.requires_grad] or weights
            self.smallest[optimizer] = min(trained, key=torch.numel)
            watch(optimizer, "zero_grad", partial(self._note_zeroed, optimizer))

    def _note_backward(self, loss: Any, *_: Any, **__: Any) -> None:
        self.losses.note_backward(loss)
        self.backward = True

    def _note_zeroed(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        if self.in_window:
            raise RuntimeError(
                "optimizer.zero_grad() before the step drops the gradients of the earlier "
                "micro-batches of --accumulate: call it after optimizer.step()"
            )
        self.zeroed.add(optimizer)

    def start_epoch(self, is_new: bool) -> None:
        """When run.steps(...) is called, remember where schedules are, and unused GradScalers."""
        self.positions = self._positions()
        self.unmoved = [] if is_new else self.unmoved
        if self.num_left:
            self.scalers = self._unused_scalers()

    def watch_mean(self, mean: torch.Tensor, values: torch.Tensor) -> None:
        """Look at the gradient that comes to a mean of run.step_mean, and at its values."""
        if self.num_left:
            self.losses.watch_mean(mean, values)

    def look_at_gradients(self, *optimizers: torch.optim.Optimizer) -> None:
        """Look for weights without a gradient, when those of a step are complete.

        Raises UsageError if a GradScaler of the script has scaled them.
        """
        for name, scaler in self.scalers.items():
            if is_in_use(scaler):
                raise UsageError(
                    f"`{name}` is a GradScaler: gradients are {scaler.get_scale():g} times too "
                    "large when run.clip_and_check(...) clips and checks them: leave it out, with "
                    "scale, unscale_, step and update, and choose mixed_precision: fp16 in the "
                    "YAML, which does all of that (docs/coming_from.md)"
                )
        self.in_window = False
        self.losses.close_window()
        if self.num_left:
            self.unused.look(*optimizers)

    def finish_micro_batch(self, is_last: bool, num_micro_batches: int) -> None:
        """Raise RuntimeError for a loss that came past Accelerate or Run, or was divided twice.

        num_micro_batches: of the step.
        """
        if self.num_left and not self.backward:
            raise RuntimeError(
                "accelerator.backward(loss) was not called: loss.backward() gives gradients that "
                "are --accumulate times too large, and under fp16 not scaled; call "
                "accelerator.backward(loss) instead"
            )
        if self.num_left:
            self.losses.finish_micro_batch(num_micro_batches)
        self.backward = False
        self.in_window = not is_last

    def check_zeroed(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError if the gradients of the last step are still in those of this one."""
        if not self.num_left:
            return
        gradient = self.smallest[optimizer].grad
        is_left = gradient is not None and gradient is self.gradients.get(optimizer)
        if is_left and optimizer not in self.zeroed:
            raise RuntimeError(
                "optimizer.zero_grad() was not called since the last step, whose gradients are "
                "still in those of this one: call it after optimizer.step()"
            )
        self.gradients[optimizer] = gradient
        self.losses.note_step(optimizer)
        self.zeroed.discard(optimizer)

    def finish_step(self, stepped: Set[torch.optim.Optimizer]) -> None:
        """Raise RuntimeError unless a schedule of make_scheduler was stepped with its optimizer.

        Of another schedule that was stepped several times there is a note.
        """
        if not self.num_left:
            return
        before = self.positions
        self.positions = self._positions()
        self.unmoved = self.unmoved or before
        for schedule, old, new in zip(self._schedules(), before, self.positions, strict=True):
            if old is not None and new is not None and new - old > 1:
                self._refuse_twice(schedule, new - old)
            if old == new and schedule in BY_STEP and schedule.optimizer in stepped:
                raise RuntimeError(
                    "scheduler.step() was not called, so the learning rate would stay as it is: "
                    "call it after optimizer.step() and before run.end_step()"
                )
        self.num_left -= 1
        if not self.num_left:
            self.unused.watch_on()
            # from now on nothing of this costs time
            self.gradients.clear()
            self.scalers.clear()
            self.in_window = False
            unwatch(self.accelerator, "backward")
            for optimizer in self.smallest:
                unwatch(optimizer, "zero_grad")

    def skip_step(self) -> None:
        """Note where the schedules are: fp16 skipped the step of one optimizer, not of all."""
        if self.num_left:
            self.positions = self._positions()

    def _refuse_twice(self, schedule: Any, times: int) -> None:
        name = type(schedule).__name__
        if schedule in BY_STEP:
            raise RuntimeError(
                f"scheduler.step() moved {name} {times} times in one step, so the learning rate "
                "would end too early: call it once, after optimizer.step()"
            )
        note = f"note: {name} was stepped {times} times in one step"
        if note not in self.said:
            self.said.add(note)
            self.say(note)

    def check_schedules(self, num_steps: int) -> None:
        """Raise RuntimeError if a schedule of make_scheduler is ahead of the steps of the run.

        num_steps: that the run has made, with those that fp16 skipped.
        """
        for schedule, position in zip(self._schedules(), self._positions(), strict=True):
            if schedule in BY_STEP and position is not None and position > num_steps:
                raise RuntimeError(
                    f"scheduler.step() was called {position} times in {num_steps} steps: a "
                    "schedule of make_scheduler(...) goes by steps, so call it once after "
                    "optimizer.step(), and not at the end of an epoch"
                )

    def say_notes(self) -> None:
        """Print what shows at the end of an epoch."""
        for note in (self.unmoved_schedules(), self.unused.note()):
            if note:
                self.say(note)

    def unmoved_schedules(self) -> str:
        """A note about schedules that were not stepped in an epoch; "" if all were."""
        names = [
            type(schedule).__name__
            for schedule, old, new in zip(
                self._schedules(), self.unmoved, self._positions(), strict=False
            )
            if old == new and old is not None
        ]
        return f"note: {', '.join(names)} was not stepped in this epoch" if names else ""

    def _unused_scalers(self) -> dict[str, torch.amp.GradScaler]:
        own = self.accelerator.scaler
        return {
            name: value
            for name, value in variables_of_script()
            if isinstance(value, torch.amp.GradScaler) and value is not own and not is_in_use(value)
        }

    def _schedules(self) -> list[Any]:
        return [prepared.scheduler for prepared in prepared_schedulers(self.accelerator)]

    def _positions(self) -> list[int | None]:
        # A ChainedScheduler has no position.
        return [getattr(schedule, "last_epoch", None) for schedule in self._schedules()]
