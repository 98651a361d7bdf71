"""The optimizer step at hand: how many samples it has, its losses, its gradients."""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from trainkit.checks.finite import FiniteGuard, Position
from trainkit.errors import UsageError
from trainkit.launch.signals import Signals
from trainkit.loaders import dealt
from trainkit.metrics import sum_and_count, sum_of
from trainkit.optim import clip_gradients, scale_gradients
from trainkit.private import prepared_optimizers
from trainkit.rng import Dropout, key, release_dropout, seed_dropout, seed_host


class Step:
    """What is known of the step that is being made. Run starts it and finishes it.

    Attributes:
        samples_draw: making a sample seeds numpy and random, at a time that depends on how far the
            loader reads ahead: so they are seeded again before each forward pass.
        position: the number of the step and its learning rate, for error messages.
        num_samples: samples of the step, over all processes and micro-batches.
        num_before: of them those in the micro-batches before the one at hand.
        num_rows: samples of this process in the micro-batch at hand.
        losses: this process's share of each mean of the micro-batch at hand, for the finite guard;
            under where= divided by num_samples until factor is known.
        num_counted: values that where= counted so far in this process, or the sum of its weights;
            None without where=.
        factor: num_samples / num_counted of all processes; None before clip_and_check.
        clipped, stepped: the optimizers that may be stepped now, and those that were.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        args: argparse.Namespace,
        num_used: int,
        signals: Signals,
        models: Sequence[nn.Module],
        samples_draw: bool = False,
    ):
        self.accelerator, self.args, self.num_used = accelerator, args, num_used
        self.signals, self.samples_draw = signals, samples_draw
        layers = (layer for model in models for layer in model.modules())
        self.dropouts = [layer for layer in layers if isinstance(layer, Dropout)]
        self.guard = FiniteGuard(accelerator)
        self.size = args.batch_size // args.accumulate  # of a micro-batch, over all processes
        self.key: tuple[int, ...] = ()
        self.position = Position()
        self.num_samples = self.num_before = self.num_rows = 0
        self.losses: list[torch.Tensor] = []
        self.num_counted: torch.Tensor | None = None
        self.factor: torch.Tensor | None = None
        self.clipped: set[torch.optim.Optimizer] = set()
        self.stepped: set[torch.optim.Optimizer] = set()
        for optimizer in prepared_optimizers(accelerator):
            optimizer.optimizer.register_step_pre_hook(self.check_clipped)
        self.update_scale = None
        if accelerator.scaler is not None:
            # Accelerate updates the loss scale after each optimizer's step: a second optimizer
            # would then unscale by a scale that has just changed. finish() updates it, once.
            self.update_scale = accelerator.scaler.update
            accelerator.scaler.update = lambda: None

    def start(self, epoch: int, batch: int, position: Position) -> None:
        """Start the step of this batch of the epoch."""
        num_done = batch * self.args.batch_size
        self.num_samples = min(self.args.batch_size, self.num_used - num_done)
        self.key, self.position = (self.args.seed, epoch, batch), position
        self.num_before, self.num_counted, self.factor = 0, None, None

    def start_micro_batch(self) -> None:
        """Seed what the next forward pass draws, by its place in the step."""
        first, self.num_rows = self.rows_of(self.accelerator.process_index)
        seed_dropout(self.dropouts, self.accelerator.device, self.num_before + first, *self.key)
        if self.samples_draw:
            seed_host(key(*self.key, self.num_before + first))
        self.losses = []

    def rows_of(self, rank: int) -> tuple[int, int]:
        """Where the rows of a process begin in the micro-batch at hand, and how many they are."""
        num, share = self._num_here(), self.size // self.accelerator.num_processes
        first, last = dealt(num, self.size, rank * share, (rank + 1) * share)
        return min(first, num), max(0, min(last, num) - first)

    def mean(self, values: torch.Tensor, where: torch.Tensor | None) -> torch.Tensor:
        """See Run.step_mean."""
        num = self.num_samples
        # An earlier mean of this step had where= and this one has not, or the other way round.
        mixed = (self.losses or self.num_before) and (where is None) != (self.num_counted is None)
        if mixed or (where is not None and self.losses):
            raise RuntimeError(
                "a step can have only one mean with where=, because its gradients are divided "
                "once: add up the losses before run.step_mean(...)"
            )
        if where is None:
            self.check_rows("run.step_mean(...)", values)
            total, num = sum_of(values), num * values.shape[1:].numel()
        else:
            total, counted = sum_and_count("run.step_mean(...)", values, where)
            self.num_counted = counted + (0 if self.num_counted is None else self.num_counted)
        loss = total.detach() / num
        self.losses.append(loss)
        scale = self.accelerator.num_processes * self.args.accumulate / num
        nan_unless_finite = 0 * loss  # else an infinite loss could have gradients that are finite
        return total * (scale + nan_unless_finite)

    def clip_and_check(self, *optimizers: AcceleratedOptimizer) -> None:
        """See Run.clip_and_check."""
        # A wait for the device may never end if another process died; these waits time out.
        if self.accelerator.scaler is None:
            self.signals.wait()  # the guard reads the norm of the step before
        else:
            self.signals.barrier()  # GradScaler reads the gradients of this step
        if self.num_counted is not None and self.factor is None:
            num_counted = self.accelerator.reduce(self.num_counted, reduction="sum")
            self.factor = self.num_samples / torch.where(num_counted == 0, 1, num_counted)
            self.losses = [loss * self.factor for loss in self.losses]
        if self.factor is not None:
            fresh = (each for each in optimizers if each.optimizer not in self.clipped)
            scale_gradients(self.factor, *fresh)
        norm = clip_gradients(self.accelerator, self.args.clip_norm, *optimizers)
        self.clipped |= {each.optimizer for each in optimizers}
        self.guard.check(norm, self.losses, self.position)

    def finish_micro_batch(self, is_last: bool) -> None:
        """Count its samples; is_last: an optimizer step followed it."""
        self.num_before += self._num_here()
        if is_last and self.num_before < self.num_samples:
            raise RuntimeError(
                "the optimizer was stepped before the last micro-batch of --accumulate: put the "
                "body of run.steps(...) into `with accelerator.accumulate(model)`"
            )

    def finish(self) -> bool:
        """Update the loss scale; return False if fp16 skipped the step because it overflowed."""
        if self.update_scale is not None:
            self.update_scale()
        skipped = self.accelerator.optimizer_step_was_skipped
        self.guard.count_skipped(skipped, self.losses)
        if self.clipped - self.stepped and not skipped:
            raise RuntimeError("optimizer.step() is missing after run.clip_and_check(optimizer)")
        self.clipped.clear()
        self.stepped.clear()
        return not skipped

    def release(self) -> None:
        """Let the model be an ordinary one again."""
        release_dropout(self.dropouts)

    def check_clipped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raise RuntimeError if an optimizer is stepped whose gradients were not clipped."""
        if optimizer not in self.clipped:
            raise RuntimeError(
                "optimizer.step() must come after run.clip_and_check(optimizer), which makes its "
                "gradients fit for it"
            )
        self.stepped.add(optimizer)

    def check_rows(self, call: str, values: torch.Tensor) -> None:
        """Raise RuntimeError if these are not values of the samples of the micro-batch at hand."""
        if values.ndim == 0 or values.shape[0] != self.num_rows:
            got = "a single number" if values.ndim == 0 else f"{len(values)} rows"
            raise RuntimeError(
                f"{call} got {got} for a batch of {self.num_rows} samples: give it the values "
                'of each sample, as losses with reduction="none" are, or say which values count '
                "with where="
            )

    def gather(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """See Run.gather."""
        if self.args.accumulate > 1:
            raise UsageError(
                f"--accumulate {self.args.accumulate}: this loss compares the samples of a whole "
                "batch with each other, and a micro-batch is not one: use --accumulate 1"
            )
        self.check_rows("run.gather(...)", rows)
        world = range(self.accelerator.num_processes)
        first = self.rows_of(self.accelerator.process_index)[0]
        if len(world) == 1:
            return rows, first
        nums = [self.rows_of(rank)[1] for rank in world]
        # All processes must send equally many rows: those that are missing are zeros.
        padded = torch.cat((rows, rows.new_zeros(max(nums) - len(rows), *rows.shape[1:])))
        from torch.distributed.nn.functional import all_gather  # imported late: a start is shorter

        shares = all_gather(padded)
        return torch.cat([share[:num] for share, num in zip(shares, nums, strict=True)]), first

    def _num_here(self) -> int:
        return min(self.size, self.num_samples - self.num_before)
