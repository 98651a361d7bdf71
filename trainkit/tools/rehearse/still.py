"""Holds still what depends on processes by design, dropout and BatchNorm."""

import torch
import torch.nn.functional as F
from torch import nn

from trainkit.repairs.private_names import BatchNorm

# Attributes of a module that are the rate of a dropout, where F.dropout is not what applies it.
RATES = ("drop_prob", "dropout", "attention_dropout", "activation_dropout", "hidden_dropout_prob")


def hold(layers: list[nn.Module]) -> set[str]:
    """Let layers have no dropout, and no BatchNorm learn from a batch; say which of them they have.

    Both give other numbers if a batch is split otherwise, as the docs say.
    """
    found = set()
    for layer in layers:
        for name in RATES:
            if isinstance(rate := vars(layer).get(name), float) and rate:
                setattr(layer, name, 0.0)
                found.add("dropout")
        if isinstance(layer, BatchNorm):
            found.add("BatchNorm")
    BatchNorm.forward = batch_norm_of_the_start  # type: ignore[method-assign]
    return found


def batch_norm_of_the_start(self: BatchNorm, input: torch.Tensor) -> torch.Tensor:
    """What a BatchNorm in evaluation mode computes: its mean and variance are not changed."""
    options = (self.weight, self.bias, False, 0.0, self.eps)
    mean, variance = self.running_mean, self.running_var
    if mean is None:
        mean = input.new_zeros(input.shape[1])
        variance = input.new_ones(input.shape[1])
    return F.batch_norm(input, mean, variance, *options)
