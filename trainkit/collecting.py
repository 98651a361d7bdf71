"""run.predict: what a function returns for each sample of a set, on every process."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.utils.data import DataLoader

from trainkit.checks.prepared import check_loader
from trainkit.checks.values import check_rows
from trainkit.evaluation import places_of, shares_of
from trainkit.private import tree_map_only

CALL = "run.predict(...)"
SENT_BYTES = 2**24  # of the rows of a process that are sent at a time
SENT_OBJECTS = 2**12  # the same for what is no tensor

Column: TypeAlias = torch.Tensor | list


def predict(
    accelerator: Accelerator,
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
    columns: dict[str, Column] = {}
    is_dict = False
    for batch, places in shares_of(accelerator, loader, CALL):
        result = function(batch)
        is_dict = isinstance(result, dict)
        if isinstance(result, tuple):
            raise RuntimeError(f"{CALL} got a tuple: return a dict, which names its parts")
        if columns and is_dict and result.keys() != columns.keys():
            raise different_rows([*columns], [*result])
        for name, rows in result.items() if is_dict else [("", result)]:
            columns[name] = put(columns.get(name), rows, places, len(loader.dataset))
        if stopping():
            return None
    if accelerator.num_processes > 1:
        exchange(accelerator, loader, columns)
    return columns if is_dict else columns[""]


def put(column: Column | None, rows: Any, places: range, num_samples: int) -> Column:
    """Write the rows of these places, on the CPU, into a column; None: into a new one."""
    rank_slice = slice(places.start, places.stop)
    if isinstance(rows, list):
        check_rows(CALL, torch.empty(len(rows), 0), len(places))
        cells = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), rows)
        objects = [None] * num_samples if column is None else column
        objects[rank_slice] = cells[: len(places)]  # not the stand-in
        return objects
    rows = torch.as_tensor(rows).detach()
    check_rows(CALL, rows, len(places))
    if column is None:
        column = torch.zeros(num_samples, *rows.shape[1:], dtype=rows.dtype)
    tensor = torch.as_tensor(column)
    if kind_of(tensor) != kind_of(rows):
        raise different_rows(kind_of(tensor), kind_of(rows))
    tensor[rank_slice] = rows[: len(places)].cpu()
    return tensor


def kind_of(column: Column) -> Any:
    """What the rows of a column have in common: dtype and sizes, or that they are anything."""
    return list if isinstance(column, list) else (column.dtype, *column.shape[1:])


def exchange(accelerator: Accelerator, loader: DataLoader, columns: dict[str, Column]) -> None:
    """Give every process the rows of all. Every process must call this."""
    kinds = {name: kind_of(column) for name, column in columns.items()}
    for others in gather_object([kinds]):
        if others != kinds:
            raise different_rows(kinds, others)
    batches = check_loader(accelerator, loader, CALL)
    world = accelerator.num_processes
    places = [
        torch.tensor([n for part in places_of(batches, world, rank) for n in part])
        for rank in range(world)
    ]
    for column in columns.values():
        if isinstance(column, list):
            exchange_objects(accelerator, places, column)
        else:
            exchange_rows(accelerator, places, column)


def exchange_rows(
    accelerator: Accelerator, places: list[torch.Tensor], column: torch.Tensor
) -> None:
    """Fill in the rows of the other processes, some at a time, so that a device holds few."""
    # As bytes, so that any dtype arrives as it is.
    flat = column.view(len(column), column[0].numel()).view(torch.uint8)
    num = max(1, SENT_BYTES // max(1, flat.shape[1]))
    for start in range(0, max(map(len, places)) if flat.shape[1] else 0, num):
        parts = [theirs[start : start + num] for theirs in places]
        longest = max(map(len, parts))
        rank_rows = flat[parts[accelerator.process_index]]
        padded = flat.new_zeros(longest, flat.shape[1])
        padded[: len(rank_rows)] = rank_rows
        shares = accelerator.gather(padded.to(accelerator.device)).cpu().split(longest)
        for part, share in zip(parts, shares, strict=True):
            flat[part] = share[: len(part)]


def exchange_objects(accelerator: Accelerator, places: list[torch.Tensor], column: list) -> None:
    """The same for a list of anything."""
    for start in range(0, max(map(len, places)), SENT_OBJECTS):
        parts = [theirs[start : start + SENT_OBJECTS].tolist() for theirs in places]
        rank_cells = [column[n] for n in parts[accelerator.process_index]]
        for part, share in zip(parts, gather_object([rank_cells]), strict=True):
            for n, cell in zip(part, share, strict=True):
                column[n] = cell


def different_rows(one: Any, other: Any) -> RuntimeError:
    return RuntimeError(
        f"{CALL} got rows of {one} and rows of {other}: return a list with one thing for each "
        "sample where sizes differ"
    )
