"""--keep-best and --patience: which evaluation was best, and when to stop for lack of improvement.

best.safetensors holds the weights that the first model had at the best evaluation.
"""

import math
from contextlib import suppress

from accelerate import Accelerator

from trainkit.cli.console import show
from trainkit.cli.directions import metric_and_direction
from trainkit.config import TrainingConfig
from trainkit.errors import UsageError, as_usage_error
from trainkit.position import Progress
from trainkit.run_dir import records
from trainkit.run_dir.files import rename_free


def update_best(config: TrainingConfig, progress: Progress) -> bool:
    """Return whether this evaluation is the best so far, and record it in `progress`.

    Evaluations without an improvement are counted; the run ends after --patience of them in a row.
    """
    name, direction = metric_and_direction(config.keep_best or "")
    if name not in progress.metrics:
        return False
    if progress.best_name != f"{name}:{direction}":  # --keep-best was changed on a resume
        progress.best = None
        progress.num_worse = 0
        progress.best_name = f"{name}:{direction}"
    value, best = progress.metrics[name], progress.best
    better = best is None or (value < best if direction == "min" else value > best)
    if better and math.isfinite(value):
        progress.best = value
        progress.best_step = progress.step
        progress.num_worse = 0
        return True
    progress.num_worse += 1
    progress.ended |= config.patience is not None and progress.num_worse >= config.patience
    return False


def unknown_metric(config: TrainingConfig, progress: Progress) -> UsageError | None:
    """An error if the evaluation lacks the metric of --keep-best."""
    if not config.keep_best or metric_and_direction(config.keep_best)[0] in progress.metrics:
        return None
    there = ", ".join(progress.metrics)
    return UsageError(f"--keep-best {config.keep_best}: there are only {there}")


def describe_best(accelerator: Accelerator, config: TrainingConfig, progress: Progress) -> str:
    """One sentence that says which evaluation was the best and where its weights are."""
    name, direction = metric_and_direction(config.keep_best or "")
    step = progress.best_step
    if progress.best is None or progress.best_name != f"{name}:{direction}":
        return f"no evaluation gave a finite {name}: nothing was kept for it"
    checkpoint = f"checkpoints/step-{step:010d}"
    if _is_of_step(accelerator, config, step):
        place = "in best.safetensors"
    elif (config.run_dir / checkpoint).exists():
        place = f"in {checkpoint}"
    else:
        place = "no longer on disk"
    value = show(name, progress.best)
    return f"{name} was best at step {step}, {value}: those weights are {place}"


def _is_of_step(accelerator: Accelerator, config: TrainingConfig, step: int) -> bool:
    """Was best.safetensors written at this step? If it was not, rename it.

    It is from another step if the run was resumed from a checkpoint that is older than the file.
    """
    path = config.run_dir / "best.safetensors"
    if path.exists() and accelerator.is_main_process:
        with suppress(UsageError), as_usage_error(f"{path} cannot be read"):
            if records.read_metadata(path)["step"] == step:
                return True
        rename_free(path, f"abandoned-{path.name}")
    return False
