"""Optimizer and learning rate from the flags of trainkit.arguments: torch's own, put together."""

import argparse
import functools
import inspect
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
        options["momentum"] = args.momentum
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    spare_the_compiler()
    optimizer = kind[args.optimizer](model.parameters(), **options)
    # Accelerate inspects the signature of zero_grad in every step, which a small model feels. A
    # signature that is stored is found at once.
    zero_grad = functools.partial(optimizer.zero_grad)
    zero_grad.__signature__ = inspect.signature(optimizer.zero_grad)
    optimizer.zero_grad = zero_grad
    return optimizer


def spare_the_compiler() -> None:
    """Let torch's optimizers work without importing torch's compiler, which takes over a second.

    They import it to mark some methods as not to be compiled, and in each step to end a graph that
    is being compiled. Accelerate compiles the model alone, so here the methods are their own
    uncompiled versions from the start. Without a compiler the numbers are the same.
    """
    optimizer = torch.optim.Optimizer
    for method in (
        optimizer.add_param_group, optimizer.zero_grad,
        optimizer.state_dict, optimizer.load_state_dict,
    ):  # fmt: skip
        plain = inspect.unwrap(method)
        plain.__dynamo_disable = plain  # where torch._compile keeps the marked version
    for kind in (torch.optim.Adam, torch.optim.SGD):  # AdamW has Adam's step
        kind.step = torch.no_grad()(inspect.unwrap(kind.step))


def peak_learning_rate(args: argparse.Namespace) -> float:
    """--learning-rate after the linear scaling rule (Goyal et al. 2017, arXiv:1706.02677)."""
    return args.learning_rate * (args.batch_size / args.scale_lr if args.scale_lr else 1.0)


def clip_gradients(
    accelerator: Accelerator, optimizer: torch.optim.Optimizer, max_norm: float
) -> torch.Tensor:
    """Clip the gradients as accelerator.clip_grad_norm_ does and return their norm.

    Where nothing is to be clipped, the gradients are not multiplied by 1: the same bits, sooner.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if max_norm < math.inf or accelerator.scaler is not None:  # a scaler unscales them there
        return accelerator.clip_grad_norm_(weights, max_norm)
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    # What nn.utils.get_total_norm does with tensors of one device, in half of its time.
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


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
            max_lr=peak_learning_rate(args),
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


def settle_sums(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
) -> None:
    """Make a resumed run add up gradients in the same order as the uninterrupted one.

    DistributedDataParallel lays out its buckets anew after its first backward pass. A number's
    place in its bucket decides in which order the processes are added to it, and with three or more
    the order decides the last bit. So one backward pass comes before the first step. Every process
    must call this.
    """
    if accelerator.num_processes > 2:
        model.eval()  # no random numbers, no running statistics: nothing else may change
        model(inputs).sum().backward()
        model.train()
        optimizer.zero_grad()
