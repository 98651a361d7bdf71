"""Helpers that all benchmarks share, to run scripts and to print tables."""

import argparse
import contextlib
import io
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch
from accelerate.state import AcceleratorState, GradientState

from trainkit.store.records import read_rows

ROOT = Path(__file__).resolve().parent.parent
MNIST = ROOT / "train_mnist.py"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # in each process


class Parser(argparse.ArgumentParser):
    """A parser with --rounds."""

    def __init__(self, description: str, rounds: int):
        super().__init__(description=description.splitlines()[0])
        self.add_argument("--rounds", type=int, default=rounds)


@dataclass
class Ended:
    """A process that has ended.

    Attributes:
        seconds: from start to exit.
        lines: what it printed, each with the second at which it came.
        memory: psutil's memory_info() of the process that was started, twenty times a second.
        timing, metrics: the rows that a run wrote into its folder.
    """

    seconds: float
    lines: list[tuple[float, str]]
    memory: list[Any]
    timing: Sequence[dict[str, Any]] = ()
    metrics: Sequence[dict[str, Any]] = ()

    def said(self, first: str) -> str:
        """Return what follows `first` in the last line that begins with it."""
        return [line for _, line in self.lines if line.startswith(first)][-1].removeprefix(first)

    @property
    def train_seconds(self) -> float:
        return sum(row["train_seconds"] for row in self.timing)

    @property
    def samples_per_second(self) -> float:
        return sum(row["train_samples"] for row in self.timing) / self.train_seconds


def launcher(num_processes: int) -> list[object]:
    """Return execute()'s launch=... for this number of processes, on GPUs if there are any."""
    name = "4gpu.yaml" if torch.cuda.is_available() else "2cpu.yaml"
    config = ROOT / "accelerate_configs" / name
    return ["--config_file", config, "--num_processes", num_processes] if num_processes > 1 else []


def execute(
    *words: object,
    launch: Sequence = (),
    env: dict | None = None,
    cwd: Path | None = None,
    until: Sequence[str] = (),
) -> Ended:
    """Run `python WORDS...`, or `accelerate launch LAUNCH... WORDS...`, to its end.

    until: when a line that begins so has come for each of them, all its processes are killed.
    Raises RuntimeError with the end of its output unless its exit code is 0 or it was killed.
    """
    if launch:
        words = ("-m", "accelerate.commands.launch", *launch, *words)
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    known = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    memory, started_at = [], time.perf_counter()
    process = psutil.Popen(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**os.environ, **known, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def read() -> list[tuple[float, str]]:
        lines, awaited = [], {*until}
        for line in process.stdout:
            lines.append((time.perf_counter() - started_at, line))
            awaited -= {first for first in awaited if line.startswith(first)}
            if until and not awaited:
                for each in [*process.children(recursive=True), process]:
                    each.kill()
        return lines

    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read)
        while wait([reading], 0.05).not_done:
            with contextlib.suppress(psutil.Error):  # it has just ended
                memory.append(process.memory_info())
    lines = reading.result()
    if process.wait() not in ((-signal.SIGKILL,) if until else (0,)):
        raise RuntimeError("".join(line for _, line in lines[-40:]))
    return Ended(time.perf_counter() - started_at, lines, memory)


def read_timing(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of timing.jsonl about epochs: others are about saves and resumes."""
    return [row for row in read_rows(run_dir / "timing.jsonl") if "train_seconds" in row]


def one_run(*words: object, **how: Any) -> Ended:
    """Call execute() on a script in a new run folder, and read the rows that it wrote there."""
    with tempfile.TemporaryDirectory() as folder:
        ended = execute(*words, "--run-dir", folder, **how)
        ended.timing = read_timing(Path(folder))
        ended.metrics = read_rows(Path(folder, "metrics.jsonl"))
    return ended


def in_process(script: ModuleType, *flags: object, precision: str = "no") -> float:
    """Return samples per second of the script's last epoch, run in this process without output."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    os.environ["ACCELERATE_USE_CPU"] = str(not torch.cuda.is_available())
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        script.main([*map(str, flags), "--no-pictures", "--run-dir", folder])
        last = read_timing(Path(folder))[-1]
    return last["train_samples"] / last["train_seconds"]


def in_turn(ways: dict[Any, Callable[[], Any]], rounds: int, warm_up: int = 0) -> dict[Any, list]:
    """Return each way's result in each round. They take turns because a machine's speed varies."""
    results = {name: [] for name in ways}
    for _ in range(warm_up + rounds):
        for name, way in ways.items():
            results[name].append(way())
    return {name: values[warm_up:] for name, values in results.items()}


def as_text(value: object) -> str:
    """Format a number with three digits, or rounded to an integer with thousands separators."""
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread(values: Sequence[float]) -> str:
    """Format values as: median (lowest to highest)."""
    low, high = as_text(min(values)), as_text(max(values))
    return f"{as_text(statistics.median(values))} ({low} to {high})"


def table(head: str, rows: Iterable[Iterable[object]]) -> None:
    """Print a Markdown table. head: the column titles, written "one | two"."""
    print(f"| {head} |\n|" + " --- |" * (head.count("|") + 1))
    for row in rows:
        print(f"| {' | '.join(map(as_text, row))} |", flush=True)
