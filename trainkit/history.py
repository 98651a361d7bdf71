"""What a run measured: metrics.jsonl as an Accelerate tracker, and sums that give exact means."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from tqdm import tqdm

from trainkit.launch import UsageError


class History(GeneralTracker):
    """Rows of reproducible numbers in RUN_DIR/metrics.jsonl, one JSON object a line.

    Two runs of one experiment write the same bytes. Seconds go to timing.jsonl instead.
    """

    name = "jsonl"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, run_dir: Path):
        super().__init__()
        self.path = run_dir / "metrics.jsonl"
        self.timing_path = run_dir / "timing.jsonl"

    @property
    def tracker(self) -> Path:
        return self.path

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Nothing: the arguments are in run.json."""

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Append one row."""
        with open(self.path, "a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    @on_main_process
    def log_timing(self, values: dict[str, Any]) -> None:
        """Append one row of seconds and rates."""
        with open(self.timing_path, "a") as file:
            file.write(json.dumps(values) + "\n")

    def sync(self) -> int:
        """Make the rows durable and return their size in bytes. Main process only."""
        with open(self.path, "ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def cut(self, num_bytes: int) -> None:
        """Forget every row after the first num_bytes bytes. Main process only."""
        with open(self.path, "ab") as file:
            if file.tell() < num_bytes:
                raise UsageError(
                    f"{self.path} has {file.tell()} bytes but the checkpoint knows {num_bytes}: it "
                    "was shortened or removed; put it back or start without --resume"
                )
            file.truncate(num_bytes)

    def rows(self) -> list[dict[str, Any]]:
        """All rows so far."""
        return [json.loads(line) for line in self.path.read_text().splitlines()]


class RunningSums:
    """Sums over samples and processes that never make the host wait for the device.

    `add` adds to a float32 window on the device. `flush` reduces the window over the processes,
    adds it to float64 totals of the epoch on the host, and empties it; it waits once.

    Args:
        names: one per column, after the number of samples, which is always the first: "samples".
    """

    def __init__(self, accelerator: Accelerator, *names: str):
        self.accelerator = accelerator
        self.names = ("samples", *names)
        self.count = 0
        # One tensor each: adding two numbers to two tensors is faster than stacking them.
        self.window = [torch.zeros((), device=accelerator.device) for _ in names]
        self.totals = dict.fromkeys(self.names, 0.0)

    def add(self, count: int, *sums: torch.Tensor) -> None:
        """Add `count` samples of this process and scalar sums over them."""
        self.count += count
        for total, value in zip(self.window, sums, strict=True):
            total += value.detach()

    def flush(self) -> dict[str, float]:
        """Return the sums since the last flush. Every process must call this."""
        values = self.accelerator.reduce(self._row(), reduction="sum").tolist()
        sums = dict(zip(self.names, values, strict=True))
        for name, value in sums.items():
            self.totals[name] += value
        self._set_row(torch.zeros(len(self.names)))
        return sums

    def means(self) -> dict[str, float]:
        """train_NAME: the mean over all samples of the epoch that were flushed so far."""
        samples = self.totals["samples"]
        return {f"train_{name}": self.totals[name] / samples for name in self.names[1:]}

    def clear(self) -> None:
        """Start a new epoch."""
        self.totals = dict.fromkeys(self.names, 0.0)

    def state(self) -> dict[str, Any]:
        """Everything, as JSON. Every process must call this; it flushes nothing."""
        return {
            "rows": self.accelerator.gather(self._row().unsqueeze(0)).tolist(),
            "totals": self.totals,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from state(), also with another number of processes."""
        rows = torch.tensor(state["rows"], dtype=torch.float32)
        if len(rows) == self.accelerator.num_processes:
            self._set_row(rows[self.accelerator.process_index])
        else:
            self._set_row(rows.sum(0) * self.accelerator.is_main_process)
        self.totals = dict(state["totals"])

    def _row(self) -> torch.Tensor:
        return torch.stack((self.window[0].new_tensor(self.count), *self.window))

    def _set_row(self, row: torch.Tensor) -> None:
        self.count = int(row[0])
        for total, value in zip(self.window, row[1:], strict=True):
            total.copy_(value)


def epoch_bar(accelerator: Accelerator, epoch: int, total: int, initial: int, unit: str) -> tqdm:
    """A progress bar over the samples of one epoch: main process only, and only on a terminal."""
    return tqdm(
        desc=f"epoch {epoch + 1}",
        total=total,
        initial=initial,
        unit=f" {unit}",
        leave=False,
        disable=None if accelerator.is_main_process else True,
    )


def check_tracker(name: str | None) -> None:
    """Raise UsageError if the package of a tracker that was asked for is missing."""
    if name is not None and importlib.util.find_spec(name) is None:
        raise UsageError(
            f"--tracker {name} needs the package {name}, which is not installed: pip install {name}"
        )
