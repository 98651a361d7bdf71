"""--keep-best and --patience: which evaluation was the best, and when to stop without a better."""

import argparse
import math
from contextlib import suppress
from typing import Any

from accelerate import Accelerator

from trainkit.checkpoint import Progress
from trainkit.cli.console import show
from trainkit.errors import UsageError, as_usage_error
from trainkit.run_dir import records
from trainkit.run_dir.files import rename_free

SMALLEST_IS_BEST = ("loss", "error", "mse", "mae", "perplexity", "nll")  # parts of names of metrics


def smallest_is_best(metric: str) -> bool:
    """True if a smaller value of this metric is better, judged by its name."""
    return any(part in metric for part in SMALLEST_IS_BEST)


def judge(args: argparse.Namespace, progress: Progress) -> bool:
    """Is this evaluation the best so far? Those that are not are counted: --patience ends a run."""
    name = args.keep_best
    if name not in progress.metrics:
        return False
    if progress.best_name != name:  # it was another one before a resume
        progress.best, progress.best_name, progress.num_worse = None, name, 0
    value, best = progress.metrics[name], progress.best
    better = best is None or (value < best if smallest_is_best(name) else value > best)
    if better and math.isfinite(value):
        progress.best, progress.best_step, progress.num_worse = value, progress.step, 0
        return True
    progress.num_worse += 1
    progress.ended |= args.patience is not None and progress.num_worse >= args.patience
    return False


def problem(args: argparse.Namespace, progress: Progress) -> str:
    """What is wrong with --keep-best, if there is no such metric."""
    if args.keep_best in (None, *progress.metrics):
        return ""
    return f"--keep-best {args.keep_best}: there are only {', '.join(progress.metrics)}"


def describe(accelerator: Accelerator, args: argparse.Namespace, progress: Progress) -> str:
    """Which evaluation was best, and which file has its weights."""
    if progress.best is None or progress.best_name != args.keep_best:
        return f"no evaluation gave a finite {args.keep_best}: nothing was kept for it"
    where = _best_file(accelerator, args, progress)
    value = show(args.keep_best, progress.best)
    return f"{args.keep_best} was best at step {progress.best_step}, {value}: {where} those weights"


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
