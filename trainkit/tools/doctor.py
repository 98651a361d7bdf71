"""Check if these processes can train together. Start it like a training script before a first run.

accelerate launch --config_file accelerate_configs/2cpu.yaml -m trainkit.tools.doctor

It makes the same checks as a run does at its start, then measures sums over all processes and sees
if they are right; with copies of a sharded model (parallelism_config) also sums within a copy and
between copies. Exit code 2: a check failed; 1: the last lines printed say what is wrong; 0: ready.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from trainkit import startup

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import gather_object

from trainkit.checkpoints import sharded as shards
from trainkit.config import parse
from trainkit.errors import LoneFailure
from trainkit.launch import environment, nodes, processes
from trainkit.repairs.private_names import mesh_groups
from trainkit.run.plan import describe_world
from trainkit.run.session import end_training
from trainkit.text import first_sentence

SIZES = 4 * 2**10, 4 * 2**20, 100 * 2**20  # bytes
GLOO_SECONDS = 20
SUM_SECONDS = 60


@dataclass
class Config:
    run_dir: Path = Path("runs/mnist")
    """must be one folder for all"""
    timeout: float = 60.0
    """seconds to wait for a process"""


def main(argv: Sequence[str] | None = None) -> None:
    """Check and measure, and print the results; exit code 1 if the processes cannot train together.

    Raises UsageError on all processes if they were not started alike or do not share --run-dir.
    """
    config = parse(Config, argv)
    precision = environment.check_launch()
    timeout = timedelta(seconds=config.timeout)
    with processes.deadline(timeout):
        accelerator = Accelerator(
            cpu=not torch.accelerator.is_available(),
            mixed_precision=precision,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
        )
    shards.shard(accelerator)
    nodes.check_world(accelerator)
    accelerator.print(f"world: {describe_world(accelerator)}")
    nodes.check_same(accelerator, nodes.describe_node())
    nodes.check_shared_folder(accelerator, config.run_dir)
    problems = []
    if accelerator.num_processes > 1:
        problems += find_gloo_problem(accelerator)
        for num_bytes in SIZES:
            problems += find_wrong_sum(accelerator, num_bytes)
        for axis, group in mesh_groups(accelerator).items():
            problems += find_wrong_sum(accelerator, 4 * 2**20, axis, group)
    for problem in problems:
        accelerator.print(f"problem: {problem}")
    accelerator.print("not ready: solve these first" if problems else "ready to train")
    end_training(accelerator)
    sys.exit(bool(problems))


def find_gloo_problem(accelerator: Accelerator) -> list[str]:
    """Open the gloo group that training opens beside NCCL; return a sentence if that fails."""
    reason = ""
    try:
        torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=GLOO_SECONDS))
    except RuntimeError as problem:
        reason = str(problem).splitlines()[0]
    failed = [pair for pair in gather_object([(reason, nodes.node_name())]) if pair[0]]
    if not failed:
        return []
    reason, node = min(failed, key=lambda pair: "timeout" in pair[0])  # others only timed out
    return [
        f"the gloo group that training opens beside {accelerator.state.backend} failed on {node} "
        f"({reason}): if the hostname resolves to 127.0.0.1 there, the usual cause, set "
        "GLOO_SOCKET_IFNAME to the network interface that the nodes share"
    ]


def find_wrong_sum(
    accelerator: Accelerator,
    num_bytes: int,
    axis: str = "",
    group: torch.distributed.ProcessGroup | None = None,
) -> list[str]:
    """Sum float32 over all processes or along an axis of the mesh, and print the time.

    Returns a sentence if a sum is wrong. Raises LoneFailure, or ends this process with a sentence,
    if the sums do not end in time.
    """
    ranks = torch.distributed.get_process_group_ranks(group)
    others = f"processes {ranks}" + (f" along the axis {axis} of the mesh" if axis else "")
    tensor = torch.empty(num_bytes // 4, device=accelerator.device)
    accelerator.wait_for_everyone()
    try:
        with processes.deadline(timedelta(seconds=SUM_SECONDS), others):
            for _ in range(2):  # the first loads kernels and makes connections
                tensor.fill_(accelerator.process_index + 1)
                started_at = time.perf_counter()
                torch.distributed.all_reduce(tensor, group=group)
                if accelerator.device.type != "cpu":  # where torch would raise
                    torch.accelerator.synchronize()
                seconds = time.perf_counter() - started_at
    except RuntimeError as problem:
        what = f"process {accelerator.process_index} could not reach {others}"
        raise LoneFailure(f"{what} ({first_sentence(problem)})") from problem
    right = bool((tensor == sum(ranks) + len(ranks)).all())
    where = f" along {axis}" if axis else ""
    size = f"{num_bytes / 2**20:.3f} MiB"
    rate = f"{num_bytes / seconds / 1e9:.3f} GB/s"
    accelerator.print(f"all-reduce of {size}{where}: {seconds * 1e3:.3f} ms, {rate}")
    wrong = [rank for rank, right in enumerate(gather_object([right])) if not right]
    what = f"an all-reduce of {num_bytes} bytes{where}"
    return [f"{what} is wrong on processes {wrong}"] if wrong else []


if __name__ == "__main__":
    startup.run(main, prints_results=True)
