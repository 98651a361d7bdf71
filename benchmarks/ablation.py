"""What each ingredient of the default run gives, in accuracy and in seconds.

    python -m benchmarks.ablation --seeds 3

Each variant differs from `python train_mnist.py` in one thing. All train on 50,000 pictures and are
judged by the other 10,000 training pictures, so the test set has no part in a choice; the variants
take turns, seed by seed.
"""

import argparse
import json
import statistics
from pathlib import Path

from benchmarks.time_to_accuracy import ROOT, one_run

VARIANTS = {
    "default": "",
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
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "ablation.json")
    args = parser.parse_args()
    common = ["--validation-split", "10000", "--no-pictures"]
    one_run([*common, "--stop-after-steps", "1"], None, 0)  # fills the caches
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for seed in range(args.seeds):
        for name, flags in VARIANTS.items():
            runs[name].append(one_run([*common, *flags.split()], None, seed))
            print(f"seed {seed}, {name}: {runs[name][-1]['accuracy']:.2%}", flush=True)
    print("| variant | flags | accuracy | standard deviation | training s |")
    print("| --- | --- | --- | --- | --- |")
    for name, flags in VARIANTS.items():
        accuracies = [100 * run["accuracy"] for run in runs[name]]
        spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        seconds = statistics.median(run["train_seconds"] for run in runs[name])
        print(f"| {name} | {f'`{flags}`' if flags else ''} | {statistics.mean(accuracies):.2f} % | "
              f"{spread:.2f} | {seconds:.1f} |")  # fmt: skip
    args.json.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
