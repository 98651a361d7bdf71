"""Compare examples/pictures.py with Accelerate's cv_example and fastai: time to an accuracy.

    OMP_NUM_THREADS=1 python -m benchmarks.photos FOLDER --size 160 --epochs 5 --rounds 2
    OMP_NUM_THREADS=1 python -m benchmarks.photos FOLDER --pictures 400 --ways cv_example freeze

FOLDER has a folder of pictures for each class. So many are taken, evenly over all, and every fifth
of these is held out. benchmarks/_photo_peers.py has what the two others do; `freeze` and `whole`
are examples/pictures.py with and without --freeze. All have the same network, weights, pictures and
number of epochs; the seed is that of the round.

Seconds count from the start of a process to the end of the evaluation after an epoch: CPU time,
user + system of the process and of its workers that have ended, and wall time. The cache of
examples/pictures.py is empty at each start, so decoding and features are part of its time.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks._runs import ROOT, Parser, table

PEERS, OURS = ("cv_example", "fastai"), ("freeze", "whole")
# After an epoch: what the peers print, and our row, whose third number is the accuracy.
LINE = re.compile(r"(?:accuracy|\d+/\d+ +\S+ +\S+) +([\d.]+) %")

# For each epoch: CPU seconds and seconds since the start, and the accuracy in percent.
Epochs = list[tuple[float, float, float]]


def lay_pictures(source: Path, folder: Path, number: int | None) -> None:
    """Copy pictures into folder/train and folder/test."""
    source = source.resolve()
    paths = sorted(path for path in source.glob("*/**/*") if path.is_file())
    number = min(number or len(paths), len(paths))
    for n in range(number):
        path = paths[n * len(paths) // number]
        into = folder / ("test" if n % 5 == 4 else "train") / path.relative_to(source).parts[0]
        into.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, into / f"{n}{path.suffix}")


def follow(*words: object, **env: str) -> Epochs:
    """Run a script to its end. Raises RuntimeError unless its exit code is 0."""
    started_at, found = time.perf_counter(), []
    process = psutil.Popen(
        [sys.executable, *map(str, words)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **env},
        stdout=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if match := LINE.match(line):
            cpu, seconds = sum(process.cpu_times()[:4]), time.perf_counter() - started_at
            found.append((cpu, seconds, float(match[1])))
    if process.wait():
        raise RuntimeError(f"{words} ended with {process.returncode}")
    return found


def measure(way: str, data: Path, size: int, epochs: int, seed: int) -> Epochs:
    if way in PEERS:
        # fastai may be in a folder of PYTHONPATH, because it asks for older packages.
        script = ROOT / "benchmarks" / "_photo_peers.py"
        return follow(script, way, data, size, epochs, seed)
    flags = ["--dataset", data, "--size", size, "--epochs", epochs, "--seed", seed]
    flags += ["--no-pictures"] + ["--freeze"] * (way == "freeze")
    with tempfile.TemporaryDirectory() as folder:
        flags += ["--run-dir", f"{folder}/run"]
        return follow(ROOT / "examples" / "pictures.py", *flags, HF_HOME=f"{folder}/cache")


def reach(epochs: Epochs, accuracy: float) -> str:
    """Return the CPU seconds and the seconds until an accuracy was reached."""
    for cpu, seconds, reached in epochs:
        if reached >= accuracy:
            return f"{cpu:.1f}, {seconds:.1f}"
    return "not reached"


def main() -> None:
    parser = Parser(__doc__, rounds=1)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pictures", type=int, help="so many of them (default: all)")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=PEERS + OURS, default=PEERS + OURS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory, "data")
        lay_pictures(args.folder, data, args.pictures)
        for seed in range(args.rounds):
            found = {way: measure(way, data, args.size, args.epochs, seed) for way in args.ways}
            best = {peer: max(row[2] for row in found[peer]) for peer in PEERS if peer in found}
            head = "".join(f" | to the {best[peer]:.2f} % of {peer}" for peer in best)
            rows = []
            for way, epochs in found.items():
                columns = zip(*epochs, strict=True)
                cpu, seconds, accuracy = (", ".join(f"{x:.1f}" for x in each) for each in columns)
                rows.append([way, accuracy, cpu, seconds, *(reach(epochs, best[p]) for p in best)])
            print(f"seed {seed}; times to an accuracy are CPU seconds, seconds")
            table(f"script | accuracy after each epoch, % | CPU s | s{head}", rows)


if __name__ == "__main__":
    main()
