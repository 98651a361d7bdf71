"""What each mean of a step is divided by: its own count, over all processes and micro-batches."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from trainkit.numbers.means import exact_type

# What count=, of run.steps, returns for a micro-batch: how many values each of its means is over.
CountValues = Callable[[Any], dict[str, torch.Tensor | float]]


class Divisors:
    """The counts of the means of one step.

    The gradients of a step are added up, so each count must be known before the first backward:

    * Without a mask it follows from the number of samples in the step.
    * With --accumulate 1 it is summed over the processes at once.
    * With more micro-batches, count= of run.steps gives it ahead.
    * Without count=, a mean that is the only one of a step is counted late: its sums are divided by
      num_in_step, and clip_and_check multiplies the gradients of the complete step by factor() =
      num_in_step / its count.

    Attributes:
        num_in_step: samples in the step, over all processes and micro-batches.
        late: what this process has counted so far of the mean that is counted late; None: the step
            has no such mean.
        known_factor: factor(), once it was computed.
        ahead: what count= gave, by name: for each micro-batch of this process, for the whole step.
        miscounted: how often a mask differed from what count= gave, by name.
    """

    def __init__(self, accelerator: Accelerator, accumulate: int):
        self.accelerator, self.accumulate = accelerator, accumulate
        self.miscounted: dict[str, torch.Tensor] = {}
        self.start(0)

    def start(self, num_in_step: int) -> None:
        """Start a step."""
        self.num_in_step = num_in_step
        self.late: int | torch.Tensor | None = None
        self.known_factor: torch.Tensor | None = None
        self.ahead: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def count_ahead(
        self, count: CountValues, micro_batches: Sequence[Any], has_samples: Sequence[bool]
    ) -> None:
        """Add up count(micro_batch), by name, over the micro-batches and the processes.

        Every process must call this. has_samples: False for a micro-batch that is a stand-in here.
        """
        device = self.accelerator.device
        with torch.no_grad():
            counts = [count(micro_batch) for micro_batch in micro_batches]
            names = sorted(counts[0])
            everybody = [sorted(part) for part in counts]
            if not self.miscounted:  # in the first step: other names would make a process wait
                everybody = gather_object(everybody)
            if any(theirs != names for theirs in everybody):
                raise RuntimeError(
                    "count= of run.steps(...) returned other names for one micro-batch than for "
                    "another, or on another process: return each name always, with 0 where nothing "
                    "counts"
                )
            rows = [
                torch.stack([torch.as_tensor(part[name], device=device).sum() for name in names])
                for part in counts
            ]
        weights = torch.tensor(has_samples, dtype=exact_type(device), device=device)
        local_counts = torch.stack(rows) * weights[:, None]
        totals = self._sum(local_counts.sum(0))
        self.ahead = {name: (local_counts[:, k], totals[k]) for k, name in enumerate(names)}
        # On every process the same names, because check() adds up over the processes.
        self.miscounted = {name: self.miscounted.get(name, 0 * totals[0]) for name in names}

    def of(
        self,
        count: int | torch.Tensor,
        is_selected: bool,
        over: str | None,
        micro_batch: int,
        num_means: int,
    ) -> int | torch.Tensor:
        """Return what the sum of a mean is divided by before backward.

        Args:
            count: of this process's values; of the whole step if is_selected is false.
            is_selected: the mean has a mask or weights.
            over: the name by which count= gives its count.
            micro_batch: its number in the step.
            num_means: how many means this micro-batch had before this one.
        """
        if is_selected and over is None and self.accumulate > 1:
            if num_means > 0 or (self.late is None) != (micro_batch == 0):
                raise self._need_counts()
            self.late = count if self.late is None else self.late + count
            return self.num_in_step
        if self.late is not None:
            raise self._need_counts()
        if over is not None:
            return self._counted_ahead(over, count, micro_batch, is_selected)
        return at_least_one(self._sum(count)) if is_selected else count

    def factor(self) -> torch.Tensor | None:
        """Return what all gradients of the step are multiplied by at its end; None: by nothing.

        Every process must call this, when the step is complete.
        """
        if self.known_factor is None and self.late is not None:
            self.known_factor = self.num_in_step / at_least_one(self._sum(self.late))
        return self.known_factor

    def check(self) -> None:
        """Raise RuntimeError if what count= gave is not what the masks select.

        Every process must call this.
        """
        for name, number in self.miscounted.items():
            if self._sum(number) > 0:
                raise RuntimeError(
                    f"count= of run.steps(...) and what run.step_mean(..., over={name!r}) selects "
                    "differ: count= must return the sum of the same mask, or of the same weights"
                )

    def _counted_ahead(
        self, over: str, count: int | torch.Tensor, number: int, is_selected: bool
    ) -> torch.Tensor:
        if not is_selected or over not in self.ahead:
            names = ", ".join(self.ahead) or "nothing, or run.steps(...) was given none"
            raise RuntimeError(
                f"run.step_mean(...) got over={over!r}: it goes with mask= or weights=, and must "
                f"be a name that count= of run.steps(...) returns, which are {names}"
            )
        local_counts, total = self.ahead[over]
        is_wrong = (count - local_counts[number]).abs() > 1e-3 * local_counts[number].abs()
        self.miscounted[over] = self.miscounted[over] + is_wrong
        return at_least_one(total)

    def _sum(self, count: int | torch.Tensor) -> torch.Tensor:
        count = torch.as_tensor(count, device=self.accelerator.device)
        return self.accelerator.reduce(count, reduction="sum")

    def _need_counts(self) -> RuntimeError:
        return RuntimeError(
            f"with --accumulate {self.accumulate} the counts of several means, of which one has "
            "mask= or weights=, must be known before the first backward: give each of those a name "
            "by over=, and run.steps(train_loader, count=function) a function that returns the "
            "counts of a micro-batch by these names"
        )


def at_least_one(count: torch.Tensor) -> torch.Tensor:
    """The count, or 1 if nothing counts: the sum is then 0, and so is the mean."""
    return torch.where(count == 0, 1, count)
