"""--ema: an exponential moving average of the weights, which is what is evaluated and written."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class EMA:
    """The average of all trained weights of a run; checkpoint.py saves it and brings it back.

    It begins as the first weights. Its decay rises to the one that was asked for, as
    min(decay, (1 + step) / (10 + step)), so that the initial weights do not dominate the average of
    a short run (as in TensorFlow's ExponentialMovingAverage). Buffers are not averaged. The models
    hold the average, except in the body of trained_weights(). With decay None there is no average.

    Attributes:
        values: in the body of trained_weights(), for each model its average by name; elsewhere the
            weights that are trained.
    """

    def __init__(self, models: Sequence[nn.Module], decay: float | None):
        self.decay = decay or 0.0
        self.weights = [
            {name: w for name, w in model.named_parameters() if w.requires_grad}
            for model in (models if decay else ())
        ]
        self.values = [{n: w.detach().clone() for n, w in of.items()} for of in self.weights]
        self.in_models = True  # at first both are the same

    def update(self, step: int) -> None:
        """Add the weights after this step, counted from 1."""
        for values, weights in zip(self.values, self.weights, strict=True):
            average = get_ema_multi_avg_fn(min(self.decay, (1 + step) / (10 + step)))
            average([*values.values()], [w.detach() for w in weights.values()], None)

    @contextmanager
    def trained_weights(self) -> Iterator[None]:
        """In the body the models hold the weights that are trained, for a step or a checkpoint.

        It may be entered in its own body. After an error everything stays as it is.
        """
        was_in_models, self.in_models = self.in_models, False
        if was_in_models:
            self._swap()
        yield
        if was_in_models:
            self._swap()
        self.in_models = was_in_models

    @torch.no_grad()
    def _swap(self) -> None:
        for values, weights in zip(self.values, self.weights, strict=True):
            for name, weight in weights.items():
                # Copied: DDP, FSDP and CUDA graphs know a weight by its memory.
                value = weight.clone()
                weight.copy_(values[name])
                values[name].copy_(value)
