"""What a larger data set costs: seconds of an epoch per sample, and memory.

    python -m benchmarks.growth
    python -m benchmarks.growth --sizes 60000 600000 --dir FOLDER_WITH_SPACE

The sets are the shipped training pictures 1, 10 and 100 times over, as links to one Parquet file;
decoded, 6 million take 11 GB of disk under --dir. train_mnist.py trains on each with its default
model. `prepare` is a first start, which decodes and ends after one step; `epoch` is the training of
a second one. `own` memory is what the process allocated itself (RssAnon); `mapped` are pages of
files (RssFile), which the kernel takes back when it needs them: past train_mnist.RESIDENT_BYTES
the pictures lie there instead of in a tensor of their own. Both are peaks.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
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


def run(folder: Path, *args: object) -> dict[str, float]:
    """Run train_mnist.py and return its seconds and the peaks of its memory, in GB."""
    started_at = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, ROOT / "train_mnist.py", "--dataset", folder, "--no-pictures",
         "--run-dir", folder.with_suffix(".run"), *map(str, args)],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder.with_suffix(".cache"))},
    )  # fmt: skip
    peak = {"RssAnon": 0.0, "RssFile": 0.0}
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except FileNotFoundError:
            break  # it ended meanwhile
        for name, kilobytes in re.findall(r"(RssAnon|RssFile):\s+(\d+)", status):
            peak[name] = max(peak[name], int(kilobytes) * 1024 / 1e9)
        time.sleep(0.05)
    if process.wait() != 0:
        raise SystemExit(f"train_mnist.py ended with {process.returncode}")
    return {"seconds": time.perf_counter() - started_at, **peak}


def measure(folder: Path, num_samples: int) -> dict[str, float]:
    """One row of the table."""
    make_dataset(folder, num_samples)
    prepared = run(folder, "--stop-after-steps", 1)
    # Three epochs where they are short: each has the noise of the machine.
    trained = run(folder, "--epochs", max(1, min(3, 10 * NUM_PICTURES // num_samples)))
    lines = (folder.with_suffix(".run") / "timing.jsonl").read_text().splitlines()
    seconds = statistics.median(json.loads(line)["train_seconds"] for line in lines)
    return {
        "num_samples": num_samples,
        "prepare_seconds": prepared["seconds"],
        "epoch_seconds": seconds,
        "microseconds_per_sample": 1e6 * seconds / num_samples,
        "own_gb_prepare": prepared["RssAnon"],
        "own_gb": trained["RssAnon"],
        "mapped_gb": trained["RssFile"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[60_000, 600_000, 6_000_000])
    parser.add_argument("--dir", type=Path, default=None, help="where the data sets are laid")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "growth.json")
    args = parser.parse_args()
    print(f"{'samples':>9} {'prepare s':>9} {'epoch s':>8} {'us/sample':>9} "
          f"{'own GB, prepare':>15} {'own GB':>6} {'mapped GB':>9}")  # fmt: skip
    rows = []
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        for num_samples in args.sizes:
            row = measure(Path(directory, str(num_samples)), num_samples)
            rows.append(row)
            print("{num_samples:9} {prepare_seconds:9.1f} {epoch_seconds:8.1f} "
                  "{microseconds_per_sample:9.1f} {own_gb_prepare:15.2f} {own_gb:6.2f} "
                  "{mapped_gb:9.2f}".format(**row), flush=True)  # fmt: skip
    change = rows[-1]["microseconds_per_sample"] / rows[0]["microseconds_per_sample"] - 1
    print(f"per sample {change:+.1%} from the first to the last row")
    args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
