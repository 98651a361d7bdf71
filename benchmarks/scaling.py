"""Measure several processes: images per second, efficiency, and where the time of a step goes.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --processes 1 2 4 --model wide --batch-size 64

Each row is train_mnist.py itself, started through the launcher with one OpenMP thread per process
(on a machine with GPUs: one GPU per process). `apart` is the total of equally many independent
runs, started at once, each with its share of the batch: the most that the machine can give. `model`
is the prediction of the formula in docs/scaling.md: a step of such a run, and one sum.

The columns after it are median milliseconds of the same step on a resident batch, in the same
number of processes: forward, backward, what gradient averaging adds to it, and the optimizer.
`rest` is what a step of train_mnist.py takes beyond them. `sum` is an all-reduce of the gradients
with nothing else running: its median, and the time that one in ten takes.
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from trainkit import startup

import torch
import torch.nn.functional as F
from accelerate import Accelerator

import train_mnist
from benchmarks._runs import MNIST, ONE_THREAD, Parser, execute, in_turn, launcher, one_run, table


def time_parts(model: str, batch_size: int, steps: int) -> None:
    """Time the parts of a step, in each process; the main one prints their milliseconds."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    device, num_processes = accelerator.device, accelerator.num_processes
    net = train_mnist.MODELS[model](10).to(memory_format=torch.channels_last)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), fused=True))
    pixels = torch.randn(batch_size // num_processes, 1, 28, 28, device=device)
    pixels = pixels.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (len(pixels),), device=device)
    gradients = torch.zeros(sum(weight.numel() for weight in net.parameters()), device=device)
    laps: dict[str, list[float]] = {}
    last = 0.0

    def lap(name: str) -> None:
        nonlocal last
        if device.type == "cuda":
            torch.cuda.synchronize()
        now = 1000 * time.perf_counter()
        laps.setdefault(name, []).append(now - last)
        last = now

    for _ in range(steps):
        lap("between")
        with accelerator.no_sync(net):
            loss = F.cross_entropy(net(pixels), labels)
            lap("forward")
            loss.backward()
            lap("backward")
        optimizer.zero_grad()
        loss = F.cross_entropy(net(pixels), labels)
        lap("between")
        loss.backward()
        lap("backward and averaging")
        optimizer.step()
        optimizer.zero_grad()
        lap("update")
        if num_processes > 1:
            torch.distributed.all_reduce(gradients)
        lap("sum")
    ms = {name: statistics.median(values) for name, values in laps.items()}
    ms["averaging"] = ms["backward and averaging"] - ms["backward"]
    ms["slow sum"] = statistics.quantiles(laps["sum"], n=10)[-1]
    if accelerator.is_main_process:
        print("milliseconds", json.dumps(ms))
    accelerator.end_training()


def main() -> None:
    parser = Parser(__doc__, rounds=3)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--model", choices=train_mnist.MODELS, default="lenet")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--parts", action="store_true", help="used by this program itself")
    args = parser.parse_args()
    if args.parts:
        time_parts(args.model, args.batch_size, args.steps)
        return

    def rate(batch_size: int, card: int = 0, launch: Sequence = ()) -> float:
        env = ONE_THREAD if launch else {**ONE_THREAD, "CUDA_VISIBLE_DEVICES": str(card)}
        flags = ("--model", args.model, "--no-augment", "--no-pictures", "--batch-size", batch_size)
        run = one_run(MNIST, *flags, "--stop-after-steps", args.steps, launch=launch, env=env)
        return run.samples_per_second

    def apart(number: int) -> float:
        with ThreadPoolExecutor(number) as pool:
            return sum(pool.map(partial(rate, args.batch_size // number), range(number)))

    ways = {}
    for number in args.processes:
        ways[number] = partial(rate, args.batch_size, launch=launcher(number))
        ways["apart", number] = partial(apart, number)
    rates = {key: statistics.median(values) for key, values in in_turn(ways, args.rounds).items()}
    first, rows = args.processes[0], []
    parts_of = partial(execute, "-m", "benchmarks.scaling", "--parts", *sys.argv[1:])
    for number in args.processes:
        done = parts_of(launch=launcher(number), env=ONE_THREAD)
        ms = json.loads(done.said("milliseconds"))
        efficiency = rates[number] / rates[first] * first / number
        step, alone = (1000 * args.batch_size / rates[key] for key in (number, ("apart", number)))
        model = 1000 * args.batch_size / (alone + ms["sum"])
        times = [ms[name] for name in ("forward", "backward", "averaging", "update")]
        times += [step - sum(times), ms["sum"], ms["slow sum"]]
        rows.append((number, efficiency, rates[number], rates["apart", number], model, *times))
    table(
        "processes | efficiency | images/s | apart | model | forward | backward | averaging "
        "| update | rest | sum | slow sum",
        rows,
    )


if __name__ == "__main__":
    startup.run(main)
