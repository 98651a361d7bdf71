"""What a run prints: its plan, read from the objects that will carry it out, and its metrics."""

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DynamoBackend
from torch import nn

from trainkit.errors import UsageError
from trainkit.internals import prepared_schedulers
from trainkit.order import Indices
from trainkit.shards import describe_shards
from trainkit.text import count
from trainkit.world import describe_world

SMALLEST_IS_BEST = (
    "loss",
    "error",
    "mse",
    "mae",
    "perplexity",
    "nll",
)  # parts of names of metrics, of --keep-best
WIDTH = 79
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def fit(text: str) -> str:
    """The text with long lines broken between words, if a terminal shows it; else as it is."""
    if not sys.stdout.isatty():
        return text
    width = max(40, shutil.get_terminal_size().columns - 1)
    lines = []
    for line in text.split("\n"):
        name = re.match(r"[^ ].*?  +", line)  # of a line of the plan: the rest is indented alike
        lines += textwrap.wrap(
            line,
            width,
            subsequent_indent=" " * (name.end() if name else 0),
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines)


def describe(run: Any, plan: dict[str, str]) -> str:
    """The plan of a Run that has its models and optimizers, with the script's own lines in it."""
    args, accelerator = run.args, run.accelerator
    num_processes = accelerator.num_processes
    num_parts = num_processes * args.accumulate
    left_out = len(run.train_set) - run.num_used
    unused = f" (the last {left_out} of each shuffle are left out)" if left_out else ""
    ends = f"{run.last_step} (--stop-after-steps) of " if args.stop_after_steps else ""
    lines = {
        "device": describe_world(accelerator),
        **plan,
        "samples": f"{len(run.train_set)} to train on{unused}, {len(run.eval_set)} to evaluate on",
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
    if accelerator.is_fsdp2:
        lines["each process"] = describe_shards(accelerator, run.models[0])
    if args.ema:
        buffers = [name for model in run.models for name, _ in model.named_buffers()]
        newest = f"; buffers ({buffers[0]}, ...) are not averaged" if buffers else ""
        lines["average"] = f"of the weights, decay {args.ema}: evaluated and written{newest}"
    if note := describe_batch_norm(args, num_processes, run.num_used, run.models):
        lines["note"] = note
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


class MetricsTable:
    """The metrics of each evaluation on a line of at most WIDTH columns, below one header.

    What does not fit stands in metrics.jsonl alone.
    """

    def __init__(self):
        self.names: list[str] = []

    def line(self, epoch: str, metrics: dict[str, float], seconds: float, rate: float) -> str:
        """The next line, the first time with the header above it."""
        header = ""
        if not self.names:
            # train_loss first; then what is evaluated, then what else is trained on, if it fits.
            names = sorted(metrics, key=lambda name: not name.startswith("eval_"))
            names.sort(key=lambda name: name != "train_loss")
            room = WIDTH - len("0.001/100   seconds  samples/s")
            for name in (n for n in names if n not in ("epoch", "eval_samples")):
                room -= max(9, len(name)) + 2
                if room >= 0:
                    self.names.append(name)
            header = self._join("epoch", self.names, "seconds", "samples/s") + "\n"
        numbers = [show(name, metrics[name]) if name in metrics else "" for name in self.names]
        return header + self._join(epoch, numbers, f"{seconds:.1f}", f"{rate:,.0f}")

    def _join(self, epoch: str, cells: list[str], seconds: str, rate: str) -> str:
        widths = [max(9, len(name)) for name in self.names]
        row = "".join(f"  {c:>{width}}" for c, width in zip(cells, widths, strict=True))
        return f"{epoch:<9}{row}  {seconds:>8}  {rate:>9}"


def show(name: str, value: float) -> str:
    """A metric with the digits that a person reads: an accuracy in percent."""
    if "accuracy" in name:
        return f"{value:.2%}".replace("%", " %")
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def show_best(metrics: dict[str, float]) -> str:
    """The first metrics of an evaluation in words, an accuracy before a loss."""
    names = [name for name in metrics if name.startswith("eval_") and name != "eval_samples"]
    names.sort(key=lambda name: "accuracy" not in name)
    return ", ".join(f"{name} {show(name, metrics[name])}" for name in names[:2])


def smallest_is_best(metric: str) -> bool:
    """True if a smaller value of this metric is better, judged by its name."""
    return any(part in metric for part in SMALLEST_IS_BEST)


def num_parameters(models: Sequence[nn.Module]) -> int:
    return sum(parameter.numel() for model in models for parameter in model.parameters())


def describe_model(accelerator: Accelerator, model: nn.Module) -> str:
    backend = accelerator.state.dynamo_plugin.backend
    compiled = ""
    if backend != DynamoBackend.NO:
        compiled = f", compiled with {backend.value.lower()} (the first step waits for it)"
    name = type(model).__name__.removeprefix("FSDP")  # which torch puts before a sharded one's
    return f"{name}, {num_parameters([model]):,} parameters{compiled}"


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
