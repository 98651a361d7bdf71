"""The benchmarks run and print the figures that RECORDS.md tells of; how fast is not tested."""

import re

import pytest
from conftest import ROOT, linux_only, run
from plain import quick

from benchmarks import gpu

pytestmark = linux_only  # they read the memory of processes and use mallopt


def benchmark(name: str, *args: object) -> str:
    """What `python -m benchmarks.NAME` prints."""
    return run("-m", f"benchmarks{name}", *args, timeout=600, cwd=ROOT).stdout


def table(name: str, *args: object) -> list[list[str]]:
    """The cells of the table that it prints, without the head."""
    lines = [line for line in benchmark(f".{name}", *args).splitlines() if line[:2] == "| "]
    return [line.strip("| ").split(" | ") for line in lines[2:]]


def number(cell: str) -> float:
    """The first number of a cell."""
    return float(re.search(r"-?[\d,.]+(e-?\d+)?", cell)[0].replace(",", ""))


def test_every_benchmark_is_listed_with_a_line():
    lines = benchmark("").splitlines()
    names = {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")}
    assert {line.split()[2].removeprefix("benchmarks.") for line in lines} == names
    assert all(line.endswith((".", "?")) for line in lines)


# A benchmark, the flags that make it short, and the first words of its rows.
TABLES = """
loop_overhead --rounds 1 --steps 20: bare schedule loader script
throughput --models compact --precisions bf16 --rounds 1 --steps 3: compact
tokens --rounds 1 --steps 4: no bf16
sharded --rounds 1 --steps 4 --layers 2 --width 64: 2cpu 2cpu_fsdp
scaling --model compact --steps 2 --rounds 1: 1 2
growth --sizes 1000 2000 --rounds 1: kit
checkpoint_cost --rounds 2: now:
billion --parameters 2e6: 2 killed resumed
time_to_accuracy --seeds 2 --stop-after-steps 1: train_mnist.py
peers --only accelerate fast --pictures 700: accelerate fast
"""


ROWS = re.findall(r"^(\w+) (.*): (.*)$", TABLES, re.MULTILINE)


@pytest.mark.parametrize("name, flags, first", quick(ROWS, []))
def test_a_benchmark_prints_its_table(name, flags, first):
    rows = table(name, flags)
    assert {row[0].split()[0] for row in rows} == {*first.split()}
    assert all(number(row[-1]) > 0 for row in rows)


# In bf16, ours and bare, as the benchmark counts them; gpt.py has one block. The counted step of
# pictures.py writes a row, whose counts are filled in on the device without a copy that waits.
MOST_LAUNCHES = [(95, 78), (128, 95), (531, 497)]


def test_a_step_of_the_digits_starts_at_most_75_operations(tiny_mnist, fork_main):
    counted = """
from functools import partial
import train_mnist
from benchmarks._launches import Launches
def main(argv):
    print("launches", Launches(partial(train_mnist.main, argv)).each_step)
"""
    flags = ["--dataset", tiny_mnist, "--batch-size", 16, "--stop-after-steps", 12]
    done = fork_main(counted, *flags, "--no-pictures", "--log-every", 100)
    assert done.codes == [0], done.output
    assert 60 < number(done.output.partition("launches")[2]) <= 75, done.output


@pytest.mark.slow
def test_each_row_of_a_gpu_is_written_as_soon_as_it_is_measured(tmp_path):
    out = tmp_path / "gpu.md"
    benchmark(".gpu", "--tiny", "--out", out, "--limit", 600)  # of a busy machine
    head, line, *rows = out.read_text().splitlines()
    assert head.startswith("| row | ours | ") and line.startswith("| --- |")
    assert len(rows) == len(gpu.ROWS)
    assert not [row for row in rows if "failed" in row or "not meas" in row]
    assert all(row.count("|") == head.count("|") for row in rows)
    assert all("| compact, batch 128" in row for row in rows[:2])
    of_steps = [re.search(r"(\d+) and (\d+) launches a step", row) for row in rows]
    launches = [tuple(map(int, found.groups())) for found in of_steps if found]
    assert len(launches) == len(MOST_LAUNCHES)  # train_mnist.py, gpt.py, pictures.py
    for counted, most in zip(launches, MOST_LAUNCHES, strict=True):
        assert counted <= most and counted[1] > 70, launches
