"""The benchmarks run and leave the figures that RECORDS.md tells of; how fast is not tested."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT


def benchmark(name: str, path: Path, *args: object, timeout: float = 100) -> Any:
    """What a benchmark writes as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--json", str(path), *map(str, args)],
        capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


def test_throughput_measures_the_loop_its_limit_and_the_habit(tmp_path: Path) -> None:
    (row,) = benchmark("throughput", tmp_path / "a.json", "--models", "compact", "--precisions",
                       "bf16", "--rounds", 1, "--steps", 3, "--batch-size", 64)  # fmt: skip
    assert len(row["rates"]) == 5 and all(len(rates) == 1 for rates in row["rates"].values())
    assert min(row["median"].values()) > 0
    assert row["loop_over_limit"] == row["median"]["loop"] / row["median"]["limit"]


def test_time_to_accuracy_takes_the_last_row_of_each_seed(tmp_path: Path) -> None:
    result = benchmark("time_to_accuracy", tmp_path / "a.json", "--seeds", 2, "@recipes/fast",
                       "--stop-after-steps", 1)  # fmt: skip
    assert [run["seed"] for run in result["runs"]] == [0, 1]
    for run in result["runs"]:
        assert 0 < run["accuracy"] < 0.5 and run["process_seconds"] > run["train_seconds"] > 0


@pytest.mark.slow
def test_ingredients_times_every_way(tmp_path: Path) -> None:
    parts = benchmark("ingredients", tmp_path / "a.json", "--rounds", 1)
    assert len(parts) >= 8 and all(len(ways) > 1 for ways in parts.values())


@pytest.mark.slow
def test_the_longer_benchmarks(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    rows = benchmark("scaling", path, "--model", "compact", "--steps", 2, "--rounds", 1)
    assert len(rows["rows"]) == 2 and path.with_suffix(".png").exists()
    rates = benchmark("busy_machine", path, "--steps", 1, "--rounds", 1, timeout=300)
    assert {len(by_setting) for by_setting in rates.values()} == {6}
    sizes = benchmark("growth", path, "--sizes", 60_000, 120_000, "--rounds", 1, "--steps", 2,
                      "--dir", tmp_path, timeout=300)  # fmt: skip
    assert [len(row["microseconds_per_sample"]) for row in sizes.values()] == [1, 1]
    loops = benchmark("loop_overhead", path, "--rounds", 1, timeout=300)
    assert loops
