"""TensorBoard, trackio and W&B through Accelerate's own trackers, also after a resume.

A killed run has logged steps that its newest checkpoint does not know and that are made again. So
at each start a tracker is told all rows of metrics.jsonl anew, which a resume has cut by then:
TensorBoard drops what it had (purge_step), trackio's run is deleted, and W&B opens another offline
folder. Online, W&B drops a row of a step that it already has; both have the same numbers.
"""

import argparse
import importlib.util
import os
import secrets
from typing import Any

from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker, WandBTracker

from trainkit.errors import UsageError
from trainkit.history import History
from trainkit.records import read_rows
from trainkit.rundir import write_durably


class Tracker(GeneralTracker):
    """What the three have in common. Accelerate's class is the next base."""

    def __init__(self, history: History, *args: Any, **options: Any):
        self.history, self.run_dir = history, history.path.parent
        super().__init__(*args, **options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the arguments, and all rows so far."""
        if self.name != "tensorboard":  # Accelerate would make them a run of their own there
            super().store_init_configuration(values)
        for row in read_rows(self.history.path):
            self.log(row, row["step"])

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log a row of metrics.jsonl: a step as steps/NAME, an evaluation as epochs/NAME."""
        group = "epochs" if "eval_loss" in values else "steps"
        super().log({f"{group}/{name}": values[name] for name in values if name != "step"}, step)

    def run_id(self) -> str:
        """A name that only this run has, even after its folder was moved; kept in the folder."""
        path = self.run_dir / "tracker_id"
        if not path.exists():
            write_durably(path, f"{self.run_dir.name}-{secrets.token_hex(4)}".encode())
        return path.read_text()


class TensorBoard(Tracker, TensorBoardTracker):
    """In RUN_DIR/tensorboard."""


class Trackio(Tracker, TrackioTracker):
    """In TRACKIO_DIR, which is below the home folder unless set."""

    def start(self) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        self.init_kwargs = {"name": self.run_id(), "embed": False}
        SQLiteStorage.delete_run(self.run_name, self.run_id())
        super().start()

    def finish(self) -> None:
        import trackio

        trackio.finish()  # run.finish() would be called and announced once more at the exit


class WandB(Tracker, WandBTracker):
    """Offline unless WANDB_MODE says otherwise; `wandb sync` sends RUN_DIR/wandb/offline-run-*."""

    def start(self) -> None:
        self.init_kwargs = {
            "id": self.run_id(),
            "name": self.run_dir.name,
            "dir": self.run_dir,
            "mode": os.environ.get("WANDB_MODE", "offline"),
            "resume": "allow",
        }
        super().start()


def make_trackers(args: argparse.Namespace, history: History, project: str) -> list[GeneralTracker]:
    """The trackers of a run for Accelerator(log_with=...): metrics.jsonl and what --tracker names.

    Raises UsageError if the package of a tracker is missing.
    """
    name = args.tracker
    if name is None:
        return [history]
    if importlib.util.find_spec(name) is None:
        raise UsageError(
            f"--tracker {name} needs the package {name}, which is not installed: pip install {name}"
        )
    if name == "tensorboard":
        return [history, TensorBoard(history, "", args.run_dir / "tensorboard", purge_step=0)]
    return [history, (Trackio if name == "trackio" else WandB)(history, project)]
