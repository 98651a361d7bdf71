"""What a run is about to do, read from the objects that will do it: the lines it prints first."""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DynamoBackend
from torch import nn

from trainkit.errors import UsageError, count
from trainkit.internals import prepared_schedulers
from trainkit.order import Indices
from trainkit.world import describe_world

SMALLEST_IS_BEST = ("loss", "error", "mse", "mae")  # parts of names of metrics, of --keep-best
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def describe(run: Any, plan: dict[str, str]) -> str:
    """The plan of a Run that has its models and optimizers, with the script's own lines in it."""
    args, accelerator = run.args, run.accelerator
    num_processes = accelerator.num_processes
    num_parts = num_processes * args.accumulate
    left_out = len(run.train_set) - run.num_used
    ends = f"{run.last_step} (--stop-after-steps) of " if args.stop_after_steps else ""
    lines = {
        "device": describe_world(accelerator),
        **plan,
        "samples": f"{len(run.train_set)} to train on (the last {left_out} of each shuffle are "
        f"left out), {len(run.eval_set)} to evaluate on",
        "model": "; ".join(describe_model(accelerator, model) for model in run.models),
        "batch": f"{args.batch_size} per step = {count(num_processes, 'process')} x "
        f"{count(args.accumulate, 'micro-batch')} x {args.batch_size // num_parts}",
        "updates": f"{ends}{args.epochs * run.steps_per_epoch} = {count(args.epochs, 'epoch')} x "
        f"{count(run.steps_per_epoch, 'step')}",
        "optimizer": "; ".join(describe_optimizer(accelerator, o) for o in run.optimizers),
        "run folder": str(args.run_dir),
    }
    if args.keep_best is not None:
        kind = "smallest" if smallest_is_best(args.keep_best) else "largest"
        lines["kept too"] = f"the checkpoint with the {kind} {args.keep_best}"
    if args.ema:
        buffers = [name for model in run.models for name, _ in model.named_buffers()]
        newest = f"; its buffers ({buffers[0]}, ...) are the newest" if buffers else ""
        lines["average"] = f"of the weights, decay {args.ema}: evaluated and written{newest}"
    if note := describe_batch_norm(args, num_processes, run.num_used, run.models):
        lines["note"] = note
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


def smallest_is_best(metric: str) -> bool:
    """True for a metric of which less is better, by its name."""
    return any(part in metric for part in SMALLEST_IS_BEST)


def num_parameters(models: Sequence[nn.Module]) -> int:
    return sum(parameter.numel() for model in models for parameter in model.parameters())


def describe_model(accelerator: Accelerator, model: nn.Module) -> str:
    backend = accelerator.state.dynamo_plugin.backend
    compiled = ""
    if backend != DynamoBackend.NO:
        compiled = f", compiled with {backend.value.lower()} (the first step waits for it)"
    return f"{type(model).__name__}, {num_parameters([model]):,} parameters{compiled}"


def describe_optimizer(accelerator: Accelerator, optimizer: AcceleratedOptimizer) -> str:
    schedules = [
        type(wrapped.scheduler).__name__
        for wrapped in prepared_schedulers(accelerator)
        if optimizer in wrapped.optimizers
    ]
    groups = optimizer.param_groups
    peaks = [group.get("max_lr", group.get("initial_lr", group["lr"])) for group in groups]
    rates = " and ".join(f"{peak:g}" for peak in dict.fromkeys(peaks))
    fused = " fused" if all(group.get("fused") for group in groups) else ""
    return (
        f"{type(optimizer.optimizer).__name__}{fused}, {', '.join(schedules) or 'no schedule'},"
        f" learning rate {rates} at its peak"
    )


def describe_batch_norm(
    args: argparse.Namespace, num_processes: int, num_used: int, models: Sequence[nn.Module]
) -> str | None:
    """What to know of BatchNorm layers, if there are any.

    Raises UsageError if a share of a batch is too small for them, before training.
    """
    norms = [layer for model in models for layer in model.modules()]
    norms = [layer for layer in norms if isinstance(layer, BATCH_NORMS)]
    if not norms:
        return None
    kind = type(norms[0]).__name__
    size = args.batch_size // args.accumulate  # of a micro-batch, over all processes
    share = size // num_processes
    last = Indices(torch.arange(num_used % size or size), size)
    smallest = min(len(last[n : n + share].values) for n in range(0, size, share))
    if smallest < 2:
        raise UsageError(
            f"--batch-size {args.batch_size}: {kind} needs more than a batch of {smallest}, which "
            "a process gets here: use another --batch-size or --drop-last"
        )
    if args.batch_size == share:
        return None
    return (
        f"{count(len(norms), kind + ' layer')}: its numbers depend on how a batch is split, so "
        "other processes or micro-batches give other losses"
    )
