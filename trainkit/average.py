"""--ema: an exponential moving average of the weights, which is what is evaluated and written."""

from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class Average:
    """The average of all trained weights of a run; saved and loaded with its checkpoints.

    It begins as the first weights. Its decay rises to the one that was asked for, as
    min(decay, (1 + step) / (10 + step)), so that the first weights of a short run do not weigh on
    it (as in TensorFlow's ExponentialMovingAverage). Buffers are not averaged.
    """

    def __init__(self, accelerator: Accelerator, models: Sequence[nn.Module], decay: float):
        self.accelerator, self.decay = accelerator, decay
        self.weights = [
            {name: w for name, w in model.named_parameters() if w.requires_grad} for model in models
        ]
        self.values = [{n: w.detach().clone() for n, w in of.items()} for of in self.weights]
        self.swapped = False
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)

    def update(self, step: int) -> None:
        """Add the weights after this step, counted from 1."""
        average = get_ema_multi_avg_fn(min(self.decay, (1 + step) / (10 + step)))
        for values, weights in zip(self.values, self.weights, strict=True):
            average([*values.values()], [w.detach() for w in weights.values()], None)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights of the models and their average."""
        self.swapped = not self.swapped
        for values, weights in zip(self.values, self.weights, strict=True):
            for name, weight in weights.items():
                # Copied: DDP, FSDP and CUDA graphs know a weight by its memory.
                value = weight.clone()
                weight.copy_(values[name])
                values[name].copy_(value)

    def _save(self, models: list, weights: list, folder: str) -> None:
        assert not self.swapped, "a checkpoint holds the weights that are trained"
        if self.accelerator.is_main_process:
            for number, values in enumerate(self.values):
                plain = {name: value.contiguous() for name, value in values.items()}
                save_file(plain, self._path(folder, number))

    def _load(self, models: list, folder: str) -> None:
        for number, values in enumerate(self.values):
            saved = load_file(self._path(folder, number))
            for name, value in values.items():
                value.copy_(saved[name])

    @staticmethod
    def _path(folder: str, number: int) -> Path:
        return Path(folder, f"average_{number}.safetensors" if number else "average.safetensors")
