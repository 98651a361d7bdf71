"""Random numbers as pure functions of the position in the run: (seed, epoch, sample, step)."""

import functools
import math
import operator
import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from trainkit.numbers.ahead import draw
from trainkit.numbers.mixing import key, mix, shift_right


def seed_host(number: int) -> None:
    """Seed the generators of numpy, of random, and of torch on the CPU."""
    torch.default_generator.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


def seed_generators(device: torch.device, number: int) -> None:
    """Seed the generators of numpy, of random, and of torch on the CPU and on this device."""
    seed_host(number)
    # torch.manual_seed seeds every kind of device, and one that is not initialised yet stores each
    # call, with its stack, for later.
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(number)


def keyed_uniform(
    seed: int, epoch: int, indices: torch.Tensor, num: int, stream: str | int | None = None
) -> torch.Tensor:
    """Uniform numbers in (0, 1) that depend only on the arguments and each sample's index.

    The bits are the same on every device, and in whatever batch a sample is. Calls with another
    seed, epoch, num or stream share no numbers, so two uses with the same num, such as two views of
    a picture, need a stream each. The generator is counter-based: the 64-bit finalizer of
    splitmix64 (Steele, Lea, Flood 2014).

    Args:
        indices: int64 of shape (n,).
        stream: a name or a number.

    Returns:
        float32 of shape (n, num) on the device of `indices`.
    """
    number = _key_of("uniform", seed, epoch, num, stream)

    def make(rows: torch.Tensor) -> torch.Tensor:
        return _bits(number, rows, num).float().clamp(min=0.5) / 2**24  # 0 is not in (0, 1)

    return draw((number, num), indices, num, make)


def keyed_normal(
    seed: int, epoch: int, indices: torch.Tensor, num: int, stream: str | int | None = None
) -> torch.Tensor:
    """Numbers of the standard normal distribution; otherwise like keyed_uniform.

    They share no bits with those of keyed_uniform, are equal on all devices to float rounding, and
    reach up to 5.4 in size.
    """
    number = _key_of("normal", seed, epoch, num, stream)
    # Only the bits are drawn ahead: erfinv may round differently at another place in a tensor.
    bits = draw((number, num), indices, num, lambda rows: _bits(number, rows, num))
    # (2 * bits + 1) / 2**24 - 1, exact in float32, symmetric and never -1 or 1.
    return torch.erfinv((2 * bits + 1 - 2**24).float() / 2**24) * math.sqrt(2)


def _key_of(kind: str, seed: int, epoch: int, num: int, stream: str | int | None) -> int:
    if stream is not None and not isinstance(stream, str):
        stream = operator.index(stream)
    return key(f"{kind} {num} {stream!r}", seed, epoch)


class Dropout(nn.Dropout):
    """nn.Dropout with the same masks for any number of processes and micro-batches.

    In a model that Run trains, a mask depends on seed, epoch, step and the number of
    the sample in the step, whichever process has it. Elsewhere this is nn.Dropout. Inputs are
    (samples, ...), with the same sizes on all processes, or torch.cat of k such inputs, as the
    views of a sample are: k blocks with a row for each sample in each. Rows that stand sample by
    sample instead need `.unflatten(0, (-1, k))` before this layer. It may be called once per
    micro-batch. Raises RuntimeError for another number of rows, or if it is called again, as
    gradient checkpointing does: use nn.Dropout there.
    """

    # In a run: the key of step and layer, and the number of the first sample in the step; int64.
    key_and_first: torch.Tensor | None = None
    num_samples: int | None = None  # of this process in the micro-batch
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
        num = self.num_samples or max(1, len(inputs))
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
    layers: Sequence[Dropout],
    device: torch.device,
    first: int,
    *position: int,
    num_samples: int | None = None,
) -> None:
    """Choose the masks of a forward pass by the position: seed, epoch and step of the epoch.

    `first` is the number in the step of this process's first sample, of num_samples (None: as many
    as the layers get rows). The masks are the same for any number of processes and micro-batches.
    """
    for number, layer in enumerate(layers):
        if layer.key_and_first is None:
            layer.key_and_first = torch.zeros(2, dtype=torch.int64, device=device)
        layer.key_and_first[0], layer.key_and_first[1] = key("dropout", number, *position), first
        # A process without a sample is given one that does not count.
        layer.num_samples = 1 if num_samples == 0 else num_samples
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
