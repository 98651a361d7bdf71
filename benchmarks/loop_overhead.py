"""Measure the cost of a step of train_regression.py and of the same step in a bare PyTorch loop.

    OMP_NUM_THREADS=1 python -m benchmarks.loop_overhead

Four loops over the same data, with the same model, optimizer and precision, take turns:

    bare      forward, loss, backward, optimizer.step, zero_grad over batches already in memory
    schedule  bare, and the learning rate of the script's default schedule set in each step
    loader    schedule, through a torch DataLoader
    script    train_regression.py: the learning rate, the loader, accelerator.prepare, the
              gradient's norm, the check that it is finite, exact sums, counters, signals, a row
              every 50 steps
"""

import statistics
import time
from functools import partial

from trainkit import make_scheduler, startup

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import train_regression
from benchmarks._runs import Parser, in_process, in_turn, spread, table
from trainkit.config import parse

BATCH_SIZE = 32


def plain_loop(flags: list[str], kind: str) -> float:
    """Return samples per second of one epoch in a loop without Accelerate."""
    args = parse(train_regression.Config, flags)
    train_set, _, metadata, _ = train_regression.load_data(args)
    indices = torch.randperm(len(train_set)).split(BATCH_SIZE)
    loader = DataLoader(train_set, batch_sampler=indices, collate_fn=lambda batch: batch)
    model = train_regression.MODELS[args.model](len(metadata["features"]), 1, args.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, fused=True)
    scheduler = make_scheduler(optimizer, args, len(loader)) if kind != "bare" else None
    batches = loader if kind == "loader" else list(loader)
    started_at = time.perf_counter()
    for features, targets, *_ in batches:
        loss = F.mse_loss(model(features), targets)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    return len(train_set) / (time.perf_counter() - started_at)


def main() -> None:
    parser = Parser(__doc__, rounds=7)
    parser.add_argument("--steps", type=int, default=2000, help="per loop and round")
    args = parser.parse_args()
    # The script's first epoch warms up, its second is timed.
    flags = ["--epochs", "2", "--num-samples", str(BATCH_SIZE * args.steps * 5 // 4)]
    ways = {kind: partial(plain_loop, flags, kind) for kind in ("bare", "schedule", "loader")}
    ways["script"] = partial(in_process, train_regression, *flags)
    times = {
        name: [1e6 * BATCH_SIZE / rate for rate in rates]
        for name, rates in in_turn(ways, args.rounds).items()
    }
    bare = statistics.median(times["bare"])
    rows = [(name, spread(v), statistics.median(v) / bare) for name, v in times.items()]
    table(f"loop, {torch.get_num_threads()} threads | microseconds per step | over bare", rows)


if __name__ == "__main__":
    startup.run(main)  # with the settings of a run, for the other loops as well
