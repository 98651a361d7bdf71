"""The current optimizer step: its number of samples, its losses and its gradients."""

from collections.abc import Sequence
from typing import Any

from trainkit import shards

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from trainkit.checks.finite import FiniteGuard, Position
from trainkit.config import TrainingConfig
from trainkit.errors import UsageError
from trainkit.launch import nodes
from trainkit.launch.signals import Signals
from trainkit.loaders import InMemory, share_of_batch
from trainkit.metrics import sum_and_count, sum_of
from trainkit.optim import clip_gradients, learning_rates, scale_gradients
from trainkit.position import Length, Progress
from trainkit.private import prepared_optimizers, take_loss_scale
from trainkit.rng import Dropout, key, release_dropout, seed_dropout, seed_host


class Step:
    """The state of the current optimizer step. Run starts and finishes it.

    Attributes:
        seeds_host: making samples reseeds numpy and random, at times that depend on prefetching; so
            they are reseeded before every forward pass.
        rates: the learning rate of each optimizer in the step.
        position: the number of the step and its learning rate, for error messages.
        num_samples: samples in the step, over all processes and micro-batches.
        num_before: how many of them are in micro-batches before the current one.
        num_rows: samples of this process in the current micro-batch.
        losses: this process's share of each mean of the current micro-batch, for FiniteGuard; with
            mask= or weights= it is divided by num_samples until `factor` is known.
        selects: whether the means of this step have mask= or weights=; None before the first one.
        num_counted: how many values mask= has selected so far in this process, or the sum of
            weights=; 0 if neither is given.
        factor: num_samples / num_counted of all processes; None before clip_and_check.
        clipped, stepped: the optimizers that may be stepped now, and those already stepped.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: TrainingConfig,
        signals: Signals,
        models: Sequence[nn.Module],
        train_set: Any,
        length: Length,
    ):
        self.accelerator, self.config, self.signals = accelerator, config, signals
        self.length, self.seeds_host = length, type(train_set) is not InMemory
        self.sharded = models if accelerator.is_fsdp2 else ()
        layers = (layer for model in models for layer in model.modules())
        self.dropouts = [layer for layer in layers if isinstance(layer, Dropout)]
        self.optimizers = prepared_optimizers(accelerator)
        self.guard = FiniteGuard(accelerator)
        self.size = (
            config.batch_size // config.accumulate
        )  # samples per micro-batch, over all processes
        self.key: tuple[int, ...] = ()
        self.position = Position()
        self.rates: dict[str, float] = {}
        self.num_samples = self.num_before = self.num_rows = 0
        self.losses: list[torch.Tensor] = []
        self.num_counted: int | torch.Tensor = 0
        self.selects: bool | None = None
        self.factor: torch.Tensor | None = None
        self.clipped: set[torch.optim.Optimizer] = set()
        self.stepped: set[torch.optim.Optimizer] = set()
        for optimizer in self.optimizers:
            optimizer.optimizer.register_step_pre_hook(self.check_clipped)
        self.update_scale = take_loss_scale(accelerator)

    def start(self, progress: Progress) -> None:
        """Start the step after this position of the run."""
        num_left = self.length.num_used - self.length.num_done(progress)
        self.num_samples = min(self.config.batch_size, num_left)
        self.key = self.config.seed, progress.epoch, progress.batch
        self.rates = learning_rates(self.optimizers)
        self.position = Position(progress.step + 1, self.rates["learning_rate"])
        self.num_before, self.num_counted = 0, 0
        self.selects = self.factor = None

    def start_micro_batch(self) -> None:
        """Seed the random numbers of the next forward pass by its place in the step."""
        first, self.num_rows = self.rows_of(self.accelerator.process_index)
        seed_dropout(self.dropouts, self.accelerator.device, self.num_before + first, *self.key)
        if self.seeds_host:
            seed_host(key(*self.key, self.num_before + first))
        self.losses = []

    def rows_of(self, rank: int) -> tuple[int, int]:
        """Return where the rows of a process start in the current micro-batch, and their number."""
        num, slots = self._num_here(), self.size // self.accelerator.num_processes
        start, stop = share_of_batch(num, self.size, rank * slots, (rank + 1) * slots)
        return start, stop - start

    def mean(
        self, values: torch.Tensor, mask: torch.Tensor | None, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """This process's share of the mean of `values` in the step, for accelerator.backward.

        The gradient becomes that of the mean over the whole step, over all processes and
        micro-batches: DDP divides by the number of processes and Accelerate by the number of
        micro-batches, so this multiplies by both. A value that is not finite gives NaN gradients
        on all processes.

        Args:
            values: (samples, ...), the losses of this process's batch, with reduction="none".
            mask: bool, True for the values that count, such as the tokens of an answer.
            weights: float, the weight of each value: the mean is sum(weights * values) /
                sum(weights) over the whole step. With mask or weights, `values` may have any shape,
                the same as theirs. The divisor is known only after the last backward, and
                clip_and_check() divides the gradients by it, so a step can have only one mean if
                that one has a mask or weights. If nothing counts, the gradient is 0.

        Raises RuntimeError if values are already reduced, or are not of this batch.
        """
        selects = mask is not None or weights is not None
        if self.selects not in (None, selects) or (selects and self.losses):
            raise RuntimeError(
                "a step can have only one mean with mask= or weights=, because its gradients are "
                "divided once: add up the losses before run.step_mean(...)"
            )
        if selects:
            total, counted = sum_and_count("run.step_mean(...)", values, mask, weights)
            self.num_counted = counted + self.num_counted
            divisor = self.num_samples  # clip_and_check() corrects it once all are counted
        else:
            self.check_rows("run.step_mean(...)", values)
            total, divisor = sum_of(values), self.num_samples * values.shape[1:].numel()
        self.selects, share = selects, total.detach() / divisor
        self.losses.append(share)
        # DDP divides by the processes and Accelerate by the micro-batches; this undoes both.
        scale = self.accelerator.num_processes * self.config.accumulate / divisor
        # 0 * share is NaN if share is not finite: an infinite loss can have finite gradients.
        return total * (scale + 0 * share)

    def clip_and_check(self, *optimizers: AcceleratedOptimizer) -> None:
        """Clip the gradients to --clip-norm; stop all processes if they are not finite.

        On a GPU this is noticed one step later, but always before a checkpoint. Several optimizers
        in one call are clipped by the joint norm of their gradients. Every process must call this.
        Raises RunFailure on all of them.
        """
        for each in optimizers:
            if each not in self.optimizers:
                raise RuntimeError(
                    f"run.clip_and_check(...) got a {type(each).__name__} that accelerator.prepare "
                    "did not return: prepare every optimizer, or a resume loses its state, and "
                    "pass several as *optimizers"
                )
        # If another process died, waiting for the device would never end; these waits time out.
        if self.accelerator.scaler is None:
            self.signals.wait()  # the guard reads the norm of the previous step
        else:
            self.signals.barrier()  # GradScaler reads the gradients of this step
        if self.selects and self.factor is None:
            num_counted = self.accelerator.reduce(self.num_counted, reduction="sum")
            self.factor = self.num_samples / torch.where(num_counted == 0, 1, num_counted)
            self.losses = [loss * self.factor for loss in self.losses]
        if self.factor is not None:
            fresh = (each for each in optimizers if each.optimizer not in self.clipped)
            scale_gradients(self.factor, *fresh)
        norm = clip_gradients(self.accelerator, self.config.clip_norm, *optimizers)
        self.clipped |= {each.optimizer for each in optimizers}
        self.guard.check(norm, self.losses, self.position)

    def finish_micro_batch(self, is_last: bool) -> None:
        """Count the samples of the micro-batch; is_last says that an optimizer step followed it."""
        self.num_before += self._num_here()
        if is_last and self.num_before < self.num_samples:
            raise RuntimeError(
                "the optimizer was stepped before the last micro-batch of --accumulate: put the "
                "body of run.steps(...) inside `with accelerator.accumulate(model)`"
            )

    def finish(self) -> bool:
        """Update the loss scale; return False if fp16 skipped the step because it overflowed."""
        self.update_scale()
        skipped = self.accelerator.optimizer_step_was_skipped
        self.guard.count_skipped(skipped, self.losses)
        if self.clipped - self.stepped and not skipped:
            raise RuntimeError("optimizer.step() is missing after run.clip_and_check(optimizer)")
        self.clipped.clear()
        self.stepped.clear()
        return not skipped

    def check_weights(self) -> None:
        """Raise RunFailure on all processes unless the weights are finite and equal on all."""
        self.signals.barrier()
        self.guard.finish(*self.optimizers)

    def explain(self, error: BaseException) -> None:
        """If this process has no sample, add a note about it to an error of the body."""
        if self.num_rows == 0:
            error.add_note(
                "This process has no sample of this short batch, and a layer or a loss may refuse "
                "0 rows (docs/your_own.md): use another --batch-size, or --drop-last"
            )

    def release(self) -> None:
        """Turn the dropout layers of the models back into ordinary nn.Dropout."""
        release_dropout(self.dropouts)

    def check_clipped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raise RuntimeError if the gradients of an optimizer were not clipped before its step.

        torch calls this before each step of an optimizer.
        """
        if optimizer not in self.clipped:
            raise RuntimeError(
                "optimizer.step() must come after run.clip_and_check(optimizer), which scales, "
                "clips and checks its gradients"
            )
        shards.forget_whole_weights(self.sharded)
        self.stepped.add(optimizer)

    def check_rows(self, call: str, values: torch.Tensor) -> None:
        """Raise RuntimeError unless there is a row for each sample of the current micro-batch."""
        if values.ndim == 0 or values.shape[0] != self.num_rows:
            got = "a single number" if values.ndim == 0 else f"{len(values)} rows"
            raise RuntimeError(
                f"{call} got {got} for a batch of {self.num_rows} samples: give it the values "
                'of each sample, as losses with reduction="none" are, or say which values count '
                "with mask="
            )

    def gather(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the rows of the whole batch, of all processes, and where this process's start.

        This is for losses that compare the samples of a batch with each other. Gradients flow back
        to the process that a row came from. Every process must call this. Raises UsageError with
        --accumulate above 1, and RuntimeError if the rows are not those of this batch.

        Args:
            rows: (samples, ...) of this process's batch.
        """
        if self.config.accumulate > 1:
            raise UsageError(
                f"--accumulate {self.config.accumulate}: this loss compares the samples of a whole "
                "batch with each other, and a micro-batch is not one: use --accumulate 1"
            )
        self.check_rows("run.gather(...)", rows)
        starts, nums = zip(*map(self.rows_of, range(self.accelerator.num_processes)), strict=True)
        return nodes.gather_rows(rows, nums), starts[self.accelerator.process_index]

    def _num_here(self) -> int:
        return min(self.size, self.num_samples - self.num_before)
