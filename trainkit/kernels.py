"""Keep the kernels of the optimizers while their state is loaded."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trainkit.errors import UsageError


def kernel_of(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a parameter group that choose between torch's optimizer implementations."""
    return {name: group[name] for name in ("fused", "foreach", "capturable") if name in group}


@contextmanager
def keeping_kernels(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Keep the kernels of these optimizers while their state is loaded in the body.

    A saved parameter group also records whether it was fused, which depends on the precision of the
    run that saved it.
    """
    wanted = [[kernel_of(group) for group in each.param_groups] for each in optimizers]
    yield
    for optimizer, kernels in zip(optimizers, wanted, strict=True):
        for group, kernel in zip(optimizer.param_groups, kernels, strict=True):
            group.update(kernel)
            for weight in group["params"]:
                fit_state(optimizer.state.get(weight, {}), weight, kernel)


def fit_state(state: dict[str, Any], weight: torch.Tensor, kernel: dict[str, Any]) -> None:
    """Give loaded state the memory layout of its weight, and put "step" on the right device.

    Raises UsageError if shapes differ and the kernel is fused: a fused kernel does not check
    shapes, and would read beyond the end of the state.
    """
    for name, value in state.items():
        shape = getattr(value, "shape", ())
        if shape == weight.shape:
            state[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)
        elif kernel.get("fused") and shape:
            raise UsageError(
                f"{name} of an optimizer is {tuple(shape)} for a weight of {tuple(weight.shape)}"
            )
    if isinstance(state.get("step"), torch.Tensor):
        # Kept on the CPU unless the kernel needs it: reading it from a GPU makes the host wait.
        on_device = kernel.get("fused") or kernel.get("capturable")
        state["step"] = state["step"].to(weight.device if on_device else "cpu")
