"""--keep-best and --patience: which evaluation was the best, and when to stop without a better."""

import argparse
import math
from contextlib import suppress
from typing import Any

from accelerate import Accelerator

from trainkit.checkpoint import Progress
from trainkit.cli.console import show
from trainkit.cli.directions import metric_and_direction
from trainkit.errors import UsageError, as_usage_error
from trainkit.run_dir import records
from trainkit.run_dir.files import rename_free


def judge(args: argparse.Namespace, progress: Progress) -> bool:
    """Is this evaluation the best so far? Those that are not are counted: --patience ends a run."""
    name, direction = metric_and_direction(args.keep_best or "")
    if name not in progress.metrics:
        return False
    if not _is_of(progress, name, direction):  # it was another one before a resume
        progress.best, progress.num_worse = None, 0
    progress.best_name = f"{name}:{direction}"
    value, best = progress.metrics[name], progress.best
    better = best is None or (value < best if direction == "min" else value > best)
    if better and math.isfinite(value):
        progress.best, progress.best_step, progress.num_worse = value, progress.step, 0
        return True
    progress.num_worse += 1
    progress.ended |= args.patience is not None and progress.num_worse >= args.patience
    return False


def _is_of(progress: Progress, name: str, direction: str) -> bool:
    """Is it the best of this metric? Older checkpoints have its name alone."""
    return progress.best_name in (name, f"{name}:{direction}")


def problem(args: argparse.Namespace, progress: Progress) -> str:
    """What is wrong with --keep-best, if there is no such metric."""
    if not args.keep_best or metric_and_direction(args.keep_best)[0] in progress.metrics:
        return ""
    return f"--keep-best {args.keep_best}: there are only {', '.join(progress.metrics)}"


def describe(accelerator: Accelerator, args: argparse.Namespace, progress: Progress) -> str:
    """Which evaluation was best, and which file has its weights."""
    name, direction = metric_and_direction(args.keep_best)
    if progress.best is None or not _is_of(progress, name, direction):
        return f"no evaluation gave a finite {name}: nothing was kept for it"
    where, value = _best_file(accelerator, args, progress), show(name, progress.best)
    return f"{name} was best at step {progress.best_step}, {value}: {where} those weights"


def _best_file(accelerator: Accelerator, args: Any, progress: Progress) -> str:
    """A resume from an older checkpoint has left the weights of another step behind."""
    path, step = args.run_dir / "best.safetensors", progress.best_step
    if path.exists() and accelerator.is_main_process:
        with suppress(UsageError), as_usage_error(f"{path} cannot be read"):
            if records.read_metadata(path)["step"] == step:
                return f"{path.name} has"
        rename_free(path, f"abandoned-{path.name}")
    kept = f"checkpoints/step-{step:010d}"
    return f"{kept} has" if (args.run_dir / kept).exists() else "no file any more has"
