"""--ema: an exponential moving average of the weights, which is what is evaluated and written."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class Average:
    """The average of all trained weights of a run; checkpoint.py saves it and brings it back.

    It begins as the first weights. Its decay rises to the one that was asked for, as
    min(decay, (1 + step) / (10 + step)), so that the first weights of a short run do not weigh on
    it (as in TensorFlow's ExponentialMovingAverage). Buffers are not averaged.

    Attributes:
        values: for each model the average of its weights, by name.
    """

    def __init__(self, models: Sequence[nn.Module], decay: float):
        self.decay = decay
        self.weights = [
            {name: w for name, w in model.named_parameters() if w.requires_grad} for model in models
        ]
        self.values = [{n: w.detach().clone() for n, w in of.items()} for of in self.weights]

    def update(self, step: int) -> None:
        """Add the weights after this step, counted from 1."""
        average = get_ema_multi_avg_fn(min(self.decay, (1 + step) / (10 + step)))
        for values, weights in zip(self.values, self.weights, strict=True):
            average([*values.values()], [w.detach() for w in weights.values()], None)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights of the models and their average."""
        for values, weights in zip(self.values, self.weights, strict=True):
            for name, weight in weights.items():
                # Copied: DDP, FSDP and CUDA graphs know a weight by its memory.
                value = weight.clone()
                weight.copy_(values[name])
                values[name].copy_(value)
