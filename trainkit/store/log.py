"""The tracker for Accelerate that writes metrics.jsonl."""

import os
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, on_main_process
from xxhash import xxh3_128

from trainkit.errors import UsageError
from trainkit.store.jsons import to_json


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
        self.write_into(run_dir)
        # Of the rows as they were written, whatever becomes of the file. Main process only.
        self.hash = xxh3_128()
        self.num_rows = 0
        super().__init__()

    def write_into(self, run_dir: Path) -> None:
        """Write into this folder from now on."""
        self.tracker = self.path = run_dir / "metrics.jsonl"
        self.timing_path = run_dir / "timing.jsonl"

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Append one row of metrics.jsonl."""
        row = (to_json({"step": step, **values}) + "\n").encode()
        with open(self.path, "ab") as file:
            file.write(row)
        self.hash.update(row)
        self.num_rows += 1

    @on_main_process
    def log_timing(self, values: dict[str, Any]) -> None:
        """Append one row of timing.jsonl."""
        with open(self.timing_path, "a") as file:
            file.write(to_json(values) + "\n")

    def size(self) -> int:
        """The size of the rows so far, in bytes."""
        return self.path.stat().st_size if self.path.exists() else 0

    def state(self) -> dict[str, Any]:
        """The number and the hash of the rows so far, as they were written. Main process only."""
        return {"rows": self.num_rows, "hash": self.hash.hexdigest()}

    def sync(self) -> None:
        """Make the rows durable. Main process only."""
        with open(self.path, "ab") as file:
            os.fsync(file.fileno())

    def truncate(self, num_bytes: int, written: dict[str, Any] | None = None) -> list[str]:
        """Remove every row after the first num_bytes bytes. Main process only.

        written: state() of then; older checkpoints lack it. Returns a sentence if what is kept is
        not what was written: then it is as many rows, as they are now. Raises UsageError if rows
        are missing.
        """
        content = self.path.read_bytes() if self.path.exists() else b""
        kept = content[:num_bytes]
        is_changed = written is not None and xxh3_128(kept).hexdigest() != written["hash"]
        if written is not None and is_changed:
            rows = content.splitlines(keepends=True)[: written["rows"]]
            kept = b"".join(rows)
            is_missing = len(rows) < written["rows"] or not kept.endswith(b"\n")
        else:
            is_missing = len(content) < num_bytes
        if is_missing:
            raise UsageError(
                f"{self.path} has {len(content)} bytes but the checkpoint expects {num_bytes}: "
                "restore what was removed, or start without --resume"
            )
        with open(self.path, "ab") as file:
            file.truncate(len(kept))
        self.hash = xxh3_128(kept)
        self.num_rows = kept.count(b"\n")
        if not is_changed:
            return []
        return [
            f"{self.path} was changed after this run wrote it: its rows are kept as they are now"
        ]
