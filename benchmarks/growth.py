"""What a larger data set costs: seconds of an epoch per sample, and memory.

    python -m benchmarks.growth
    python -m benchmarks.growth --sizes 60000 600000 --dir FOLDER_WITH_SPACE

The sets are the shipped training pictures 1, 10 and 100 times over, as links to one Parquet file;
decoded, 6 million take 11 GB of disk under --dir. train_mnist.py trains on each with its default
model. A first start decodes and ends after one step. Then the sizes take turns, the same number of
steps each. `own` memory is what the process allocated itself; `mapped` are pages of files, which
the kernel takes back when it needs them: large sets lie there instead of in a tensor. Both are
peaks.
"""

import tempfile
from functools import partial
from pathlib import Path

from benchmarks._runs import MNIST, ROOT, Parser, in_turn, one_run, spread, table

NUM_PICTURES = 60_000


def make_dataset(folder: Path, num_samples: int) -> None:
    """A folder as large as num_samples pictures to whoever reads it."""
    folder.mkdir()
    number = num_samples // NUM_PICTURES
    test, train = sorted((ROOT / "data" / "mnist").glob("*.parquet"))
    (folder / test.name).symlink_to(test)
    for index in range(number):
        (folder / f"train-{index:05}-of-{number:05}.parquet").symlink_to(train)


def main() -> None:
    parser = Parser(__doc__, rounds=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[60_000, 600_000, 6_000_000])
    parser.add_argument("--steps", type=int, default=1404, help="of each run in a round")
    parser.add_argument("--dir", type=Path, help="where the data sets are laid")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        first, ways = {}, {}
        for size in args.sizes:
            folder = Path(directory, str(size))
            make_dataset(folder, size)
            words = (MNIST, "--dataset", folder, "--no-pictures", "--epochs", 100)
            run = partial(one_run, *words, env={"HF_HOME": str(folder.with_suffix(".cache"))})
            first[size] = run("--stop-after-steps", 1)
            ways[size] = partial(run, "--stop-after-steps", args.steps)
        results = in_turn(ways, args.rounds)
    rows = []
    for size, (*_, last) in results.items():
        times = spread([1e6 / run.samples_per_second for run in results[size]])
        own = [max(m.rss - m.shared for m in run.memory) / 1e9 for run in (first[size], last)]
        mapped = max(m.shared for m in last.memory) / 1e9
        rows.append((size, first[size].seconds, times, *own, mapped))
    table(
        "samples | first start, s | microseconds per sample | own memory at first start, GB "
        "| own memory, GB | mapped files, GB",
        rows,
    )


if __name__ == "__main__":
    main()
