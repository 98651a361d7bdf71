"""Every private name of torch, Accelerate and Python that the kit reads, and what it replaces.

Each function says what would go wrong without it. tests/test_private.py fails when a new release
changes one of these names, and when another module reads a private one or replaces a name of
another package: it lists the exceptions. Where `skip_the_compiler` finds its target changed it
saves no time, and the numbers are the same.
"""

import atexit
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.data import DataLoader

__all__ = ["tree_leaves", "tree_map", "tree_map_only"]


def prepared_models(accelerator: Accelerator) -> list[nn.Module]:
    """Every model that accelerator.prepare was given, in order, without DDP around it."""
    return accelerator._models


def prepared_optimizers(accelerator: Accelerator) -> list[AcceleratedOptimizer]:
    """What accelerator.prepare returned for each optimizer, in order."""
    return accelerator._optimizers


def prepared_schedulers(accelerator: Accelerator) -> list[AcceleratedScheduler]:
    """What accelerator.prepare returned for each learning rate schedule, in order."""
    return accelerator._schedulers


def prepared_loaders(accelerator: Accelerator) -> list[DataLoader]:
    """What accelerator.prepare returned for each data loader, in order."""
    return accelerator._dataloaders


def fingerprint_of(rows: Any) -> str:
    """What a datasets.Dataset is known by: two with the same have the same rows."""
    return rows._fingerprint


def end_workers(accelerator: Accelerator) -> None:
    """End the loader workers: else a notebook waits 5 s for each when Python collects garbage.

    The queue that would tell a worker to end is garbage too by then, and may be closed first.
    """
    for loader in prepared_loaders(accelerator):
        loader.base_dataloader._iterator = None


def fix_bucket_order(*models: nn.Module) -> None:
    """Let DistributedDataParallel sum gradients in the same order from the first step on.

    It rebuilds its buckets after its first backward pass. The place of a number in its bucket
    decides in which order the processes are summed, and with three or more the order changes the
    last bit: the first step of a resumed run would differ. So one backward pass is made before, of
    a sum of all parameters instead of the model, and its gradients are thrown away.

    Every process must call this; without DistributedDataParallel it does nothing.
    """
    for model in models:
        parallel = getattr(model, "_orig_mod", model)  # of a compiled model
        if isinstance(parallel, nn.parallel.DistributedDataParallel):
            _backward_once(parallel)


def _backward_once(parallel: nn.parallel.DistributedDataParallel) -> None:
    module, forward = parallel.module, parallel.module.forward
    parameters = [p for p in module.parameters() if p.requires_grad]
    module.forward = lambda: sum(parameter.sum() for parameter in parameters)
    try:
        parallel().backward()
    finally:
        module.forward = forward
    for parameter in parameters:
        parameter.grad = None


def share_frozen_weights(
    accelerator: Accelerator, frozen: Callable[[nn.Module], dict[str, torch.Tensor]]
) -> None:
    """Let what is frozen stay where from_pretrained has mapped it from a file, once per machine.

    Else each process would have a copy of its own: Accelerate moves a model to the device cpu:0,
    which is not cpu, and DistributedDataParallel overwrites it by that of the first process. Call
    before accelerator.prepare. `frozen` returns by name what is frozen of a model.
    """
    prepare = accelerator.prepare_model

    def prepare_model(model: nn.Module, **options: Any) -> nn.Module:
        if accelerator.device.type == "cpu":
            options["device_placement"] = False
        parallel = nn.parallel.DistributedDataParallel
        parallel._set_params_and_buffers_to_ignore_for_model(model, [*frozen(model)])
        return prepare(model, **options)

    accelerator.prepare_model = prepare_model


def skip_the_compiler() -> None:
    """Let optimizers work without importing torch's compiler: a start takes 1.1 s less.

    That is CPU time (3.8 to 2.6 s, median of 5 pairs of `train_mnist.py --stop-after-steps 1`).
    torch imports it to mark some methods as not to be compiled, and in each step to end a graph
    that is being compiled. Accelerate compiles the model alone, so here these methods are their
    uncompiled selves from the start. Hooks on a step are called as ever.
    """
    compiles = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no"
    if compiles or "torch._dynamo" in sys.modules:
        return
    optimizer = torch.optim.Optimizer
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        plain = inspect.unwrap(getattr(optimizer, name))
        plain.__dynamo_disable = plain  # where torch._compile keeps the marked version
    for kind in (torch.optim.Adam, torch.optim.SGD):  # AdamW has Adam's step
        if not hasattr(kind.step, "hooked"):  # the first optimizer of a kind wraps step for hooks
            kind.step = _without_graph_breaks(inspect.unwrap(kind.step))


def _without_graph_breaks(step: Callable) -> Callable:
    @functools.wraps(step)
    def plain(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return plain


def precision_of_notebook_launcher() -> str:
    """The mixed_precision that the notebook_launcher around this call was given, "no" without one.

    It writes it to a variable that Accelerate does not read, and with one process nowhere: a run
    that was asked for fp16 or bf16 would train in float32.
    """
    for caller in inspect.stack(0):
        if caller.frame.f_code is accelerate.notebook_launcher.__code__:
            return str(caller.frame.f_locals["mixed_precision"])
    return os.environ.get("MIXED_PRECISION", "no") if "NPROC" in os.environ else "no"


def run_exit_functions() -> None:
    """What the interpreter does before its teardown: end and join threads, call exit functions."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
