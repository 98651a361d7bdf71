"""Optimizer and learning rate from the flags of config.py: torch's own, put together."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import lr_scheduler

from trainkit.config import TrainingConfig


def make_optimizer(
    accelerator: Accelerator,
    parameters: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
    config: TrainingConfig,
) -> torch.optim.Optimizer:
    """AdamW, Adam or SGD with momentum, fused into one kernel.

    `parameters` are those of a model, or groups of them, each of which may have an "lr" and a
    "weight_decay" of its own: a schedule keeps the ratios of their rates.

    Not fused under fp16: GradScaler lets a fused optimizer skip a step by itself, and Accelerate
    then counts a skipped step as made. None leaves the choice to torch, which takes its foreach
    kernels on a GPU.
    """
    sharded_sgd = config.optimizer == "sgd" and accelerator.is_fsdp2  # torch has no such kernel
    options: dict[str, Any] = {
        "lr": config.peak_learning_rate,
        "weight_decay": config.weight_decay,
        "fused": None if accelerator.mixed_precision == "fp16" or sharded_sgd else True,
    }
    if config.optimizer == "sgd":
        options["momentum"] = config.momentum
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    return kind[config.optimizer](parameters, **options)


def weights_of(*optimizers: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The weights that these optimizers train."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [weight for group in groups for weight in group["params"]]


def learning_rates(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, float]:
    """Those of the first group of each optimizer, by their names in metrics.jsonl."""
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    return {f"learning_rate_{n}" if n else "learning_rate": r for n, r in enumerate(rates)}


def scale_gradients(factor: torch.Tensor, *optimizers: torch.optim.Optimizer) -> None:
    """Multiply the gradients of these optimizers by a number that is on their device."""
    for weight in weights_of(*optimizers):
        if weight.grad is not None:
            weight.grad.mul_(factor)


def total_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of all of them together; every process must call this if they are sharded."""
    norm = nn.utils.get_total_norm(tensors)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def clip_gradients(
    accelerator: Accelerator, max_norm: float, *optimizers: torch.optim.Optimizer
) -> torch.Tensor:
    """Clip the gradients of prepared optimizers to one norm; return that norm before clipping.

    Under fp16 the loss scale is taken out of them first, as accelerator.clip_grad_norm_ does.
    """
    if accelerator.scaler is not None:
        for optimizer in optimizers:
            accelerator.unscale_gradients(optimizer)
    weights = weights_of(*optimizers)
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    if not gradients:
        raise RuntimeError(
            "run.clip_and_check(...) found no gradient: it comes after accelerator.backward(...), "
            "and zero_grad() after optimizer.step()"
        )
    norm = total_norm(gradients)
    if max_norm < math.inf:  # else multiplying by 1 would take time
        nn.utils.clip_grads_with_norm_(weights, max_norm, norm)
    return norm


def make_scheduler(
    optimizer: torch.optim.Optimizer, config: TrainingConfig, steps_per_epoch: int
) -> lr_scheduler.LRScheduler:
    """A schedule that is stepped once per optimizer step, its lengths counted in those steps.

    onecycle: up to the peak in the warm-up and down to 0 (OneCycleLR, Smith and Topin 2017).
    The others are products of: a line up to 1 in the warm-up; gamma per epoch (ExponentialLR);
    half a period of a cosine down to 0, and up again (CosineAnnealingLR, Loshchilov and Hutter
    2016). At the end of each epoch they have the value of those schedulers stepped together, once
    per epoch. With --min-learning-rate they go down to that instead of 0.
    """
    total_steps = config.epochs * steps_per_epoch
    floor = config.min_learning_rate / config.peak_learning_rate
    if config.schedule == "onecycle":
        return lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=[group["lr"] for group in optimizer.param_groups],
            total_steps=total_steps,
            pct_start=config.warmup + 1e-9,  # torch divides by warmup * total_steps - 1
            # Momentum stays: cycling it as well is an ingredient of its own.
            cycle_momentum=False,
            # The rate begins at a 25th of the peak and ends at that over this factor.
            final_div_factor=1 / (25 * floor) if floor else 1e4,
        )
    warmup_steps = math.ceil(config.warmup * total_steps)
    cosine_epochs = config.cosine_epochs or config.epochs

    def factor(step: int) -> float:
        epoch, value = step / steps_per_epoch, 1.0
        warmup = min(1.0, (step + 1) / max(1, warmup_steps))
        if "cosine" in config.schedule:
            value *= (1 + math.cos(math.pi * epoch / cosine_epochs)) / 2
            # CosineAnnealingLR leaves each 0 of the cosine with the first learning rate: whatever
            # was multiplied in before, the decay too, starts again one epoch later.
            num_zeros = math.floor((epoch / cosine_epochs + 1) / 2)
            if num_zeros > 0:
                epoch -= (2 * num_zeros - 1) * cosine_epochs + 1
        if "exponential" in config.schedule:
            value *= config.gamma**epoch
        return warmup * (floor + (1 - floor) * value)

    return lr_scheduler.LambdaLR(optimizer, factor)
