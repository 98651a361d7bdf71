"""run.evaluate: means over an evaluation set, in which each sample counts exactly once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from trainkit.checks.prepared import check_loader
from trainkit.checks.values import EqualSizes, check_rows
from trainkit.loaders import EpochBatches, share_of_batch
from trainkit.metrics import RunningMeans, select, sum_and_count
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


def places_of(batches: EpochBatches, num_processes: int, rank: int) -> Iterator[range]:
    """Yield the places in the set that a process has of each batch; none for a stand-in."""
    size = batches.batch_size
    slots = batches.batch_size // num_processes
    for first in range(0, batches.num_used, size):
        num = min(size, batches.num_used - first)
        start, stop = share_of_batch(num, size, rank * slots, (rank + 1) * slots)
        yield range(first + start, first + stop)


def shares_of(
    accelerator: Accelerator, loader: DataLoader, call: str
) -> Iterator[tuple[Any, range]]:
    """Yield this process's share of each batch, without gradients, and its places in the set.

    The models are in evaluation mode meanwhile. Every process must call this.
    """
    batches = check_loader(accelerator, loader, call)
    rank_places = places_of(batches, accelerator.num_processes, accelerator.process_index)
    # Not inference_mode: FSDP could not train with its tensors afterwards.
    with torch.no_grad(), evaluating(prepared_models(accelerator)), batches.read_by_run():
        yield from zip(loader, rank_places, strict=True)


def evaluate(
    accelerator: Accelerator,
    loader: DataLoader,
    compute_losses: Callable[[Any], dict[str, Any]],
    stopping: Callable[[], bool],
) -> dict[str, float]:
    """Return eval_samples, and the mean of each value of compute_losses(batch) as eval_NAME.

    compute_losses returns what run.add() takes: unreduced values by name, and optionally "mask" or
    "weights", which are tensors for all values or dicts with one for some of the names. The models
    are in evaluation mode, without gradients. Each sample counts once, whichever process has it.
    Every process must call this. Raises RuntimeError for values that do not have one row per
    sample. Returns an empty dict if stopping(), which must be the same on all processes, is true
    after a batch.
    """
    means = RunningMeans(accelerator)
    sizes = EqualSizes()
    for batch, places in shares_of(accelerator, loader, CALL):
        values = dict(compute_losses(batch))
        mask, weights = values.pop("mask", None), values.pop("weights", None)
        for name, value, selection in select(CALL, values, mask, weights):
            call = f"run.evaluate(...), for {name},"
            if not selection:
                check_rows(call, value, len(places))
                if places:
                    sizes.check(call, value)
            means.add(name, *sum_and_count(call, value, **selection, is_stand_in=not places))
        if stopping():
            return {}
    sizes.check_processes(accelerator)
    return means.compute("eval") | {"eval_samples": len(loader.dataset)}
