"""What a larger data set costs: seconds of an epoch per sample, and memory.

    python -m benchmarks.growth
    python -m benchmarks.growth --sizes 60000 600000 --dir FOLDER_WITH_SPACE

The sets are the shipped training pictures 1, 10 and 100 times over, as links to one Parquet file;
decoded, 6 million take 11 GB of disk under --dir. train_mnist.py trains on each with its default
model. A first start decodes and ends after one step. Then the sizes take turns, the same number of
steps each, so that what the machine does meanwhile meets them all. `own` memory is what the process
allocated itself (RssAnon); `mapped` are pages of files (RssFile), the pictures among them, which
the kernel takes back when it needs them. Both are peaks.
"""

import argparse
import json
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._runs import MNIST, ROOT, figures, finish, start

NUM_PICTURES = 60_000


def make_dataset(folder: Path, num_samples: int) -> None:
    """A folder as large as num_samples pictures to whoever reads it."""
    folder.mkdir()
    source, number = ROOT / "data" / "mnist", num_samples // NUM_PICTURES
    for index in range(number):
        target = folder / f"train-{index:05}-of-{number:05}.parquet"
        target.symlink_to(source / "train-00000-of-00001.parquet")
    name = "test-00000-of-00001.parquet"
    (folder / name).symlink_to(source / name)


def run(folder: Path, *flags: object) -> dict[str, float]:
    """Run train_mnist.py and return its seconds and the peaks of its memory, in GB."""
    started_at = time.perf_counter()
    process = start(MNIST, "--dataset", folder, "--no-pictures", "--run-dir",
                    folder.with_suffix(".run"), *flags,
                    env={"HF_HOME": str(folder.with_suffix(".cache"))})  # fmt: skip
    peak = {"RssAnon": 0.0, "RssFile": 0.0}
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except FileNotFoundError:
            break  # it ended meanwhile
        for name, kilobytes in re.findall(r"(RssAnon|RssFile):\s+(\d+)", status):
            peak[name] = max(peak[name], int(kilobytes) * 1024 / 1e9)
        time.sleep(0.05)
    finish(process)
    return {"seconds": time.perf_counter() - started_at, **peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[60_000, 600_000, 6_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1404, help="of each run in a round")
    parser.add_argument("--dir", type=Path, default=None, help="where the data sets are laid")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures there")
    args = parser.parse_args()
    rows: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        folders = {size: Path(directory, str(size)) for size in args.sizes}
        for size, folder in folders.items():
            make_dataset(folder, size)
            first = run(folder, "--stop-after-steps", 1)
            rows[size] = {"prepare_seconds": first["seconds"], "own_gb_prepare": first["RssAnon"],
                          "microseconds_per_sample": []}  # fmt: skip
        for _ in range(args.rounds):
            for size, folder in folders.items():
                peak = run(folder, "--epochs", 100, "--stop-after-steps", args.steps)
                rate = figures(folder.with_suffix(".run"))["samples_per_second"]
                rows[size]["microseconds_per_sample"].append(1e6 / rate)
                rows[size] |= {"own_gb": peak["RssAnon"], "mapped_gb": peak["RssFile"]}
    print("| samples | first start | microseconds per sample | range | "
          "own memory, first start | own memory | mapped files |")  # fmt: skip
    print("| --- " * 7 + "|")
    for size, row in rows.items():
        times = row["microseconds_per_sample"]
        print(f"| {size:,} | {row['prepare_seconds']:.1f} s | {statistics.median(times):.1f} | "
              f"{min(times):.1f} to {max(times):.1f} | {row['own_gb_prepare']:.2f} GB | "
              f"{row['own_gb']:.2f} GB | {row['mapped_gb']:.2f} GB |")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
