"""Compare examples/pictures.py with a loop like Accelerate's cv_example: CPU time and accuracy.

    python -m benchmarks.photos FOLDER --pictures 300 --size 96 --epochs 2
    python -m benchmarks.photos FOLDER --freeze

FOLDER has a folder of pictures for each class. So many are taken, evenly over all, and every fourth
of these is held out. The loop is benchmarks/_cv_photos.py, which says what both have in common.

CPU time is user + system of all processes of a run. `an epoch` is the difference between a run of
--epochs + 1 and a run of one epoch, divided by --epochs: training and evaluation without the start.
`a run` and the accuracy are those of the longer run. Before the first round a run of ours fills the
cache, so decoding is not in its figures.
"""

import resource
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks._runs import ROOT, Ended, Parser, execute, in_turn, one_run, spread, table


def lay_pictures(source: Path, folder: Path, number: int) -> None:
    """Copy pictures into folder/train and folder/test."""
    source = source.resolve()
    paths = sorted(path for path in source.glob("*/**/*") if path.is_file())
    for n in range(min(number, len(paths))):
        path = paths[n * len(paths) // min(number, len(paths))]
        into = folder / ("test" if n % 4 == 3 else "train") / path.relative_to(source).parts[0]
        into.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, into / f"{n}{path.suffix}")


def cpu_of(run: Callable[[], Ended]) -> tuple[float, Ended]:
    """Return the CPU seconds of a run and of its workers, and the run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, ended


def accuracy_of(ended: Ended) -> float:
    """Return the last accuracy, in percent."""
    if ended.metrics:
        return 100 * [row["eval_accuracy"] for row in ended.metrics if "eval_accuracy" in row][-1]
    return 100 * float(
        [line for _, line in ended.lines if line.startswith("accuracy")][-1].split()[1]
    )


def main() -> None:
    parser = Parser(__doc__, rounds=1)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pictures", type=int, default=300)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--freeze", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        data, env = Path(directory, "data"), {"HF_HOME": str(Path(directory, "cache"))}
        lay_pictures(args.folder, data, args.pictures)
        flags = ["--dataset", data, "--size", args.size, "--no-pictures"]
        flags += ["--freeze"] * args.freeze
        script = ROOT / "examples" / "pictures.py"
        loop = ROOT / "benchmarks" / "_cv_photos.py"
        kind = "frozen" if args.freeze else "whole"

        def ways(epochs: int) -> dict[tuple[str, int], Callable]:
            ours = partial(one_run, script, *flags, "--epochs", epochs, env=env)
            theirs = partial(execute, loop, data, args.size, epochs, kind)
            return {
                ("cv_example", epochs): partial(cpu_of, theirs),
                ("ours", epochs): partial(cpu_of, ours),
            }

        ways(1)["ours", 1]()  # fills the cache
        results = in_turn(ways(1) | ways(args.epochs + 1), args.rounds)
    rows = []
    for name in ("cv_example", "ours"):
        short, long = results[name, 1], results[name, args.epochs + 1]
        pairs = zip(short, long, strict=True)
        rows.append(
            [
                name,
                spread([(more - less) / args.epochs for (less, _), (more, _) in pairs]),
                spread([seconds for seconds, _ in long]),
                spread([accuracy_of(ended) for _, ended in long]),
            ]
        )
    table("script | an epoch, CPU s | a run, CPU s | accuracy, %", rows)


if __name__ == "__main__":
    main()
