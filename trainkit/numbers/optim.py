"""Make torch's own optimizers and learning rate schedules from the flags."""

import math
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import lr_scheduler

from trainkit.config import TrainingConfig
from trainkit.errors import UsageError
from trainkit.launch.processes import gather_rows
from trainkit.numbers.muon import Muon

# The options of a parameter group that choose between torch's implementations of an optimizer.
KERNEL = ("fused", "foreach", "capturable")

# What make_scheduler has made: run/guards.py refuses a step in which they do not move.
BY_STEP: WeakSet[lr_scheduler.LRScheduler] = WeakSet()


def make_optimizer(
    accelerator: Accelerator,
    parameters: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
    config: TrainingConfig,
) -> torch.optim.Optimizer:
    """AdamW, Adam, Muon or SGD with momentum, fused into one kernel but for Muon's matrices.

    `parameters` are those of a model, or groups of them, each of which may have its own "lr" and
    "weight_decay". A schedule keeps the ratios of the learning rates.
    """
    sharded_sgd = config.optimizer == "sgd" and accelerator.is_fsdp2  # torch cannot fuse it
    # Under fp16 a fused optimizer skips a step by itself, which Accelerate counts as made.
    options: dict[str, Any] = {
        "lr": config.peak_learning_rate,
        "weight_decay": config.weight_decay,
        "fused": None if accelerator.mixed_precision == "fp16" or sharded_sgd else True,
    }
    if config.optimizer in ("sgd", "muon"):
        options["momentum"] = config.momentum
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    return (kind | {"muon": Muon})[config.optimizer](parameters, **options)


def weights_of(*optimizers: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The weights that these optimizers train."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [weight for group in groups for weight in group["params"]]


def learning_rates(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, float]:
    """The rate of the first group of each optimizer; NaN if it finds it by itself (lr=None)."""
    rates = [optimizer.param_groups[0].get("lr") for optimizer in optimizers]
    numbers = [math.nan if rate is None else float(rate) for rate in rates]
    return {f"learning_rate_{n}" if n else "learning_rate": r for n, r in enumerate(numbers)}


def total_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The joint norm of all tensors. Every process must call this if they are sharded."""
    norm = nn.utils.get_total_norm(tensors)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def clip_gradients(
    accelerator: Accelerator, max_norm: float, *optimizers: torch.optim.Optimizer
) -> torch.Tensor:
    """Clip the joint norm of the gradients of prepared optimizers; return the norm before that."""
    if accelerator.scaler is not None:  # as accelerator.clip_grad_norm_ does
        for optimizer in optimizers:
            accelerator.unscale_gradients(optimizer)
    weights = weights_of(*optimizers)
    for weight in weights:
        if weight.grad is not None and weight.grad.is_sparse:
            weight.grad = mean_of_sparse(accelerator, weight.grad)
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    if not gradients:
        raise RuntimeError(
            "optimizer.step() found no gradient to clip: call it after "
            "accelerator.backward(...), and zero_grad() after optimizer.step()"
        )
    norm = total_norm(gradients)
    if max_norm < math.inf:  # multiplying by 1 would take time
        nn.utils.clip_grads_with_norm_(weights, max_norm, norm)
    return norm


def mean_of_sparse(accelerator: Accelerator, gradient: torch.Tensor) -> torch.Tensor:
    """The mean of a sparse gradient over the processes; every process must call this."""
    gradient = gradient.coalesce()  # a row may be there several times
    if accelerator.num_processes == 1:
        return gradient
    index, rows = gradient.indices()[0], gradient.values() / accelerator.num_processes
    nums = accelerator.gather(torch.tensor([len(index)], device=index.device)).tolist()
    index, rows = gather_rows(index, nums), gather_rows(rows, nums)
    return torch.sparse_coo_tensor(index[None], rows, gradient.shape).coalesce()


def make_scheduler(
    optimizer: torch.optim.Optimizer, config: TrainingConfig, steps_per_epoch: int
) -> lr_scheduler.LRScheduler:
    """Make a schedule that is stepped once per optimizer step.

    onecycle is OneCycleLR (Smith and Topin 2017). The others are products of a linear rise in the
    warm-up, a factor of gamma per epoch, and a cosine that falls to 0 in half a period and rises
    again (Loshchilov and Hutter 2016). linear falls from the end of the warm-up to 0 at the end of
    the run; with --decay the rate falls so in the last of the steps alone (Hu et al. 2024,
    arXiv:2404.06395). With --min-learning-rate the rate falls to that instead of 0.
    """
    total_steps = config.epochs * steps_per_epoch
    floor = config.min_learning_rate / config.peak_learning_rate
    warmup_steps = math.ceil(config.warmup * total_steps)
    cosine_epochs = config.cosine_epochs or config.epochs
    num_falling = math.ceil(config.decay * total_steps)
    if config.schedule == "linear":
        num_falling = total_steps - warmup_steps

    def factor(step: int) -> float:
        epoch = step / steps_per_epoch
        value = config.gamma**epoch if "exponential" in config.schedule else 1.0
        if "cosine" in config.schedule:
            value *= (1 + math.cos(math.pi * epoch / cosine_epochs)) / 2
        if num_falling > 0:
            value *= min(1.0, max(0, total_steps - step) / num_falling)
        return min(1.0, (step + 1) / max(1, warmup_steps)) * (floor + (1 - floor) * value)

    schedule: lr_scheduler.LRScheduler
    if config.schedule == "onecycle":
        schedule = lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=[group["lr"] for group in optimizer.param_groups],
            total_steps=total_steps,
            pct_start=config.warmup + 1e-9,  # torch divides by warmup * total_steps - 1
            cycle_momentum=False,  # that would be a separate choice
            # The rate starts at 1/25 of the peak, and ends at that divided by this factor.
            final_div_factor=1 / (25 * floor) if floor else 1e4,
        )
    else:
        schedule = lr_scheduler.LambdaLR(optimizer, factor)
    BY_STEP.add(schedule)
    return schedule


def keep_when_loading(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer keep its kernels, and the layout of its state, when a state is loaded.

    Raises UsageError, when loading, if shapes differ and the kernel is fused: a fused kernel would
    read beyond the end of the state.
    """
    optimizer.register_load_state_dict_pre_hook(_keep_kernels)
    optimizer.register_load_state_dict_post_hook(_fit_state)


def _keep_kernels(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        saved.update({name: group[name] for name in KERNEL if name in group})


def _fit_state(optimizer: torch.optim.Optimizer) -> None:
    """Give loaded state the memory layout of its weight."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            state = optimizer.state.get(weight, {})
            for name, value in state.items():
                shape = getattr(value, "shape", ())
                if shape == weight.shape:
                    state[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)
                elif group.get("fused") and shape:
                    raise UsageError(
                        f"{name} of an optimizer is {tuple(shape)}, but its weight is "
                        f"{tuple(weight.shape)}"
                    )


def num_parameters(models: Sequence[nn.Module]) -> int:
    """How many numbers the parameters of these models have, trained or frozen."""
    return sum(parameter.numel() for model in models for parameter in model.parameters())
