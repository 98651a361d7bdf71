"""Measure how long a save blocks the training, and how long it takes until it is durable.

    python -m benchmarks.checkpoint_cost
    python -m benchmarks.checkpoint_cost --width 2560 --layers 4 --rounds 9
    python -m benchmarks.checkpoint_cost --width 5700 --layers 8 --rounds 3

A square network of --layers x --width**2 parameters is saved with the moments of AdamW, 12 bytes
for each parameter, as Run saves. "Synchronous" is what a save without the thread costs: the same
files, hashed with SHA-256 and synced, one after the other, before the training goes on. The two
take turns, and a save begins only when the one before is durable.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

from trainkit import startup

import torch
from accelerate import Accelerator
from torch import nn

from benchmarks._runs import Parser, in_turn, spread, table
from trainkit.checkpoint import Checkpoints, Progress
from trainkit.config import TrainingConfig
from trainkit.metrics import RunningMeans
from trainkit.run_dir.files import remove_tree, sync
from trainkit.run_dir.log import JsonlTracker
from trainkit.run_dir.manifest import hash_of


def synchronous(accelerator: Accelerator, folder: Path) -> float:
    """Return the seconds of a durable save without a thread."""
    started_at = time.perf_counter()
    accelerator.save_state(folder / ".tmp-before")
    for path in [path for path in (folder / ".tmp-before").rglob("*") if path.is_file()]:
        hash_of(path, "sha256")
        sync(path)
    os.rename(folder / ".tmp-before", folder / "before")
    sync(folder)
    seconds = time.perf_counter() - started_at
    remove_tree(folder / "before")
    return seconds


def main() -> None:
    parser = Parser(__doc__, rounds=15)
    for flag, default in (("--width", 774), ("--layers", 2)):
        parser.add_argument(flag, type=int, default=default)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    layers = [nn.Linear(args.width, args.width) for _ in range(args.layers)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    model(torch.ones(1, args.width, device=accelerator.device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with tempfile.TemporaryDirectory(dir=".") as name:
        config = TrainingConfig(run_dir=Path(name), keep=1)
        (config.run_dir / "checkpoints").mkdir()
        progress, parts = Progress(), (JsonlTracker(config.run_dir), RunningMeans(accelerator))
        checkpoints = Checkpoints(accelerator, config, {}, *parts)
        whole: list[float] = []

        def in_thread() -> float:
            progress.step += 1
            started_at = time.perf_counter()
            checkpoints.save(progress)
            blocked = time.perf_counter() - started_at
            checkpoints.commits.wait()
            whole.append(time.perf_counter() - started_at)
            return blocked

        ways = {
            "synchronous, SHA-256": lambda: synchronous(accelerator, config.run_dir),
            "in a thread: blocked": in_thread,
        }
        found = in_turn(ways, args.rounds, warm_up=1)
        size = sum(path.stat().st_size for path in config.run_dir.rglob("*") if path.is_file())
    found["in a thread: until durable"] = whole[1:]
    print(f"{size / 2**20:,.0f} MiB in a checkpoint")
    before = statistics.median(found["synchronous, SHA-256"])
    rows = [
        (name, spread([1000 * x for x in values]), statistics.median(values) / before)
        for name, values in found.items()
    ]
    table("save | milliseconds | of the synchronous one", rows)


if __name__ == "__main__":
    startup.run(main)
