"""What idle OpenMP threads cost: images per second alone, and beside another busy process.

    python -m benchmarks.busy_machine
    python -m benchmarks.busy_machine --spins 10000 3000 1000 0

Threads that wait for work either spin, which is quick to notice new work and takes a core from
whatever else wants it, or sleep. Each row is train_mnist.py with as many threads as cores: first
with libgomp's own setting, which spins 300,000 times, then with `export OMP_WAIT_POLICY=PASSIVE
GOMP_SPINCOUNT=N` for each N of --spins; alone, and beside one process that never rests. The rows
take turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks._runs import MNIST, one_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spins", type=int, nargs="+", default=[3000])
    parser.add_argument("--model", default="compact")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path, default=None, help="also write the figures there")
    args = parser.parse_args()
    settings = {"nothing set": {}} | {
        f"OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT={number}": {
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": str(number),
        }
        for number in args.spins
    }
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        os.environ.pop(name, None)
    flags = ["--model", args.model, "--batch-size", 256, "--stop-after-steps", args.steps]
    rates: dict[str, dict[str, list[float]]] = {
        place: {name: [] for name in settings} for place in ("alone", "beside a busy process")
    }
    for place, by_setting in rates.items():
        busy = None
        if place != "alone":
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            for _ in range(args.rounds):
                for name, env in settings.items():
                    run = one_run(MNIST, *flags, "--no-pictures", env=env)
                    by_setting[name].append(run["samples_per_second"])
        finally:
            if busy is not None:
                busy.kill()
                busy.wait()
    print(f"{args.model}, batch 256, images/s, median of {args.rounds}, over the first row")
    print("| idle threads | " + " | ".join(rates) + " |\n| --- | --- | --- |")
    for name in settings:
        cells = []
        for by_setting in rates.values():
            rate, first = (statistics.median(by_setting[n]) for n in (name, "nothing set"))
            cells.append(f"{rate:,.0f} ({rate / first - 1:+.0%})")
        print(f"| {name} | {' | '.join(cells)} |")
    if args.json:
        args.json.write_text(json.dumps(rates, indent=1) + "\n")


if __name__ == "__main__":
    main()
