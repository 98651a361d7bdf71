"""What safety costs: a durable save beside a bare save_state, and a step that saves nothing.

    python -m benchmarks.checkpoint_cost
    accelerate launch --config_file accelerate_configs/2cpu.yaml benchmarks/checkpoint_cost.py

Saves are timed in turn, round by round, after one step of AdamW. A step that saves nothing pays for
the finite guard, for asking whether a signal came, and for counting; the same calls are timed in a
loop of their own and held against a step of LeNet at batch 256.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # under a launcher this is a script

# isort: off
import trainkit  # noqa: F401  (before torch)

# isort: on
import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from train_mnist import LeNet
from trainkit.checkpoint import Checkpoints, Progress
from trainkit.finite import FiniteGuard
from trainkit.history import History, RunningSums
from trainkit.preemption import Preemption

BATCH_SIZE = 256


def timed(accelerator: Accelerator, action: Callable[[], object]) -> float:
    """Milliseconds of one call, in step over the processes."""
    accelerator.wait_for_everyone()
    started_at = time.perf_counter()
    action()
    accelerator.wait_for_everyone()
    return 1000 * (time.perf_counter() - started_at)


def measure_saves(accelerator: Accelerator, run_dir: Path, rounds: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(784, 1024), torch.nn.Linear(1024, 384))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.backward(model(torch.randn(8, 784, device=accelerator.device)).square().mean())
    optimizer.step()
    if accelerator.is_main_process:
        (run_dir / "checkpoints").mkdir()
    history, sums = History(run_dir), RunningSums(accelerator, "loss")
    checkpoints = Checkpoints(
        accelerator, run_dir, history, sums, {"seed": 0}, keep=2, steps_per_epoch=rounds + 1
    )
    progress, bare, durable = Progress(), [], []
    for _ in range(rounds + 1):
        progress.step += 1
        # A folder of its own each time, as the durable save makes one.
        folder = run_dir / "bare" / str(progress.step)
        bare.append(timed(accelerator, lambda folder=folder: accelerator.save_state(folder)))
        durable.append(timed(accelerator, lambda: checkpoints.save(progress)))
        if accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
    number = sum(p.numel() for p in model.parameters())
    bare_median, median = statistics.median(bare[1:]), statistics.median(durable[1:])
    allowed = 2 * bare_median + 5
    accelerator.print(
        f"{number:,} parameters, median of {rounds}: save_state {bare_median:.1f} ms "
        f"({min(bare[1:]):.1f} to {max(bare[1:]):.1f}), durable save {median:.1f} ms "
        f"({min(durable[1:]):.1f} to {max(durable[1:]):.1f}), "
        f"at most {allowed:.1f} ms: {'met' if median <= allowed else 'MISSED'}"
    )


def measure_step(accelerator: Accelerator, steps: int) -> None:
    preemption = Preemption(accelerator, timedelta(seconds=60))
    model = LeNet(10).to(memory_format=torch.channels_last)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
    guard, progress = FiniteGuard(accelerator, optimizer), Progress()
    images = torch.randn(BATCH_SIZE, 1, 28, 28, device=accelerator.device)
    labels = torch.randint(0, 10, (BATCH_SIZE,), device=accelerator.device)
    norm = torch.ones((), device=accelerator.device)

    def train() -> None:
        for _ in range(steps):
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.device.type != "cpu":
            torch.accelerator.synchronize()

    def be_safe() -> None:
        for _ in range(steps):
            guard.check(norm, norm, progress, 0.1)
            progress.advance(accelerator)
            preemption.requested()

    train()
    be_safe()
    rounds = [(timed(accelerator, train), timed(accelerator, be_safe)) for _ in range(5)]
    step, safety = (statistics.median(column) / steps for column in zip(*rounds, strict=True))
    accelerator.print(
        f"a step of LeNet at {BATCH_SIZE} per process: {step:.2f} ms; guard, signal and position: "
        f"{1000 * safety:.0f} us = {safety / step:.2%} of it"
    )
    preemption.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dir", type=Path, default=None, help="a folder on the disk to measure")
    args = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    run_dir = tempfile.mkdtemp(dir=args.dir) if accelerator.is_main_process else ""
    run_dir = Path(broadcast_object_list([run_dir])[0])
    measure_saves(accelerator, run_dir, args.rounds)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(run_dir, ignore_errors=True)  # pruned checkpoints are being removed
    measure_step(accelerator, args.steps)
    accelerator.end_training()


if __name__ == "__main__":
    main()
