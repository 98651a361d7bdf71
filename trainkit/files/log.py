"""The tracker for Accelerate that writes metrics.jsonl."""

import json
import os
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, on_main_process

from trainkit.errors import UsageError


def is_evaluation(row: dict[str, Any]) -> bool:
    """Is a row of metrics.jsonl that of an evaluation, and not of a step?"""
    return any(name.startswith("eval_") for name in row)


class JsonlTracker(GeneralTracker):
    """Write rows of reproducible numbers to RUN_DIR/metrics.jsonl, one JSON object per line.

    Two runs of one experiment write the same bytes. Seconds go to timing.jsonl instead.
    """

    name = "jsonl"
    requires_logging_directory = False

    def __init__(self, run_dir: Path):
        self.tracker = self.path = run_dir / "metrics.jsonl"
        self.timing_path = run_dir / "timing.jsonl"
        super().__init__()

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Append one row of metrics.jsonl."""
        with open(self.path, "a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    @on_main_process
    def log_timing(self, values: dict[str, Any]) -> None:
        """Append one row of timing.jsonl."""
        with open(self.timing_path, "a") as file:
            file.write(json.dumps(values) + "\n")

    def size(self) -> int:
        """The size of the rows so far, in bytes."""
        return self.path.stat().st_size if self.path.exists() else 0

    def sync(self) -> None:
        """Make the rows durable. Main process only."""
        with open(self.path, "ab") as file:
            os.fsync(file.fileno())

    def cut(self, num_bytes: int) -> None:
        """Remove every row after the first num_bytes bytes. Main process only."""
        with open(self.path, "ab") as file:
            if file.tell() < num_bytes:
                raise UsageError(
                    f"{self.path} has {file.tell()} bytes but the checkpoint expects {num_bytes}: "
                    "restore what was removed, or start without --resume"
                )
            file.truncate(num_bytes)
