"""Images per second of train_mnist.py's loop, of the machine's limit and of the usual pipeline.

    python -m benchmarks.throughput
    python -m benchmarks.throughput --models lenet --precisions bf16 --rounds 7

For each model and precision these are timed in turn, round by round:

    loop        train_mnist.main, from an epoch's first batch to its last (timing.jsonl)
    limit       the same model, loss, optimizer and precision on one resident batch: no loader,
                no Accelerate, torch's own dropout
    per-sample  the same model and optimizer behind PIL -> ToTensor -> Normalize, a call per picture
    augment     the loop with its default augmentation

The per-sample pipeline is that of most tutorials: float32 in contiguous memory, in a separate
process without the settings of trainkit/startup.py. It runs with 0 and with 2 loader workers, and
the faster of the two is reported.
"""

import functools
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from trainkit import startup

import torch
import torch.nn.functional as F
from datasets import load_dataset
from torch.utils.data import DataLoader, default_collate
from torchvision import transforms

import train_mnist
from benchmarks._runs import ROOT, Parser, in_process, in_turn, table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TRANSFORM = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])


def resident_step(model: str, precision: str, batch_size: int) -> Callable[[], None]:
    """Return a function that does forward, backward and update on one batch already in memory."""
    net = train_mnist.MODELS[model](10).to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.0, fused=True)
    scaler = torch.amp.GradScaler(DEVICE, enabled=precision == "fp16")
    dtype = DTYPES.get(precision, torch.float32)
    pixels = torch.randn(batch_size, 1, 28, 28, device=DEVICE)
    pixels = pixels.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (batch_size,), device=DEVICE)

    def step() -> None:
        with torch.autocast(DEVICE, dtype, enabled=precision in DTYPES):
            logits = net(pixels)
        scaler.scale(F.cross_entropy(logits.float(), labels, label_smoothing=0.1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def rate(step: Callable[[], None], batch_size: int, steps: int) -> float:
    """Return samples per second."""
    started_at = time.perf_counter()
    for _ in range(steps):
        step()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return batch_size * steps / (time.perf_counter() - started_at)


def limit(model: str, precision: str, batch_size: int, steps: int) -> float:
    """Return images per second of resident_step."""
    return rate(resident_step(model, precision, batch_size), batch_size, steps)


@functools.cache
def pictures_and_labels() -> list[tuple]:
    rows = load_dataset(str(ROOT / "data" / "mnist"), split="train")
    return [*zip(rows["image"], rows["label"], strict=True)]


def collate(samples: list[tuple]) -> list[torch.Tensor]:
    """Apply PIL -> ToTensor -> Normalize with one call per picture."""
    return default_collate([(TRANSFORM(picture), label) for picture, label in samples])


def per_sample(model: str, batch_size: int, steps: int, num_workers: int) -> float:
    """Return images per second of a plain PyTorch loop that loads through collate."""
    net = train_mnist.MODELS[model](10).to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    fork = "fork" if num_workers else None  # the usual default; this process was spawned
    options = {"shuffle": True, "num_workers": num_workers, "multiprocessing_context": fork}
    data = pictures_and_labels()
    batches = iter(DataLoader(data, batch_size, collate_fn=collate, **options))
    next(batches)  # workers start and prefetch before the clock starts

    def step() -> None:
        pixels, labels = next(batches)
        F.cross_entropy(net(pixels.to(DEVICE)), labels.to(DEVICE)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return rate(step, batch_size, steps)


def main() -> None:
    parser = Parser(__doc__, rounds=9)
    parser.add_argument("--models", nargs="+", default=[*train_mnist.MODELS])
    parser.add_argument("--precisions", nargs="+", default=["no", "bf16"])
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument(
        "--steps", type=int, default=230, help="per round; lenet and deep: a third, wide: a twelfth"
    )
    args = parser.parse_args()
    print(f"{DEVICE}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    # Not forked, because it must not inherit the settings of this process.
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    rows = []
    for model, precision in itertools.product(args.models, args.precisions):
        steps = max(1, args.steps // {"compact": 1, "wide": 12}.get(model, 3))
        flags = ("--model", model, "--batch-size", args.batch_size, "--stop-after-steps", steps)
        flags += ("--validation-split", 1000)
        loop = partial(in_process, train_mnist, *flags, precision=precision)
        habit = partial(pool.submit, per_sample, model, args.batch_size, max(1, steps // 3))
        ways = {
            "loop": partial(loop, "--no-augment"),
            "limit": partial(limit, model, precision, args.batch_size, steps),
            "0 workers": lambda habit=habit: habit(0).result(),
            "2 workers": lambda habit=habit: habit(2).result(),
            "augment": loop,
        }
        rates = in_turn(ways, args.rounds, warm_up=1)
        ratios = (a / b for a, b in zip(rates["loop"], rates["limit"], strict=True))
        loop, limit_, *workers, augment = map(statistics.median, rates.values())
        of_limit, habit = statistics.median(ratios), max(workers)
        rows.append((model, precision, loop, limit_, habit, augment, of_limit, loop / habit))
    pool.shutdown()
    table(
        "model | precision | loop | limit | per-sample | with augmentation | loop / limit "
        "| loop / per-sample",
        rows,
    )


if __name__ == "__main__":
    startup.run(main)  # with the settings of a run, for the limit as well
