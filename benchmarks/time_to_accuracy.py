"""Measure accuracy and seconds of whole runs over several seeds, and how a setting changes them.

    python -m benchmarks.time_to_accuracy --seeds 10
    python -m benchmarks.time_to_accuracy --seeds 10 @examples/recipes/fast
    python -m benchmarks.time_to_accuracy --seeds 2 --compare ablation --validation-split 10000
    python -m benchmarks.time_to_accuracy --seeds 4 --compare threads --stop-after-steps 120

Everything that is not a flag of this program is passed to train_mnist.py. The accuracy is that of
the last epoch, never the best. `train` is the sum of the epochs' seconds from first batch to last;
`process` is the time from start to exit, including imports, decoding (cached after a first run,
which is not counted), evaluation and checkpoints.

With --compare, runs that each differ from the first in one thing take turns, seed by seed:

    ablation  one ingredient of the default run; judge by --validation-split, so that no choice is
              made on the test set
    threads   how OpenMP's idle threads wait for work: they spin, which reacts quickly but takes a
              core from other programs (libgomp: 300,000 times), or sleep; measured alone, and while
              `python -c "while True: pass"` runs
    startup   without keep_memory of trainkit/launch/startup.py, or without its skip_the_compiler
"""

import argparse
import itertools
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks._runs import MNIST, Ended, in_turn, one_run, spread, table

SPINS = "OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT="
VARIANTS = {  # environment variables and flags
    "ablation": {
        "as it is": "",
        "without augmentation": "--no-augment",
        "twice the shift and turn": "--max-shift 2 --max-turn 10",
        "with a warp of one pixel": "--max-warp 1",
        "without label smoothing": "--label-smoothing 0",
        "constant learning rate 1e-3": "--schedule constant --warmup 0 --learning-rate 1e-3",
        "learning rate 3e-3": "--learning-rate 3e-3",
        "SGD with momentum": "--optimizer sgd",
        "batches of 64": "--batch-size 64 --learning-rate 5e-3",
        "batches of 256": "--batch-size 256",
        "2 epochs": "--epochs 2",
        "4 epochs": "--epochs 4",
        "lenet": "--model lenet",
        "deep": "--model deep",
    },
    "threads": {
        "nothing set": "",
        "always spin": "GOMP_SPINCOUNT=INFINITY",
        "10,000 spins": SPINS + "10000",
        "3,000 spins": SPINS + "3000",
        "1,000 spins": SPINS + "1000",
        "no spins": SPINS + "0",
    },
    "startup": {
        "as it is": "",
        "freed memory goes back": "LEFT_OUT=startup.keep_memory",
        "with torch's compiler imported": "LEFT_OUT=startup.skip_the_compiler",
    },
}
# Runs the script that is the first argument after -c, without the functions named by LEFT_OUT.
WITHOUT = """
import os, runpy, sys
from trainkit import startup
for left_out in filter(None, os.environ.get("LEFT_OUT", "").split(",")):
    module, name = left_out.split(".")
    getattr(globals()[module], name)
    setattr(globals()[module], name, lambda: None)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def mean(values: list[float]) -> str:
    """Format values as: mean +- standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} +- {deviation:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--config", type=Path, help="YAML; None: plain python")
    parser.add_argument("--compare", choices=VARIANTS)
    args, common = parser.parse_known_args()
    launch = ("--config_file", args.config) if args.config else ()
    script = ("-c", WITHOUT, MNIST) if args.compare == "startup" else (MNIST,)
    variants = VARIANTS.get(args.compare, {"train_mnist.py": ""})

    def seed_by_seed(variant: str) -> Callable[[], Ended]:
        seeds, words = itertools.count(), variant.split()
        flags = [word for word in words if "=" not in word]
        env = dict(word.split("=") for word in words if "=" in word)
        run = partial(one_run, *script, *common, *flags, launch=launch, env=env)
        return lambda: run("--seed", next(seeds))

    one_run(MNIST, *common, "--stop-after-steps", 1, launch=launch)  # fills the caches
    ways = {name: seed_by_seed(variant) for name, variant in variants.items()}
    rows = []
    for name, runs in in_turn(ways, args.seeds).items():
        accuracies = [100 * run.metrics[-1]["eval_accuracy"] for run in runs]
        seconds = mean([run.train_seconds for run in runs]), mean([run.seconds for run in runs])
        rate = spread([run.samples_per_second for run in runs])
        rows.append((name, " ".join((*common, variants[name])), mean(accuracies), *seconds, rate))
    table("run | with | accuracy, % | train, s | process, s | images/s", rows)


if __name__ == "__main__":
    main()
