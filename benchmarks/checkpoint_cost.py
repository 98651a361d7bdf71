"""Measure the cost of a durable save, and of the bare accelerator.save_state within it.

    python -m benchmarks.checkpoint_cost

train_regression.py trains a network of 1,197,440 parameters with AdamW and saves at every step.
The cost of a step without a save is measured by benchmarks.loop_overhead.
"""

import time
from typing import Any

from trainkit import startup

from accelerate import Accelerator

import train_regression
from benchmarks._runs import Parser, in_process, spread, table
from trainkit.checkpoint import Checkpoints

FLAGS = "--model mlp --num-features 784 --hidden 1024 --num-targets 384 --save-every 1"


def timed(kind: type, name: str) -> list[float]:
    """Return a list to which each later call of this method adds its milliseconds."""
    method, times = getattr(kind, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        started_at = time.perf_counter()
        result = method(*args, **kwargs)
        times.append(1000 * (time.perf_counter() - started_at))
        return result

    setattr(kind, name, call)
    return times


def main() -> None:
    rounds = Parser(__doc__, rounds=15).parse_args().rounds
    times = {
        "bare accelerator.save_state": timed(Accelerator, "save_state"),
        "durable save: the same, hashed, synced, renamed, pruned": timed(Checkpoints, "save"),
    }
    in_process(train_regression, *FLAGS.split(), "--stop-after-steps", rounds + 1)
    # The first save warms up.
    rows = [(name, spread(values[1 : rounds + 1])) for name, values in times.items()]
    table("save | milliseconds", rows)


if __name__ == "__main__":
    startup.run(main)
