"""How far apart do the losses of one experiment drift, trained by other processes or threads?

    python -m benchmarks.rounding

Draws docs/rounding.png: per step of the default run, the distance of its training loss from that of
one process with one thread. Order, augmentation and rates are equal in all of them; sums are made
in another order, which changes last bits, and training amplifies these. Runs that are done in
runs/rounding are not made again.
"""

import argparse
import json
import math
from typing import Any

from matplotlib.figure import Figure

from benchmarks._runs import MNIST, ROOT, finish, start
from trainkit.plots import COLOURS

ALIKE = 1e-5
WORLDS: dict[str, dict[str, Any]] = {
    "1 process, 1 thread": {"env": {"OMP_NUM_THREADS": "1"}},
    "1 process, 2 threads": {"env": {"OMP_NUM_THREADS": "2"}},
    "2 processes, 1 thread each": {"config": ROOT / "accelerate_configs" / "2cpu.yaml",
                                   "env": {"OMP_NUM_THREADS": "1"}},
}  # fmt: skip


def steps(world: str) -> list[dict[str, float]]:
    """The row of each step of the default run in this world."""
    run_dir = ROOT / "runs" / "rounding" / world.replace(", ", "_").replace(" ", "_")
    if not (run_dir / "DONE").exists():
        finish(start(MNIST, "--log-every", 1, "--run-dir", run_dir, **WORLDS[world]))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "learning_rate" in row]


def main() -> None:
    """Print a line per world and write docs/rounding.png."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    figure = Figure(figsize=(7, 3.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    (_, first), *others = ((world, steps(world)) for world in WORLDS)
    for (world, rows), colour in zip(others, COLOURS, strict=False):
        assert [row["learning_rate"] for row in rows] == [row["learning_rate"] for row in first]
        apart = [abs(row["train_loss"] - one["train_loss"])
                 for row, one in zip(rows, first, strict=True)]  # fmt: skip
        alike = next((step for step, gap in enumerate(apart) if gap > ALIKE), len(apart))
        print(f"{world}: within {ALIKE:g} for {alike} steps of {len(apart)}; at most "
              f"{max(apart[:100]):.1e} in the first 100, {max(apart):.1e} in all")  # fmt: skip
        axes.plot(range(1, len(apart) + 1), [gap or math.nan for gap in apart], color=colour,
                  linewidth=0.8, label=world)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="optimizer steps", ylabel="distance of the loss")
    axes.axhline(ALIKE, color="0.5", linestyle=":")
    axes.grid(color="0.9")
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    figure.savefig(ROOT / "docs" / "rounding.png")


if __name__ == "__main__":
    main()
