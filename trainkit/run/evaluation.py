"""run.evaluate and run.predict: what a function says of an evaluation set, each sample once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.utils.data import DataLoader

from trainkit.checkpoints.sharded import forget_whole_weights
from trainkit.numbers.loaders import EpochBatches, share_of_batch
from trainkit.numbers.means import RunningMeans
from trainkit.repairs.private_names import prepared_models, tree_map_only
from trainkit.run.guards import EqualSizes, check_rows
from trainkit.run.prepared import check_loader
from trainkit.run.step import Step, sums_of

EVALUATE, PREDICT = "run.evaluate(...)", "run.predict(...)"
SENT_BYTES = 2**24  # of the rows of a process that are sent at a time
SENT_OBJECTS = 2**12  # the same for what is not a tensor


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


def samples_of(batches: EpochBatches, num_processes: int, rank: int) -> Iterator[range]:
    """Yield the samples of the set that a process has of each batch; none for padding."""
    size = batches.batch_size
    slots = size // num_processes
    for batch in batches.spans():
        start, stop = share_of_batch(len(batch), size, rank * slots, (rank + 1) * slots)
        yield range(batch.start + start, batch.start + stop)


def results_of(
    accelerator: Accelerator,
    loader: DataLoader,
    call: str,
    function: Callable[[Any], Any],
    step: Step,
) -> Iterator[tuple[Any, range]]:
    """Yield function(batch) of this process's share of each batch, and which samples it is.

    The models are in evaluation mode meanwhile, without gradients. Every process must call this.
    """
    batches = check_loader(accelerator, loader, call)
    models = prepared_models(accelerator)
    shares = samples_of(batches, accelerator.num_processes, accelerator.process_index)
    # Not inference_mode: FSDP could not train with its tensors afterwards.
    with torch.no_grad(), evaluating(models), batches.read_by_run():
        for batch, indices in zip(loader, shares, strict=True):
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
    accelerator: Accelerator,
    loader: DataLoader,
    compute_losses: Callable[[Any], dict[str, Any]],
    stopping: Callable[[], bool],
    step: Step,
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
    for result, indices in results_of(accelerator, loader, EVALUATE, compute_losses, step):
        values = dict(result)
        chosen = values.pop("mask", None), values.pop("weights", None)
        num, device = len(indices), accelerator.device
        means.add_all(sums_of(EVALUATE, values, *chosen, num, sizes, device))
        if stopping():
            return {}
    sizes.check_processes(accelerator)
    return means.compute("eval") | {"eval_samples": len(loader.dataset)}


def predict(
    accelerator: Accelerator,
    loader: DataLoader,
    function: Callable[[Any], Any],
    stopping: Callable[[], bool],
    step: Step,
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
    for result, indices in results_of(accelerator, loader, PREDICT, function, step):
        is_dict = isinstance(result, dict)
        named = result if is_dict else {"": result}
        if columns and named.keys() != columns.keys():
            raise different_rows([*columns], [*named])
        for name, rows in named.items():
            columns[name] = put(columns.get(name), rows, indices, len(loader.dataset))
        if stopping():
            return None
    if accelerator.num_processes > 1:
        exchange(accelerator, loader, columns)
    return columns if is_dict else columns[""]


def put(column: Any, rows: Any, indices: range, num_samples: int) -> Any:
    """Write the rows of these samples, on the CPU, into a column; None: into a new one."""
    if isinstance(rows, list):
        # Cloned, because pickling a view of a batch sends the whole batch.
        rows = tree_map_only(torch.Tensor, lambda t: t.detach().cpu().clone(), rows)
    else:
        rows = torch.as_tensor(rows).detach().cpu()
    check_rows(PREDICT, rows, len(indices))
    if column is None and isinstance(rows, list):
        column = [None] * num_samples
    elif column is None:
        column = rows.new_zeros(num_samples, *rows.shape[1:])
    if kind_of(column) != kind_of(rows):
        raise different_rows(kind_of(column), kind_of(rows))
    column[indices.start : indices.stop] = rows[: len(indices)]  # not the padding sample
    return column


def kind_of(column: Any) -> Any:
    """What the rows of a column have in common: dtype and sizes, or that they are anything."""
    return list if isinstance(column, list) else (column.dtype, *column.shape[1:])


def exchange(accelerator: Accelerator, loader: DataLoader, columns: dict[str, Any]) -> None:
    """Give every process the rows of all, some at a time. Every process must call this."""
    kinds = {name: kind_of(column) for name, column in columns.items()}
    for others in gather_object([kinds]):
        if others != kinds:
            raise different_rows(kinds, others)
    batches = check_loader(accelerator, loader, PREDICT)
    world = accelerator.num_processes
    samples = [
        [n for part in samples_of(batches, world, rank) for n in part] for rank in range(world)
    ]
    for _, column in sorted(columns.items()):  # in one order on all processes
        is_tensor = isinstance(column, torch.Tensor)
        num = max(1, SENT_BYTES // max(1, column[0].nbytes)) if is_tensor else SENT_OBJECTS
        for start in range(0, max(map(len, samples)), num):
            parts = [theirs[start : start + num] for theirs in samples]
            own = parts[accelerator.process_index]
            rows = column[own] if is_tensor else [column[n] for n in own]
            for part, theirs in zip(parts, gather_object([rows]), strict=True):
                if is_tensor:
                    column[part] = theirs
                    continue
                for n, cell in zip(part, theirs, strict=True):
                    column[n] = cell


def different_rows(one: Any, other: Any) -> RuntimeError:
    return RuntimeError(
        f"{PREDICT} got rows of {one} and rows of {other}: return a list with one thing for each "
        "sample where sizes differ"
    )
