"""The tracker for Accelerate that writes metrics.jsonl, and those of others beside it.

A resume repeats the steps after its checkpoint, so each start sends all rows of metrics.jsonl to
the tracker again. TensorBoard drops its earlier rows (purge_step); trackio and W&B start another
run of the same name.
"""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import (
    GeneralTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
    on_main_process,
)

from trainkit.config import TrainingConfig
from trainkit.errors import UsageError, as_usage_error
from trainkit.store.jsons import as_numbers, to_json


def is_evaluation(row: dict[str, Any]) -> bool:
    """Is a row of metrics.jsonl that of an evaluation, and not of a step?"""
    return any(name.startswith("eval_") for name in row)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl or timing.jsonl, empty without the file. Raises UsageError."""
    with as_usage_error(f"{path} cannot be read"):
        if not path.exists():
            return []
        return [as_numbers(json.loads(line)) for line in path.read_text().splitlines()]


class JsonlTracker(GeneralTracker):
    """Write rows of reproducible numbers to RUN_DIR/metrics.jsonl, and seconds to timing.jsonl."""

    name = "jsonl"
    requires_logging_directory = False

    def __init__(self, run_dir: Path):
        self.tracker = self.path = run_dir / "metrics.jsonl"
        self.timing_path = run_dir / "timing.jsonl"
        self.num_rows = 0  # that this run has written, on the main process
        super().__init__()

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Append one row of metrics.jsonl."""
        with open(self.path, "ab") as file:
            file.write((to_json({"step": step, **values}) + "\n").encode())
        self.num_rows += 1

    @on_main_process
    def log_timing(self, values: dict[str, Any]) -> None:
        """Append one row of timing.jsonl."""
        with open(self.timing_path, "a") as file:
            file.write(to_json(values) + "\n")

    def sync(self) -> None:
        """Make the rows durable. Main process only."""
        with open(self.path, "ab") as file:
            os.fsync(file.fileno())

    def truncate(self, num_rows: int) -> None:
        """Remove the rows after this many, on the main process. Raises UsageError without them."""
        content = self.path.read_bytes() if self.path.exists() else b""
        rows = [row for row in content.splitlines(keepends=True) if row.endswith(b"\n")]
        if len(rows) < num_rows:
            raise UsageError(
                f"{self.path} has {len(rows)} rows but the checkpoint expects {num_rows}: "
                "restore what was removed, or start without --resume"
            )
        with open(self.path, "ab") as file:
            file.truncate(sum(map(len, rows[:num_rows])))
        self.num_rows = num_rows


class Sent(GeneralTracker):
    """A tracker that is sent each row of metrics.jsonl, at its start all that are there already."""

    def __init__(self, tracker: GeneralTracker, history: JsonlTracker):
        self.sent_to, self.history = tracker, history

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sent_to, name)

    def start(self) -> None:
        """Start the tracker."""
        self.sent_to.start()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the arguments, and all rows so far."""
        if self.name != "tensorboard":  # there Accelerate would log them as a run of their own
            self.sent_to.store_init_configuration(values)
        for row in read_rows(self.history.path):
            self.log(row, row["step"])

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log a row of metrics.jsonl: a step as steps/NAME, an evaluation as epochs/NAME."""
        group = "epochs" if is_evaluation(values) else "steps"
        named = {f"{group}/{name}": values[name] for name in values if name != "step"}
        self.sent_to.log(named, step, **kwargs)

    def finish(self) -> None:
        """End the tracker."""
        self.sent_to.finish()


def send_all_rows(accelerator: Accelerator) -> None:
    """Let every tracker, also one of the script's own, be sent all rows."""
    given = [*accelerator.log_with, *accelerator.trackers]
    (history,) = (tracker for tracker in given if isinstance(tracker, JsonlTracker))
    others = [Sent(tracker, history) for tracker in given if tracker != history]
    accelerator.trackers.clear()
    accelerator.log_with[:] = history, *others


def make_trackers(
    config: TrainingConfig, history: JsonlTracker, project: str
) -> list[GeneralTracker]:
    """The trackers for Accelerator(log_with=...): metrics.jsonl, and what --tracker names."""
    name, run_dir = config.tracker, config.run_dir
    if name is None:
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
    return [history, kind(**{"run_name": project} | options)]
