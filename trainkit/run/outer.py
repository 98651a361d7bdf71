"""Refuse values of predictions (n, 1) against targets (n,), which broadcast to (n, n)."""

from collections import deque

import torch

from trainkit.repairs.names import inputs_of

NUM_SEEN = 64  # rows and columns of values without a graph are looked at
MAX_NODES = 64  # of a graph
SMALL = 1e-4  # relative size of the second singular value of a table that has but one


def check_outer(call: str, values: torch.Tensor) -> None:
    """Raise RuntimeError if values were made by broadcasting (n, 1) against (n,).

    Values with a graph show how they were made. Others show it by themselves: of an outer
    comparison or an outer difference, a row says what the others are.
    """
    if not isinstance(values, torch.Tensor) or values.ndim == 0 or values.is_nested:
        return
    num = len(values)
    shape = tuple(values.shape[:2])
    if values.ndim == 1 and values.requires_grad and num > 1:
        is_outer = is_made_by_one_side(values, num)
    elif shape == (num, num) and num > 1 and values[0].numel() == num:
        square = values.detach().reshape(num, num)
        if values.requires_grad:
            is_outer = is_made_by_one_side(values, num)
        else:
            is_outer = is_outer_table(square[:NUM_SEEN, :NUM_SEEN])
    else:
        return
    if is_outer:
        raise RuntimeError(
            f"{call} got values of each of the {num} samples against each of them, ({num}, {num}): "
            "predictions (n, 1) and targets (n,) were broadcast. Give both the same shape, as by "
            "predictions.squeeze(1)"
        )


def is_made_by_one_side(values: torch.Tensor, num: int) -> bool:
    """Is every (n, n) in the graph of the values made of one tensor of n numbers alone?

    What it was broadcast against has no graph, as targets. A matrix product, and the scores of a
    layer with n outputs, have inputs of other sizes.
    """
    found = False
    nodes = deque([(values.grad_fn, tuple(values.shape))])
    for _ in range(MAX_NODES):
        if not nodes:
            return found
        node, shape = nodes.popleft()
        inputs = inputs_of(node)
        wide = [pair for pair in inputs if is_wide(pair[1], num)]
        if wide:
            nodes.extend(wide)
        elif not is_wide(shape, num):
            if len(inputs) != 1:  # else a mean over rows, or a factor
                return False
            nodes.extend(inputs)
        elif len(inputs) == 1 and torch.Size(inputs[0][1]).numel() == num and inputs[0][1]:
            found = True
        else:
            return False
    return False


def is_wide(shape: tuple[int, ...], num: int) -> bool:
    """Is this (n, n)?"""
    return shape[:2] == (num, num) and torch.Size(shape).numel() == num * num


def is_outer_table(table: torch.Tensor) -> bool:
    """Is this table a[i] == b[j], (a[i] - b[j]) ** 2, abs(a[i] - b[j]), or a sum or product?"""
    if len(table) < 4 or (table == table[0, 0]).all():
        return False  # too few, or all alike
    if ((table == 0) | (table == 1)).all():
        return is_comparison(table == 1) or is_comparison(table == 0)
    numbers = table.double().cpu()
    if not numbers.isfinite().all():
        return False
    return is_rank_one(numbers) or is_rank_one(numbers.square())


def is_comparison(table: torch.Tensor) -> bool:
    """Are rows with a true entry in common equal, as those of a[i] == b[j] are?

    There must be several kinds of such rows, and some rows of one kind.
    """
    rows = table[table.any(1)]
    kinds = rows.unique(dim=0)
    is_disjoint = (kinds.sum(0) <= 1).all()
    return bool(is_disjoint) and 1 < len(kinds) < len(rows)


def is_rank_one(numbers: torch.Tensor) -> bool:
    """Are the numbers a sum of row and column terms, and of one product of both?"""
    rows = numbers.mean(1, keepdim=True)
    columns = numbers.mean(0, keepdim=True)
    centred = numbers - rows - columns + numbers.mean()
    sizes = torch.linalg.svdvals(centred)
    return bool(sizes[1] <= SMALL * numbers.abs().max())
