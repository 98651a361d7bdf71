"""The kernels of the optimizers after their state was loaded."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trainkit.errors import UsageError


def kernel_of(group: dict[str, Any]) -> dict[str, Any]:
    """Which of torch's implementations steps a parameter group."""
    return {name: group[name] for name in ("fused", "foreach", "capturable") if name in group}


@contextmanager
def keeping_kernels(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """In the body the state of these optimizers is loaded; they keep the kernels that they have.

    A saved parameter group also says whether it was fused, which depends on the precision it was
    saved under.
    """
    wanted = [[kernel_of(group) for group in each.param_groups] for each in optimizers]
    yield
    for optimizer, kernels in zip(optimizers, wanted, strict=True):
        for group, kernel in zip(optimizer.param_groups, kernels, strict=True):
            group.update(kernel)
            for weight in group["params"]:
                fit_state(optimizer.state.get(weight, {}), weight, kernel)


def fit_state(state: dict[str, Any], weight: torch.Tensor, kernel: dict[str, Any]) -> None:
    """Give the loaded state of a weight its memory layout, and its count of steps its place.

    Raises UsageError for what a fused kernel, which looks at no shape, would read beyond its end.
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
        # Where no kernel needs it on the device, reading it there would make the host wait.
        on_device = kernel.get("fused") or kernel.get("capturable")
        state["step"] = state["step"].to(weight.device if on_device else "cpu")
