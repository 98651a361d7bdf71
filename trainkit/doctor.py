"""Can these machines train together? Launch it like a training script, before the first run.

accelerate launch --config_file accelerate_configs/2cpu.yaml -m trainkit.doctor --run-dir runs/mnist

If the launchers do not find each other, start it without them, one line per machine:

python -m trainkit.doctor --num-machines 2 --machine-rank 0 --main-process-ip HOST
"""

import argparse
import json
import os
import platform
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import gather_object
from torch.utils import collect_env

from trainkit import launch, startup, world
from trainkit.arguments import Parser
from trainkit.errors import UsageError

FORMAT = 1
ALL_REDUCES = {4 * 2**10: 50, 4 * 2**20: 10, 100 * 2**20: 2}  # bytes: repetitions
SLOW = 0.6  # of the median rank's rate; a rank that shares its core with one other process has 0.5
MATMUL_SECONDS = 0.5  # several turns of a busy core's scheduler
GLOO_SECONDS = 20
MAX_SKEW_SECONDS = 1.0
MIN_OPEN_FILES, MIN_SHM_BYTES = 4096, 2**30
MAX_ROWS = 32


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--run-dir", type=Path, default=Path("runs"), help="must be one folder for all ranks")
    add("--json", action="store_true", help="print one JSON object instead of text")
    add("--wait", type=float, default=8.0, help="seconds to wait for all ranks")
    add = parser.add_argument_group("without a launcher, one process per machine").add_argument
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
            raise UsageError("--num-machines needs --machine-rank and --main-process-ip")
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
        timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=120))
        on_cpu = not torch.accelerator.is_available()
        accelerator = Accelerator(cpu=on_cpu, kwargs_handlers=[timeout])
        world.check_world(accelerator)
        examine(accelerator, args.run_dir, report)
        accelerator.end_training()
    if int(os.environ.get("RANK", "0")) == speaker:
        print(json.dumps(report, indent=1) if args.json else as_text(report), flush=True)
    return 1 if report["problems"] else 0


def open_store(seconds: float) -> torch.distributed.Store | None:
    """The key-value store through which the ranks find each other; None for one process.

    Raises UsageError if nobody answers at its address.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    rank, host, port = (os.environ[name] for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    # Under a launcher the store is the launcher's.
    is_host = rank == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    deadline = time.monotonic() + seconds
    while not is_host:  # TCPStore's own attempt would end in pages of C++ frames
        try:
            socket.create_connection((host, int(port)), timeout=seconds).close()
            break
        except OSError as problem:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"rank {rank} on {world.node_name()} finds nobody at {host}:{port} "
                    f"({problem.strerror or problem}): start rank 0 on {host}; if it runs, look "
                    "for a firewall, a wrong address or a wrong port"
                ) from problem
            time.sleep(0.2)
    store = torch.distributed.TCPStore(
        host, int(port), is_master=is_host, timeout=timedelta(seconds=seconds),
        wait_for_workers=False, multi_tenant=True,  # Accelerator opens it once more
    )  # fmt: skip
    # The launcher's store outlives a restart of its processes.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return torch.distributed.PrefixStore(f"doctor/{restart}", store)


def find_missing_ranks(store: torch.distributed.Store, seconds: float) -> tuple[int, list[str]]:
    """Meet the other ranks; return the lowest one that came, and a sentence for each that did not.

    This is no collective, which would wait for the missing ones.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store.set(f"rank/{rank}", "")
    store.add("arrived", 1)
    deadline = time.monotonic() + seconds
    while (here := store.add("arrived", 0)) < world_size and time.monotonic() < deadline:
        time.sleep(0.05)
    # The first to decide decides for all: some may time out just as the last rank comes.
    outcome = store.compare_set("outcome", "", "whole" if here == world_size else "missing")
    if outcome == b"whole":
        return 0, []
    missing = [other for other in range(world_size) if not store.check([f"rank/{other}"])]
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    address = f"{os.environ['MASTER_ADDR']} {os.environ['MASTER_PORT']}"
    problems = [
        f"rank {other} never came (node {other // per_node}, local rank {other % per_node}): type "
        f"`nc -vz {address}` on that node, then read the end of what its process printed"
        for other in missing[:8]
    ]
    if missing[8:]:
        problems.append(f"{len(missing) - 8} more ranks never came, up to rank {missing[-1]}")
    time.sleep(1.0)  # the process that holds the store leaves last
    return min({*range(world_size)} - {*missing}, default=rank), problems


