"""What idle OpenMP threads cost: images per second alone, and beside another busy process.

    python -m benchmarks.busy_machine

Threads that wait for work either spin, which is quick to notice new work and takes a core from
whatever else wants it, or sleep. trainkit/__init__.py sets OMP_WAIT_POLICY and GOMP_SPINCOUNT,
unless they are set already, so that train_mnist.py's threads soon sleep. A setting below is one run
of train_mnist.py with as many threads as cores, alone and beside one process that never rests;
settings take turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.timing import images_per_second

ROOT = Path(__file__).parent.parent
SETTINGS = {  # libgomp's counts: 0 for PASSIVE, 300,000 where nothing is set, no end for ACTIVE
    "spin without end (ACTIVE)": {"GOMP_SPINCOUNT": "INFINITY"},
    "spin 300,000 times (nothing set)": {"GOMP_SPINCOUNT": "300000"},
    "spin 10,000 times, then sleep": {"GOMP_SPINCOUNT": "10000"},
    "spin 3,000 times, then sleep (set by trainkit)": {},
    "spin 1,000 times, then sleep": {"GOMP_SPINCOUNT": "1000"},
    "sleep at once (PASSIVE)": {"GOMP_SPINCOUNT": "0"},
}


def rate(model: str, steps: int, settings: dict[str, str]) -> float:
    """Images per second of train_mnist.py, as it measures itself."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **settings}
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        subprocess.run(
            [sys.executable, ROOT / "train_mnist.py", "--model", model, "--no-pictures",
             "--batch-size", "256", "--stop-after-steps", str(steps), "--run-dir", run_dir],
            check=True, stdout=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
        return images_per_second(run_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="compact")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "busy_machine.json")
    args = parser.parse_args()
    rates: dict[str, dict[str, list[float]]] = {
        place: {name: [] for name in SETTINGS} for place in ("alone", "beside a busy process")
    }
    for place, by_setting in rates.items():
        busy = None
        if place != "alone":
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            for _ in range(args.rounds):
                for name, settings in SETTINGS.items():
                    by_setting[name].append(rate(args.model, args.steps, settings))
        finally:
            if busy is not None:
                busy.kill()
                busy.wait()
    print(f"{args.model}, batch 256, images/s, median of {args.rounds}")
    print("| idle threads | " + " | ".join(rates) + " |\n| --- | --- | --- |")
    for name in SETTINGS:
        medians = [f"{statistics.median(values[name]):,.0f}" for values in rates.values()]
        print(f"| {name} | {' | '.join(medians)} |")
    args.json.write_text(json.dumps(rates, indent=1) + "\n")


if __name__ == "__main__":
    main()
