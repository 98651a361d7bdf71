"""Orders of the samples, by weight or by length."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from trainkit.errors import UsageError
from trainkit.numbers.mixing import key, mix, permute

# order(epoch, start, stop) returns the sample indices at start <= position < stop, int64.
Order = Callable[[int, int, int], torch.Tensor]
WINDOW = 50  # batches: by_length sorts this many at a time


def weighted(weights: Sequence[float] | torch.Tensor, num_samples: int, seed: int) -> Order:
    """Draw a sample by weight, with replacement, for each position; holds one float64 per sample.

    Raises UsageError for weights that cannot be used.
    """
    values = torch.as_tensor(weights, dtype=torch.float64).cpu()
    good = values.shape == (num_samples,) and values.min() >= 0
    sums = values.cumsum(0) if good else torch.zeros(1)
    if not 0 < sums[-1] < math.inf:
        raise UsageError(
            f"weights= of shape {tuple(values.shape)} must be {num_samples} numbers of at least 0, "
            "not all of them 0: one for each training sample"
        )

    def order(epoch: int, start: int, stop: int) -> torch.Tensor:
        numbers = mix(torch.arange(start, stop) + key("order", seed, epoch)) & (2**53 - 1)
        return torch.searchsorted(sums, numbers * (sums[-1] / 2**53), right=True)

    return order


def by_length(lengths: Sequence[int] | torch.Tensor, batch_size: int, seed: int) -> Order:
    """Yield each sample once per epoch, in batches whose samples have similar lengths.

    The shuffled samples are split into windows of WINDOW batches, each window is sorted by length
    and split into batches, and the batches are shuffled. If batch_size does not divide the number
    of samples, the short batch comes last and holds the last of the shuffled samples, whatever
    their lengths. It holds one epoch in memory, 8 bytes for each sample.
    """
    sizes = torch.as_tensor(lengths)
    num_samples = len(lengths)
    num_batches = num_samples // batch_size

    @lru_cache(maxsize=1)
    def whole(epoch: int) -> torch.Tensor:
        samples = permute(torch.arange(num_samples), num_samples, key("order", seed, epoch))
        full, rest = samples.split([num_batches * batch_size, num_samples % batch_size])
        windows = [
            part[sizes[part].argsort(stable=True)] for part in full.split(WINDOW * batch_size)
        ]
        batches = torch.cat([*windows, full[:0]]).view(num_batches, batch_size)
        shuffle = permute(torch.arange(num_batches), num_batches, key("batches", seed, epoch))
        return torch.cat([batches[shuffle].flatten(), rest[sizes[rest].argsort(stable=True)]])

    return lambda epoch, start, stop: whole(epoch)[start:stop]
