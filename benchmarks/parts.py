"""The parts of a step of train_mnist.py, each as it is and as it could have been written.

    python -m benchmarks.parts --rounds 60 --models compact lenet

Microseconds; the ways take turns in one process, and the first of each part is train_mnist.py's.
"""

import itertools
import statistics
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils import get_total_norm

import train_mnist
from benchmarks._runs import Parser, in_turn, table
from benchmarks.throughput import resident_step
from train_mnist import MEAN, MODELS, STD, augment, normalise
from trainkit import InMemory, startup

BATCH_SIZE = 256


def parts(models: list[str]) -> Iterator[tuple[str, dict[str, Callable[[], Any]]]]:
    """The ways to write each part of a step; the first is what train_mnist.py does."""
    for model, precision in itertools.product(models, ("no", "bf16")):
        step = partial(resident_step, model, precision, BATCH_SIZE)
        ways = {
            "channels_last, fused AdamW": step(fused=True),
            "contiguous": step(memory_format=torch.contiguous_format, fused=True),
            "AdamW with foreach": step(foreach=True),
            "AdamW, a loop over weights": step(foreach=False),
        }
        yield f"step of {model}, {precision}", ways

    images = torch.randint(0, 256, (60_000, 1, 28, 28), dtype=torch.uint8)
    data = InMemory(images, torch.randint(0, 10, (60_000,)))
    indices = torch.randint(0, 60_000, (BATCH_SIZE,))
    ways = {
        "index_select": lambda: data.__getitems__(indices),
        "images[indices]": lambda: [tensor[indices] for tensor in data.tensors],
        "one by one, stacked": lambda: torch.stack([images[i] for i in indices.tolist()]),
    }
    yield "a batch of uint8 pictures", ways

    grey = images[:BATCH_SIZE]
    args = train_mnist.parse_args([])
    affine = torch.eye(2, 3).expand(BATCH_SIZE, 2, 3)

    def with_affine_grid() -> torch.Tensor:
        grid = F.affine_grid(affine, grey.shape, align_corners=False)
        return F.grid_sample(grey.float(), grid, align_corners=False)

    ways = {
        "keyed numbers, grid as a matrix product": partial(augment, grey, indices, 0, args),
        "no numbers, F.affine_grid": with_affine_grid,
    }
    yield "augmentation", ways

    last = {"memory_format": torch.channels_last}
    ways = {
        "to float32, in place": lambda: normalise(grey),
        "(images / 255 - MEAN) / STD": lambda: ((grey / 255 - MEAN) / STD).contiguous(**last),
    }
    yield "normalisation", ways

    net = MODELS["compact"](10)
    net(torch.randn(grey.shape)).sum().backward()
    gradients = [weight.grad for weight in net.parameters()]
    ways = {
        "_foreach_norm": lambda: torch.stack(torch._foreach_norm(gradients)).norm(),
        "nn.utils.get_total_norm": lambda: get_total_norm(gradients),
    }
    yield "norm of the gradients, compact", ways

    lenet = MODELS["lenet"](10).to(**last)

    def evaluate(batch_size: int, mode: Callable[[], Any] = torch.inference_mode) -> None:
        with mode():
            for batch in images[:2048].split(batch_size):
                lenet(normalise(batch)).argmax(1)

    ways = {
        "inference_mode, batches of 512": partial(evaluate, 512),
        "batches of 128": partial(evaluate, 128),
        "batches of 2,048": partial(evaluate, 2048),
        "no_grad, batches of 512": partial(evaluate, 512, torch.no_grad),
    }
    yield "evaluation of 2,048 pictures, lenet", ways


def main() -> None:
    parser = Parser(__doc__, rounds=60)
    parser.add_argument("--models", nargs="+", default=["compact", "lenet"])
    args = parser.parse_args()
    rows = []
    for part, ways in parts(args.models):
        calls = {name: partial(timeit.timeit, call, number=1) for name, call in ways.items()}
        times = in_turn(calls, args.rounds, warm_up=5)
        first, *_ = medians = [statistics.median(values) for values in times.values()]
        for name, value in zip(ways, medians, strict=True):
            rows.append((part, name, 1e6 * value, value / first))
    table("part | as | microseconds | over the first", rows)


if __name__ == "__main__":
    startup.run(main)
