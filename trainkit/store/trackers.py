"""TensorBoard, trackio and W&B through Accelerate's own trackers, in addition to metrics.jsonl.

A run that was killed has logged steps after its newest checkpoint, which a resume repeats. So each
start sends all rows of metrics.jsonl, which the resume has truncated, to the tracker again.
TensorBoard drops its earlier rows (purge_step); trackio and W&B start another run of the same name,
with complete curves.
"""

import importlib.util
import os
from typing import Any

from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker, WandBTracker

from trainkit.config import TrainingConfig
from trainkit.errors import UsageError
from trainkit.store.log import JsonlTracker, is_evaluation
from trainkit.store.records import read_rows


class Tracker(GeneralTracker):
    """What the three trackers have in common; Accelerate's class is the next base class."""

    history: JsonlTracker

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the arguments, and all rows so far."""
        if self.name != "tensorboard":  # there Accelerate would log them as a run of their own
            super().store_init_configuration(values)
        for row in read_rows(self.history.path):
            self.log(row, row["step"])

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log a row of metrics.jsonl: a step as steps/NAME, an evaluation as epochs/NAME."""
        group = "epochs" if is_evaluation(values) else "steps"
        super().log({f"{group}/{name}": values[name] for name in values if name != "step"}, step)


def make_trackers(
    config: TrainingConfig, history: JsonlTracker, project: str
) -> list[GeneralTracker]:
    """The trackers for Accelerator(log_with=...): metrics.jsonl and the one that --tracker names.

    A dry run has no tracker.

    Raises UsageError if a package is missing.
    """
    name, run_dir = config.tracker, config.run_dir
    if name is None or config.dry_run:
        return [history]
    if importlib.util.find_spec(name) is None:
        raise UsageError(
            f"--tracker {name} needs the package {name}, which is not installed: pip install {name}"
        )
    kind: type[GeneralTracker] = TensorBoardTracker
    options = {"run_name": "", "logging_dir": run_dir / "tensorboard", "purge_step": 0}
    if name == "trackio":
        kind = TrackioTracker
        options = {"name": run_dir.name, "embed": False}
    elif name == "wandb":
        mode = os.environ.get("WANDB_MODE", "offline")
        kind = WandBTracker
        options = {"name": run_dir.name, "dir": run_dir, "mode": mode}
    tracker = type(kind.__name__, (Tracker, kind), {"history": history})(
        **{"run_name": project} | options
    )
    return [history, tracker]
