"""The benchmarks run and leave the figures that RECORDS.md tells of; how fast is not tested."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, linux_only

import train_mnist
from benchmarks import _cv_example, peers
from datakit.pictures import load_images

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


def test_peers_find_the_shipped_pictures_and_the_same_network(tmp_path: Path) -> None:
    from torchvision.datasets import MNIST

    peers.lay_data(tmp_path, 300)
    for train, split in ((True, "train"), (False, "test")):
        ours = load_images(str(ROOT / "data" / "mnist"), split, 28, None)[0]
        for folder in ("data", "Datasets"):
            theirs = MNIST(tmp_path / folder, train=train)
            assert torch.equal(theirs.data, ours.tensors[0][:300, 0])
            assert torch.equal(theirs.targets, ours.tensors[1][:300])
        digits = _cv_example.Digits(tmp_path / "rows" / f"{split}.parquet")
        assert torch.equal(digits[299]["image"] * 255, ours.tensors[0][299].float())
    assert [*map(str, _cv_example.make_model())] == [*map(str, train_mnist.Compact(10))]


def test_the_lines_of_peers_are_read(tmp_path: Path) -> None:
    epochs = peers.epochs_of_peer([
        (4.0, "Train Epoch: 1 [0/1000 (0%)]\tLoss: 2.300000\n"),
        (5.0, "Train Epoch: 1 [640/1000 (64%)]\tLoss: 0.300000\n"),
        (6.0, "Train Epoch: 1 [800/1000 (80%)]\tLoss: 0.200000\n"),
        (7.0, "\n"),
        (7.0, "Test set: Average loss: 0.0262, Accuracy: 9899/10000 (99%)\n"),
        (8.0, "Train Epoch: 2 [200/1000]\n"),
        (9.0, "Train Epoch: 2 [1000/1000]\n"),
        (9.5, "Test set: Average loss: 0.0262, Accuracy: (99.0000%)\n"),
    ])  # fmt: skip
    assert epochs == [
        {"accuracy": 98.99, "at": 7.0, "train": 2.5, "images_per_second": 400, "eval": 0.5},
        {"accuracy": 99.0, "at": 9.5, "train": 1.25, "images_per_second": 800, "eval": 0.5},
    ]
    run = {"epochs": epochs, "process": 11.0, "memory": 900.0}
    cells = peers.table_row("fabric", "7", [run]).split(" | ")
    assert cells[1:] == ["7", "1.88", "0.50", "600", "98.99, 99.00", "9.5", "11.0", "900 |"]
    assert peers.table_row("fabric", "7", [{**run, "epochs": epochs[:1]}]).split(" | ")[6] == "-"
    script = tmp_path / "script.py"
    script.write_text('"""What\nit does."""\n\nimport os  # here\n\n# Why.\n'
                      'def f():\n    """Do."""\n    return """a\nb"""\n')  # fmt: skip
    assert peers.count_lines(script) == 4


@pytest.mark.slow
def test_peers_are_timed_beside_train_mnist(tmp_path: Path) -> None:
    runs = written("peers", tmp_path / "a.json", "--only", "accelerate", "fast", "--pictures", 700)
    assert [len(run["epochs"]) for (run,) in runs.values()] == [3, 1]
    for (run,) in runs.values():
        assert all(0 < value < 1e5 for row in run["epochs"] for value in row.values())
        assert run["process"] > run["epochs"][-1]["at"] and run["memory"] > 100


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
