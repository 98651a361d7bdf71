"""What several processes give: images per second, efficiency, and where the time of a step goes.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --processes 1 2 4 --model wide --batch-size 64

Each row is train_mnist.py itself, started through the launcher with one OpenMP thread per process
(on a machine with GPUs: one GPU per process). The columns behind it are medians of the same step on
a resident batch, taken by this program in the same number of processes: forward, backward without
and with gradient averaging, optimizer. `data` is what train_mnist.py's step takes beyond them.
`apart` is what as many runs give together that know nothing of each other, each with its share of
the batch, started at once: more than that the machine does not have. The rounds take turns.
The verdict says what limits. --json writes what `benchmarks.scaling_model check` reads.
"""

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml
from accelerate import Accelerator

import train_mnist
from benchmarks._runs import MNIST, ROOT, finish, one_run, start
from trainkit import startup

PARTS = ("forward", "backward", "all_reduce", "update")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # in each process


def write_config(folder: Path, num_processes: int) -> Path:
    """accelerate_configs/2cpu.yaml, or 4gpu.yaml where there are GPUs, for another number."""
    name = "4gpu.yaml" if torch.cuda.is_available() else "2cpu.yaml"
    config = yaml.safe_load((ROOT / "accelerate_configs" / name).read_text())
    config["num_processes"] = num_processes
    if num_processes == 1:
        config |= {"distributed_type": "NO", "gpu_ids": "all"}
    elif not torch.cuda.is_available():
        config["gpu_ids"] = ",".join(["-1"] * num_processes)
    path = folder / f"{num_processes}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def time_parts(model: str, batch_size: int, steps: int, path: Path) -> None:
    """Run in each process: write the seconds of the parts of a step, medians, to `path`."""
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    net = train_mnist.MODELS[model](10).to(memory_format=torch.channels_last)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), fused=True))
    size = batch_size // accelerator.num_processes
    pixels = torch.randn(size, 1, 28, 28, device=accelerator.device)
    pixels = pixels.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (size,), device=accelerator.device)

    def now() -> float:
        if accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    seconds: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(steps):
        with accelerator.no_sync(net):
            started_at = now()
            loss = F.cross_entropy(net(pixels), labels)
            forward_at = now()
            loss.backward()
            backward_at = now()
        optimizer.zero_grad()
        loss = F.cross_entropy(net(pixels), labels)
        again_at = now()
        loss.backward()
        synced_at = now()
        optimizer.step()
        optimizer.zero_grad()
        updated_at = now()
        seconds["forward"].append(forward_at - started_at)
        seconds["backward"].append(backward_at - forward_at)
        seconds["all_reduce"].append((synced_at - again_at) - (backward_at - forward_at))
        seconds["update"].append(updated_at - synced_at)
    row = {part: statistics.median(values) for part, values in seconds.items()}
    if accelerator.num_processes > 1:
        gradients = torch.ones(sum(p.numel() for p in net.parameters()), device=accelerator.device)
        alone = []
        for _ in range(200):
            started_at = now()
            torch.distributed.all_reduce(gradients)
            alone.append(now() - started_at)
            gradients.fill_(1)
        row["alone"], row["alone_slow"] = statistics.median(alone), sorted(alone)[180]
    if accelerator.is_main_process:
        path.write_text(json.dumps(row))
    accelerator.end_training()


def rates(num_processes: int, args: argparse.Namespace, folder: Path) -> tuple[float, float]:
    """Images per second of one run of so many processes, and of so many runs of one process."""
    run = (MNIST, "--model", args.model, "--no-augment", "--stop-after-steps", args.steps,
           "--no-pictures", "--batch-size")  # fmt: skip
    config, alone = (write_config(folder, number) for number in (num_processes, 1))
    together = one_run(*run, args.batch_size, config=config, env=ONE_THREAD)
    if num_processes == 1:
        return (together["samples_per_second"],) * 2
    share = args.batch_size // num_processes
    with ThreadPoolExecutor(num_processes) as pool:
        runs = [pool.submit(one_run, *run, share, config=alone,
                            env={**ONE_THREAD, "CUDA_VISIBLE_DEVICES": str(card)})
                for card in range(num_processes)]  # fmt: skip
        return together["samples_per_second"], sum(r.result()["samples_per_second"] for r in runs)


