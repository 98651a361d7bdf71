"""What each setting and patch of trainkit/startup.py gives: runs with it and without it, in turn.

    OMP_NUM_THREADS=1 python -m benchmarks.startup
    OMP_NUM_THREADS=1 python -m benchmarks.startup --figures epoch --only keep_memory --model wide

Three figures of a run as a person starts it:

    start  seconds from start to exit of train_mnist.py with one step
    epoch  microseconds a sample of train_mnist.py, --steps steps
    step   microseconds a step of train_regression.py

Each row leaves out one function, the last row all of them. The rows take turns; `more` is how much
more than with everything, the median over the rounds, and `more CPU` the same of the processor's
seconds from start to exit, which other work on the machine disturbs less.
"""

import argparse
import json
import os
import statistics
from pathlib import Path

from benchmarks._runs import MNIST, REGRESSION, one_run

FUNCTIONS = ("keep_memory", "spare_the_compiler", "spare_sharded_tensors", "spare_lookups")
# Runs a script (the first argument after -c) with functions of trainkit/startup.py left out.
WITHOUT = (
    "import gc, runpy, sys; from trainkit import startup; del sys.argv[0]\n"
    "for name in {names!r}: getattr(startup, name); setattr(startup, name, lambda: None)\n"
    "if {thaw}: gc.freeze = lambda: None\n"
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
FREEZE = "gc.freeze"


def measure(figure: str, left_out: tuple[str, ...], model: str, steps: int) -> tuple[float, float]:
    """The figure, and CPU seconds of the whole process."""
    script = REGRESSION if figure == "step" else MNIST
    flags = {
        "start": ["--stop-after-steps", 1],
        "epoch": ["--model", model, "--stop-after-steps", steps, "--validation-split", 1000],
        "step": ["--num-samples", 40_000, "--epochs", 2],
    }[figure]
    names = [name for name in left_out if name != FREEZE]
    code = WITHOUT.format(names=names, thaw=FREEZE in left_out)
    run = one_run("-c", code, script, *flags, "--no-pictures")
    microseconds = 1e6 / run["samples_per_second"]
    value = {"start": run["process_seconds"], "epoch": microseconds, "step": 32 * microseconds}
    return value[figure], run["cpu_seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figures", nargs="+", default=["start", "epoch", "step"])
    parser.add_argument("--only", nargs="+", default=[*FUNCTIONS, FREEZE])
    parser.add_argument("--model", default="compact", help="of epoch")
    parser.add_argument("--steps", type=int, default=200, help="of epoch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None, help="also write the figures there")
    args = parser.parse_args()
    rows: dict[str, tuple[str, ...]] = {"with everything": ()}
    rows |= {f"without {name}": (name,) for name in args.only}
    if len(args.only) > 1:
        rows["without any of them"] = tuple(args.only)
    results: dict[str, dict[str, list[tuple[float, float]]]] = {}
    print(f"| figure | run | median of {args.rounds} | more | more CPU | load |\n|" + " --- |" * 6)
    for figure in args.figures:
        results[figure] = {name: [] for name in rows}
        measure(figure, (), args.model, args.steps)  # fills the caches
        for _ in range(args.rounds):
            for name, left_out in rows.items():
                values = measure(figure, left_out, args.model, args.steps)
                results[figure][name].append(values)
        for name, runs in results[figure].items():
            pairs = [*zip(runs, results[figure]["with everything"], strict=True)]
            more, more_cpu = (statistics.median(a[i] / b[i] for a, b in pairs) - 1 for i in (0, 1))
            value = statistics.median(run[0] for run in runs)
            print(f"| {figure} | {name} | {value:.4g} | {more:+.1%} | {more_cpu:+.1%} | "
                  f"{os.getloadavg()[0]:.1f} |", flush=True)  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
