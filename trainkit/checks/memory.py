"""Refuse a run for which the memory of this machine, or of its container, does not suffice."""

import os
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator

from trainkit.cli.console import num_moments
from trainkit.errors import UsageError, failing_together

# Of a control group, version 2 and 1: where its folder is, its limit, what is used, and the name in
# memory.stat of what the kernel gives back when it is needed (pages of files).
GROUPS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": (
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}


def check_memory(accelerator: Accelerator, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse a run whose gradients and moments do not fit into the memory of this machine.

    Linux would end it with SIGKILL in its first step. Every process must call this. Raises
    UsageError on all of them. It is not about GPUs, which say themselves what they lack.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    needed = 0
    for group in groups:
        for weight in group["params"]:
            rows = getattr(weight, "to_local", weight.detach)()
            needed += rows.numel() * rows.itemsize * (1 + num_moments(group))
    needed *= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with failing_together(accelerator, "the memory cannot be read"):
        free = free_memory()
        if accelerator.device.type == "cpu" and needed > free:
            raise UsageError(
                f"gradients and moments need {needed / 2**30:,.1f} GiB on this machine and "
                f"{free / 2**30:,.1f} GiB are free: use more machines with sharded weights "
                "(docs/scaling.md), a smaller model, or stop other programs"
            )


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that can still be taken on this machine, within the limits of containers and Slurm.

    A control group has the limits of all groups around it. `root` is where /proc and /sys are.
    """
    free = [psutil.virtual_memory().available + psutil.swap_memory().free]
    own = root / "proc/self/cgroup"
    for line in own.read_text().splitlines() if own.exists() else ():
        _, kinds, path = line.split(":", 2)
        for kind in GROUPS.keys() & kinds.split(","):
            name, limit, used, stat = GROUPS[kind]
            top = root / "sys/fs/cgroup" / name
            # A container may not see the folder that has its own name; then its group is the top.
            for folder in (top / path[1:], *(top / path[1:]).parents):
                if folder.is_relative_to(top) and (folder / limit).exists():
                    most, stats = (folder / limit).read_text().strip(), folder / "memory.stat"
                    back = dict(map(str.split, stats.read_text().splitlines())).get(stat, 0)
                    taken = int((folder / used).read_text()) - int(back)
                    free += [int(most) - taken] if most != "max" else []
    return min(free)
