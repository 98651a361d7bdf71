"""Optimizer and learning rate from the flags of trainkit.arguments: torch's own, put together."""

import argparse
import math
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import lr_scheduler


def make_optimizer(
    accelerator: Accelerator, model: nn.Module, args: argparse.Namespace
) -> torch.optim.Optimizer:
    """AdamW, Adam or SGD with momentum over all parameters, fused into one kernel.

    Not fused under fp16: GradScaler lets a fused optimizer skip a step by itself, and Accelerate
    then counts a skipped step as made.
    """
    options: dict[str, Any] = {
        "lr": peak_learning_rate(args),
        "weight_decay": args.weight_decay,
        "fused": accelerator.mixed_precision != "fp16",
    }
    if args.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), momentum=args.momentum, **options)
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[args.optimizer]
    return kind(model.parameters(), **options)


def peak_learning_rate(args: argparse.Namespace) -> float:
    """--learning-rate after the linear scaling rule (Goyal et al. 2017, arXiv:1706.02677)."""
    return args.learning_rate * (args.batch_size / args.scale_lr if args.scale_lr else 1.0)


def make_scheduler(
    optimizer: torch.optim.Optimizer, args: argparse.Namespace, steps_per_epoch: int
) -> lr_scheduler.LRScheduler:
    """A schedule that is stepped once per optimizer step, its lengths counted in those steps.

    exponential: x gamma per epoch (ExponentialLR). cosine: half a period down to 0
    (CosineAnnealingLR, Loshchilov and Hutter 2016). exponential+cosine: both stepped in a chain. A
    warm-up multiplies any of them by a line up to 1.
    onecycle: up to the peak in the warm-up and down to 0 (OneCycleLR, Smith and Topin 2017).
    """
    total_steps = args.epochs * steps_per_epoch
    warmup_steps = math.ceil(args.warmup * total_steps)
    if args.schedule == "onecycle":
        # Momentum stays: cycling it as well is an ingredient of its own.
        return lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=peak_learning_rate(args),
            total_steps=total_steps,
            pct_start=args.warmup + 1e-9,  # torch divides by warmup * total_steps - 1
            cycle_momentum=False,
        )
    cosine_steps = total_steps
    if args.cosine_epochs is not None:
        cosine_steps = round(args.cosine_epochs * steps_per_epoch)
    # All of these multiply the learning rate step by step, so they can be chained in any order.
    factors: list[lr_scheduler.LRScheduler] = []
    if warmup_steps > 1:
        factors.append(lr_scheduler.LinearLR(optimizer, 1 / warmup_steps, 1.0, warmup_steps - 1))
    if "exponential" in args.schedule:
        factors.append(lr_scheduler.ExponentialLR(optimizer, args.gamma ** (1 / steps_per_epoch)))
    if "cosine" in args.schedule:
        factors.append(lr_scheduler.CosineAnnealingLR(optimizer, max(1, cosine_steps)))
    if not factors:
        factors.append(lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=0))
    return factors[0] if len(factors) == 1 else lr_scheduler.ChainedScheduler(factors)
