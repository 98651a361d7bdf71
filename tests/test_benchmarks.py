"""The benchmarks run and leave the figures that RECORDS.md tells of; how fast is not tested."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, linux_only

pytestmark = linux_only  # they read /proc and use the module resource


def benchmark(name: str, *args: object, timeout: float = 300) -> str:
    """What `python -m benchmarks.NAME` prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks{name}", *map(str, args)],
        capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def written(name: str, path: Path, *args: object, timeout: float = 300) -> Any:
    """What it writes as JSON."""
    benchmark(f".{name}", "--json", path, *args, timeout=timeout)
    return json.loads(path.read_text())


def test_every_benchmark_is_listed_with_a_line() -> None:
    lines = benchmark("").splitlines()
    names = {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")}
    assert {line.split()[2].removeprefix("benchmarks.") for line in lines} == names
    assert all(line.endswith((".", "?")) for line in lines)


@pytest.mark.slow
def test_throughput_measures_the_loop_its_limit_and_the_habit(tmp_path: Path) -> None:
    (row,) = written("throughput", tmp_path / "a.json", "--models", "compact", "--precisions",
                     "bf16", "--rounds", 1, "--steps", 3, "--batch-size", 64)  # fmt: skip
    assert len(row["rates"]) == 5 and all(len(rates) == 1 for rates in row["rates"].values())
    assert min(row["median"].values()) > 0
    assert row["loop_over_limit"] == row["median"]["loop"] / row["median"]["limit"]


@pytest.mark.slow
def test_time_to_accuracy_takes_the_last_row_of_each_seed(tmp_path: Path) -> None:
    (runs,) = written("time_to_accuracy", tmp_path / "a.json", "--seeds", 2, "@recipes/fast",
                      "--stop-after-steps", 1).values()  # fmt: skip
    assert [run["seed"] for run in runs] == [0, 1]
    for run in runs:
        assert 0 < run["accuracy"] < 0.5 and run["process"] > run["train"] > 0


def test_the_loops_of_a_tiny_model_make_the_same_steps(tmp_path: Path) -> None:
    loops = written("loop_overhead", tmp_path / "a.json", "--rounds", 1, "--steps", 20)
    assert [*loops] == ["bare", "schedule", "loader", "script"]
    assert all(min(seconds) > 0 for seconds in loops.values())


@pytest.mark.slow
def test_startup_leaves_out_what_it_says(tmp_path: Path) -> None:
    flags = ("--rounds", 1, "--steps", 2, "--only", "spare_lookups", "gc.freeze")
    figures = written("startup", tmp_path / "a.json", *flags, timeout=600)
    assert [*figures] == ["start", "epoch", "step"]
    assert {len(rows) for rows in figures.values()} == {4}  # all, without each, without both


@pytest.mark.slow
def test_the_longer_benchmarks(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    parts = written("throughput", path, "--parts", "--rounds", 1, "--models", "compact")
    assert len(parts) >= 7 and all(len(ways) > 1 for ways in parts.values())
    rows = written("scaling", path, "--model", "compact", "--steps", 2, "--rounds", 1)
    assert len(rows["rows"]) == 2 and path.with_suffix(".png").exists()
    rates = written("busy_machine", path, "--steps", 1, "--rounds", 1, timeout=600)
    assert {len(by_setting) for by_setting in rates.values()} == {2}
    sizes = written("growth", path, "--sizes", 60_000, 120_000, "--rounds", 1, "--steps", 2,
                    "--dir", tmp_path, timeout=600)  # fmt: skip
    assert [len(row["microseconds_per_sample"]) for row in sizes.values()] == [1, 1]
    assert "durable save: median" in benchmark(".checkpoint_cost", "--rounds", 1)
