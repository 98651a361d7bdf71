"""Integers mixed into pseudorandom ones: keys, and permutations that are computed in parts."""

import functools

import torch

from trainkit.hashes import digest

NUM_HELD = 2**18  # longer orders are computed in parts of at most this many numbers
GOLDEN = 0x9E3779B97F4A7C1  # odd; 5 * GOLDEN still fits into int64
NUM_ROUNDS = 6  # of the Feistel network; with 4, neighbours too often stay neighbours


def key(*parts: int | str) -> int:
    """Mix integers and names into one 63-bit key; every part changes about half of its bits.

    A name says what the key is for, so that two uses of one seed have nothing in common: the order
    of the samples is of key("order", seed, epoch).
    """
    mixed = 0
    for part in parts:
        number = _number_of(part) if isinstance(part, str) else part
        mixed = (mixed + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed >> 1


@functools.cache
def _number_of(name: str) -> int:
    return int(digest(name)[:16], 16)


def permute(positions: torch.Tensor, num: int, number: int) -> torch.Tensor:
    """Return the numbers at these positions of a permutation of range(num) chosen by `number`.

    Up to 2**18 the permutation is that of torch.randperm. Above that, memory and time depend only
    on how many positions are asked for.

    Args:
        positions: int64, each at least 0 and below num.
    """
    if num > NUM_HELD:
        return scramble(positions, torch.tensor(num), torch.tensor(number))
    return torch.randperm(num, generator=torch.Generator().manual_seed(number))[positions]


def scramble(positions: torch.Tensor, num: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Like permute, but num and number may differ by position, and no permutation is in memory.

    It is a Feistel network (Luby, Rackoff 1988) over the next power of two. A result outside of
    range(num) is put through it again (cycle walking; Black, Rogaway 2002). For num below about 100
    the permutations are not all equally likely.
    """
    bits = torch.frexp((num - 1).double()).exponent.long().clamp(min=2)
    low = bits // 2
    masks = (1 << low) - 1, (1 << (bits - low)) - 1
    halves = [positions & masks[0], positions >> low]
    for n in range(NUM_ROUNDS):
        here, other = n % 2, 1 - n % 2
        noise = mix(halves[other] + number + n * GOLDEN)
        halves[here] = halves[here] ^ (noise & masks[here])
    values = halves[1] << low | halves[0]
    outside = values >= num
    if outside.any():
        parts = (x.expand_as(positions)[outside] for x in (values, num, number))
        values[outside] = scramble(*parts)
    return values


def mix(x: torch.Tensor) -> torch.Tensor:
    """The finalizer of key() for int64: it turns each number into pseudorandom bits."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ shift_right(x, shift)) * factor
    return x ^ shift_right(x, 31)


def shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; >> on int64 would copy the sign into the high bits."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
