"""What a run measured: metrics.jsonl as an Accelerate tracker, and exact running means."""

import json
import os
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from tqdm import tqdm

from trainkit.errors import UsageError


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


class RunningMeans:
    """Means of the values of an epoch, over all processes; adding to them waits for no device.

    `add` sums and counts them on the device, each name by itself. `flush` adds that up over the
    processes and adds it to the epoch's totals, float64 on the host; it waits once. Every process
    must add the same names, in any order.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        # Since the last flush. One tensor each: adding to two tensors is faster than stacking them.
        self.sums: dict[str, torch.Tensor] = {}
        self.counts: dict[str, int | torch.Tensor] = {}
        self.totals: dict[str, tuple[float, float]] = {}  # sum and count of the epoch, flushed

    def add(self, name: str, total: torch.Tensor, count: int | torch.Tensor) -> None:
        """Add the sum of `count` values of this process, a scalar on the device."""
        if name not in self.sums:
            self._open(name)
        self.sums[name] += total
        self.counts[name] += count

    def flush(self, prefix: str) -> dict[str, float]:
        """PREFIX_NAME: the means since the last flush. Every process must call this."""
        window = self._reduce()
        for name, pair in window.items():
            self.totals[name] = add_pairs(self.totals[name], pair)
            self._open(name)
        return means(prefix, window)

    def means(self, prefix: str) -> dict[str, float]:
        """PREFIX_NAME: the means of the epoch so far. Every process must call this.

        It flushes nothing: the sums of a run that evaluates here are those of one that does not.
        """
        window = self._reduce()
        return means(prefix, {n: add_pairs(self.totals[n], window[n]) for n in window})

    def clear(self) -> None:
        """Start a new epoch."""
        for name in self.sums:
            self._open(name)
            self.totals[name] = 0.0, 0.0

    def state(self) -> dict[str, Any]:
        """Everything, as JSON. Every process must call this."""
        # Each process fills in its own row; the sum over the processes is the whole table.
        row, accelerator = self._row(), self.accelerator
        rows = row.new_zeros(accelerator.num_processes, len(row))
        rows[accelerator.process_index] = row
        return {"rows": accelerator.reduce(rows, reduction="sum").tolist(), "totals": self.totals}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from state(), also with another number of processes."""
        rows, accelerator = torch.tensor(state["rows"], dtype=torch.float64), self.accelerator
        if len(rows) == accelerator.num_processes:
            row = rows[accelerator.process_index]
        else:
            row = rows.sum(0) * accelerator.is_main_process
        self.totals = {name: tuple(pair) for name, pair in state["totals"].items()}
        pairs = dict(zip(sorted(self.totals), row.view(-1, 2), strict=True))
        for name in self.totals:
            total, count = pairs[name]
            self.sums[name] = total.float().to(accelerator.device)
            self.counts[name] = int(count)

    def _open(self, name: str) -> None:
        self.sums[name] = torch.zeros((), device=self.accelerator.device)
        self.counts[name] = 0
        self.totals.setdefault(name, (0.0, 0.0))

    def _row(self) -> torch.Tensor:
        """Sum and count of each name, by name; float64, as a count may exceed 2**24."""
        device = self.accelerator.device
        dtype = torch.float32 if device.type == "mps" else torch.float64  # a Mac's GPU has no other
        pairs = [(self.sums[name], self.counts[name]) for name in sorted(self.sums)]
        numbers = [torch.as_tensor(x, dtype=dtype, device=device) for pair in pairs for x in pair]
        return torch.stack(numbers) if numbers else torch.zeros(0, dtype=dtype, device=device)

    def _reduce(self) -> dict[str, tuple[float, float]]:
        row, names = self._row(), crc32(" ".join(sorted(self.sums)).encode()) % 2**16
        row = torch.cat((row, row.new_tensor([names])))
        *row, total = self.accelerator.reduce(row, reduction="sum").tolist()
        if total != names * self.accelerator.num_processes:
            raise RuntimeError(
                f"run.add(...) or run.evaluate(...) got other names on another process than "
                f"{', '.join(self.sums)}: every process must add the same"
            )
        pairs = dict(zip(sorted(self.sums), zip(row[::2], row[1::2], strict=True), strict=True))
        return {name: pairs[name] for name in self.sums}


def add_pairs(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    return first[0] + second[0], first[1] + second[1]


def means(prefix: str, pairs: dict[str, tuple[float, float]]) -> dict[str, float]:
    """PREFIX_NAME: each sum divided by its own count; nothing where nothing was counted."""
    return {f"{prefix}_{name}": total / count for name, (total, count) in pairs.items() if count}


def epoch_bar(accelerator: Accelerator, epoch: int, num_epochs: int, num_samples: int) -> tqdm:
    """A progress bar over the whole run, at the start of an epoch.

    On the main process only, and only on a terminal. Its unit is a sample.
    """
    return tqdm(
        desc=f"epoch {epoch + 1}/{num_epochs}",
        total=num_epochs * num_samples,
        initial=epoch * num_samples,
        bar_format="{desc} {percentage:3.0f} %|{bar}| {remaining} left{postfix}",
        leave=False,
        disable=None if accelerator.is_main_process else True,
    )
