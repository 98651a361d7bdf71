"""Random numbers as pure functions of the position in the run: (seed, epoch, sample, step)."""

import math
import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

NUM_HELD = 2**18  # longer orders are computed in parts of at most this many numbers
GOLDEN = 0x9E3779B97F4A7C1  # odd; 5 * GOLDEN still fits into int64
NUM_ROUNDS = 6  # of the Feistel network; with 4, neighbours too often stay neighbours


def key(*numbers: int) -> int:
    """Mix integers into one 63-bit key; every number changes about half of its bits."""
    mixed = 0
    for number in numbers:
        mixed = (mixed + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed >> 1


def permute(places: torch.Tensor, num: int, number: int) -> torch.Tensor:
    """Return the numbers at these places of a permutation of range(num) chosen by `number`.

    Up to 2**18 the permutation is that of torch.randperm. Above that, memory and time depend only
    on how many places are asked for.

    Args:
        places: int64, each at least 0 and below num.
    """
    if num > NUM_HELD:
        return scramble(places, torch.tensor(num), torch.tensor(number))
    return torch.randperm(num, generator=torch.Generator().manual_seed(number))[places]


def scramble(places: torch.Tensor, num: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Like permute, but num and number may differ per place, and no permutation is held in memory.

    It is a Feistel network (Luby, Rackoff 1988) over the next power of two. A result outside of
    range(num) is put through it again (cycle walking; Black, Rogaway 2002). For num below about 100
    the permutations are not all equally likely.
    """
    bits = torch.frexp((num - 1).double()).exponent.long().clamp(min=2)
    low = bits // 2
    masks = (1 << low) - 1, (1 << (bits - low)) - 1
    halves = [places & masks[0], places >> low]
    for n in range(NUM_ROUNDS):
        here, other = n % 2, 1 - n % 2
        noise = mix(halves[other] + number + n * GOLDEN)
        halves[here] = halves[here] ^ (noise & masks[here])
    values = halves[1] << low | halves[0]
    outside = values >= num
    if outside.any():
        parts = (x.expand_as(places)[outside] for x in (values, num, number))
        values[outside] = scramble(*parts)
    return values


def seed_host(number: int) -> None:
    """Seed the generators of numpy, of random, and of torch on the CPU."""
    torch.default_generator.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


def keyed_uniform(seed: int, epoch: int, indices: torch.Tensor, num: int) -> torch.Tensor:
    """Uniform numbers in [0, 1) that depend only on (seed, epoch, sample index, column, num).

    The bits are the same on every device, and in whatever batch a sample is. The generator is
    counter-based: the 64-bit finalizer of splitmix64 (Steele, Lea, Flood 2014).

    Args:
        indices: int64 of shape (n,).

    Returns:
        float32 of shape (n, num) on the device of `indices`.
    """
    return _uniform(key(seed, epoch), indices, num)


class Dropout(nn.Dropout):
    """nn.Dropout with the same masks for any number of processes and micro-batches.

    In a model that Run trains, a mask depends on seed, epoch, step and the sample's place in the
    step, whichever process has the sample. Elsewhere this is nn.Dropout. Inputs are (samples, ...),
    with the same sizes on all processes. It may be called once per micro-batch and raises
    RuntimeError if it is called again, as gradient checkpointing does: use nn.Dropout there.
    """

    # In a run: the key of step and layer, and the first sample's place in the step; int64 (2,).
    place: torch.Tensor | None = None
    drawn = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.place is None or not self.training or self.p == 1:
            return super().forward(inputs)
        if self.drawn:
            raise RuntimeError(
                "trainkit's Dropout was called twice for a batch, or outside of run.steps(): use "
                "nn.Dropout there"
            )
        self.drawn = True
        rows = self.place[1] + torch.arange(len(inputs), device=inputs.device)
        numbers = _uniform(self.place[0], rows, math.prod(inputs.shape[1:]))
        return inputs * (numbers >= self.p).view_as(inputs) / (1 - self.p)


def seed_dropout(
    layers: Sequence[Dropout], device: torch.device, first: int, *position: int
) -> None:
    """Seed the random numbers of a forward pass by seed, epoch, step and `first`.

    `first` is the place in the step of this process's first sample. The masks of these layers are
    the same for any number of processes and micro-batches. All other random numbers, those of
    nn.Dropout too, depend on `first` and so on both numbers.
    """
    # Only the device's generator: torch.manual_seed seeds every kind of device, and one that is not
    # initialised yet stores each call, with its stack, for later.
    where = torch.default_generator if device.type == "cpu" else torch.get_device_module(device)
    where.manual_seed(key(*position, first))
    for number, layer in enumerate(layers):
        if layer.place is None:
            layer.place = torch.zeros(2, dtype=torch.int64, device=device)
        layer.place[0], layer.place[1] = key(*position, number), first
        layer.drawn = False


def release_dropout(layers: Sequence[Dropout]) -> None:
    """Make these layers behave like nn.Dropout again."""
    for layer in layers:
        layer.place = None


def _uniform(offset: int | torch.Tensor, rows: torch.Tensor, num: int) -> torch.Tensor:
    columns = torch.arange(num, device=rows.device)
    x = mix(rows.unsqueeze(1) * num + columns + offset)
    return _shift_right(x, 40).float() / 2**24  # 24 bits, the precision of a float32


def mix(x: torch.Tensor) -> torch.Tensor:
    """The finalizer of key() for int64: it turns each number into pseudorandom bits."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ _shift_right(x, shift)) * factor
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; >> on int64 would copy the sign into the high bits."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
