"""What a run measured: metrics.jsonl as an Accelerate tracker, and sums that give exact means."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from tqdm import tqdm

from trainkit.errors import UsageError
from trainkit.records import read_rows


class History(GeneralTracker):
    """Rows of reproducible numbers in RUN_DIR/metrics.jsonl, one JSON object a line.

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
                    f"{self.path} has {file.tell()} bytes but the checkpoint knows {num_bytes}: "
                    "put back what was removed, or start without --resume"
                )
            file.truncate(num_bytes)

    def rows(self) -> list[dict[str, Any]]:
        """All rows so far."""
        return read_rows(self.path)


class RunningSums:
    """Sums over the samples of an epoch; adding to them never waits for the device.

    `add` adds to a float32 window on the device. `flush` sums the window over the processes, adds
    that to the epoch's totals, which are float64 on the host, and empties the window; it waits
    once. The first `add` names the sums; "samples" comes before them.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.count = 0
        # One tensor each: adding two numbers to two tensors is faster than stacking them.
        self.window: dict[str, torch.Tensor] = {}
        self.totals = {"samples": 0.0}

    def add(self, count: int, **sums: torch.Tensor) -> None:
        """Add `count` samples of this process and scalar sums over them."""
        if not self.window:
            self._open(sums)
        if sums.keys() != self.window.keys():
            raise ValueError(f"the sums were {[*self.window]}, they cannot become {[*sums]}")
        self.count += count
        for name, value in sums.items():
            self.window[name] += value.detach()

    def flush(self) -> dict[str, float]:
        """Return the sums since the last flush. Every process must call this."""
        row = self.accelerator.reduce(self._row(), reduction="sum").tolist()
        sums = dict(zip(self.totals, row, strict=True))
        self.totals = {name: total + sums[name] for name, total in self.totals.items()}
        self._open(self.window)
        return sums

    def means(self) -> dict[str, float]:
        """train_NAME: the mean over all samples of the epoch that were flushed so far."""
        return means(self.totals)

    def clear(self) -> None:
        """Start a new epoch."""
        self.totals = dict.fromkeys(self.totals, 0.0)

    def state(self) -> dict[str, Any]:
        """Everything, as JSON. Every process must call this; it flushes nothing."""
        # Each process fills in its own row; the sum over the processes is the whole table.
        row, accelerator = self._row(), self.accelerator
        rows = row.new_zeros(accelerator.num_processes, len(row))
        rows[accelerator.process_index] = row
        return {"rows": accelerator.reduce(rows, reduction="sum").tolist(), "totals": self.totals}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from state(), also with another number of processes."""
        rows, accelerator = torch.tensor(state["rows"], dtype=torch.float32), self.accelerator
        if len(rows) == accelerator.num_processes:
            row = rows[accelerator.process_index]
        else:
            row = rows.sum(0) * accelerator.is_main_process
        self.totals = dict(state["totals"])
        _, *names = self.totals
        self.count = int(row[0])
        self.window = dict(zip(names, row[1:].to(accelerator.device), strict=True))

    def _open(self, names: Iterable[str]) -> None:
        self.count = 0
        self.window = {name: torch.zeros((), device=self.accelerator.device) for name in names}
        self.totals |= {name: self.totals.get(name, 0.0) for name in names}

    def _row(self) -> torch.Tensor:
        count = torch.tensor(float(self.count), device=self.accelerator.device)
        return torch.stack((count, *self.window.values()))


def means(sums: dict[str, float]) -> dict[str, float]:
    """train_NAME: each sum divided by the number of samples, which is the first entry."""
    (_, samples), *others = sums.items()
    return {f"train_{name}": total / max(samples, 1) for name, total in others}


def epoch_bar(accelerator: Accelerator, epoch: int, total: int, initial: int, unit: str) -> tqdm:
    """A progress bar over the samples of one epoch: main process only, and only on a terminal."""
    return tqdm(desc=f"epoch {epoch + 1}", total=total, initial=initial, unit=f" {unit}",
                leave=False, disable=None if accelerator.is_main_process else True)  # fmt: skip
