"""--keep-best and --patience: which evaluation was the best, and when to stop without a better."""

import argparse
import math
from contextlib import suppress
from typing import Any

from accelerate import Accelerator

from trainkit.checkpoint import Progress
from trainkit.errors import UsageError, as_usage_error
from trainkit.folder import records
from trainkit.folder.rundir import rename_free
from trainkit.words.console import show

SMALLEST_IS_BEST = ("loss", "error", "mse", "mae", "perplexity", "nll")  # parts of names of metrics


def smallest_is_best(metric: str) -> bool:
    """True if a smaller value of this metric is better, judged by its name."""
    return any(part in metric for part in SMALLEST_IS_BEST)


def judge(args: argparse.Namespace, progress: Progress) -> bool:
    """Is this evaluation the best so far? Those that are not are counted: --patience ends a run."""
    name, best = args.keep_best, progress.best
    if name not in progress.metrics:
        return False
    value, progress.best_name = progress.metrics[name], name
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


def forget_another(args: argparse.Namespace, progress: Progress) -> str:
    """Forget the best value of a metric that the rest of the run is not held to.

    Its checkpoint stays until there is a new best.
    """
    before = progress.best_name
    if before in (None, args.keep_best):
        return ""
    progress.best, progress.best_name, progress.num_worse = None, None, 0
    return f"--keep-best was {before} and is {args.keep_best}: what is best is found anew"


def describe(accelerator: Accelerator, args: argparse.Namespace, progress: Progress) -> str:
    """Which evaluation was best, and which file has its weights."""
    if progress.best is None:
        return f"{args.keep_best} was never a finite number: nothing was kept for it"
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
