"""Can these machines train together? Launch it like a training script, before the first run.

accelerate launch --config_file accelerate_configs/2cpu.yaml -m trainkit.doctor --run-dir runs/mnist
"""

import argparse
import json
import platform
import socket
import statistics
import sys
import textwrap
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import gather_object
from torch.utils import collect_env

from trainkit import launch, startup, world
from trainkit.arguments import Parser
from trainkit.errors import UsageError

FORMAT = 2
ALL_REDUCES = {4 * 2**10: 50, 4 * 2**20: 10, 100 * 2**20: 2}  # bytes: repetitions
SLOW = 0.6  # of the median rank's rate; a rank that shares its core with one other process has 0.5
MATMUL_SECONDS = 0.5  # several turns of a busy core's scheduler
GLOO_SECONDS = 20
MAX_ROWS = 32


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--run-dir", type=Path, default=Path("runs"), help="must be one folder for all ranks")
    add("--json", action="store_true", help="print one JSON object instead of text")
    add("--timeout", type=float, default=60.0, help="seconds to wait for a rank")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Examine and report; return 0 if these ranks can train together, 1 if not."""
    args = parse_args(argv)
    if not 1 <= args.timeout < 1e7:
        raise UsageError(f"--timeout {args.timeout} must be 1 to below 10,000,000")
    launch.check_launch()
    timeout = timedelta(seconds=args.timeout)
    with world.deadline(timeout):
        accelerator = Accelerator(
            cpu=not torch.accelerator.is_available(),
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
        )
    world.check_world(accelerator)
    report = examine(accelerator, args.run_dir)
    if accelerator.is_main_process:
        print(json.dumps(report, indent=1) if args.json else as_text(report), flush=True)
    accelerator.end_training()
    return 1 if report["problems"] else 0


def examine(accelerator: Accelerator, run_dir: Path) -> dict[str, Any]:
    """The report. Every process must call this."""
    ranks = gather_object([describe_rank(accelerator)])
    names = [f"rank {number} on {rank['node']}" for number, rank in enumerate(ranks)]
    problems = world.find_differences(
        [{"node": name, "facts": rank["facts"]} for name, rank in zip(names, ranks, strict=True)]
    )
    problems += find_slow_ranks(names, [rank["matmul_flops"] for rank in ranks])
    try:
        world.check_shared_folder(accelerator, run_dir)
    except UsageError as error:
        problems.append(str(error))
    all_reduce = []
    if len(ranks) > 1:
        problems += find_gloo_problem(accelerator)
        all_reduce = [measure_all_reduce(accelerator, *size) for size in ALL_REDUCES.items()]
    problems += [
        f"an all-reduce of {result['bytes']} bytes gave wrong sums"
        for result in all_reduce
        if not result["correct"]
    ]
    return {
        "format": FORMAT,
        "num_processes": len(ranks),
        "num_nodes": len({rank["node"] for rank in ranks}),
        "run_dir": str(run_dir),
        "ranks": ranks,
        "all_reduce": all_reduce,
        "problems": problems,
    }


def describe_rank(accelerator: Accelerator) -> dict[str, Any]:
    """What this process runs on and how fast; "facts" must be equal everywhere."""
    device, backend, driver = accelerator.device, accelerator.state.backend or "none", "none"
    import psutil  # here: it does not load everywhere

    name, free_bytes = platform.machine(), psutil.virtual_memory().available
    if device.type == "cuda":
        name, free_bytes = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[0]
        backend += " " + ".".join(map(str, torch.cuda.nccl.version()))
        driver = collect_env.get_nvidia_driver_version(collect_env.run)
    return {
        "node": world.node_name(),
        "host": socket.gethostname(),
        "device": name,
        "driver": driver,
        "backend": backend,
        "threads": torch.get_num_threads(),
        "free_bytes": free_bytes,
        "facts": {**world.describe_node(), "the communication library": backend},
        "matmul_flops": measure_matmul(accelerator),
    }


def measure_matmul(accelerator: Accelerator) -> dict[str, float]:
    """Floating-point operations per second of a matrix product, for each precision.

    All ranks measure at the same time, as they train.
    """
    device, rates = accelerator.device, {}
    size, precisions = 4096, [torch.float32, torch.bfloat16, torch.float16]
    if device.type == "cpu":
        size, precisions = 384, precisions[:2]
    for dtype in precisions:
        a, b = torch.ones(2, size, size, dtype=dtype, device=device)
        a @ b  # chooses and loads a kernel
        _synchronize(device)
        accelerator.wait_for_everyone()
        started_at, num, elapsed_seconds = time.perf_counter(), 0, 0.0
        while elapsed_seconds < MATMUL_SECONDS:
            a @ b
            _synchronize(device)
            num, elapsed_seconds = num + 1, time.perf_counter() - started_at
        rates[str(dtype).removeprefix("torch.")] = num * 2 * size**3 / elapsed_seconds
    return rates


def find_slow_ranks(names: Sequence[str], rates: Sequence[dict[str, float]]) -> list[str]:
    """A sentence for each rank that is far slower than the median rank."""
    medians = {name: statistics.median_high(rate[name] for rate in rates) for name in rates[0]}
    problems = []
    for rank, rate in zip(names, rates, strict=True):
        shares = {name: rate[name] / median for name, median in medians.items()}
        if slow := [f"{name} at {share:.0%}" for name, share in shares.items() if share < SLOW]:
            problems.append(
                f"{rank} is slow ({', '.join(slow)} of the median rank) and every step waits for "
                "it: look for another process on its cores or card (top, nvidia-smi)"
            )
    return problems


def find_gloo_problem(accelerator: Accelerator) -> list[str]:
    """Open the gloo group that training opens beside NCCL; a sentence if it fails on any rank.

    Every process must call this.
    """
    reason, timeout = None, timedelta(seconds=GLOO_SECONDS)
    try:
        torch.distributed.new_group(backend="gloo", timeout=timeout)
    except RuntimeError as problem:
        reason = str(problem).splitlines()[0]
    failed = [pair for pair in gather_object([(reason, world.node_name())]) if pair[0]]
    if not failed:
        return []
    reason, node = min(failed, key=lambda pair: "timeout" in pair[0])  # others only timed out
    return [
        f"the gloo group that training opens beside {accelerator.state.backend} failed on {node} "
        f"({reason}): if the hostname resolves to 127.0.0.1 there, the usual cause, set "
        "GLOO_SOCKET_IFNAME to the network interface that the nodes share"
    ]


def measure_all_reduce(accelerator: Accelerator, num_bytes: int, repetitions: int) -> dict:
    """Sum float32 tensors over all ranks: is the sum right, and how long does it take?

    Seconds are the median of the repetitions on the slowest rank. The bus bandwidth is what each
    link carries if the sum is made in a ring: 2 (n - 1) / n times the bytes.
    """
    num = accelerator.num_processes
    tensor = torch.empty(num_bytes // 4, device=accelerator.device)
    seconds, correct = [], True
    for _ in range(repetitions + 1):
        tensor.fill_(accelerator.process_index + 1)
        _synchronize(accelerator.device)
        accelerator.wait_for_everyone()
        started_at = time.perf_counter()
        torch.distributed.all_reduce(tensor)
        _synchronize(accelerator.device)
        seconds.append(time.perf_counter() - started_at)
        correct = correct and bool((tensor == num * (num + 1) // 2).all())
    # The first repetition makes connections.
    results = gather_object([(statistics.median(seconds[1:]), correct)])
    slowest = max(seconds for seconds, _ in results)
    return {
        "bytes": num_bytes,
        "seconds": slowest,
        "bus_bytes_per_second": 2 * (num - 1) / num * num_bytes / slowest,
        "correct": all(correct for _, correct in results),
    }


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":  # where torch would raise
        torch.accelerator.synchronize(device)


def as_text(report: dict[str, Any]) -> str:
    """The report for people, in 79 columns: ranks, what they run, all-reduces, and the verdict."""
    ranks, problems = report["ranks"], report["problems"]
    precisions = "".join(f"{name:>10}" for name in ranks[0]["matmul_flops"])
    lines = [f"rank  {'host':<14}  {'device':<17}  free GiB{precisions}"]
    for number, rank in enumerate(ranks[:MAX_ROWS]):
        rates = "".join(f"{rate / 1e9:10,.0f}" for rate in rank["matmul_flops"].values())
        free = rank["free_bytes"] / 2**30
        lines.append(
            f"{number:4}  {rank['host']:<14.14}  {rank['device']:<17.17}  {free:8.1f}{rates}"
        )
    lines.append("the last columns: GFLOP/s of a matrix product, on all ranks at once")
    if len(ranks) > MAX_ROWS:
        lines.append(f"({len(ranks)} ranks, of which {MAX_ROWS} are shown)")
    for name in ("torch", "accelerate", "backend", "driver", "threads"):
        values = {str((rank | rank["facts"])[name]) for rank in ranks}
        lines.append(f"{name}: {' and '.join(sorted(values))}")
    lines.append(f"run folder: {report['run_dir']}")
    for result in report["all_reduce"]:
        rate = result["bus_bytes_per_second"] / 1e9
        lines.append(
            f"all-reduce of {result['bytes'] / 2**20:7.3f} MiB: {result['seconds'] * 1e3:9.3f} ms, "
            f"{rate:7.3f} GB/s per link, {'right' if result['correct'] else 'WRONG'}"
        )
    lines += [
        textwrap.fill(f"problem: {problem}", 79, subsequent_indent="  ") for problem in problems
    ]
    verdict = "do not train on these ranks before the problems above are solved"
    if not problems:
        verdict = f"ready to train (ranks: {len(ranks)})"
    return "\n".join([*lines, f"verdict: {verdict}"])


if __name__ == "__main__":
    startup.run(lambda: sys.exit(main()))
