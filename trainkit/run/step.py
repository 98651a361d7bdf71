"""The current optimizer step: its number of samples, its means and its gradients."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.utils.data import DataLoader

from trainkit.checkpoints import sharded as shards
from trainkit.config import TrainingConfig
from trainkit.errors import UsageError
from trainkit.launch import processes
from trainkit.launch.signals import Signals
from trainkit.numbers.loaders import share_of_batch
from trainkit.numbers.means import (
    CountValues,
    Divisors,
    NotYet,
    Selection,
    exact_type,
    sum_and_count,
)
from trainkit.numbers.optim import clip_gradients, learning_rates
from trainkit.numbers.orders import Length, Progress
from trainkit.numbers.randoms import Dropout, key, release_dropout, seed_dropout, seed_generators
from trainkit.repairs.private_names import prepared_optimizers
from trainkit.repairs.replaced import end_with_this_batch, take_loss_scale
from trainkit.run.compiling import Compiling
from trainkit.run.guards import EqualSizes, FiniteGuard, LoopGuard, check_gradients, check_rows

CALL = "run.step_mean(...)"


class Step:
    """The state of the current optimizer step. Run starts and finishes it.

    Attributes:
        num_in_step: samples in the step, over all processes and micro-batches.
        num_done_in_step: how many of them are in micro-batches before the current one.
        first: the number in the step of this process's first sample in the micro-batch.
        num_samples: samples of this process in it; 0: only padding.
        num_evaluated: the same in a batch of an evaluation; None outside of one.
        losses: this process's share of each mean of the micro-batch, for messages.
        rates, norms: learning rates, and norms before clipping, by their names in metrics.jsonl.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: TrainingConfig,
        signals: Signals,
        models: Sequence[nn.Module],
        length: Length,
    ):
        self.accelerator, self.config, self.signals = accelerator, config, signals
        self.length = length
        self.sharded = models if accelerator.is_fsdp2 else ()
        self.parallel = models if accelerator.num_processes > 1 and not self.sharded else ()
        layers = (layer for model in models for layer in model.modules())
        self.dropouts = [layer for layer in layers if isinstance(layer, Dropout)]
        self.optimizers = prepared_optimizers(accelerator)
        self.guard = FiniteGuard(accelerator)
        self.loop = LoopGuard(accelerator)
        self.micro_batch_size = config.batch_size // config.accumulate  # over all processes
        self.seed_key: tuple[int, ...] = ()
        self.name = ""
        self.rates: dict[str, float] = {}
        self.norms: dict[str, torch.Tensor] = {}
        self.num_in_step = self.num_done_in_step = self.first = self.num_samples = 0
        self.num_evaluated: int | None = None
        self.losses: list[torch.Tensor] = []
        self.divisors = Divisors(accelerator, config.accumulate)
        self.num_means = 0  # calls of run.mean(...) in this micro-batch
        self.sums: dict[int, list[torch.Tensor]] = {}  # of each of them, for each micro-batch
        self.sizes = EqualSizes()
        self.clipped: set[torch.optim.Optimizer] = set()
        self.stepped: set[torch.optim.Optimizer] = set()
        for optimizer in self.optimizers:
            optimizer.optimizer.register_step_pre_hook(self.enter_step)
        self.update_scale = take_loss_scale(accelerator, self.clip_once)
        self.compiling = Compiling(accelerator)

    def start(self, progress: Progress) -> None:
        """Start the step after this position of the run."""
        self.num_in_step = self.length.num_in_step(progress)
        self.seed_key = self.config.seed, progress.epoch, progress.step_in_epoch
        self.rates = learning_rates(self.optimizers)
        self.norms = {}
        rate = self.rates["learning_rate"]
        self.name = f"step {progress.step + 1}, learning rate {rate:.4g}"
        self.num_done_in_step = 0
        self.sums = {}
        # A short step may have fewer: what a script adds to the loss keeps its weight.
        self.accelerator.gradient_accumulation_steps = self.num_micro_batches
        self.sizes.num_steps += 1
        self.compiling.start_step(self.num_in_step == self.config.batch_size)

    @property
    def num_micro_batches(self) -> int:
        """How many there are in this step, which has fewer if it is short."""
        return -(-self.num_in_step // self.micro_batch_size)

    def take_micro_batches(
        self, batches: Iterator[Any], count: CountValues | None
    ) -> Iterable[Any]:
        """The micro-batches of this step; count adds up over them first, see Divisors."""
        micro_batches = islice(batches, self.num_micro_batches)
        if count is None or self.config.accumulate == 1:
            return micro_batches
        taken, rank = [*micro_batches], self.accelerator.process_index
        firsts = range(0, self.num_in_step, self.micro_batch_size)
        has_samples = [self.rows_of(rank, first)[1] > 0 for first in firsts]
        self.divisors.count_micro_batches(count, taken, has_samples)
        return taken

    def start_micro_batch(self, loader: DataLoader) -> None:
        """Seed the random numbers of the next forward pass by where it is in the step."""
        is_last = self.num_done_in_step + self.micro_batch_size >= self.num_in_step
        end_with_this_batch(loader, is_last)
        rank, device = self.accelerator.process_index, self.accelerator.device
        start, self.num_samples = self.rows_of(rank, self.num_done_in_step)
        self.first = self.num_done_in_step + start
        place = self.first, *self.seed_key
        seed_dropout(self.dropouts, device, *place, num_samples=self.num_samples)
        # All other random numbers, those of nn.Dropout too, depend on `first` and so on the number
        # of processes and micro-batches. Samples that are made meanwhile reseed those of the host.
        seed_generators(device, key("batch", *self.seed_key, self.first))
        self.losses = []
        self.num_means = 0

    def rows_of(self, rank: int, num_done_in_step: int) -> tuple[int, int]:
        """Return where the rows of a process start in a micro-batch, and their number."""
        num = min(self.micro_batch_size, self.num_in_step - num_done_in_step)
        slots = self.micro_batch_size // self.accelerator.num_processes
        start, stop = share_of_batch(num, self.micro_batch_size, rank * slots, (rank + 1) * slots)
        return start, stop - start

    def mean(
        self,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        weights: torch.Tensor | None,
        over: str | None = None,
    ) -> torch.Tensor:
        """See Run.step_mean.

        DDP, or FSDP2, divides by the number of processes and Accelerate by that of micro-batches,
        so this multiplies by both.
        """
        selection = weights if mask is None else mask
        if selection is None:
            self.sizes.check(CALL, values, self.num_samples, len(self.losses))
        total, count = sum_and_count(CALL, values, mask, weights, self.num_samples == 0)
        if selection is None:
            count = self.num_in_step * values.shape[1:].numel()
        number = self.num_done_in_step // self.micro_batch_size
        divisor = self.divisors.of(count, selection, over, number)
        share = total.detach() / divisor
        self.losses.append(share)
        scale = self.accelerator.num_processes * self.num_micro_batches / divisor
        # 0 * share is NaN if share is not finite: an infinite loss can have finite gradients.
        mean = total * (scale + 0 * share)
        self.loop.watch_mean(mean)
        return mean

    def clip_and_check(self, *optimizers: AcceleratedOptimizer) -> None:
        """See Run.clip_and_check."""
        if self.accelerator.sync_gradients:
            self._clip(*(optimizer.optimizer for optimizer in optimizers))

    def _clip(self, *optimizers: torch.optim.Optimizer) -> None:
        if not self.losses:
            raise RuntimeError(
                "optimizer.step() came without accelerator.backward(run.step_mean(losses)) in this "
                "batch of run.steps(...): give step_mean the loss of each sample "
                '(reduction="none"), and step the optimizer only there'
            )
        if self.parallel:
            check_gradients(self.parallel, *optimizers)
        # If another process died, waiting for the device would never end; these waits time out.
        if self.accelerator.scaler is None:
            self.signals.wait()  # the guard reads the norm of the previous step
        else:
            self.signals.barrier()  # GradScaler reads the gradients of this step
        self.loop.in_window = False  # zero_grad() may follow
        norm = clip_gradients(self.accelerator, self.config.clip_norm, *optimizers)
        order = [prepared.optimizer for prepared in self.optimizers]
        number = min(order.index(optimizer) for optimizer in optimizers)
        self.norms[f"grad_norm_{number}" if number else "grad_norm"] = norm.detach()
        self.clipped |= {*optimizers}
        self.guard.check(norm, self.losses, self.name)

    def clip_once(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Clip and check the gradients, unless the script itself has done so in this step."""
        if optimizer not in self.clipped:
            self._clip(optimizer)

    def enter_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Clip and check the gradients of an optimizer. torch calls this before its step."""
        self.clip_once(optimizer)
        self.loop.enter_step(optimizer)
        shards.forget_whole_weights(self.sharded)
        self.stepped.add(optimizer)

    def finish_micro_batch(self, is_last: bool) -> None:
        """Count the samples of the micro-batch; is_last says that an optimizer step followed it."""
        self.loop.finish_micro_batch(is_last)
        self.num_done_in_step = min(self.num_done_in_step + self.micro_batch_size, self.num_in_step)
        if is_last != (self.num_done_in_step == self.num_in_step):
            raise RuntimeError(
                "the optimizer was not stepped after the last micro-batch of --accumulate and no "
                "other: put the body of run.steps(...) inside `with accelerator.accumulate(model)`"
            )

    def finish(self) -> bool:
        """Update the loss scale; return False if fp16 skipped the step because it overflowed."""
        self.compiling.finish_step(self.num_in_step == self.config.batch_size)
        self.update_scale()
        # Of an optimizer that was not stepped now, step_was_skipped is that of an earlier step.
        skipped = any(o.step_was_skipped for o in self.optimizers if o.optimizer in self.clipped)
        self.guard.count_skipped(skipped, self.losses)
        if not skipped and (self.clipped - self.stepped or not self.stepped):
            raise RuntimeError(
                "optimizer.step() is missing before run.end_step(): each batch of run.steps(...) "
                "is a step of the optimizer; to add up the gradients of N batches give "
                "--accumulate N and N times the --batch-size"
            )
        if self.loop.num_left:
            self._check_shares()
        self.loop.finish_step(set() if skipped else self.stepped)
        self.clipped.clear()
        self.stepped.clear()
        self.losses = []
        return not skipped

    def check_weights(self) -> None:
        """Raise RunFailure on all processes unless the weights are finite and equal on all."""
        self.signals.barrier()
        self._check_shares()
        self.guard.finish(*self.optimizers)

    def _check_shares(self) -> None:
        self.sizes.check_processes(self.accelerator)
        self.divisors.check()

    def release(self) -> None:
        """Turn the dropout layers back into ordinary nn.Dropout, and compile as before."""
        release_dropout(self.dropouts)
        self.compiling.release()

    def gather(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """See Run.gather."""
        if self.config.accumulate > 1:
            raise UsageError(
                f"--accumulate {self.config.accumulate}: this loss compares the samples of a whole "
                "batch with each other, and a micro-batch is not one: use --accumulate 1"
            )
        return self._gather("run.gather(...)", rows), min(self.first, self.num_in_step - 1)

    def _gather(self, call: str, rows: torch.Tensor) -> torch.Tensor:
        check_rows(call, rows, self.num_samples)
        ranks = range(self.accelerator.num_processes)
        nums = [self.rows_of(rank, self.num_done_in_step)[1] for rank in ranks]
        return processes.gather_rows(rows[: self.num_samples], nums)

    def mean_of_samples(self, values: torch.Tensor) -> torch.Tensor:
        """See Run.mean."""
        self.sizes.check("run.mean(...)", values, self.num_samples, self.num_means)
        sums = self.sums.setdefault(self.num_means, [])
        self.num_means += 1
        own = values[: self.num_samples].detach()
        sums.append(own.sum(0, dtype=exact_type(values.device)))
        if not self.accelerator.sync_gradients:
            return torch.empty(0).as_subclass(NotYet)
        if len(sums) != self.num_micro_batches:
            raise RuntimeError(
                f"run.mean(...) was called in {len(sums)} of the {self.num_micro_batches} "
                "micro-batches of this step, and is the mean over all: call it in each, outside of "
                "`if accelerator.sync_gradients:`"
            )
        total = torch.stack(sums).sum(0)
        if self.accelerator.num_processes > 1:
            total = self.accelerator.reduce(total, reduction="sum")
        dtype = values.dtype if values.is_floating_point() else torch.get_default_dtype()
        return (total / self.num_in_step).to(dtype)

    def put(self, table: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
        """See Run.put."""
        with torch.no_grad():
            index, rows = (
                self._gather("run.put(...)", values.detach()).to(table.device)
                for values in (index, rows)
            )
            # Of a row that comes twice the last one counts, on every device.
            ordered, order = index.sort(stable=True)
            last = torch.searchsorted(ordered, ordered, right=True) - 1
            table[ordered] = rows[order[last]].to(table.dtype)


def sums_of(
    call: str,
    values: dict[str, torch.Tensor],
    mask: Selection,
    weights: Selection,
    num_samples: int,
    sizes: EqualSizes,
    dtype: torch.dtype,
) -> Iterator[tuple[str, torch.Tensor, int | torch.Tensor]]:
    """Yield name, sum and number of each of these values of a batch, or of those that count."""
    masks, weights_of = (
        dict.fromkeys(values, one) if isinstance(one, torch.Tensor) else one or {}
        for one in (mask, weights)
    )
    if unknown := (masks.keys() | weights_of.keys()) - values.keys():
        raise RuntimeError(
            f"{call} got mask= or weights= for {min(unknown)!r}, but values only of "
            f"{', '.join(values)}"
        )
    for name, value in values.items():
        named, chosen = f"{call}, for {name},", (masks.get(name), weights_of.get(name))
        if chosen[0] is None and chosen[1] is None:
            sizes.check(named, value, num_samples)
        yield name, *sum_and_count(named, value.detach(), *chosen, num_samples == 0, dtype)