def parts_of(num_processes: int, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Seconds of the parts of a step."""
    path = folder / "parts.json"
    finish(start("-m", "benchmarks.scaling", "--parts", path, "--model", args.model,
                 "--batch-size", args.batch_size, "--steps", args.steps,
                 config=write_config(folder, num_processes), env=ONE_THREAD))  # fmt: skip
    return json.loads(path.read_text())


def verdict(rows: list[dict[str, float]]) -> str:
    """One sentence about the last row."""
    first, last = rows[0], rows[-1]
    gain = last["images_per_second"] / first["images_per_second"]
    wanted = last["num_processes"] / first["num_processes"]
    step = sum(last[part] for part in (*PARTS, "data"))
    share = last["all_reduce"] / step
    if gain >= 0.9 * wanted:
        return f"scales: {gain:.2f} times on {wanted:.0f} times the processes"
    if share > 0.1:
        return (f"too small to scale: {gain:.2f} times on {wanted:.0f} times the processes, as "
                f"{share:.0%} of a step is gradient averaging: use larger batches")  # fmt: skip
    apart = last["apart"] / first["images_per_second"]
    reason = ("they wait for each other" if apart >= 0.95 * wanted else
              "the processes compete for cores or memory")  # fmt: skip
    return (
        f"{gain:.2f} times on {wanted:.0f} times the processes; gradient averaging is only "
        f"{share:.0%} of a step, and as many runs apart give {apart:.2f} times: {reason}"
    )


def draw(rows: list[dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    names = [str(row["num_processes"]) for row in rows]
    bottom = [0.0] * len(rows)
    hatches = ("", "//", "xx", "..", "--")
    for part, hatch in zip((*PARTS, "data"), hatches, strict=True):
        values = [1000 * row[part] for row in rows]
        axes.bar(names, values, bottom=bottom, label=part.replace("_", "-"), hatch=hatch,
                 edgecolor="white", width=0.6)  # fmt: skip
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    for index, row in enumerate(rows):
        axes.text(index, bottom[index], f"{row['images_per_second']:,.0f} images/s", ha="center",
                  va="bottom")  # fmt: skip
    axes.set(xlabel="processes", ylabel="milliseconds per step", ylim=(0, 1.15 * max(bottom)))
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--model", choices=train_mnist.MODELS, default="lenet")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None,
                        help="also write the figures there, and a picture beside them")  # fmt: skip
    parser.add_argument("--parts", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.parts is not None:
        time_parts(args.model, args.batch_size, args.steps, args.parts)
        return
    parts = (*PARTS, "data")
    print(
        f"{args.model}, batch {args.batch_size} over all processes, median of {args.rounds} rounds"
    )
    print(f"{'processes':>9} {'images/s':>9} {'efficiency':>10} {'apart':>9}"
          + "".join(f"{part:>11}" for part in parts) + "   ms per step")  # fmt: skip
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        found: dict[int, list[tuple[float, float]]] = {number: [] for number in args.processes}
        for _ in range(args.rounds):
            for number in args.processes:
                found[number].append(rates(number, args, Path(folder)))
        for number in args.processes:
            rate, apart = map(statistics.median, zip(*found[number], strict=True))
            row = {"num_processes": number, "images_per_second": rate, "apart": apart,
                   **parts_of(number, args, Path(folder))}  # fmt: skip
            row["data"] = max(0.0, args.batch_size / rate - sum(row[part] for part in PARTS))
            rows.append(row)
            scale = row["num_processes"] / rows[0]["num_processes"]
            efficiency = row["images_per_second"] / rows[0]["images_per_second"] / scale
            print(f"{number:9} {rate:9,.0f} {efficiency:10.2f} {apart:9,.0f}"
                  + "".join(f"{1000 * row[part]:11.2f}" for part in parts), flush=True)  # fmt: skip
    print(verdict(rows))
    for row in rows:
        if "alone" in row:
            print(f"{row['num_processes']} processes: an all-reduce of the gradients alone takes "
                  f"{1000 * row['alone']:.2f} ms, one in ten {1000 * row['alone_slow']:.2f} ms or "
                  "more")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "batch_size": args.batch_size,
                                         "rows": rows}, indent=1) + "\n")  # fmt: skip
        draw(rows, args.json.with_suffix(".png"))


if __name__ == "__main__":
    startup.run(main)
