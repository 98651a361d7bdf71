"""What one step of train_regression.py costs beside the same step in a bare PyTorch loop.

    OMP_NUM_THREADS=1 python -m benchmarks.loop_overhead

Four loops over the same batches, with the same model, optimizer and precision, take turns:

    bare      forward, loss, backward, optimizer.step, zero_grad over batches that lie in memory
    schedule  bare, and the learning rate of the script's default schedule set in each step
    loader    schedule, through a torch DataLoader
    script    train_regression.py: the learning rate, the loader, accelerator.prepare, the
              gradient's norm, the check that it is finite, exact sums, counters, signals, a row
              every 50 steps
"""

import argparse
import contextlib
import io
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import train_regression
from trainkit import startup
from trainkit.optim import make_scheduler
from trainkit.order import batches_of, make_loaders


def plain_loop(args: argparse.Namespace, kind: str) -> float:
    """Seconds per step of one epoch in a loop without Accelerate."""
    train_set, eval_set, about = train_regression.load_data(args)
    world = SimpleNamespace(num_processes=1, device=torch.device("cpu"))
    loader, _ = make_loaders(world, train_set, eval_set, args)
    torch.manual_seed(args.seed)
    model = train_regression.MODELS[args.model](len(about["features"]), 1, args.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, fused=True)
    scheduler = make_scheduler(optimizer, args, len(loader)) if kind != "bare" else None
    batches_of(loader).set_position(1, 0)
    batches = loader if kind == "loader" else list(loader)
    started_at = time.perf_counter()
    for features, targets, *_ in batches:
        loss = F.mse_loss(model(features), targets)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    return (time.perf_counter() - started_at) / len(loader)


def script_loop(args: argparse.Namespace, argv: list[str]) -> float:
    """Seconds per step of the second epoch in train_regression.py; the first one warms up."""
    with contextlib.redirect_stdout(io.StringIO()):
        train_regression.main(argv)
    timing = json.loads((args.run_dir / "timing.jsonl").read_text().splitlines()[-1])
    return timing["train_seconds"] / (timing["train_samples"] / args.batch_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="per loop and round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None, help="also write the figures there")
    options = parser.parse_args()
    kinds = ["bare", "schedule", "loader", "script"]
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind in kinds:
            with tempfile.TemporaryDirectory() as folder:
                argv = ["--run-dir", folder, "--epochs", "2", "--test-fraction", "0",
                        "--no-pictures", "--num-samples", str(32 * options.steps)]  # fmt: skip
                args = train_regression.parse_args(argv)
                if kind == "script":
                    seconds[kind].append(script_loop(args, argv))
                else:
                    seconds[kind].append(plain_loop(args, kind))
    medians = {kind: statistics.median(seconds[kind]) * 1e6 for kind in kinds}
    print(f"microseconds per step, median (fastest) of {options.rounds} rounds of {options.steps} "
          f"steps; linear model, batch 32, {torch.get_num_threads()} thread, "
          f"torch {torch.__version__}, {platform.processor() or platform.machine()}")  # fmt: skip
    for kind in kinds:
        print(f"{kind:<9} {medians[kind]:7.1f} ({min(seconds[kind]) * 1e6:.1f})  "
              f"{medians[kind] / medians['bare']:.2f} x bare")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(seconds, indent=1) + "\n")


if __name__ == "__main__":
    startup.run(main)  # with the settings of a run, which the other loops get as well
