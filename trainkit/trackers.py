"""TensorBoard, trackio and W&B as mirrors of metrics.jsonl: the same curve after any resume.

A tracker has seen every row up to the kill; the checkpoint knows fewer. So on each start a mirror
is brought to exactly the rows that metrics.jsonl holds, then follows it: TensorBoard is told which
steps are void (purge_step), trackio's rows are replaced, and W&B's offline folder is written anew,
the earlier ones being renamed. A row of a step is logged as steps/NAME, one of an epoch as
epochs/NAME, because both may have the same step.
"""

import argparse
import os
import secrets
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process

from trainkit import plots
from trainkit.history import History, check_tracker
from trainkit.launch import RunFailure, failing_together
from trainkit.rundir import write_durably


class Mirror(GeneralTracker):
    """Keeps a tracker equal to metrics.jsonl. A subclass opens it and adds pictures."""

    requires_logging_directory = False
    main_process_only = True

    def __init__(self, args: argparse.Namespace, history: History, project: str):
        super().__init__()
        self.run_dir, self.history, self.project = args.run_dir, history, project
        self.arguments = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in vars(args).items()
        }

    @property
    def tracker(self) -> Any:
        return self.run

    @on_main_process
    def start(self) -> None:
        """Bring the tracker to the rows of metrics.jsonl, which a resume has already cut."""
        rows = self.history.rows() if self.history.path.exists() else []
        self.run = self.open(rows, self.arguments)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Nothing: start() logs the arguments, which some trackers want before the first row."""

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log one row."""
        self.write(_grouped(values), step)

    def write(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()

    def run_id(self) -> str:
        """A name that only this run has, also after its folder was moved; kept in the folder."""
        path = self.run_dir / "tracker_id"
        if not path.exists():
            write_durably(path, secrets.token_hex(4).encode())
        return path.read_text()


class TensorBoard(Mirror):
    name = "tensorboard"

    def open(self, rows: list[dict[str, Any]], arguments: dict[str, Any]) -> Any:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        # The last step is void too and written again: a run that is over, started once more, logs
        # its pictures there a second time.
        first_void = rows[-1]["step"] if rows else 0
        self.run = SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=first_void)
        for summary in hparams(arguments, {}):  # add_hparams opens a run of its own at each start
            self.run.file_writer.add_summary(summary)
        for row in rows:
            if row["step"] == first_void:
                self.write(_grouped(row), first_void)
        return self.run

    def write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.run.add_scalar(name, value, step)
        self.run.flush()

    def add_pictures(self, paths: list[Path], step: int) -> None:
        import numpy as np
        from PIL import Image

        for path in paths:
            with Image.open(path) as picture:
                pixels = np.array(picture.convert("RGB"))
            self.run.add_image(path.stem, pixels, step, dataformats="HWC")

    @on_main_process
    def finish(self) -> None:
        self.run.close()


class Trackio(Mirror):
    name = "trackio"

    def open(self, rows: list[dict[str, Any]], arguments: dict[str, Any]) -> Any:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        name = f"{self.run_dir.name}-{self.run_id()}"
        SQLiteStorage.delete_run(self.project, name)
        run = trackio.init(project=self.project, name=name, config=arguments, embed=False)
        for row in rows:
            run.log(_grouped(row), step=row["step"])
        return run

    def add_pictures(self, paths: list[Path], step: int) -> None:
        import trackio

        self.run.log({path.stem: trackio.Image(str(path)) for path in paths}, step=step)


class WandB(Mirror):
    """Offline unless WANDB_MODE says otherwise; `wandb sync RUN_DIR/wandb/offline-run-*` sends it.

    Online, the service itself drops the rows that it already has, which a resume makes again with
    the same numbers.
    """

    name = "wandb"

    def open(self, rows: list[dict[str, Any]], arguments: dict[str, Any]) -> Any:
        import wandb

        for earlier in (self.run_dir / "wandb").glob("offline-run-*"):
            earlier.rename(earlier.with_name(f"superseded-{earlier.name}"))
        run = wandb.init(
            project=self.project,
            id=self.run_id(),
            name=self.run_dir.name,
            dir=self.run_dir,
            config=arguments,
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(console="off", silent=True),
        )
        for row in rows:
            run.log(_grouped(row), step=row["step"])
        return run

    def add_pictures(self, paths: list[Path], step: int) -> None:
        import wandb

        self.run.log({path.stem: wandb.Image(str(path)) for path in paths}, step=step)


KINDS = {kind.name: kind for kind in (TensorBoard, Trackio, WandB)}


def make_trackers(args: argparse.Namespace, history: History, project: str) -> list[GeneralTracker]:
    """The trackers of a run for Accelerator(log_with=...): metrics.jsonl and what --tracker names.

    Raises UsageError if the package of a tracker is missing.
    """
    check_tracker(args.tracker)
    return [history, *([KINDS[args.tracker](args, history, project)] if args.tracker else [])]


def draw_pictures(accelerator: Accelerator, run_dir: Path, step: int) -> None:
    """Draw the pictures of a run and log them where pictures are shown.

    Every process must call this. Raises RunFailure on all of them if the disk is full.
    """
    with failing_together(accelerator, f"{run_dir}: the pictures cannot be drawn", RunFailure):
        if accelerator.is_main_process:
            paths = plots.draw_run(run_dir)
            for tracker in accelerator.trackers:
                if isinstance(tracker, Mirror):
                    tracker.add_pictures(paths, step)


def _grouped(row: dict[str, Any]) -> dict[str, float]:
    group = "epochs" if "eval_loss" in row else "steps"
    return {f"{group}/{name}": value for name, value in row.items() if name != "step"}
