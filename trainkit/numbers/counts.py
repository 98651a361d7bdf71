"""What each mean of a step is divided by: its own count, over all processes and micro-batches."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from trainkit.errors import UsageError
from trainkit.numbers.means import exact_type

# What count=, of run.steps, returns for a micro-batch: how many values its mean is over, or, of
# several means, each by its name.
Number: TypeAlias = torch.Tensor | float
CountValues = Callable[[Any], Number | dict[str, Number]]

UNNAMED = ""  # the name of a count that was returned alone
DIFFERENT = 1e-5  # relative difference of two sums of weights, which may be added up in any order


class Divisors:
    """The counts of the means of one step.

    The gradients of a step are added up, so each count must be known before the first backward:

    * Without a mask it follows from the number of samples in the step.
    * With --accumulate 1 it is summed over the processes at once.
    * With more micro-batches, count= of run.steps gives it ahead.

    Attributes:
        ahead: what count= gave, by name: for each micro-batch of this process, for the whole step.
        miscounted: how often a mask differed from what count= gave, by name.
    """

    def __init__(self, accelerator: Accelerator, accumulate: int):
        self.accelerator = accelerator
        self.accumulate = accumulate
        self.ahead: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.miscounted: dict[str, torch.Tensor] = {}

    def count_ahead(
        self, count: CountValues, micro_batches: Sequence[Any], has_samples: Sequence[bool]
    ) -> None:
        """Add up count(micro_batch), by name, over the micro-batches and the processes.

        Every process must call this. has_samples: False if this micro-batch is only padding here.
        """
        device = self.accelerator.device
        with torch.no_grad():
            counts = [by_name(count(micro_batch)) for micro_batch in micro_batches]
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
        # Whole numbers stay whole; a sum of weights may be larger than float32 can count.
        rows = [row.to(exact_type(device)) if row.is_floating_point() else row for row in rows]
        # Not by a tensor of booleans: to copy it to a GPU would wait for the GPU.
        local_counts = torch.stack(
            [row * int(has) for row, has in zip(rows, has_samples, strict=True)]
        )
        totals = self._sum(local_counts.sum(0))
        self.ahead = {name: (local_counts[:, k], totals[k]) for k, name in enumerate(names)}
        # On every process the same names, because check() adds up over the processes.
        self.miscounted = {name: self.miscounted.get(name, 0 * totals[0]) for name in names}

    def of(
        self,
        count: int | torch.Tensor,
        mask_or_weights: torch.Tensor | None,
        over: str | None,
        micro_batch: int,
    ) -> int | torch.Tensor:
        """Return what the sum of a mean is divided by before backward.

        Args:
            count: of this process's values; of the whole step if nothing selects from them.
            mask_or_weights: what selects from them.
            over: the name by which count= gives its count.
            micro_batch: its number in the step.

        Raises UsageError if the count is needed and count= was not given.
        """
        if mask_or_weights is None:
            if over is not None:
                raise self._unknown(over)
            return count
        if self.accumulate == 1:
            return at_least_one(self._sum(count))
        if not self.ahead:
            raise UsageError(
                f"--accumulate {self.accumulate}: a mean with mask= or weights= is divided by how "
                "many values count in all micro-batches of the step, which must be known before "
                "the first backward: give run.steps(train_loader, count=function) a function that "
                "returns this number for a micro-batch (docs/loop.md, Several means), or use "
                "--accumulate 1"
            )
        name = UNNAMED if over is None else over
        if name not in self.ahead:
            raise self._unknown(over)
        local_counts, total = self.ahead[name]
        difference = (count - local_counts[micro_batch]).abs()
        is_mask = mask_or_weights.dtype == torch.bool
        allowed = 0 if is_mask else DIFFERENT * local_counts[micro_batch].abs()
        self.miscounted[name] = self.miscounted[name] + (difference > allowed)
        return at_least_one(total)

    def check(self) -> None:
        """Raise RuntimeError if what count= gave is not what the masks select.

        Every process must call this.
        """
        for name, number in self.miscounted.items():
            if self._sum(number) > 0:
                over = f", over={name!r}" if name != UNNAMED else ""
                raise RuntimeError(
                    f"count= of run.steps(...) and what run.step_mean(...{over}) selects "
                    "differ: count= must return the sum of the same mask, or of the same weights "
                    "in float32"
                )

    def _sum(self, count: int | torch.Tensor) -> torch.Tensor:
        count = torch.as_tensor(count, device=self.accelerator.device)
        if self.accelerator.num_processes == 1:
            return count  # Accelerate would copy it
        return self.accelerator.reduce(count, reduction="sum")

    def _unknown(self, over: str | None) -> RuntimeError:
        names = ", ".join(map(repr, self.ahead)) or "nothing, or run.steps(...) was given none"
        if [*self.ahead] == [UNNAMED]:
            names = "one number, without a name"
        return RuntimeError(
            f"run.step_mean(...) got over={over!r}: it goes with mask= or weights=, and must "
            f"be a name that count= of run.steps(...) returns, which are {names}"
        )


def by_name(counts: Number | dict[str, Number]) -> dict[str, Number]:
    """What count= returned, by name."""
    return counts if isinstance(counts, dict) else {UNNAMED: counts}


def at_least_one(count: torch.Tensor) -> torch.Tensor:
    """The count, or 1 if nothing counts: the sum is then 0, and so is the mean."""
    return count + (count == 0)