def examine(accelerator: Accelerator, run_dir: Path, report: dict[str, Any]) -> None:
    """Fill in the report. Every process must call this."""
    problems, notes = report["problems"], report["notes"]
    rank = describe_rank(accelerator) | {"matmul_flops": measure_matmul(accelerator)}
    ranks = report["ranks"] = gather_object([rank])
    report["num_processes"], report["run_dir"] = len(ranks), str(run_dir)
    report["num_nodes"] = len({rank["node"] for rank in ranks})
    names = [f"rank {number} on {rank['node']}" for number, rank in enumerate(ranks)]
    problems += world.find_differences(
        [{"node": name, "facts": rank["facts"]} for name, rank in zip(names, ranks, strict=True)]
    )
    for name, rank, skew in zip(names, ranks, measure_skew(accelerator), strict=True):
        rank["clock_skew_seconds"] = skew
        shares = {}
        for precision, flops in rank["matmul_flops"].items():
            rates = (r["matmul_flops"][precision] for r in ranks if precision in r["matmul_flops"])
            shares[precision] = flops / statistics.median_high(rates)
        rank["slow"] = [precision for precision, share in shares.items() if share < SLOW]
        if slow := ", ".join(f"{p} at {shares[p]:.0%} of the median rank" for p in rank["slow"]):
            problems.append(f"{name} is slow ({slow}) and every step waits for it: look for "
                            "another process on its cores or card (top, nvidia-smi)")  # fmt: skip
        if abs(skew) > MAX_SKEW_SECONDS:
            notes.append(f"the clock of {name} is off by {skew:.1f} s")
        if rank["open_files"] in range(MIN_OPEN_FILES):
            notes.append(f"{name} may open only {rank['open_files']} files (ulimit -n)")
        if rank["shm_bytes"] in range(MIN_SHM_BYTES):
            notes.append(f"{name} has {rank['shm_bytes'] / 2**20:.0f} MiB of /dev/shm: loader "
                         "workers and NCCL need it (docker run --shm-size)")  # fmt: skip
    try:
        world.check_shared_folder(accelerator, run_dir)
    except UsageError as error:
        problems.append(str(error))
    if len(ranks) > 1:
        problems += find_gloo_problem(accelerator)
        report["all_reduce"] = [measure_all_reduce(accelerator, *s) for s in ALL_REDUCES.items()]
    for result in report["all_reduce"]:
        if not result["correct"]:
            problems.append(f"an all-reduce of {result['bytes']} bytes gave wrong sums")


def describe_rank(accelerator: Accelerator) -> dict[str, Any]:
    """What this process runs on; "facts" are those that must be equal everywhere."""
    device, backend, driver = accelerator.device, accelerator.state.backend or "none", None
    name = _read_proc("cpuinfo", "model name") or platform.machine()
    free_bytes = int((_read_proc("meminfo", "MemAvailable") or "0").split()[0]) * 1024
    if device.type == "cuda":
        name, free_bytes = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[0]
        backend += " " + ".".join(map(str, torch.cuda.nccl.version()))
        driver = collect_env.get_nvidia_driver_version(collect_env.run)
    try:
        import resource

        open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except ImportError:  # Windows has neither the module nor such a low limit
        open_files = None
    shm = Path("/dev/shm")
    return {
        "node": world.node_name(),
        "host": socket.gethostname(),
        "device": name,
        "driver": driver,
        "backend": backend,
        "threads": torch.get_num_threads(),
        "free_bytes": free_bytes or None,
        "open_files": open_files,
        "shm_bytes": shutil.disk_usage(shm).free if shm.is_dir() else None,
        "facts": {**world.describe_node(), "the communication library": backend},
    }


