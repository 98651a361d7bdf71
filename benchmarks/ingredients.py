"""What each part of the loop takes as it is, and as it could have been written.

    python -m benchmarks.ingredients
    python -m benchmarks.ingredients --compile

Alternatives take turns in one process; each figure is the median over all turns, in microseconds.
--compile adds the step under torch.compile, which needs a C++ compiler and a minute.
"""

# isort: off
import trainkit  # noqa: F401  (before torch)

# isort: on
import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import train_mnist
from benchmarks.throughput import resident_step
from trainkit.optim import clip_gradients

ROOT = Path(__file__).parent.parent
BATCH_SIZE = 256


class Unscaled:
    """As much of an Accelerator as clip_gradients needs."""

    scaler = None


def parts(with_compile: bool) -> dict[str, dict[str, Callable[[], object]]]:
    """The alternatives of each part; the first is what train_mnist.py does."""
    found: dict[str, dict[str, Callable[[], object]]] = {}
    for model in ("compact", "lenet"):
        for name, precision in (("float32", "no"), ("bfloat16", "bf16")):
            one = partial(resident_step, model, precision, BATCH_SIZE)
            found[f"step of {model}, {name}"] = {
                "channels_last, fused AdamW": one(fused=True),
                "contiguous": one(memory_format=torch.contiguous_format, fused=True),
            }
            if with_compile:
                found[f"step of {model}, {name}"]["compiled"] = one(fused=True, compiled=True)
    found["step of compact, float32"] |= {
        "AdamW with foreach": resident_step("compact", "no", BATCH_SIZE, foreach=True),
        "AdamW, a loop over weights": resident_step("compact", "no", BATCH_SIZE, foreach=False),
    }

    images = torch.randint(0, 256, (60_000, 1, 28, 28), dtype=torch.uint8)
    data = train_mnist.Images(images, torch.randint(0, 10, (60_000,)))
    indices = torch.randint(0, 60_000, (BATCH_SIZE,))
    found["a batch of uint8 pictures"] = {
        "index_select": lambda: data.__getitems__(indices),
        "images[indices]": lambda: (images[indices], data.labels[indices]),
        "one by one, stacked": lambda: torch.stack([images[i] for i in indices.tolist()]),
    }

    grey = images[:BATCH_SIZE]
    args = argparse.Namespace(seed=0, max_turn=5.0, max_shift=1.0, max_warp=0.0)
    affine = torch.eye(2, 3).expand(BATCH_SIZE, 2, 3)

    def with_affine_grid() -> torch.Tensor:
        grid = F.affine_grid(affine, [BATCH_SIZE, 1, 28, 28], align_corners=False)
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
    net(torch.randn(BATCH_SIZE, 1, 28, 28)).sum().backward()
    gradients = [weight.grad for weight in net.parameters()]
    found["norm of the gradients, compact"] = {
        "_foreach_norm": partial(clip_gradients, Unscaled, optimizer, float("inf")),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "ingredients.json")
    args = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, batch {BATCH_SIZE}, "
          f"median of {args.rounds} rounds\n")  # fmt: skip
    print("| part | as | microseconds | over the first |\n| --- | --- | --- | --- |")
    results = {}
    for part, ways in parts(args.compile).items():
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
    args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
