"""How far does the linear scaling rule carry? Accuracy after one epoch at growing batch sizes.

    python -m benchmarks.scaling_rule

Draws docs/scaling_rule.png. Runs that are done in runs/scaling_rule are not made again.
"""

import argparse
import subprocess
import sys

from matplotlib.figure import Figure

from benchmarks._runs import MNIST, ROOT, figures
from trainkit.plots import COLOURS

BATCH_SIZES = (32, 128, 256, 512, 2048)
GUESS = 0.1  # the accuracy of a guess among ten classes
FLAGS = ("--no-pictures", "--model", "lenet", "--no-augment", "--label-smoothing", "0",
         "--epochs", "1", "--optimizer", "sgd", "--learning-rate", "0.02",
         "--schedule", "constant", "--log-every", "1")  # fmt: skip
RULES = {"0.02 at every size": (), "0.02 x batch size / 32": ("--scale-lr", "32"),
         "the same, warm-up": ("--scale-lr", "32", "--warmup", "0.25")}  # fmt: skip


def accuracy(batch_size: int, name: str, rule: tuple[str, ...]) -> float | None:
    """Test accuracy after one epoch; None if the loss did not stay finite."""
    run_dir = ROOT / "runs" / "scaling_rule" / f"{name.replace(' ', '_').replace('/', 'by')}"
    run_dir = run_dir / str(batch_size)
    if not (run_dir / "DONE").exists():
        warmup = () if "--warmup" in rule else ("--warmup", "0")
        done = subprocess.run(
            [sys.executable, str(MNIST), "--batch-size", str(batch_size),
             "--run-dir", str(run_dir), *FLAGS, *warmup, *rule],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode == 1 and "not finite" in done.stderr:
            return None
        assert done.returncode == 0, done.stderr
    return figures(run_dir)["metrics"]["eval_accuracy"]


def main() -> None:
    """Print the table and write docs/scaling_rule.png."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    print(f"| batch size | {' | '.join(RULES)} |\n| --- |{' --- |' * len(RULES)}")
    results = {
        name: [accuracy(batch_size, name, rule) for batch_size in BATCH_SIZES]
        for name, rule in RULES.items()
    }
    for number, batch_size in enumerate(BATCH_SIZES):
        cells = ["not finite" if values[number] is None else f"{values[number]:.2%}"
                 for values in results.values()]  # fmt: skip
        print(f"| {batch_size} | {' | '.join(cells)} |")
    looks = zip(COLOURS, "os^", ("-", "--", "-."), (12, 9, 5), strict=False)  # none hides another
    for (name, values), (colour, marker, style, size) in zip(results.items(), looks, strict=False):
        errors = [1 - (GUESS if value is None else value) for value in values]
        axes.plot(BATCH_SIZES, errors, color=colour, marker=marker, markersize=size,
                  markerfacecolor="white", linestyle=style, label=name)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(BATCH_SIZES, BATCH_SIZES)
    ticks = (0.02, 0.05, 0.1, 0.2, 0.5, 1)
    axes.set_yticks(ticks, [f"{tick:.0%}" for tick in ticks])
    axes.tick_params(which="minor", length=0, labelleft=False)
    axes.set_xlabel("batch size")
    axes.set_ylabel("test errors after one epoch")
    axes.grid(color="0.9")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=9)
    figure.savefig(ROOT / "docs" / "scaling_rule.png")


if __name__ == "__main__":
    main()
