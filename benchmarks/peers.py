"""Compare train_mnist.py with scripts that a user might pick instead: seconds, accuracy, memory.

    python -m benchmarks.peers --pytorch CLONE --fabric CLONE
    python -m benchmarks.peers --only accelerate ours fast --rounds 3

CLONEs are git repositories (bare or not) of pytorch/examples and Lightning-AI/pytorch-lightning,
whose HEAD is run unmodified; a peer without its clone is left out. Each script runs with its own
defaults, except for the number of epochs:

    pytorch     mnist/main.py, 4 epochs
    fabric      examples/fabric/image_classifier/train_fabric.py, 4 epochs; `pip install lightning`
    accelerate  benchmarks/_cv_example.py: Accelerate's examples/cv_example.py, written for MNIST
    ours        train_mnist.py, 3 epochs
    fast        train_mnist.py @examples/recipes/fast, 1 epoch

All use the shipped pictures, which the peers find where torchvision looks for them, and the number
of threads that the environment sets. The peers' download and our first start, which decodes the
pictures, are not counted. Fabric prints whole percents, so it is started in a way that prints
tensors with four decimals.

Training and evaluation times are medians over epochs. Those of peers are taken from the times at
which lines are printed, and an epoch's from the pace between its first and its last progress line.
`to 99 %` is the time from the start of the process to the line of its first evaluation at 99.0 % or
more, `process` the time to its exit; `memory` is the largest resident size of one process, without
that of loader workers.
"""

import re
import subprocess
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pyarrow.parquet
import torch

import train_mnist
from benchmarks._runs import MNIST, ROOT, Ended, Parser, execute, in_turn, one_run, table
from trainkit.config import parse

UNROUNDED = (
    "import runpy, sys, torch; del sys.argv[0]\n"
    "torch.Tensor.__format__ = lambda self, _: f'{self.item():.4f}'\n"
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
IN_CLONES = {
    "pytorch": "mnist/main.py",
    "fabric": "examples/fabric/image_classifier/train_fabric.py",
}
PROGRESS = re.compile(r"Train Epoch: \d+ \[(\d+)/(\d+)")
ACCURACY = re.compile(r"Accuracy: (?:(\d+)/(\d+)|\(([\d.]+)%)")


class Epoch(NamedTuple):
    """Its accuracy in percent, when that was printed, seconds of training and of evaluation."""

    accuracy: float
    at: float
    train: float
    evaluation: float


def lay_data(folder: Path, number: int | None) -> None:
    """Put the shipped data under rows/ as Parquet, and decoded where torchvision looks for them."""
    processed = folder / "data" / "MNIST" / "processed"
    for path in (folder / "rows", processed):
        path.mkdir(parents=True)
    (folder / "Datasets").symlink_to("data")  # its name in Fabric's example
    sets = train_mnist.load_data(parse(train_mnist.Config, []))
    for split, name, data in zip(("train", "test"), ("training", "test"), sets, strict=False):
        source = ROOT / "data" / "mnist" / f"{split}-00000-of-00001.parquet"
        rows = pyarrow.parquet.read_table(source).slice(0, number)
        pyarrow.parquet.write_table(rows, folder / "rows" / f"{split}.parquet")
        pictures, labels = data.tensors
        torch.save((pictures[:number, 0], labels[:number]), processed / f"{name}.pt")


def epochs_of_peer(lines: list[tuple[float, str]]) -> list[Epoch]:
    """Read the epochs from what a peer printed."""
    epochs, marks = [], []
    for at, line in lines:
        if found := PROGRESS.search(line):
            marks.append((at, *map(int, found.groups())))
        elif found := ACCURACY.search(line):
            correct, samples, percent = found.groups()
            (first_at, first, _), (last_at, last, total) = marks[0], marks[-1]
            pace, marks = (last_at - first_at) / (last - first), []
            accuracy = float(percent or 100 * int(correct) / int(samples))
            evaluation = at - last_at - (total - last) * pace
            epochs.append(Epoch(accuracy, at, total * pace, evaluation))
    return epochs


def epochs_of_ours(run: Ended) -> list[Epoch]:
    """Return the epochs of train_mnist.py, from the files in which it records its own times."""
    times = [at for at, line in run.lines if re.match(r"\d+/\d+ ", line)]
    accuracies = [100 * row["eval_accuracy"] for row in run.metrics if "eval_accuracy" in row]
    return [
        Epoch(accuracy, at, row["train_seconds"], row["eval_seconds"])
        for accuracy, at, row in zip(accuracies, times, run.timing, strict=True)
    ]


def table_row(name: str, run: Ended) -> list[str]:
    """Return the cells of one run."""
    epochs = epochs_of_ours(run) if run.timing else epochs_of_peer(run.lines)
    # 99.0 as a float32 may be slightly below 99.0.
    reached = [epoch.at for epoch in epochs if epoch.accuracy > 98.999]
    return [
        name,
        f"{median(epoch.train for epoch in epochs):.2f}",
        f"{median(epoch.evaluation for epoch in epochs):.2f}",
        ", ".join(f"{epoch.accuracy:.2f}" for epoch in epochs),
        f"{reached[0]:.1f}" if reached else "-",
        f"{run.seconds:.1f}",
        f"{max(info.rss for info in run.memory) / 1e6:,.0f}",
    ]


def main() -> None:
    parser = Parser(__doc__, rounds=1)
    for name, path in IN_CLONES.items():
        parser.add_argument(f"--{name}", type=Path, metavar="CLONE", help=f"that has {path}")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--pictures", type=int, help="of each split, 700 or more, to try it out")
    args = parser.parse_args()
    print(*(f"{name} {version(name)}" for name in ("torch", "torchvision", "accelerate")))
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        lay_data(folder, args.pictures)
        cwd = folder / "cwd"  # beside data/: mnist/main.py asks for ../data
        cwd.mkdir()
        env = {"HF_HOME": str(folder / "cache")}
        ours = partial(one_run, MNIST, "--dataset", folder / "rows", cwd=cwd, env=env)
        ways = {}
        for name, path in IN_CLONES.items():
            if clone := getattr(args, name):
                script, git = folder / path, ["git", "-C", clone]
                script.parent.mkdir(parents=True)
                script.write_bytes(subprocess.check_output([*git, "show", f"HEAD:{path}"]))
                subprocess.run([*git, "log", "-1", f"--format={path} of %h"], check=True)
                how = ["-c", UNROUNDED] if name == "fabric" else []
                ways[name] = partial(execute, *how, script, "--epochs", 4, cwd=cwd)
        cv_example = ROOT / "benchmarks" / "_cv_example.py"
        ways["accelerate"] = partial(execute, cv_example, folder / "rows", cwd=cwd)
        ways |= {"ours": ours, "fast": partial(ours, f"@{ROOT / 'examples' / 'recipes' / 'fast'}")}
        ours("--stop-after-steps", 1)  # fills the cache
        wanted = {name: way for name, way in ways.items() if name in (args.only or ways)}
        results = in_turn(wanted, args.rounds)
    table(
        "script | training, s/epoch | evaluation, s | accuracy by epoch, % | to 99 %, s "
        "| process, s | memory, MB",
        (table_row(name, run) for name, runs in results.items() for run in runs),
    )


if __name__ == "__main__":
    main()
