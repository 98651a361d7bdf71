"""Accuracy and seconds of whole runs over several seeds: always the last epoch, never the best.

    python -m benchmarks.time_to_accuracy --seeds 10
    python -m benchmarks.time_to_accuracy --seeds 10 @recipes/fast
    python -m benchmarks.time_to_accuracy --seeds 5 --config CONFIG.yaml @recipes/best
    python -m benchmarks.time_to_accuracy --seeds 2 --ablation

Everything that is not a flag of this program goes to train_mnist.py. `train` is the sum of the
epochs' seconds from first batch to last, `process` is from start to exit: imports, decoding (cached
after a first run, which is not counted), evaluation and checkpoints included.

With --ablation, runs that each differ from the others in one thing take turns, seed by seed. They
train on 50,000 pictures and are judged by the other 10,000 training pictures, so that the test set
has no part in a choice.
"""

import argparse
import json
import statistics
from pathlib import Path

from benchmarks._runs import MNIST, one_run

ABLATION = {
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
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--config", type=Path, default=None, help="YAML; None: plain python")
    parser.add_argument("--ablation", action="store_true", help="what each ingredient gives")
    parser.add_argument("--json", type=Path, default=None, help="also write every run there")
    args, common = parser.parse_known_args()
    variants = {"": ""}
    if args.ablation:
        variants, common = ABLATION, [*common, "--validation-split", "10000", "--no-pictures"]
    one_run(MNIST, *common, "--stop-after-steps", 1, config=args.config)  # fills caches
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for name, flags in variants.items():
            words = (*common, *flags.split(), "--seed", seed)
            run = one_run(MNIST, *words, config=args.config)
            runs[name].append(
                {
                    "seed": seed,
                    "accuracy": run["metrics"]["eval_accuracy"],
                    "train": run["train_seconds"],
                    "process": run["process_seconds"],
                }
            )
            print(f"{name} seed {seed}: {runs[name][-1]['accuracy']:.2%}, train "
                  f"{run['train_seconds']:.1f} s, process {run['process_seconds']:.1f} s",
                  flush=True)  # fmt: skip
    print(
        f"train_mnist.py {' '.join(common)}, mean of {args.seeds} +- standard deviation\n"
        "| variant | flags | accuracy, % | train, s | process, s |\n|" + " --- |" * 5
    )
    for name, flags in variants.items():
        cells = []
        for key, scale, places in (("accuracy", 100, 3), ("train", 1, 1), ("process", 1, 1)):
            values = [scale * run[key] for run in runs[name]]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{statistics.mean(values):.{places}f} +- {spread:.{places}f}")
        print(f"| {name} | {f'`{flags}`' if flags else ''} | {' | '.join(cells)} |")
    if args.json:
        args.json.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
