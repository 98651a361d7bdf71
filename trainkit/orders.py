"""An order that draws samples in proportion to their weights."""

import math
from collections.abc import Callable, Sequence

import torch

from trainkit.errors import UsageError
from trainkit.rng import key, mix

# order(epoch, start, stop) returns the sample indices at start <= place < stop, int64.
Order = Callable[[int, int, int], torch.Tensor]


def weighted(weights: Sequence[float] | torch.Tensor, num_samples: int, seed: int) -> Order:
    """Draw a sample by weight, with replacement, for each place; holds one float64 per sample.

    Raises UsageError for weights that cannot be used.
    """
    given = torch.as_tensor(weights, dtype=torch.float64).cpu()
    good = given.shape == (num_samples,) and given.min() >= 0
    sums = given.cumsum(0) if good else torch.zeros(1)
    if not 0 < sums[-1] < math.inf:
        raise UsageError(
            f"weights= of shape {tuple(given.shape)} must be {num_samples} numbers of at least 0, "
            "not all of them 0: one for each training sample"
        )

    def order(epoch: int, start: int, stop: int) -> torch.Tensor:
        numbers = mix(torch.arange(start, stop) + key(seed, epoch)) & (2**53 - 1)
        return torch.searchsorted(sums, numbers * (sums[-1] / 2**53), right=True)

    return order
