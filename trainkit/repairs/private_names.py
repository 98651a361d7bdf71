"""Private names of torch, Accelerate and others that the kit only reads.

tests/test_private.py fails if another module reads a private name of another package.
"""

import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._pytree import (
    keystr,
    tree_leaves,
    tree_leaves_with_path,
    tree_map_only,
    tree_map_with_path,
)
from torch.utils.data import DataLoader

__all__ = [
    "BatchNorm",
    "keystr",
    "tree_leaves",
    "tree_leaves_with_path",
    "tree_map_only",
    "tree_map_with_path",
]


def is_trained(model: nn.Module) -> bool:
    """Has this model a weight that is not frozen, unlike a teacher?"""
    return any(weight.requires_grad for weight in model.parameters())


def prepared_models(accelerator: Accelerator) -> list[nn.Module]:
    """Every model that accelerator.prepare was given, in order, without DDP around it."""
    return accelerator._models


def prepared_optimizers(accelerator: Accelerator) -> list[AcceleratedOptimizer]:
    """The optimizers that accelerator.prepare returned, in order."""
    return accelerator._optimizers


def prepared_schedulers(accelerator: Accelerator) -> list[AcceleratedScheduler]:
    """The learning rate schedules that accelerator.prepare returned, in order."""
    return accelerator._schedulers


def registered_things(accelerator: Accelerator) -> list[Any]:
    """What accelerator.register_for_checkpointing(...) was given."""
    return accelerator._custom_objects


def prepared_loaders(accelerator: Accelerator) -> list[DataLoader]:
    """The data loaders that accelerator.prepare returned, in order."""
    return accelerator._dataloaders


def without_compiler(model: nn.Module) -> nn.Module:
    """What torch.compile has wrapped, or the model itself."""
    return getattr(model, "_orig_mod", model)


def as_it_was(prepared: nn.Module) -> nn.Module:
    """The model that accelerator.prepare was given; accelerator.unwrap_model takes 1.3 s."""
    model = without_compiler(prepared)
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def fingerprint_of(rows: Any) -> str:
    """The fingerprint of a datasets.Dataset: two with the same fingerprint have the same rows."""
    return rows._fingerprint


def is_stateful(model: Any) -> bool:
    """Does a state go from token to token in this transformers model, whatever the position_ids?"""
    return model._is_stateful


def mesh_groups(accelerator: Accelerator) -> dict[str, torch.distributed.ProcessGroup]:
    """The groups of this process by the axis of the mesh; empty without copies of the model."""
    mesh = accelerator.torch_device_mesh
    names = accelerator.parallelism_config.fsdp_dim_names if mesh else ()
    return {name.removesuffix("_cp"): mesh[name].get_group() for name in names}


def named_weights(model: nn.Module, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """model.named_parameters(...) with the names of state_dict(), also after recompute_layers."""
    for name, weight in model.named_parameters(**options):
        yield plain_name(name.replace("_checkpoint_wrapped_module.", "")), weight


def store_of_processes() -> Any:
    """Where the processes of the default group leave values for each other; each call is short."""
    return torch.distributed.distributed_c10d._get_default_store()


def frame_of_thread(thread: int) -> FrameType | None:
    """What the thread of this number executes now."""
    return sys._current_frames().get(thread)


def plain_name(name: str) -> str:
    """The name of a weight without what torch.compile(model) puts into it."""
    return name.replace("_orig_mod.", "")


def precision_of_notebook_launcher() -> str:
    """The mixed_precision passed to the notebook_launcher around this call, which loses it."""
    for caller in inspect.stack(0):
        if caller.frame.f_code is accelerate.notebook_launcher.__code__:
            return str(caller.frame.f_locals["mixed_precision"])
    return os.environ.get("MIXED_PRECISION", "no") if "NPROC" in os.environ else "no"


def version_of(tensor: torch.Tensor) -> int:
    """How often torch has changed this tensor in place; those of inference mode are not counted."""
    return 0 if tensor.is_inference() else tensor._version


def add_to_each(sums: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Add a value to each of these sums in place: if dtypes are equal, in one kernel of a GPU."""
    torch._foreach_add_(sums, values)
