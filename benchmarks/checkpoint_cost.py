"""Measure how long a save blocks the training, beside another version of this code.

    git worktree add ../before 636a531     the last version whose saves did not use a thread
    python -m benchmarks.checkpoint_cost --before ../before
    python -m benchmarks.checkpoint_cost --before ../before --width 5700 --layers 8 --rounds 3
    python -m benchmarks.checkpoint_cost --before ../before --width 3600 --layers 4 --sharded

A square network of --layers x --width**2 parameters is saved with the moments of AdamW, 12 bytes
for each parameter, as Run saves; with --sharded by two processes, each of which has half. Both
versions hold it in processes of their own and save in turn; a save begins only when the one before
is durable.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from trainkit import startup

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn

from benchmarks._runs import ROOT, Parser, in_turn, spread, table
from trainkit.checkpoints import sharded as shards
from trainkit.checkpoints.contents import Contents, Frozen
from trainkit.checkpoints.save import Checkpoints
from trainkit.config import TrainingConfig
from trainkit.numbers.means import RunningMeans
from trainkit.numbers.orders import Progress
from trainkit.repairs.private_names import prepared_models
from trainkit.store.log import JsonlTracker

SHARDED = ["-m", "accelerate.commands.launch", "--config_file"]
SHARDED += [str(ROOT / "accelerate_configs" / "2cpu_fsdp.yaml")]
SHARDED += ["--fsdp_state_dict_type", "SHARDED_STATE_DICT"]


def make_checkpoints(run_dir: Path, width: int, layers: int) -> tuple[Any, ...]:
    """Return what saves a square network and the moments of AdamW, its progress, and the two."""
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    shards.shard(accelerator)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    model(torch.ones(1, width, device=accelerator.device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    config = TrainingConfig(run_dir=run_dir, keep=1)
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    contents = Contents(accelerator, Frozen(prepared_models(accelerator)))
    parts = JsonlTracker(run_dir), RunningMeans(accelerator), contents
    checkpoints = Checkpoints(accelerator, config, {}, *parts)
    return checkpoints, Progress(), model, optimizer, accelerator.is_main_process


def save_when_asked(run_dir: Path, width: int, layers: int) -> None:
    """For each line from stdin save; print seconds until that returns, of CPU, until it is durable.

    The other version runs this too.
    """
    checkpoints, progress, *_, main = make_checkpoints(run_dir, width, layers)
    while broadcast_object_list([sys.stdin.readline() if main else ""])[0]:
        progress.step += 1
        started_at, cpu = time.perf_counter(), time.thread_time()
        checkpoints.save(progress)
        blocked, cpu = time.perf_counter() - started_at, time.thread_time() - cpu
        if hasattr(checkpoints, "commits"):
            checkpoints.commits.wait()
        if main:
            print("seconds", blocked, cpu, time.perf_counter() - started_at, flush=True)


def main() -> None:
    parser = Parser(__doc__, rounds=15)
    for flag, default in (("--width", 774), ("--layers", 2)):
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--run-dir", type=Path)
    args = parser.parse_args()
    if args.run_dir:
        save_when_asked(args.run_dir, args.width, args.layers)
        return
    with tempfile.TemporaryDirectory(dir=".") as folder:

        def start(name: str, root: Path) -> subprocess.Popen:
            flags = [
                "--width",
                args.width,
                "--layers",
                args.layers,
                "--run-dir",
                f"{folder}/{name}",
            ]
            return subprocess.Popen(
                [sys.executable, *(SHARDED if args.sharded else []), __file__, *map(str, flags)],
                env={**os.environ, "PYTHONPATH": str(root.resolve())},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

        def save(child: subprocess.Popen) -> list[float]:
            child.stdin.write("\n")
            child.stdin.flush()
            line = next(line for line in child.stdout if line.startswith("seconds"))
            return [*map(float, line.split()[1:])]

        roots = {"before": args.before, "now": ROOT} if args.before else {"now": ROOT}
        children = {name: start(name, root) for name, root in roots.items()}
        ways = {name: lambda child=child: save(child) for name, child in children.items()}
        found = in_turn(ways, args.rounds, warm_up=1)
        for child in children.values():
            child.communicate()
        paths = [path for path in Path(folder, "now").rglob("*") if path.is_file()]
        print(f"{sum(path.stat().st_size for path in paths) / 2**20:,.0f} MiB in a checkpoint")
    first, rows = next(iter(found.values())), []
    for number, what in enumerate(("blocked", "CPU while blocked", "until durable")):
        before = statistics.median(pair[number] for pair in first)
        for name, pairs in found.items():
            values = [1000 * pair[number] for pair in pairs]
            rows.append(
                (f"{name}: {what}", spread(values), statistics.median(values) / before / 1000)
            )
    table("save | milliseconds | of the first", rows)


if __name__ == "__main__":
    startup.run(main)
