"""train_regression.py with a frozen base and a small adapter as its mlp, for tests to start."""

import functools
import os

from trainkit import Run

import torch
from torch import nn

import train_regression

MLP = train_regression.MLP


class Adapted(nn.Module):
    """BASE in the environment, a number or $RANK, is the seed of what is frozen."""

    def __init__(self, num_features, num_targets, hidden):
        super().__init__()
        self.base = MLP(num_features, num_targets, hidden).requires_grad_(False)
        seed = int(os.path.expandvars(os.environ.get("BASE", "0")))
        torch.manual_seed(seed)
        for weight in self.base.parameters():
            weight.normal_(std=len(weight) ** -0.5)
        torch.manual_seed(int(os.environ.get("RANK", "0")))  # all take what the first process has
        # The gradient of a bias before BatchNorm is rounding alone, which AdamW makes a whole step.
        self.down, self.up = nn.Linear(num_features, 4, bias=False), nn.Linear(4, num_targets)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, inputs):
        return self.base(inputs) + self.up(self.norm(self.down(inputs)))


def main(argv):
    """Train, and write no frozen weights at all."""
    train_regression.MODELS["mlp"] = Adapted
    Run.begin = functools.partialmethod(Run.begin, save_frozen=False)
    return train_regression.main(argv)
