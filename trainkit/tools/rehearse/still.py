"""Holds still what depends on processes by design, dropout and BatchNorm."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from trainkit.repairs.private_names import BatchNorm

# Attributes of a module that are the rate of a dropout, where F.dropout is not what applies it.
RATES = ("drop_prob", "dropout", "attention_dropout", "activation_dropout", "hidden_dropout_prob")


def rates_of(layers: list[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    for layer in layers:
        for name in RATES:
            if isinstance(rate := vars(layer).get(name), float) and rate:
                yield layer, name


def names_by_process(layers: list[nn.Module]) -> set[str]:
    """Which of these layers give other numbers if a batch is split otherwise, as documented."""
    found = {"dropout"} if any(rates_of(layers)) else set()
    if any(isinstance(layer, BatchNorm) and layer.training for layer in layers):
        found.add("BatchNorm")
    return found


def hold(names: tuple[str, ...], layers: list[nn.Module]) -> None:
    """Let these layers have no dropout, and no BatchNorm learn from a batch."""
    if "dropout" in names:
        for layer, name in rates_of(layers):
            setattr(layer, name, 0.0)
    if "BatchNorm" in names:
        BatchNorm.forward = batch_norm_of_the_start  # type: ignore[method-assign]


def batch_norm_of_the_start(self: BatchNorm, input: torch.Tensor) -> torch.Tensor:
    """What a BatchNorm in evaluation mode computes: its mean and variance are not changed."""
    options = (self.weight, self.bias, False, 0.0, self.eps)
    mean, variance = self.running_mean, self.running_var
    if mean is None:
        mean = input.new_zeros(input.shape[1])
        variance = input.new_ones(input.shape[1])
    return F.batch_norm(input, mean, variance, *options)
