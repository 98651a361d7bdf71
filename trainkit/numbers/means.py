"""Exact means over all processes. Adding a value does not wait for the device."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from trainkit.errors import UsageError
from trainkit.repairs.private_names import add_to_each

# mask= or weights=: one tensor for all values, or one for each of some names.
Selection: TypeAlias = torch.Tensor | dict[str, torch.Tensor] | None
# What count=, of run.steps, returns for a micro-batch: how many values its mean is over, or, of
# several means, each by its name.
Number: TypeAlias = torch.Tensor | float
CountValues = Callable[[Any], Number | dict[str, Number]]

DIFFERENT = 1e-5  # relative difference of two sums of weights, which may be added up in any order


def exact_type(device: torch.device) -> torch.dtype:
    """float64, in which a count may exceed 2**24; float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def sum_and_count(
    call: str,
    values: torch.Tensor,
    mask: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    is_padding: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, int | torch.Tensor]:
    """Return the sum and the number of the values, or of those where `mask` is True.

    With weights, return the sum of weights * values and the sum of weights. The host does not wait.
    Of a padding sample, in a process that has no other, nothing counts; the sum keeps its graph
    and its gradient is 0.

    dtype: of the sums; by default that of the values, and float32 for 16-bit values, whose sum
        would overflow or lose precision.
    """
    if dtype is None and values.dtype.itemsize == 2:
        dtype = torch.float32
    selection = mask if weights is None else weights
    if selection is not None:
        fits = selection.dtype == torch.bool if weights is None else selection.is_floating_point()
        both = mask is not None and weights is not None
        if both or not fits or selection.requires_grad or selection.shape != values.shape:
            raise RuntimeError(
                f"{call} got values of shape {tuple(values.shape)}, with mask= or weights= of "
                f"shape {tuple(selection.shape)} and {selection.dtype}: give it one of the two, of "
                "the same shape, a mask as bool, weights as float without a gradient; losses with "
                'reduction="none" are not yet reduced'
            )
    count: int | torch.Tensor = values.numel()
    if selection is not None:
        count = selection.sum(dtype=dtype if mask is None else None)
    if is_padding:  # the counts of all processes are added up, so they have one dtype
        nothing = torch.zeros_like(values, dtype=torch.bool)
        return torch.where(nothing, values, 0).sum(dtype=dtype), count * 0
    if mask is not None:
        values = torch.where(mask, values, 0)
    elif weights is not None:
        values = torch.where(weights != 0, values * weights, 0)
    return values.sum(dtype=dtype), count


