"""The averages of weights that are evaluated and saved: --ema, or those of an optimizer itself."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainkit.checkpoints import sharded as shards
from trainkit.errors import UsageError
from trainkit.numbers.optim import weights_of
from trainkit.repairs.private_names import named_weights
from trainkit.repairs.replaced import take_modes


class EMA:
    """The moving average of all trained weights; a checkpoint has it.

    Its decay rises to the given one as min(decay, (1 + step) / (10 + step)), so that the initial
    weights do not dominate the average of a short run (as in TensorFlow). Buffers are not averaged.
    The models hold the average, except in the body of trained_weights().

    Schedule-Free optimizers (Defazio et al. 2024, arXiv:2405.15682) keep an average of their own,
    which their eval() puts into the models and train() takes out: both are called here alone, so
    that what is evaluated is what is written. Raises UsageError for one of them with a decay.

    Attributes:
        values: for each model, by name: in the body of trained_weights() the averages, elsewhere
            the weights being trained.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        decay: float | None,
        optimizers: Sequence[AcceleratedOptimizer] = (),
    ):
        self.decay = decay or 0.0
        inner = [prepared.optimizer for prepared in optimizers]
        averaging = [one for one in inner if hasattr(one, "train") and hasattr(one, "eval")]
        if averaging and decay:
            raise UsageError(
                f"--ema {decay}: {type(averaging[0]).__name__} keeps an average of the weights by "
                "itself, which is evaluated and saved: leave --ema out"
            )
        self.modes = [take_modes(one) for one in averaging]
        self.averaged = weights_of(*averaging)
        self.trained = [weight.detach().clone() for weight in self.averaged]
        self.models = models if decay else ()
        self.weights = [
            {name: w for name, w in named_weights(model) if w.requires_grad}
            for model in self.models
        ]
        self.values = [{n: w.detach().clone() for n, w in of.items()} for of in self.weights]
        self.in_models = True  # at first the weights and their average are equal

    def update(self, step: int) -> None:
        """Average in the weights as they are after this step; steps are counted from 1."""
        for values, weights in zip(self.values, self.weights, strict=True):
            average = get_ema_multi_avg_fn(min(self.decay, (1 + step) / (10 + step)))
            average([*values.values()], [w.detach() for w in weights.values()], None)

    @contextmanager
    def trained_weights(self) -> Iterator[None]:
        """In the body, which may be nested, the models hold the weights being trained."""
        was_in_models = self.in_models
        self.in_models = False
        if was_in_models:
            self._swap()
            with torch.no_grad():
                for train, _ in self.modes:
                    train()
                for weight, value in zip(self.averaged, self.trained, strict=True):
                    weight.copy_(value)  # train() only rounds to it
        try:
            yield
        finally:
            if was_in_models:
                self._swap()
                with torch.no_grad():
                    for weight, value in zip(self.averaged, self.trained, strict=True):
                        value.copy_(weight)
                    for _, evaluate in self.modes:
                        evaluate()
            self.in_models = was_in_models

    @torch.no_grad()
    def _swap(self) -> None:
        shards.forget_whole_weights(self.models)
        for values, weights in zip(self.values, self.weights, strict=True):
            for name, weight in weights.items():
                # Copied, because DDP, FSDP and CUDA graphs rely on the address of a weight.
                value = weight.clone()
                weight.copy_(values[name])
                values[name].copy_(value)
