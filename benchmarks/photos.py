"""Compare examples/pictures.py with Accelerate's cv_example and fastai: CPU time and accuracy.

    python -m benchmarks.photos FOLDER
    python -m benchmarks.photos FOLDER --pictures 400 --size 160 --ways cv_example freeze

FOLDER has a folder of pictures for each class. So many are taken, evenly over all, and every fifth
of these is held out. benchmarks/_photo_peers.py has what the two others do; `freeze` and `whole`
are examples/pictures.py with and without --freeze. All have the same network, weights, pictures and
number of epochs.

CPU time is user + system of all processes of a run, from its start to its end. The cache of
examples/pictures.py is empty at each start, so decoding and features are part of its time.
"""

import os
import resource
import shutil
import tempfile
from pathlib import Path

from benchmarks._runs import ROOT, Parser, execute, in_turn, one_run, spread, table

WAYS = ("cv_example", "fastai", "freeze", "whole")


def lay_pictures(source: Path, folder: Path, number: int | None) -> None:
    """Copy pictures into folder/train and folder/test."""
    source = source.resolve()
    paths = sorted(path for path in source.glob("*/**/*") if path.is_file())
    number = min(number or len(paths), len(paths))
    for n in range(number):
        path = paths[n * len(paths) // number]
        into = folder / ("test" if n % 5 == 4 else "train") / path.relative_to(source).parts[0]
        into.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, into / f"{n}{path.suffix}")


def measure(way: str, data: Path, size: int, epochs: int) -> tuple[float, float]:
    """Return the CPU seconds of a run and of its workers, and the last accuracy in percent."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    if way in ("freeze", "whole"):
        flags = ["--dataset", data, "--size", size, "--epochs", epochs, "--no-pictures"]
        flags += ["--freeze"] * (way == "freeze")
        with tempfile.TemporaryDirectory() as cache:
            script = ROOT / "examples" / "pictures.py"
            ended = one_run(script, *flags, env={"HF_HOME": cache})
        accuracy = [row["eval_accuracy"] for row in ended.metrics if "eval_accuracy" in row][-1]
    else:
        # fastai may be in a folder of its own, because it asks for older packages.
        env = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        ended = execute(ROOT / "benchmarks" / "_photo_peers.py", way, data, size, epochs, env=env)
        lines = [line for _, line in ended.lines if line.startswith("accuracy")]
        accuracy = float(lines[-1].split()[1])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, 100 * accuracy


def main() -> None:
    parser = Parser(__doc__, rounds=1)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pictures", type=int, help="so many of them (default: all)")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory, "data")
        lay_pictures(args.folder, data, args.pictures)
        results = in_turn(
            {way: lambda way=way: measure(way, data, args.size, args.epochs) for way in args.ways},
            args.rounds,
        )
    rows = [[way, *map(spread, zip(*found, strict=True))] for way, found in results.items()]
    table("script | CPU s | accuracy, %", rows)


if __name__ == "__main__":
    main()
