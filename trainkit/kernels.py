"""Keep the kernels of an optimizer when its state is loaded."""

from typing import Any

import torch

from trainkit.errors import UsageError

# The options of a parameter group that choose between torch's implementations of an optimizer.
KERNEL = ("fused", "foreach", "capturable")


def with_own_kernels(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Return saved state with this optimizer's kernels, each tensor in the layout of its weight.

    This is a hook for Optimizer.register_load_state_dict_pre_hook. A saved parameter group also
    records whether it was fused, which depends on the precision of the run that saved it. Raises
    UsageError if shapes differ and the kernel is fused: a fused kernel does not check shapes, and
    would read beyond the end of the state.
    """
    groups, states = [], dict(saved["state"])
    for group, theirs in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        kernel = {name: group[name] for name in KERNEL if name in group}
        groups.append(theirs | kernel)
        for weight, number in zip(group["params"], theirs["params"], strict=True):
            state = dict(states.get(number, {}))
            for name, value in state.items():
                shape = getattr(value, "shape", ())
                if shape and shape == weight.shape:
                    state[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)
                elif kernel.get("fused") and shape:
                    raise UsageError(
                        f"{name} of an optimizer is {tuple(shape)} for a weight of "
                        f"{tuple(weight.shape)}"
                    )
            if state:
                states[number] = state
    return saved | {"param_groups": groups, "state": states}
