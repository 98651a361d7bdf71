"""How a run ends by its metrics: by --patience, or without reaching --target."""

import math
import sys
from collections.abc import Callable

from trainkit.config import TrainingConfig, metric_and_direction
from trainkit.errors import EXIT_TARGET_MISSED, UsageError
from trainkit.numbers.orders import Progress


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


def check_metrics(config: TrainingConfig, metrics: dict[str, float]) -> None:
    """Raise UsageError if an evaluation lacks the metric of --keep-best or of --target."""
    best, _ = metric_and_direction(config.keep_best or "")
    target = config.metric_target[0] if config.metric_target else ""
    for flag, name in {"--keep-best": best, "--target": target}.items():
        if name and name not in metrics:
            raise UsageError(f"{flag} {name}: there are only {', '.join(metrics)}")


def leave_if_missed(
    config: TrainingConfig, metrics: dict[str, float], say: Callable[[str], object]
) -> None:
    """End every process with exit code 3 if the metrics of the last evaluation miss --target."""
    if config.metric_target is None:
        return
    name, direction, wanted = config.metric_target
    value = metrics[name]
    if not (value <= wanted if direction == "min" else value >= wanted):
        say(f"--target {config.target} is missed: {name} is {value:.6g}")
        sys.exit(EXIT_TARGET_MISSED)
