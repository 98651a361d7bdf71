"""Measure what a larger data set costs: seconds to the first batches, and memory.

    OMP_NUM_THREADS=1 python -m benchmarks.growth
    OMP_NUM_THREADS=1 python -m benchmarks.growth --sizes 10000000 100000000 --accelerate

Samples are computed from their index, and batches have 128 of them. Each run has one or two new
processes. The time is measured from before the loaders are made until the first batch of training
and the first of evaluation, in a new run and in one that is resumed in the middle of an epoch.
`own` is what that adds to the memory that belongs to the process alone. --accelerate adds what
Accelerate does for a DataLoader with shuffle=True: skip_first_batches.
"""

import argparse
import os
import time
from functools import partial

from trainkit import make_loaders

import psutil
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, Dataset

from benchmarks._runs import Parser, execute, in_turn, launcher, spread, table
from examples import gpt
from trainkit.config import parse
from trainkit.numbers.loaders import batches_of

BATCH_SIZE = 128
ARGS = parse(gpt.Config, f"--batch-size {BATCH_SIZE} --eval-batch-size {BATCH_SIZE}".split())


class Numbers(Dataset):
    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def begin(way: str, size: str, place: str) -> None:
    """Print the seconds to the first batches, and the memory they added to this process, in MB."""
    config = DataLoaderConfiguration(split_batches=True)
    accelerator, data = Accelerator(cpu=True, dataloader_config=config), Numbers(int(size))
    first = int(size) // 2 // BATCH_SIZE * (place == "half")
    before, started_at = psutil.Process().memory_full_info().uss, time.perf_counter()
    if way == "accelerate":
        loader = accelerator.prepare(DataLoader(data, BATCH_SIZE, shuffle=True))
        loader = accelerator.skip_first_batches(loader, first) if first else loader
        loaders = [loader, accelerator.prepare(DataLoader(data, BATCH_SIZE))]
    else:
        loaders = accelerator.prepare(*make_loaders(accelerator, data, data, ARGS))
        batches_of(loaders[0]).set_position(0, first * BATCH_SIZE)
        for loader in loaders:
            batches_of(loader).is_read_by_run = True  # there is no Run here
    for loader in loaders:
        next(iter(loader))
    seconds = time.perf_counter() - started_at
    own = (psutil.Process().memory_full_info().uss - before) / 1e6
    accelerator.print("begun", seconds, own, flush=True)
    os._exit(0)


def main() -> None:
    parser = Parser(__doc__, rounds=1)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**6, 10**8, 10**9])
    parser.add_argument("--accelerate", action="store_true")
    parser.add_argument("--begin", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.begin:
        return begin(*args.begin)

    def run(num: int, *words: object) -> list[float]:
        ended = execute("-m", "benchmarks.growth", "--begin", *words, launch=launcher(num))
        return [float(word) for word in ended.said("begun").split()]

    ways = {
        (way, num, size, place): partial(run, num, way, size, place)
        for way in ["kit", "accelerate"][: 1 + args.accelerate]
        for num in (1, 2)[: 2 - args.accelerate]
        for place in ("new", "half")
        for size in args.sizes
    }
    results = in_turn(ways, args.rounds)
    rows = ((*name, *map(spread, zip(*found, strict=True))) for name, found in results.items())
    table(
        "loader | processes | samples | run | seconds to the first batches | own memory, MB", rows
    )


if __name__ == "__main__":
    main()
