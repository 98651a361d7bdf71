"""TensorBoard, trackio and W&B as mirrors of metrics.jsonl: the same curve after any resume.

When a run is killed, a tracker has seen rows that the newest checkpoint does not know. So at each
start a mirror forgets what it has and logs all rows of metrics.jsonl anew: TensorBoard is told to
drop every step (purge_step), trackio's run is deleted, and W&B gets a new offline folder while the
earlier ones are renamed. A row of a step is logged as steps/NAME and one of an epoch as
epochs/NAME, because both may have the same step.
"""

import argparse
import importlib.util
import os
import secrets
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process

from trainkit.errors import UsageError
from trainkit.history import History
from trainkit.rundir import write_durably


class Mirror(GeneralTracker):
    """Keeps a tracker equal to metrics.jsonl. A subclass has open(), which starts an empty one.

    open() knows the arguments of the run, which some trackers want before the first row.
    """

    requires_logging_directory = False
    tracker: Any = None  # what open() returned
    picture: Any = None  # makes of a path what the tracker shows as a picture

    def __init__(self, args: argparse.Namespace, history: History, project: str):
        super().__init__()
        self.run_dir, self.history, self.project = args.run_dir, history, project
        self.arguments = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in vars(args).items()
        }

    @on_main_process
    def start(self) -> None:
        """Log the rows of metrics.jsonl, which a resume has already cut."""
        self.tracker = self.open()
        for row in self.history.rows():
            self.log(row, row["step"])

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log one row."""
        group = "epochs" if "eval_loss" in values else "steps"
        self.write({f"{group}/{name}": values[name] for name in values if name != "step"}, step)

    def write(self, values: dict[str, float], step: int | None) -> None:
        self.tracker.log(values, step=step)

    def add_pictures(self, paths: list[Path], step: int) -> None:
        self.tracker.log({path.stem: self.picture(str(path)) for path in paths}, step=step)

    @on_main_process
    def finish(self) -> None:
        self.tracker.finish()

    def run_id(self) -> str:
        """A name that only this run has, even after its folder was moved; kept in the folder."""
        path = self.run_dir / "tracker_id"
        if not path.exists():
            write_durably(path, secrets.token_hex(4).encode())
        return path.read_text()


class TensorBoard(Mirror):
    name = "tensorboard"

    def open(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        writer = SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=0, flush_secs=5)
        for summary in hparams(self.arguments, {}):  # add_hparams opens a run of its own
            writer.file_writer.add_summary(summary)
        return writer

    def write(self, values: dict[str, float], step: int | None) -> None:
        for name, value in values.items():
            self.tracker.add_scalar(name, value, step)

    def add_pictures(self, paths: list[Path], step: int) -> None:
        import numpy as np
        from PIL import Image

        for path in paths:
            pixels = np.array(Image.open(path).convert("RGB"))
            self.tracker.add_image(path.stem, pixels, step, dataformats="HWC")

    @on_main_process
    def finish(self) -> None:
        self.tracker.close()


class Trackio(Mirror):
    name = "trackio"

    def open(self) -> Any:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        self.picture = trackio.Image
        name = f"{self.run_dir.name}-{self.run_id()}"
        SQLiteStorage.delete_run(self.project, name)
        return trackio.init(project=self.project, name=name, config=self.arguments, embed=False)

    @on_main_process
    def finish(self) -> None:
        import trackio

        trackio.finish()  # run.finish() would be called and announced once more at the exit


class WandB(Mirror):
    """Offline unless WANDB_MODE says otherwise; `wandb sync RUN_DIR/wandb/offline-run-*` sends it.

    Online, a resume sends the same rows again, and the service drops those that it already has.
    """

    name = "wandb"

    def open(self) -> Any:
        import wandb

        self.picture = wandb.Image
        for earlier in (self.run_dir / "wandb").glob("offline-run-*"):
            earlier.rename(earlier.with_name(f"superseded-{earlier.name}"))
        return wandb.init(
            project=self.project, id=self.run_id(), name=self.run_dir.name, dir=self.run_dir,
            config=self.arguments, resume="allow", mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip


KINDS = {kind.name: kind for kind in (TensorBoard, Trackio, WandB)}


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
    return [history, KINDS[name](args, history, project)]


def add_pictures(accelerator: Accelerator, paths: list[Path], step: int) -> None:
    """Log pictures where a tracker shows them. Main process only."""
    for tracker in accelerator.trackers:
        if isinstance(tracker, Mirror):
            tracker.add_pictures(paths, step)
