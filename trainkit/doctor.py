"""Can these machines train together? Run it like a training script, before the first one.

accelerate launch --config_file accelerate_configs/2cpu.yaml -m trainkit.doctor --run-dir runs/mnist

Where even the launchers do not find each other, without them, one line per machine:

python -m trainkit.doctor --num-machines 2 --machine-rank 0 --main-process-ip HOST
"""

import argparse
import json
import os
import platform
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import gather_object

from trainkit import launch, nodes
from trainkit.arguments import Parser

FORMAT = 1
ALL_REDUCES = {4 * 2**10: 50, 4 * 2**20: 10, 100 * 2**20: 2}  # bytes: repetitions
SLOW = 0.6  # of the median rank's rate; a rank that shares its core with one other process has 0.5
MATMUL_SECONDS = 0.5  # long enough that the scheduler of a busy core cannot hide
MAX_SKEW_SECONDS = 1.0
MIN_OPEN_FILES, MIN_SHM_BYTES = 4096, 2**30
MAX_ROWS = 32


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--run-dir", type=Path, default=Path("runs"), help="must be one folder for all ranks")
    add("--json", action="store_true", help="print one JSON object instead of text")
    add("--wait", type=float, default=8.0, help="seconds to wait for all ranks")
    group = parser.add_argument_group("without a launcher, one process per machine")
    add = group.add_argument
    add("--num-machines", type=int, default=None, help="how many machines there are")
    add("--machine-rank", type=int, default=None, help="number of this one, from 0")
    add("--main-process-ip", default=None, help="address of machine 0")
    add("--main-process-port", type=int, default=29501, help="a free port on machine 0")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Examine and report; return 0 if these ranks can train together, 1 if not."""
    args = parse_args(argv)
    if args.num_machines is not None:
        if args.machine_rank is None or args.main_process_ip is None:
            raise launch.UsageError("--num-machines needs --machine-rank and --main-process-ip")
        os.environ.update(
            WORLD_SIZE=str(args.num_machines), LOCAL_WORLD_SIZE="1", LOCAL_RANK="0",
            RANK=str(args.machine_rank), GROUP_RANK=str(args.machine_rank),
            MASTER_ADDR=args.main_process_ip, MASTER_PORT=str(args.main_process_port),
        )  # fmt: skip
    launch.check_launch()
    report: dict[str, Any] = {"format": FORMAT, "ranks": [], "all_reduce": [], "notes": []}
    store = open_store(args.wait)  # kept: its server ends with it
    speaker, report["problems"] = find_missing_ranks(store, args.wait) if store else (0, [])
    if not report["problems"]:
        timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=60))
        accelerator = Accelerator(
            cpu=not torch.accelerator.is_available(), kwargs_handlers=[timeout]
        )
        launch.check_world(accelerator)
        examine(accelerator, args.run_dir, report)
        accelerator.end_training()
    if int(os.environ.get("RANK", "0")) == speaker:
        print(json.dumps(report, indent=1) if args.json else as_text(report), flush=True)
    return 1 if report["problems"] else 0


def open_store(seconds: float) -> torch.distributed.Store | None:
    """The key-value store through which the ranks find each other; None for a world of one.

    Raises UsageError if nobody answers at its address.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    rank, host, port = (os.environ[name] for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    # Under a launcher the store is the launcher's.
    is_host = rank == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    deadline = time.monotonic() + seconds
    while not is_host:  # the store's own attempt would end in pages of C++ frames
        try:
            socket.create_connection((host, int(port)), timeout=seconds).close()
            break
        except OSError as problem:
            if time.monotonic() > deadline:
                raise launch.UsageError(
                    f"rank {rank} on {nodes.node_name()} finds nobody at {host}:{port} ("
                    f"{problem.strerror or problem}): start the process with rank 0 on {host}; if "
                    "it runs, then a firewall, the address or the port is in the way"
                ) from problem
            time.sleep(0.2)
    store = torch.distributed.TCPStore(
        host,
        int(port),
        is_master=is_host,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,  # Accelerator opens it once more
    )
    # The launcher's store outlives a restart of its processes.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return torch.distributed.PrefixStore(f"doctor/{restart}", store)


def find_missing_ranks(store: torch.distributed.Store, seconds: float) -> tuple[int, list[str]]:
    """Meet the other ranks; return the lowest one that came, and a phrase for each that did not.

    Needs no collective, which would wait for the missing ones.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store.set(f"rank/{rank}", nodes.node_name())
    store.add("arrived", 1)
    deadline = time.monotonic() + seconds
    while (here := store.add("arrived", 0)) < world_size and time.monotonic() < deadline:
        time.sleep(0.05)
    # The first to decide decides for all: some may time out just as the last one comes.
    outcome = store.compare_set("outcome", "", "whole" if here == world_size else "missing")
    if outcome == b"whole":
        return 0, []
    missing = [other for other in range(world_size) if not store.check([f"rank/{other}"])]
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    address = f"{os.environ['MASTER_ADDR']} {os.environ['MASTER_PORT']}"
    problems = [
        f"rank {other} never came (node {other // per_node}, local rank {other % per_node}): type "
        f"`nc -vz {address}` on that node, then look at the end of what was started there"
        for other in missing[:8]
    ]
    if missing[8:]:
        problems.append(f"{len(missing) - 8} more ranks never came, up to rank {missing[-1]}")
    time.sleep(1.0)  # the process that holds the store leaves last
    return next((other for other in range(world_size) if other not in missing), rank), problems


def examine(accelerator: Accelerator, run_dir: Path, report: dict[str, Any]) -> None:
    """Fill in the report. Every process must call this."""
    problems, notes = report["problems"], report["notes"]
    rank = describe_rank(accelerator)
    rank["matmul_flops"] = measure_matmul(accelerator)
    ranks = report["ranks"] = gather_object([rank])
    for number, skew in enumerate(measure_skew(accelerator)):
        ranks[number]["clock_skew_seconds"] = skew
    problems += nodes.find_differences(
        [{"node": name_rank(n, rank), "facts": rank["facts"]} for n, rank in enumerate(ranks)]
    )
    for number, rank in enumerate(ranks):
        name = name_rank(number, rank)
        shares = {}
        for precision, flops in rank["matmul_flops"].items():
            rates = sorted(other["matmul_flops"].get(precision, 0.0) for other in ranks)
            shares[precision] = flops / rates[len(rates) // 2]
        rank["slow"] = [precision for precision, share in shares.items() if share < SLOW]
        if rank["slow"]:
            problems.append(
                f"{name} is slow ("
                + ", ".join(f"{p} at {shares[p]:.0%} of the median rank" for p in rank["slow"])
                + ") and every step waits for it: look for another process on its cores or card "
                "(top, nvidia-smi)"
            )
        if abs(rank["clock_skew_seconds"]) > MAX_SKEW_SECONDS:
            notes.append(f"the clock of {name} is off by {rank['clock_skew_seconds']:.1f} s")
        if rank["open_files"] < MIN_OPEN_FILES:
            notes.append(f"{name} may open only {rank['open_files']} files (ulimit -n)")
        if rank["shm_bytes"] is not None and rank["shm_bytes"] < MIN_SHM_BYTES:
            notes.append(
                f"{name} has {rank['shm_bytes'] / 2**20:.0f} MiB of /dev/shm: loader workers and "
                "NCCL need it (docker run --shm-size)"
            )
    report["num_processes"] = len(ranks)
    report["num_nodes"] = len({rank["node"] for rank in ranks})
    report["run_dir"] = str(run_dir)
    try:
        nodes.check_shared(accelerator, run_dir)
    except launch.UsageError as error:
        problems.append(str(error))
    for num_bytes, repetitions in ALL_REDUCES.items():
        if accelerator.num_processes > 1:
            result = measure_all_reduce(accelerator, num_bytes, repetitions)
            report["all_reduce"].append(result)
            if not result["correct"]:
                problems.append(f"an all-reduce of {num_bytes} bytes gave wrong sums")


def describe_rank(accelerator: Accelerator) -> dict[str, Any]:
    """What this process runs on; "facts" are those that must be equal everywhere."""
    device = accelerator.device
    on_cuda = device.type == "cuda"
    backend = accelerator.state.backend or "none"
    if on_cuda:
        backend += " " + ".".join(map(str, torch.cuda.nccl.version()))
    shm = Path("/dev/shm")
    return {
        "node": nodes.node_name(),
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(device) if on_cuda else _cpu_name(),
        "driver": _nvidia_driver() if on_cuda else None,
        "backend": backend,
        "threads": torch.get_num_threads(),
        "free_bytes": torch.cuda.mem_get_info(device)[0] if on_cuda else _free_memory(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "shm_bytes": shutil.disk_usage(shm).free if shm.is_dir() else None,
        "facts": {**nodes.describe_node(), "the communication library": backend},
    }


def measure_matmul(accelerator: Accelerator) -> dict[str, float]:
    """Floating-point operations per second of a matrix product, for each precision.

    All ranks measure at the same time, as they train.
    """
    device = accelerator.device
    on_cpu = device.type == "cpu"
    size = 384 if on_cpu else 4096
    precisions = [torch.float32, torch.bfloat16] + ([] if on_cpu else [torch.float16])
    rates = {}
    for dtype in precisions:
        a, b = torch.ones(2, size, size, dtype=dtype, device=device)
        a @ b  # chooses and loads a kernel
        _synchronize(device)
        accelerator.wait_for_everyone()
        started_at, num = time.perf_counter(), 0
        while time.perf_counter() - started_at < MATMUL_SECONDS:
            a @ b
            _synchronize(device)
            num += 1
        elapsed_seconds = time.perf_counter() - started_at
        rates[str(dtype).removeprefix("torch.")] = num * 2 * size**3 / elapsed_seconds
    return rates


def measure_skew(accelerator: Accelerator) -> list[float]:
    """Seconds by which each rank's clock is ahead of rank 0's; good to some milliseconds."""
    rounds = []
    for _ in range(5):
        accelerator.wait_for_everyone()
        clocks = gather_object([time.time()])
        rounds.append([clock - clocks[0] for clock in clocks])
    return [statistics.median(offsets) for offsets in zip(*rounds, strict=True)]


def measure_all_reduce(
    accelerator: Accelerator, num_bytes: int, repetitions: int
) -> dict[str, Any]:
    """Sum float32 tensors over all ranks: is the sum right, and how long does it take?

    Seconds are of the slowest rank, the median of the repetitions. The bus bandwidth is what each
    link carries if the sum is made in a ring: 2 (n - 1) / n times the bytes.
    """
    num = accelerator.num_processes
    tensor = torch.empty(num_bytes // 4, device=accelerator.device)
    seconds, correct = [], True
    for repetition in range(repetitions + 1):
        tensor.fill_(accelerator.process_index + 1)
        _synchronize(accelerator.device)
        accelerator.wait_for_everyone()
        started_at = time.perf_counter()
        torch.distributed.all_reduce(tensor)
        _synchronize(accelerator.device)
        if repetition:  # the first one makes connections
            seconds.append(time.perf_counter() - started_at)
        correct = correct and bool((tensor == num * (num + 1) // 2).all())
    results = gather_object([(statistics.median(seconds), correct)])
    slowest = max(result[0] for result in results)
    return {
        "bytes": num_bytes,
        "seconds": slowest,
        "bus_bytes_per_second": 2 * (num - 1) / num * num_bytes / slowest,
        "correct": all(result[1] for result in results),
    }


def name_rank(number: int, rank: dict[str, Any]) -> str:
    """For people: its number, its node and its host."""
    return f"rank {number} on {rank['node']}"


def as_text(report: dict[str, Any]) -> str:
    """The report for people: a table of ranks, measurements, and last the verdict."""
    lines = []
    if ranks := report["ranks"]:
        precisions = list(ranks[0]["matmul_flops"])
        table = [["rank", "node", "device", "driver", "torch", "accelerate", "backend", "threads",
                  "free GiB", *(f"{p} GFLOP/s" for p in precisions), "clock ms"]]  # fmt: skip
        for number, rank in enumerate(ranks):
            if number >= MAX_ROWS and not rank["slow"]:
                continue
            rates = (
                f"{rank['matmul_flops'].get(p, 0) / 1e9:.0f}{' slow' * (p in rank['slow'])}"
                for p in precisions
            )
            facts = rank["facts"]
            table.append([str(number), rank["node"], rank["device"], rank["driver"] or "-",
                          facts["torch"], facts["accelerate"], rank["backend"],
                          str(rank["threads"]), f"{(rank['free_bytes'] or 0) / 2**30:.1f}", *rates,
                          f"{rank['clock_skew_seconds'] * 1e3:+.0f}"])  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        if len(ranks) > MAX_ROWS:
            lines.append(f"({len(ranks)} ranks; of those from {MAX_ROWS} on, only the slow ones)")
        lines.append(f"run folder: {report['run_dir']}")
    for result in report["all_reduce"]:
        lines.append(
            f"all-reduce of {result['bytes'] / 2**10:>9,.0f} KiB: {result['seconds'] * 1e3:9.3f} ms"
            f", {result['bus_bytes_per_second'] / 1e9:7.3f} GB/s per link, "
            f"{'right' if result['correct'] else 'WRONG'}"
        )
    lines += [f"note: {note}" for note in report["notes"]]
    lines += [f"problem: {problem}" for problem in report["problems"]]
    if report["problems"]:
        lines.append("verdict: do not train on these ranks before the problems above are solved")
    else:
        lines.append(f"verdict: ready to train (ranks: {report['num_processes']})")
    return "\n".join(lines)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _free_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return next(free, None)


def _nvidia_driver() -> str | None:
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    output = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    return next(iter(output.splitlines()), None)


if __name__ == "__main__":
    launch.run(lambda: sys.exit(main()))
