"""Orders of the samples, by weight or by length, and their split into two sets."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from trainkit.errors import UsageError
from trainkit.numbers.mixing import key, mix, permute

# order(epoch, start, stop) returns the sample indices at start <= place < stop, int64.
Order = Callable[[int, int, int], torch.Tensor]
WINDOW = 50  # batches: by_length sorts this many at a time


def weighted(weights: Sequence[float] | torch.Tensor, num_samples: int, seed: int) -> Order:
    """Draw a sample by weight, with replacement, for each place; holds one float64 per sample.

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
        numbers = mix(torch.arange(start, stop) + key(seed, epoch)) & (2**53 - 1)
        return torch.searchsorted(sums, numbers * (sums[-1] / 2**53), right=True)

    return order


def by_length(lengths: Sequence[int] | torch.Tensor, batch_size: int, seed: int) -> Order:
    """Yield each sample once per epoch, in batches whose samples have similar lengths.

    The shuffled samples are cut into windows of WINDOW batches, each window is sorted by length and
    cut into batches, and the batches are shuffled. If batch_size does not divide the number of
    samples, the short batch comes last and holds the last of the shuffled samples, whatever their
    lengths. It holds one epoch in memory, 8 bytes for each sample.
    """
    sizes = torch.as_tensor(lengths)
    num_samples = len(lengths)
    num_batches = num_samples // batch_size

    @lru_cache(maxsize=1)
    def whole(epoch: int) -> torch.Tensor:
        places = permute(torch.arange(num_samples), num_samples, key(seed, epoch))
        full, rest = places.split([num_batches * batch_size, num_samples % batch_size])
        windows = [
            part[sizes[part].argsort(stable=True)] for part in full.split(WINDOW * batch_size)
        ]
        batches = torch.cat([*windows, full[:0]]).view(num_batches, batch_size)
        shuffle = permute(torch.arange(num_batches), num_batches, key(seed, epoch, 1))
        return torch.cat([batches[shuffle].flatten(), rest[sizes[rest].argsort(stable=True)]])

    return lambda epoch, start, stop: whole(epoch)[start:stop]


def hold_out(labels: torch.Tensor, split: str, number: int) -> torch.Tensor:
    """Return the indices of the samples to evaluate on, or to train on: the same for any --seed.

    number: how many there are to evaluate on; 0: about a fifth of each class, and never all of one.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    places = torch.arange(len(labels))
    held_out = places < number
    if not number:
        order = order[labels[order].argsort(stable=True)]
        held_out = places % 5 == 4
        trained_on = labels[order[~held_out]]
        held_out &= torch.isin(labels[order], trained_on)  # of a class with one sample, none
    return order[held_out == (split == "test")]


def split_equal_samples(
    held_out: torch.Tensor, hashes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices to train and to evaluate on; equal samples are on the side of the first.

    If a sample has more copies than the evaluation set has samples, all of them are trained on. A
    split without equal samples is not changed.

    Args:
        held_out: bool, (samples,), True for those that a split would evaluate on.
        hashes: int64, (samples,), equal for samples that are equal.
    """
    _, group, sizes = hashes.unique(return_inverse=True, return_counts=True)
    indices = torch.arange(len(hashes))
    first = torch.full_like(sizes, len(hashes)).scatter_reduce(0, group, indices, "amin")
    held_out = (held_out[first] & (sizes <= held_out.sum()))[group]
    return (~held_out).nonzero().flatten(), held_out.nonzero().flatten()
