"""Refuse values of which no mean over a step or an evaluation can be made."""

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from trainkit.hashes import digest


def check_tensor(call: str, values: object) -> None:
    """Raise RuntimeError unless the values are a tensor, as loss.item() is not."""
    if not isinstance(values, torch.Tensor):
        raise RuntimeError(
            f"{call} got a {type(values).__name__} and no tensor: give it the values of each "
            'sample, as losses with reduction="none" are, without .item()'
        )


def check_rows(call: str, values: torch.Tensor | list, num_samples: int) -> None:
    """Raise RuntimeError unless there is a row for each of the samples, or for a padding sample."""
    is_number = isinstance(values, torch.Tensor) and values.ndim == 0
    if is_number or len(values) != max(1, num_samples):
        rows = "a single number" if is_number else f"{len(values)} rows"
        raise RuntimeError(
            f"{call} got {rows} for a batch of {num_samples} samples: give it the values of each "
            'sample, as losses with reduction="none" are, or say which values count with mask='
        )


class EqualSizes:
    """Refuses values (samples, ...) with different trailing sizes where one mean goes over them.

    Such values were padded, each batch to its own longest sample, so their mean would depend on how
    the samples are shared out to processes and batches.
    """

    def __init__(self):
        self.sizes: dict[tuple[str, int], tuple[int, ...]] = {}
        self.hashes: dict[int, str] = {}  # of those of earlier steps, by step, where there are any
        self.num_steps = 0

    def start_step(self) -> None:
        """Let the sizes be others from here on: each step has means of its own."""
        if self.sizes:
            self.hashes[self.num_steps] = digest(repr(self.sizes))
        self.num_steps += 1
        self.sizes.clear()

    def check(self, call: str, values: torch.Tensor, number: int = 0) -> None:
        """Raise RuntimeError if earlier values had other sizes; number: of equal calls."""
        sizes = tuple(values.shape[1:])
        if sizes and self.sizes.setdefault((call, number), sizes) != sizes:
            raise different_sizes(call)

    def check_processes(self, accelerator: Accelerator) -> None:
        """Raise RuntimeError if other processes had other sizes. Every process must call this.

        A process may have none in a step, for example because it had a padding sample.
        """
        if accelerator.num_processes > 1:
            for hashes, sizes in gather_object([(self.hashes, self.sizes)]):
                for (call, number), other in sizes.items():
                    if self.sizes.get((call, number), other) != other:
                        raise different_sizes(call)
                if any(self.hashes.get(step, other) != other for step, other in hashes.items()):
                    raise different_sizes("run.step_mean(...) or run.add(...)")
        self.hashes.clear()
        self.sizes.clear()


def different_sizes(call: str) -> RuntimeError:
    return RuntimeError(
        f"{call} got values of shape (samples, ...) with different trailing sizes in different "
        "processes, micro-batches or batches: pass mask= if they are padded, or one value for each "
        "sample"
    )
