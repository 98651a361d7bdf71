"""Holds still what depends on processes by design, dropout and BatchNorm, and nudges weights."""

from collections.abc import Iterator

from trainkit import Dropout

import torch
import torch.nn.functional as F
from torch import nn

from trainkit.repairs.private_names import BatchNorm

# Attributes of a module that are the rate of a dropout, where F.dropout is not what applies it.
RATES = ("drop_prob", "dropout", "attention_dropout", "activation_dropout", "hidden_dropout_prob")


def names_by_process(layers: list[nn.Module]) -> set[str]:
    """Which of these layers give other numbers if a batch is split otherwise, as documented."""
    found = set()
    for layer in layers:
        if isinstance(layer, BatchNorm) and layer.training:
            found.add("BatchNorm")
        is_dropout = "Drop" in type(layer).__name__ and not isinstance(layer, Dropout)
        rates = [rate for _, rate in rates_of(layer)]
        if is_dropout:
            rates.append(getattr(layer, "p", 0.0))
        if any(rates):
            found.add("dropout")
    return found


def rates_of(layer: nn.Module) -> Iterator[tuple[str, float]]:
    for name in RATES:
        if isinstance(rate := vars(layer).get(name), float):
            yield name, rate


def set_rates(layers: list[nn.Module]) -> None:
    for layer in layers:
        for name, _ in rates_of(layer):
            setattr(layer, name, 0.0)


def batch_norm_of_the_start(self: BatchNorm, input: torch.Tensor) -> torch.Tensor:
    """What a BatchNorm in evaluation mode computes: its mean and variance are not changed."""
    options = (self.weight, self.bias, False, 0.0, self.eps)
    mean, variance = self.running_mean, self.running_var
    if mean is None:
        mean = input.new_zeros(input.shape[1])
        variance = input.new_ones(input.shape[1])
    return F.batch_norm(input, mean, variance, *options)


@torch.no_grad()
def nudge(models: list[nn.Module]) -> None:
    """Change each weight by a rounding: what two runs may differ by that sum in another order."""
    generator = torch.Generator().manual_seed(0)
    for weight in (weight for model in models for weight in model.parameters()):
        if weight.requires_grad and weight.is_floating_point():
            signs = torch.randint(-1, 2, weight.shape, generator=generator)
            weight.mul_(1 + torch.finfo(weight.dtype).eps * signs.to(weight))
