"""Optimizer and learning rate from the flags of trainkit.arguments: torch's own, put together."""

import argparse
import math
from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import lr_scheduler

from trainkit.internals import total_norm


def make_optimizer(
    accelerator: Accelerator,
    parameters: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
    args: argparse.Namespace,
) -> torch.optim.Optimizer:
    """AdamW, Adam or SGD with momentum, fused into one kernel.

    `parameters` are those of a model, or groups of them, each of which may have an "lr" and a
    "weight_decay" of its own: a schedule keeps the ratios of their rates.

    Not fused under fp16: GradScaler lets a fused optimizer skip a step by itself, and Accelerate
    then counts a skipped step as made. None leaves the choice to torch, which takes its foreach
    kernels on a GPU.
    """
    options: dict[str, Any] = {
        "lr": peak_learning_rate(args),
        "weight_decay": args.weight_decay,
        "fused": None if accelerator.mixed_precision == "fp16" else True,
    }
    if args.optimizer == "sgd":
        options["momentum"] = args.momentum
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    return kind[args.optimizer](parameters, **options)


def peak_learning_rate(args: argparse.Namespace) -> float:
    """--learning-rate after the linear scaling rule (Goyal et al. 2017, arXiv:1706.02677)."""
    return args.learning_rate * (args.batch_size / args.scale_lr if args.scale_lr else 1.0)


def clip_gradients(
    accelerator: Accelerator, optimizer: torch.optim.Optimizer, max_norm: float
) -> torch.Tensor:
    """Clip the gradients of one prepared optimizer to max_norm; return their norm before that.

    Under fp16 the loss scale is taken out of them first, as accelerator.clip_grad_norm_ does for
    all optimizers at once. Where nothing is to be clipped they are not multiplied by 1: the same
    bits, sooner.
    """
    if accelerator.scaler is not None:
        accelerator.unscale_gradients(optimizer)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if max_norm < math.inf:
        return nn.utils.clip_grad_norm_(weights, max_norm)
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return total_norm(gradients)


def make_scheduler(
    optimizer: torch.optim.Optimizer, args: argparse.Namespace, steps_per_epoch: int
) -> lr_scheduler.LRScheduler:
    """A schedule that is stepped once per optimizer step, its lengths counted in those steps.

    onecycle: up to the peak in the warm-up and down to 0 (OneCycleLR, Smith and Topin 2017).
    The others are products of: a line up to 1 in the warm-up; gamma per epoch (ExponentialLR);
    half a period of a cosine down to 0, and up again (CosineAnnealingLR, Loshchilov and Hutter
    2016). At the end of each epoch they have the value of those schedulers stepped together, once
    per epoch.
    """
    total_steps = args.epochs * steps_per_epoch
    if args.schedule == "onecycle":
        return lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=[group["lr"] for group in optimizer.param_groups],
            total_steps=total_steps,
            pct_start=args.warmup + 1e-9,  # torch divides by warmup * total_steps - 1
            # Momentum stays: cycling it as well is an ingredient of its own.
            cycle_momentum=False,
        )
    warmup_steps = math.ceil(args.warmup * total_steps)
    cosine_epochs = args.cosine_epochs or args.epochs

    def factor(step: int) -> float:
        epoch, value = step / steps_per_epoch, 1.0
        if step < warmup_steps:
            value *= (step + 1) / warmup_steps
        if "cosine" in args.schedule:
            value *= (1 + math.cos(math.pi * epoch / cosine_epochs)) / 2
            # CosineAnnealingLR leaves each 0 of the cosine with the first learning rate: whatever
            # was multiplied in before, the decay too, starts again one epoch later.
            num_zeros = math.floor((epoch / cosine_epochs + 1) / 2)
            if num_zeros > 0:
                epoch -= (2 * num_zeros - 1) * cosine_epochs + 1
        if "exponential" in args.schedule:
            value *= args.gamma**epoch
        return value

    return lr_scheduler.LambdaLR(optimizer, factor)
