"""run.evaluate: means over an evaluation set, in which each sample counts exactly once."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from trainkit.checks.prepared import check_evaluated, check_loader
from trainkit.metrics import RunningMeans, sum_and_count
from trainkit.private import prepared_models

CALL = "run.evaluate(...)"


@contextmanager
def evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    """In the body the models are in evaluation mode; then each layer is in its mode of before."""
    modes = {layer: layer.training for model in models for layer in model.modules()}
    for model in models:
        model.eval()
    yield
    for layer, mode in modes.items():
        layer.training = mode


def evaluate(
    accelerator: Accelerator,
    loader: DataLoader,
    compute_losses: Callable[[Any], dict[str, torch.Tensor]],
    stopping: Callable[[], bool],
) -> dict[str, float]:
    """Return eval_samples, and the mean of each value of compute_losses(batch) as eval_NAME.

    compute_losses returns what run.add() takes: unreduced values by name, and optionally "mask" or
    "weights". The models are in evaluation mode, without gradients. Each sample counts once,
    whichever process has it. Every process must call this. Raises RuntimeError for values that do
    not have one row per sample. Returns an empty dict if stopping(), which must be the same on all
    processes, is true after a batch.
    """
    check_loader(accelerator, loader, training=False)
    means, num_rows = RunningMeans(accelerator), Counter[str]()  # without a mask
    # Not inference_mode: FSDP could not train with its tensors afterwards.
    with torch.no_grad(), evaluating(prepared_models(accelerator)):
        for batch in loader:
            values = compute_losses(batch)
            counted = {name: values.pop(name) for name in ("mask", "weights") if name in values}
            for name, value in values.items():
                if value.ndim == 0:
                    raise RuntimeError(
                        f"{CALL} got a single number for {name}: return one value for each "
                        'sample, as losses with reduction="none" are'
                    )
                if not counted:
                    num_rows[name] += len(value)
                means.add(name, *sum_and_count(CALL, value, **counted))
            if stopping():
                return {}
    check_evaluated(accelerator, num_rows, loader)
    return means.compute("eval") | {"eval_samples": len(loader.dataset)}
