"""Images per second of train_mnist.py's own loop, beside the machine's limit and beside habit.

    python -m benchmarks.throughput
    python -m benchmarks.throughput --models lenet --precisions bf16 --rounds 7

For each model and precision three things are timed in turn, round by round:

    loop        train_mnist.main, from an epoch's first batch to its last (timing.jsonl)
    limit       the same model, optimizer and precision on one resident batch: no loader, no
                Accelerate
    per-sample  the same model and optimizer behind PIL -> ToTensor -> Normalize, a call per picture

The per-sample pipeline (benchmarks/habit.py) runs in float32 and contiguous memory, as it is
commonly written, in a process of its own without trainkit's settings, with 0 and with 2 loader
workers; the faster one counts, of a third of the rounds. `loop+augment` is the loop with its
default augmentation.
"""

# isort: off
import trainkit  # noqa: F401  (before torch)

# isort: on
import argparse
import contextlib
import io
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn

import train_mnist
from benchmarks.timing import images_per_second

ROOT = Path(__file__).parent.parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def loop(model: str, precision: str, batch_size: int, steps: int, augment: bool) -> float:
    """Images per second of train_mnist.py, as it measures itself."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    os.environ["ACCELERATE_USE_CPU"] = str(DEVICE == "cpu")
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        train_mnist.main(
            ["--model", model, "--batch-size", str(batch_size), "--run-dir", f"{folder}/run",
             "--stop-after-steps", str(steps), "--augment" if augment else "--no-augment",
             "--validation-split", "1000", "--no-pictures"]
        )  # fmt: skip
        return images_per_second(Path(folder, "run"))


def resident_step(
    model: str,
    precision: str,
    batch_size: int,
    *,
    memory_format: torch.memory_format = torch.channels_last,
    compiled: bool = False,
    **optimizer_options: bool,
) -> Callable[[], None]:
    """Forward, backward and update on one batch that is already there, as a call."""
    net = train_mnist.MODELS[model](10).to(DEVICE, memory_format=memory_format)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.0, **optimizer_options)
    scaler = torch.amp.GradScaler(DEVICE, enabled=precision == "fp16")
    pixels = torch.randn(batch_size, 1, 28, 28, device=DEVICE)
    pixels = pixels.contiguous(memory_format=memory_format)
    labels = torch.randint(0, 10, (batch_size,), device=DEVICE)
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    forward = torch.compile(net) if compiled else net

    def step() -> None:
        with torch.autocast(DEVICE, dtype, enabled=precision != "no"):
            logits = forward(pixels)
        loss = F.cross_entropy(logits.float(), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def limit(model: str, precision: str, batch_size: int, steps: int) -> float:
    """Images per second of a resident step."""
    step = resident_step(model, precision, batch_size, fused=True)
    synchronize()
    started_at = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return batch_size * steps / (time.perf_counter() - started_at)


class Habit:
    """The per-sample pipeline in a process of its own, which waits while others are measured."""

    def __init__(self) -> None:
        ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # set by trainkit, above
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.habit"], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name not in ours},
        )  # fmt: skip

    def __call__(self, model: str, batch_size: int, steps: int, num_workers: int) -> float:
        net = nn.Sequential(*train_mnist.MODELS[model](10))  # of torch's classes alone
        pickle.dump((net, batch_size, steps, num_workers), self.process.stdin)
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[*train_mnist.MODELS])
    parser.add_argument("--precisions", nargs="+", default=["no", "bf16"])
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=230,  # an epoch of 59,000
                        help="per round; lenet and deep: a third, wide: a twelfth")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "throughput.json")
    args = parser.parse_args()
    habit, rows = Habit(), []
    print(f"{DEVICE}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
          f"batch {args.batch_size}, median of {args.rounds} rounds")  # fmt: skip
    print(f"{'model':8} {'precision':9} {'loop':>8} {'limit':>8} {'per-sample':>10} "
          f"{'loop+augment':>12} {'loop/limit':>10} {'loop/per-sample':>15}")  # fmt: skip
    for model in args.models:
        steps = max(1, args.steps // {"compact": 1, "wide": 12}.get(model, 3))
        size, fewer = (args.batch_size, steps), (args.batch_size, max(1, steps // 3))
        for precision in args.precisions:
            kinds: dict[str, Callable[[], float]] = {
                "loop": partial(loop, model, precision, *size, augment=False),
                "limit": partial(limit, model, precision, *size),
                "loop+augment": partial(loop, model, precision, *size, augment=True),
                "per-sample, 0 workers": partial(habit, model, *fewer, num_workers=0),
                "per-sample, 2 workers": partial(habit, model, *fewer, num_workers=2),
            }
            rates: dict[str, list[float]] = {name: [] for name in kinds}
            for round_number in range(args.rounds + 1):
                for name, measure in kinds.items():
                    if name.startswith("per-sample") and round_number > 1 and round_number % 3:
                        continue  # slow, and far from the others
                    rate = measure()
                    if round_number:  # the first round warms up
                        rates[name].append(rate)
            median = {name: statistics.median(values) for name, values in rates.items()}
            usual = max(v for name, v in median.items() if name.startswith("per-sample"))
            pairs = zip(rates["loop"], rates["limit"], strict=True)
            row = {"model": model, "precision": precision, "median": median, "rates": rates,
                   "loop_over_limit": statistics.median(a / b for a, b in pairs),
                   "loop_over_per_sample": median["loop"] / usual}  # fmt: skip
            rows.append(row)
            print(f"{model:8} {precision:9} {median['loop']:8,.0f} {median['limit']:8,.0f} "
                  f"{usual:10,.0f} {median['loop+augment']:12,.0f} {row['loop_over_limit']:10.3f} "
                  f"{row['loop_over_per_sample']:15.2f}", flush=True)  # fmt: skip
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
    habit.process.stdin.close()
    habit.process.wait()


if __name__ == "__main__":
    main()
