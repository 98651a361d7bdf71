"""What safety costs: a durable save beside a bare accelerator.save_state, in milliseconds.

    python -m benchmarks.checkpoint_cost

train_regression.py trains a network of 1,197,440 parameters with AdamW and saves at every step,
each time both ways, into folders of their own. What a step costs that saves nothing is part of
benchmarks.loop_overhead.
"""

import argparse
import contextlib
import io
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import train_regression
from trainkit import startup
from trainkit.checkpoint import Checkpoints, Progress


def milliseconds(action: Callable[[], object]) -> float:
    """Of one call."""
    started_at = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - started_at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dir", type=Path, default=None, help="a folder on the disk to measure")
    args = parser.parse_args()
    times: dict[str, list[float]] = {"bare save_state": [], "durable save": []}
    save_durably = Checkpoints.save

    def save_both_ways(checkpoints: Checkpoints, progress: Progress) -> None:
        bare = Path(folder, "bare", str(progress.step))
        save_state = checkpoints.accelerator.save_state
        times["bare save_state"].append(milliseconds(lambda: save_state(bare)))
        times["durable save"].append(milliseconds(lambda: save_durably(checkpoints, progress)))
        shutil.rmtree(bare)

    Checkpoints.save = save_both_ways
    silent = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory(dir=args.dir) as folder, silent:
        train_regression.main(
            ["--model", "mlp", "--num-features", "784", "--hidden", "1024", "--num-targets", "384",
             "--run-dir", f"{folder}/run", "--no-pictures", "--save-every", "1",
             "--stop-after-steps", str(args.rounds + 1)]
        )  # fmt: skip
    Checkpoints.save = save_durably
    for name, values in times.items():
        values = values[1 : args.rounds + 1]  # the first one warms up
        print(f"{name}: median {statistics.median(values):.1f} ms "
              f"({min(values):.1f} to {max(values):.1f}), n {len(values)}")  # fmt: skip


if __name__ == "__main__":
    startup.run(main)
