"""run.evaluate and run.predict: what a function says of an evaluation set, each sample once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from torch.utils.data import DataLoader

from trainkit.checkpoints.sharded import forget_whole_weights
from trainkit.numbers.loaders import share_of_batch
from trainkit.numbers.means import RunningMeans
from trainkit.repairs.private_names import prepared_models, tree_map_only
from trainkit.run.guards import EqualSizes, check_rows
from trainkit.run.prepared import check_loader
from trainkit.run.step import Step, sums_of

EVALUATE, PREDICT = "run.evaluate(...)", "run.predict(...)"


@contextmanager
def evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    """In the body the models are in evaluation mode; then each layer is in its mode of before."""
    modes = {layer: layer.training for model in models for layer in model.modules()}
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for layer, mode in modes.items():
            layer.training = mode
        forget_whole_weights(models)  # what the script does to them now is done to the rows


def results_of(
    step: Step, loader: DataLoader, call: str, function: Callable[[Any], Any]
) -> Iterator[tuple[Any, range]]:
    """Yield function(batch) of this process's share of each batch, and which samples it is."""
    batches = check_loader(step.accelerator, loader, call)
    models = prepared_models(step.accelerator)
    size, rank = batches.batch_size, step.accelerator.process_index
    slots = size // step.accelerator.num_processes
    # Not inference_mode: FSDP could not train with its tensors afterwards.
    with torch.no_grad(), evaluating(models), batches.read_by_run():
        for batch, span in zip(loader, batches.spans(), strict=True):
            share = share_of_batch(len(span), size, rank * slots, (rank + 1) * slots)
            indices = span[slice(*share)]  # none for a padding sample
            step.num_evaluated = len(indices)
            result = function(batch)
            step.num_evaluated = None
            if any(model.training for model in models):
                raise RuntimeError(
                    f"the function of {call} called model.train(), so dropout and BatchNorm act as "
                    "in training: leave it out"
                )
            yield result, indices


def evaluate(
    step: Step,
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
    means, sizes = RunningMeans(step.accelerator), EqualSizes()
    for result, indices in results_of(step, loader, EVALUATE, compute_losses):
        values = dict(result)
        chosen = values.pop("mask", None), values.pop("weights", None)
        means.add_all(sums_of(EVALUATE, values, *chosen, len(indices), sizes, means.dtype))
        if stopping():
            return {}
    sizes.check_processes(step.accelerator)
    return means.compute("eval") | {"eval_samples": len(loader.dataset)}


def predict(
    step: Step,
    loader: DataLoader,
    function: Callable[[Any], Any],
    stopping: Callable[[], bool],
) -> Any:
    """Return what function(batch) gives for each sample of a set, in its order, on every process.

    Each sample comes exactly once. The models are in evaluation mode, without gradients. The result
    is on the CPU, so it may be larger than the memory of a device. Every process must call this.

    Args:
        function: returns a tensor (samples, ...), all rows of the same sizes; or a list with any
            one thing for each sample that can be pickled; or a dict of those.

    Returns:
        A tensor, a list, or a dict of those, with as many rows as the set has samples; None if
        stopping(), which must be the same on all processes, is true after a batch.

    Raises RuntimeError if there is not one row for each sample, or if rows differ in size.
    """
    columns: dict[str, Any] = {}  # tensors or lists
    is_dict = False
    for result, indices in results_of(step, loader, PREDICT, function):
        is_dict = isinstance(result, dict)
        named = result if is_dict else {"": result}
        own = {name: on_host(rows, len(indices)) for name, rows in named.items()}
        for theirs, samples in gather_object([(own, indices)]):
            columns = columns or {
                name: empty_column(rows, len(loader.dataset)) for name, rows in theirs.items()
            }
            if kinds_of(columns) != kinds_of(theirs):
                raise RuntimeError(
                    f"{PREDICT} got rows of {kinds_of(columns)} and rows of {kinds_of(theirs)}: "
                    "return a list with one thing for each sample where sizes differ"
                )
            for name, rows in theirs.items():
                columns[name][samples.start : samples.stop] = rows
        if stopping():
            return None
    return columns if is_dict else columns[""]


def on_host(rows: Any, num_samples: int) -> Any:
    """The rows of these samples on the CPU, without that of padding."""
    check_rows(PREDICT, rows, num_samples)
    # Cloned, because pickling a view of a batch sends the whole batch.
    if isinstance(rows, list):
        own = rows[:num_samples]
        return tree_map_only(torch.Tensor, lambda t: t.detach().cpu().clone(), own)
    return torch.as_tensor(rows)[:num_samples].detach().cpu().clone()


def empty_column(rows: Any, num_samples: int) -> Any:
    if isinstance(rows, list):
        return [None] * num_samples
    return rows.new_zeros(num_samples, *rows.shape[1:])


def kinds_of(columns: dict[str, Any]) -> dict[str, Any]:
    """By name, what the rows have in common: dtype and sizes, or that they are anything."""
    return {
        name: "anything" if isinstance(rows, list) else (rows.dtype, *rows.shape[1:])
        for name, rows in columns.items()
    }
