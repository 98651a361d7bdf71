"""Keep the kernels of the optimizers while their state is loaded."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trainkit.errors import UsageError

# The options of a parameter group that choose between torch's implementations of an optimizer.
KERNEL = ("fused", "foreach", "capturable")


@contextmanager
def keeping_kernels(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Keep the kernels of these optimizers while their state is loaded in the body.

    A saved parameter group also records whether it was fused, which depends on the precision of the
    run that saved it.
    """

    def groups() -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        return [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]

    wanted = [{name: group[name] for name in KERNEL if name in group} for _, group in groups()]
    yield
    for (optimizer, group), kernel in zip(groups(), wanted, strict=True):
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
                f"{name} of an optimizer is {tuple(shape)}, but its weight is {tuple(weight.shape)}"
            )
    if isinstance(state.get("step"), torch.Tensor):
        # Kept on the CPU unless the kernel needs it: reading it from a GPU makes the host wait.
        on_device = kernel.get("fused") or kernel.get("capturable")
        state["step"] = state["step"].to(weight.device if on_device else "cpu")