def _read_proc(file: str, key: str) -> str | None:
    """The first value of this key in a file of Linux's /proc; None on other systems."""
    path = Path("/proc", file)
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)


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


def measure_skew(accelerator: Accelerator) -> list[float]:
    """Seconds by which each rank's clock is ahead of rank 0's, to within some milliseconds."""
    rounds = []
    for _ in range(5):
        accelerator.wait_for_everyone()
        clocks = gather_object([time.time()])
        rounds.append([clock - clocks[0] for clock in clocks])
    return [statistics.median(offsets) for offsets in zip(*rounds, strict=True)]


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
    reason, node = min(failed, key=lambda pair: "timeout" in pair[0])  # the others waited for it
    return [f"the gloo group that training opens beside {accelerator.state.backend} failed on "
            f"{node} ({reason}): if the hostname resolves to 127.0.0.1 there, the usual cause, "
            "set GLOO_SOCKET_IFNAME to the network interface that the nodes share"]  # fmt: skip


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
    slowest = max(gather_object([statistics.median(seconds[1:])]))
    return {
        "bytes": num_bytes,
        "seconds": slowest,
        "bus_bytes_per_second": 2 * (num - 1) / num * num_bytes / slowest,
        "correct": all(gather_object([correct])),
    }


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":  # where torch would raise
        torch.accelerator.synchronize(device)


def as_text(report: dict[str, Any]) -> str:
    """The report for people: a table of ranks, measurements, and last the verdict."""
    lines = []
    if ranks := report["ranks"]:
        table = pd.json_normalize(ranks).rename(columns=lambda name: name.removeprefix("facts."))
        table["rank"], table["slow"] = table.index, table["slow"].str.join(" ")
        table["free GiB"] = table["free_bytes"].astype(float) / 2**30
        table["clock ms"] = table["clock_skew_seconds"] * 1e3
        columns = ["rank", "node", "device", "driver", "torch", "accelerate", "backend", "threads",
                   "free GiB", "clock ms"]  # fmt: skip
        for precision in ranks[0]["matmul_flops"]:
            columns.append(f"{precision} GFLOP/s")
            table[columns[-1]] = table[f"matmul_flops.{precision}"] / 1e9
        shown = table.loc[(table.index < MAX_ROWS) | (table["slow"] != ""), [*columns, "slow"]]
        shown = shown.astype(object).fillna("-")
        lines.append(shown.to_string(index=False, float_format="{:,.1f}".format))
        if len(ranks) > MAX_ROWS:
            lines.append(f"({len(ranks)} ranks; from rank {MAX_ROWS} on only the slow ones)")
        lines.append(f"run folder: {report['run_dir']}")
    for result in report["all_reduce"]:
        lines.append(f"all-reduce of {result['bytes'] / 2**10:>9,.0f} KiB: "
                     f"{result['seconds'] * 1e3:9.3f} ms, "
                     f"{result['bus_bytes_per_second'] / 1e9:7.3f} GB/s per link, "
                     f"{'right' if result['correct'] else 'WRONG'}")  # fmt: skip
    lines += [f"note: {note}" for note in report["notes"]]
    lines += [f"problem: {problem}" for problem in report["problems"]]
    verdict = "do not train on these ranks before the problems above are solved"
    if not report["problems"]:
        verdict = f"ready to train (ranks: {report['num_processes']})"
    return "\n".join([*lines, f"verdict: {verdict}"])


if __name__ == "__main__":
    startup.run(lambda: sys.exit(main()))
