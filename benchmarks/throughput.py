"""Images per second of train_mnist.py's own loop, beside the machine's limit and beside habit.

    python -m benchmarks.throughput
    python -m benchmarks.throughput --models lenet --precisions bf16 --rounds 7
    python -m benchmarks.throughput --parts

For each model and precision three things are timed in turn, round by round:

    loop        train_mnist.main, from an epoch's first batch to its last (timing.jsonl)
    limit       the same model, loss, optimizer and precision on one resident batch: no loader,
                no Accelerate, torch's own dropout
    per-sample  the same model and optimizer behind PIL -> ToTensor -> Normalize, a call per picture

The per-sample pipeline (benchmarks/_habit.py) runs in float32 and contiguous memory, as it is
commonly written, in a process of its own without the settings of trainkit/startup.py, with 0 and
with 2 loader workers; the faster one counts, of a third of the rounds. `loop+augment` is the loop
with its default augmentation.

--parts times the parts of a step instead, each as it is and as it could have been written.
"""

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
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn

import train_mnist
from benchmarks._runs import ROOT, figures
from trainkit import startup
from trainkit.optim import clip_gradients
from trainkit.order import InMemory

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Ways = dict[str, Callable[[], Any]]


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
        return figures(Path(folder, "run"))["samples_per_second"]


def resident_step(
    model: str,
    precision: str,
    batch_size: int,
    memory_format: torch.memory_format = torch.channels_last,
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

    def step() -> None:
        with torch.autocast(DEVICE, dtype, enabled=precision != "no"):
            logits = net(pixels)
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=0.1)
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
        self.process = subprocess.Popen([sys.executable, "-m", "benchmarks._habit"], cwd=ROOT,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip

    def __call__(self, model: str, batch_size: int, steps: int, num_workers: int) -> float:
        layers = train_mnist.MODELS[model](10)
        net = nn.Sequential(*(nn.Dropout(layer.p) if isinstance(layer, nn.Dropout) else layer
                              for layer in layers))  # fmt: skip # of torch's classes alone
        pickle.dump((net, batch_size, steps, num_workers), self.process.stdin)
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def compare_loops(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Print and return a row for each model and precision."""
    habit, rows = Habit(), []
    print(f"{'model':8} {'precision':9} {'loop':>8} {'limit':>8} {'per-sample':>10} "
          f"{'loop+augment':>12} {'loop/limit':>10} {'loop/per-sample':>15}")  # fmt: skip
    for model in args.models:
        steps = max(1, args.steps // {"compact": 1, "wide": 12}.get(model, 3))
        size, fewer = (args.batch_size, steps), (args.batch_size, max(1, steps // 3))
        for precision in args.precisions:
            kinds: Ways = {
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
    habit.process.stdin.close()
    habit.process.wait()
    return rows


def parts(models: list[str], batch_size: int) -> dict[str, Ways]:
    """The ways to write each part of a step; the first is what train_mnist.py does."""
    found: dict[str, Ways] = {}
    for model in models:
        for name, precision in (("float32", "no"), ("bfloat16", "bf16")):
            one = partial(resident_step, model, precision, batch_size)
            found[f"step of {model}, {name}"] = {
                "channels_last, fused AdamW": one(fused=True),
                "contiguous": one(memory_format=torch.contiguous_format, fused=True),
                "AdamW with foreach": one(foreach=True),
                "AdamW, a loop over weights": one(foreach=False),
            }

    images = torch.randint(0, 256, (60_000, 1, 28, 28), dtype=torch.uint8)
    data = InMemory(images, torch.randint(0, 10, (60_000,)))
    indices = torch.randint(0, 60_000, (batch_size,))
    found["a batch of uint8 pictures"] = {
        "index_select": lambda: data.__getitems__(indices),
        "images[indices]": lambda: [tensor[indices] for tensor in data.tensors],
        "one by one, stacked": lambda: torch.stack([images[i] for i in indices.tolist()]),
    }

    grey = images[:batch_size]
    args = argparse.Namespace(seed=0, max_turn=5.0, max_shift=1.0, max_warp=0.0)
    affine = torch.eye(2, 3).expand(batch_size, 2, 3)

    def with_affine_grid() -> torch.Tensor:
        grid = F.affine_grid(affine, [batch_size, 1, 28, 28], align_corners=False)
        return F.grid_sample(grey.float(), grid, align_corners=False)

    found["augmentation"] = {
        "keyed numbers, grid as a matrix product": partial(
            train_mnist.augment, grey, indices, 0, args
        ),
        "no numbers, F.affine_grid": with_affine_grid,
    }
    found["normalisation"] = {
        "to float32, in place": partial(train_mnist.normalise, grey),
        "(images / 255 - MEAN) / STD": lambda: (
            (grey / 255 - train_mnist.MEAN) / train_mnist.STD
        ).contiguous(memory_format=torch.channels_last),
    }

    net = train_mnist.Compact(10)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(batch_size, 1, 28, 28)).sum().backward()
    gradients = [weight.grad for weight in net.parameters()]
    accelerator = SimpleNamespace(scaler=None)  # as much of one as clip_gradients needs
    found["norm of the gradients, compact"] = {
        "_foreach_norm": partial(clip_gradients, accelerator, optimizer, float("inf")),
        "nn.utils.get_total_norm": partial(nn.utils.get_total_norm, gradients),
    }

    evaluated = train_mnist.LeNet(10).to(memory_format=torch.channels_last)

    def evaluate(batch_size: int, mode: Callable) -> None:
        with mode():
            for batch in images[:2048].split(batch_size):
                evaluated(train_mnist.normalise(batch)).argmax(1)

    found["evaluation of 2,048 pictures, lenet"] = {
        "inference_mode, batches of 512": partial(evaluate, 512, torch.inference_mode),
        "batches of 128": partial(evaluate, 128, torch.inference_mode),
        "batches of 2,048": partial(evaluate, 2048, torch.inference_mode),
        "no_grad, batches of 512": partial(evaluate, 512, torch.no_grad),
    }
    return found


def compare_parts(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Print and return microseconds of each way, which take turns in one process."""
    print("| part | as | microseconds | over the first |\n| --- | --- | --- | --- |")
    results = {}
    for part, ways in parts(args.models, args.batch_size).items():
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(args.rounds + 5):
            for name, call in ways.items():
                started_at = time.perf_counter()
                call()
                if number >= 5:  # the first rounds warm up
                    seconds[name].append(time.perf_counter() - started_at)
        results[part] = {name: 1e6 * statistics.median(v) for name, v in seconds.items()}
        first = next(iter(results[part].values()))
        for name, value in results[part].items():
            print(f"| {part} | {name} | {value:,.0f} | {value / first:.2f} |", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[*train_mnist.MODELS])
    parser.add_argument("--precisions", nargs="+", default=["no", "bf16"])
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=230,  # an epoch of 59,000
                        help="per round; lenet and deep: a third, wide: a twelfth")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--parts", action="store_true", help="time the parts of a step instead")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures there")
    args = parser.parse_args()
    print(f"{DEVICE}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
          f"batch {args.batch_size}, median of {args.rounds} rounds")  # fmt: skip
    results = compare_parts(args) if args.parts else compare_loops(args)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    startup.run(main)  # with the settings of a run, which the limit gets as well
