"""Random numbers as pure functions of the position in the run: (seed, epoch, sample, step)."""

import functools
import math
import operator
import random
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from trainkit.hashes import digest
from trainkit.repairs.private_names import version_of

NUM_HELD = 2**18  # longer orders are computed in parts of at most this many numbers
NUM_AT_ONCE = 2**16  # numbers that are drawn for the samples that come next
GOLDEN = 0x9E3779B97F4A7C1  # odd; 5 * GOLDEN still fits into int64
NUM_ROUNDS = 6  # of the Feistel network; with 4, neighbours too often stay neighbours


def key(*parts: int | str) -> int:
    """Mix integers and names into one 63-bit key; every part changes about half of its bits.

    A name says what the key is for, so that two uses of one seed have nothing in common.
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
    range(num) is put through it again (cycle walking; Black, Rogaway 2002).
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


class KnownOrder:
    """Indices of samples, int64, in the order in which batches have them."""

    def __init__(self, indices: torch.Tensor):
        self.indices = indices
        self.version = version_of(indices)

    def place_of(self, indices: torch.Tensor) -> int:
        """Where they begin; -1 unless they are a piece of this order, which nobody has changed."""
        place = indices.storage_offset() - self.indices.storage_offset()
        is_piece = (
            indices.untyped_storage().data_ptr() == self.indices.untyped_storage().data_ptr()
            and indices.dtype == self.indices.dtype
            and indices.stride() == (1,)
            and version_of(indices) == self.version
            and 0 <= place <= len(self.indices) - len(indices)
        )
        return place if is_piece else -1


# Of loaders, whose batches are slices of them; older ones are read no more.
KNOWN: deque[KnownOrder] = deque(maxlen=4)


def _drawn(
    make: Callable[[int, torch.Tensor, int], torch.Tensor],
    number: int,
    indices: torch.Tensor,
    num: int,
) -> torch.Tensor:
    """Return make(number, indices, num), of many batches at once if it is known which come next.

    A step then starts one operation on a GPU in place of 18, and they are the same numbers.
    """
    for order in () if torch.compiler.is_compiling() else reversed(KNOWN):
        if (place := order.place_of(indices)) >= 0:
            size = max(len(indices), NUM_AT_ONCE // max(1, num))
            start = place - place % size
            bits = _drawn_once(make, number, num, order, start, size + len(indices))
            return bits[place - start :][: len(indices)].clone()  # which a script may change
    return make(number, indices, num)


@functools.lru_cache(maxsize=16)
def _drawn_once(
    make: Callable[[int, torch.Tensor, int], torch.Tensor],
    number: int,
    num: int,
    order: KnownOrder,
    start: int,
    size: int,
) -> torch.Tensor:
    return make(number, order.indices[start : start + size], num)


def seed_host(number: int) -> None:
    """Seed the generators of numpy, of random, and of torch on the CPU."""
    torch.default_generator.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


def seed_generators(device: torch.device, number: int) -> None:
    """Seed the generators of numpy, of random, and of torch on the CPU and on this device."""
    seed_host(number)
    # torch.manual_seed would seed every kind of device, also those that are not used.
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(number)


def keyed_uniform(
    seed: int, epoch: int, indices: torch.Tensor, num: int, stream: str | int | None = None
) -> torch.Tensor:
    """Uniform numbers in (0, 1) that depend only on the arguments and each sample's index.

    The bits are the same on every device. Calls with another seed, epoch, num or stream share no
    numbers, so two uses with the same num, such as two views of a picture, need a stream each. The
    generator is counter-based: the 64-bit finalizer of splitmix64 (Steele, Lea, Flood 2014).

    Args:
        indices: int64 of shape (n,).
        stream: a name or a number.

    Returns:
        float32 of shape (n, num) on the device of `indices`.
    """
    return _drawn(_uniform, _key_of("uniform", seed, epoch, num, stream), indices, num)


def _uniform(number: int, indices: torch.Tensor, num: int) -> torch.Tensor:
    return _bits(number, indices, num).float().clamp(min=0.5) / 2**24  # 0 is not in (0, 1)


def keyed_normal(
    seed: int, epoch: int, indices: torch.Tensor, num: int, stream: str | int | None = None
) -> torch.Tensor:
    """Numbers of the standard normal distribution; otherwise like keyed_uniform.

    They share no bits with those of keyed_uniform, are equal on all devices to float rounding, and
    reach up to 5.4 in size.
    """
    # Only the bits are drawn early: erfinv may round differently at another place in a tensor.
    bits = _drawn(_bits, _key_of("normal", seed, epoch, num, stream), indices, num)
    # (2 * bits + 1) / 2**24 - 1, exact in float32, symmetric and never -1 or 1.
    return torch.erfinv((2 * bits + 1 - 2**24).float() / 2**24) * math.sqrt(2)


def _key_of(kind: str, seed: int, epoch: int, num: int, stream: str | int | None) -> int:
    if stream is not None and not isinstance(stream, str):
        stream = operator.index(stream)
    return key(f"{kind} {num} {stream!r}", seed, epoch)


class Dropout(nn.Dropout):
    """nn.Dropout with the same masks for any number of processes and micro-batches.

    In a model that Run trains, a mask depends on seed, epoch, step and the number of the sample in
    the step, whichever process has it. Elsewhere this is nn.Dropout. Inputs are (samples, ...),
    with the same sizes on all processes, or torch.cat of k such inputs, as the views of a sample
    are: k blocks with a row for each sample in each. Raises RuntimeError for another number of
    rows, or if it is called twice in a micro-batch, as gradient checkpointing does.
    """

    # In a run: the key of step and layer, and the number of the first sample in the step; int64.
    key_and_first: torch.Tensor | None = None
    num_samples = 1  # of this process in the micro-batch
    drawn = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.key_and_first is None or not self.training or self.p == 1:
            return super().forward(inputs)
        if self.drawn:
            raise RuntimeError(
                "trainkit's Dropout was called twice for a batch, or outside of run.steps(): use "
                "nn.Dropout there"
            )
        self.drawn = True
        num = self.num_samples
        if len(inputs) % num:
            raise RuntimeError(
                f"trainkit's Dropout got {len(inputs)} rows for a batch of {num} samples: it needs "
                "as many rows for each sample, as torch.cat(views) has, or use nn.Dropout there"
            )
        samples = self.key_and_first[1] + torch.arange(num, device=inputs.device)
        numbers = _bits(self.key_and_first[0], samples, inputs.numel() // num).float() / 2**24
        kept = (numbers >= self.p).view(num, len(inputs) // num, *inputs.shape[1:])
        return inputs * kept.transpose(0, 1).reshape(inputs.shape) / (1 - self.p)


def seed_dropout(
    layers: Sequence[Dropout], device: torch.device, first: int, *position: int, num_samples: int
) -> None:
    """Choose the masks of a forward pass: position is seed, epoch and step of the epoch."""
    for number, layer in enumerate(layers):
        if layer.key_and_first is None:
            layer.key_and_first = torch.zeros(2, dtype=torch.int64, device=device)
        layer.key_and_first[0], layer.key_and_first[1] = key("dropout", number, *position), first
        layer.num_samples = max(1, num_samples)  # the padding sample
        layer.drawn = False


def release_dropout(layers: Sequence[Dropout]) -> None:
    """Make these layers behave like nn.Dropout again."""
    for layer in layers:
        layer.key_and_first = None


def _bits(offset: int | torch.Tensor, rows: torch.Tensor, num: int) -> torch.Tensor:
    """24 random bits, the precision of a float32, for each row and column: int64 (n, num)."""
    columns = _columns(num, rows.device) + offset
    return shift_right(mix(torch.add(columns, rows.unsqueeze(1), alpha=num)), 40)


@functools.cache
def _columns(num: int, device: torch.device) -> torch.Tensor:
    return torch.arange(num, device=device)
