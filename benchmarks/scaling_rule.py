"""How far does the linear scaling rule carry? Accuracy after one epoch at growing batch sizes.

    python -m benchmarks.scaling_rule

Draws docs/scaling_rule.png.
"""

from benchmarks._runs import MNIST, draw, one_run, table

BATCH_SIZES = (32, 128, 256, 512, 2048)
GUESS = 0.1  # the accuracy of a guess among ten classes
FLAGS = (
    "--no-pictures --model lenet --no-augment --label-smoothing 0 --epochs 1 --optimizer sgd "
    "--learning-rate 0.02 --schedule constant --log-every 1"
)
RULES = {
    "0.02 at every size": "--warmup 0",
    "0.02 x batch size / 32": "--warmup 0 --scale-lr 32",
    "the same, warm-up": "--warmup 0.25 --scale-lr 32",
}


def accuracy(batch_size: int, rule: str) -> float | None:
    """Test accuracy after one epoch; None if the loss did not stay finite."""
    words = (*FLAGS.split(), *RULES[rule].split(), "--batch-size", batch_size)
    try:
        run = one_run(MNIST, *words)
    except RuntimeError as failure:
        if "not finite" not in str(failure):
            raise
        return None
    return run.metrics[-1]["eval_accuracy"]


def main() -> None:
    """Print the table and write docs/scaling_rule.png."""
    found = {rule: [accuracy(size, rule) for size in BATCH_SIZES] for rule in RULES}
    columns = [["not finite" if v is None else f"{v:.2%}" for v in found[rule]] for rule in RULES]
    table(f"batch size | {' | '.join(RULES)}", zip(BATCH_SIZES, *columns, strict=True))
    errors = {rule: [1 - (value or GUESS) for value in values] for rule, values in found.items()}
    lines = {rule: (BATCH_SIZES, values) for rule, values in errors.items()}
    draw("scaling_rule", lines, x="batch size", y="fraction of wrong test pictures")


if __name__ == "__main__":
    main()