class NotYet(torch.Tensor):
    """What run.mean(...) returns before the last micro-batch: every operation is an error."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "run.mean(...) is the mean of a whole step, which --accumulate ends with the last "
            "micro-batch: use what it returns inside `if accelerator.sync_gradients:`"
        )


class RunningMeans:
    """Means of the values of an epoch over all processes. Adding does not wait for the device.

    Every process must add the same names, in any order.

    gather: like gather_object, which waits for a GPU; Signals.gather does not.
    """

    def __init__(self, accelerator: Accelerator, gather: Callable[[list], list] = gather_object):
        self.accelerator = accelerator
        self.gather = gather
        self.dtype = exact_type(accelerator.device)
        # Since the last flush.
        self.sums: dict[str, torch.Tensor] = defaultdict(
            lambda: torch.zeros((), dtype=self.dtype, device=accelerator.device)
        )
        self.counts: dict[str, int | torch.Tensor] = defaultdict(int)
        self.totals: dict[str, np.ndarray] = {}  # sum and count of the epoch, flushed

    def add_all(self, values: Iterable[tuple[str, torch.Tensor, int | torch.Tensor]]) -> None:
        """For each name, add the sum of `count` values of this process, a scalar on the device."""
        sums, totals = [], []
        for name, total, count in values:
            self.totals.setdefault(name, np.zeros(2))
            self.counts[name] += count
            sums.append(self.sums[name])
            totals.append(total)
        if sums:
            add_to_each(sums, totals)

    def flush(self, prefix: str) -> dict[str, float]:
        """PREFIX_NAME: the means since the last flush. Every process must call this."""
        window = self._window()
        self.sums.clear()
        self.counts.clear()
        for name, pair in window.items():
            self.totals[name] = self.totals[name] + pair
        return divide(prefix, window)

    def compute(self, prefix: str) -> dict[str, float]:
        """PREFIX_NAME: the means of the epoch so far. Every process must call this."""
        window = self._window()
        return divide(prefix, {name: self.totals[name] + window[name] for name in window})

    def clear(self) -> None:
        """Start a new epoch."""
        for values in (self.sums, self.counts, self.totals):
            values.clear()

    def state(self) -> dict[str, Any]:
        """Return the whole state, as JSON. Every process must call this."""
        totals = {name: pair.tolist() for name, pair in self.totals.items()}
        return {"rows": gather_object([self._row().tolist()]), "totals": totals}

    def load(self, state: dict[str, Any]) -> None:
        """Restore state(), which may come from a run with another number of processes."""
        rows = torch.tensor(state["rows"], dtype=torch.float64)
        accelerator = self.accelerator
        if len(rows) == accelerator.num_processes:
            row = rows[accelerator.process_index]
        else:
            row = rows.sum(0) * accelerator.is_main_process
        self.totals = {name: np.array(pair) for name, pair in state["totals"].items()}
        pairs = row.view(len(self.totals), 2)
        for name, (total, count) in zip(sorted(self.totals), pairs, strict=True):
            self.sums[name] = total.to(accelerator.device, self.dtype, copy=True)
            self.counts[name] = int(count) if count.item().is_integer() else count.item()

    def _row(self) -> torch.Tensor:
        """Sum and count of each name, sorted by name. Every process must call this."""
        names = sorted(self.totals)
        if self.accelerator.num_processes > 1:
            everybody = self.gather([names])
            if others := [theirs for theirs in everybody if theirs != names]:
                raise RuntimeError(
                    f"run.add(...) or run.evaluate(...) got {', '.join(names) or 'nothing'} on one "
                    f"process and {', '.join(others[0]) or 'nothing'} on another: every process "
                    "must add the same names"
                )
        device, dtype = self.accelerator.device, self.dtype
        numbers = []
        for name in names:
            count = self.counts[name]
            if not isinstance(count, torch.Tensor):  # as_tensor would wait for the device
                count = torch.full((), count, dtype=dtype, device=device)
            numbers += [self.sums[name], count.to(dtype)]
        return torch.stack(numbers) if numbers else torch.zeros(0, dtype=dtype, device=device)

    def _window(self) -> dict[str, np.ndarray]:
        """Sum and count of each name over all processes, since the last flush."""
        row = self.accelerator.reduce(self._row(), reduction="sum")
        pairs = dict(zip(sorted(self.totals), row.view(-1, 2).tolist(), strict=True))
        return {name: np.array(pairs[name]) for name in self.totals}


def divide(prefix: str, pairs: dict[str, np.ndarray]) -> dict[str, float]:
    """PREFIX_NAME: each sum divided by its own count; names with a count of 0 are left out."""
    return {
        f"{prefix}_{name}": float(total / count) for name, (total, count) in pairs.items() if count
    }


class Divisors:
    """What each mean of a step is divided by: its own count, over processes and micro-batches.

    The gradients of a step are added up, so each count must be known before the first backward. A
    mask's count is summed over the processes, or, with several micro-batches, given by count=.

    Attributes:
        given: what count= gave, by name: for each micro-batch of this process, for the whole step.
            A count that was returned alone has the name None.
        num_wrong: how often a mask differed from what count= gave; None without count=.
    """

    def __init__(self, accelerator: Accelerator, accumulate: int):
        self.accelerator = accelerator
        self.accumulate = accumulate
        self.given: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}
        self.num_wrong: torch.Tensor | None = None

    @torch.no_grad()
    def count_micro_batches(
        self, count: CountValues, micro_batches: Sequence[Any], has_samples: Sequence[bool]
    ) -> None:
        """Add up count(micro_batch), by name, over the micro-batches and the processes.

        Every process must call this. has_samples: False if this micro-batch is only padding here.
        """
        device = self.accelerator.device
        counts = [count(micro_batch) for micro_batch in micro_batches]
        parts = [part if isinstance(part, dict) else {None: part} for part in counts]
        if any(part.keys() != parts[0].keys() for part in parts):
            raise RuntimeError(
                "count= of run.steps(...) returned other names for one micro-batch than for "
                "another: return each name always, even if it is 0"
            )
        for name in sorted(parts[0], key=str):  # in one order on all processes
            # Not by a tensor of booleans: to copy it to a GPU would wait for the GPU.
            numbers = torch.stack(
                [
                    torch.as_tensor(part[name], device=device).sum() * int(has)
                    for part, has in zip(parts, has_samples, strict=True)
                ]
            )
            # Whole numbers stay whole; a sum of weights may be larger than float32 can count.
            if numbers.is_floating_point():
                numbers = numbers.to(exact_type(device))
            self.given[name] = numbers, self._sum(numbers.sum())
        if self.num_wrong is None:
            self.num_wrong = torch.zeros((), dtype=torch.int64, device=device)

    def of(
        self,
        count: int | torch.Tensor,
        selection: torch.Tensor | None,
        over: str | None,
        micro_batch: int,
    ) -> int | torch.Tensor:
        """Return what the sum of a mean is divided by before backward.

        count: of this process's values; of the whole step if nothing selects from them.
        """
        if selection is None and over is None:
            return count
        if selection is not None and self.accumulate == 1:
            total = self._sum(count)
            return total + (total == 0)  # if nothing counts, the sum is 0, and so is the mean
        if selection is not None and not self.given:
            raise UsageError(
                f"--accumulate {self.accumulate}: a mean with mask= or weights= is divided by how "
                "many values count in all micro-batches of the step: give run.steps(train_loader, "
                "count=function) a function that returns this number for a micro-batch "
                "(docs/loop.md, Several means), or use --accumulate 1"
            )
        if selection is None or over not in self.given:
            raise RuntimeError(
                f"run.step_mean(...) got over={over!r}: it goes with mask= or weights=, and must "
                "be a name that count= of run.steps(...) returns, which are "
                f"{', '.join(map(repr, self.given)) or 'none'} (None: one number, without a name)"
            )
        numbers, total = self.given[over]
        difference = (count - numbers[micro_batch]).abs()
        tolerance = 0 if selection.dtype == torch.bool else DIFFERENT
        self.num_wrong = self.num_wrong + (difference > tolerance * numbers[micro_batch].abs())
        return total + (total == 0)

    def check(self) -> None:
        """Raise RuntimeError if count= gave other numbers. Every process must call this."""
        if self.num_wrong is not None and self._sum(self.num_wrong) > 0:
            raise RuntimeError(
                "count= of run.steps(...) and what run.step_mean(...) selects differ: count= must "
                "return the sum of the same mask, or of the same weights in float32"
            )

    def _sum(self, count: int | torch.Tensor) -> torch.Tensor:
        count = torch.as_tensor(count, device=self.accelerator.device)
        if self.accelerator.num_processes == 1:
            return count  # Accelerate would copy it
        return self.accelerator.reduce(count, reduction="sum")
