"""Check that this is the world that the YAML asks for, and that all its nodes are alike.

Machines are installed and started one by one, so they can differ. A run on machines that differ
hangs, or silently trains wrong. A "node" is the group of all processes that one launcher started.
"""

import hashlib
import importlib.metadata
import math
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from trainkit.config import TrainingConfig, flag
from trainkit.errors import UsageError, failing_together, raise_together
from trainkit.stores import shown

SHOWN_SECONDS = 5.0  # a network file system may show a new file a little later


@contextmanager
def deadline(timeout: timedelta, others: str = "the other processes") -> Iterator[None]:
    """End this process with one sentence if the body takes 5 seconds longer than timeout.

    It is for the first connection with other processes: if one of them died, gloo waits for it five
    times as long as its timeout, and signals are not handled meanwhile.
    """

    def give_up() -> None:
        print(
            f"error: process {os.environ.get('RANK', '0')} could not reach {others} "
            f"within {timeout.total_seconds():.0f} s: read their output, or run "
            "trainkit.tools.doctor",
            file=sys.stderr,
        )
        os._exit(1)

    timer = threading.Timer(timeout.total_seconds() + 5, give_up)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_world(accelerator: Accelerator) -> None:
    """Refuse a world other than the one the launcher announced. Call after Accelerator(...)."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != accelerator.num_processes:
        raise UsageError(
            f"{world_size} processes were started but Accelerate sees {accelerator.num_processes}, "
            "so they would overwrite each other's files: use a YAML from accelerate_configs/"
        )
    if accelerator.mixed_precision == "fp16" and accelerator.scaler is None:
        raise UsageError(
            f"on {accelerator.device.type} Accelerate trains in float32 where fp16 was asked for: "
            "use mixed_precision: bf16 or no"
        )


def first_on_each_node(accelerator: Accelerator, load: Callable[[], Any]) -> Any:
    """Return load(), called first by one process per file system, so that it fills a cache once.

    Every process must call this. A UsageError on any process is raised on all of them.
    """
    result = None
    error = None
    # If machines share a disk, rank 0 goes first; if not, local rank 0 of each machine. The body
    # must not raise a UsageError, because the other processes wait at a barrier.
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        try:
            result = load()
        except UsageError as problem:
            error = str(problem)
    raise_together(accelerator, error)
    return result


def check_nodes(accelerator: Accelerator, config: TrainingConfig) -> None:
    """Refuse a run whose nodes were started differently or do not share --run-dir.

    Every process must call this, before any other collective. Raises UsageError on all of them.
    """
    values = vars(config).items()
    may_differ = config.nodes_may_differ
    flags = {flag(name): value for name, value in values if name not in may_differ}
    check_same(accelerator, describe_node() | flags)
    check_shared_folder(accelerator, config.run_dir)


def check_same(accelerator: Accelerator, described: dict[str, Any]) -> None:
    """Refuse a run whose nodes differ in one of the described values.

    Every process must call this. Raises UsageError on all, with name, nodes and values.
    """
    described = {name: shown(str(value)) for name, value in described.items()}
    everybody = gather_object([(node_name(), described)])
    for name in dict.fromkeys(name for _, theirs in everybody for name in theirs):
        nodes = {theirs.get(name, "not set"): node for node, theirs in reversed(everybody)}
        if len(nodes) > 1:
            values = (f"{value} on {node}" for value, node in reversed(nodes.items()))
            raise UsageError(
                f"the nodes of this run differ: {name} is {', and '.join(values)}: start all of "
                "them with the same command, code, packages and data"
            )


def check_shared_folder(accelerator: Accelerator, run_dir: Path) -> None:
    """Refuse a run folder that is not the same folder for all processes.

    Every process must call this. Raises UsageError on all of them.
    """
    if accelerator.num_processes == 1:
        return
    name = ""
    folder = run_dir.parent  # beside it, where the lock will be
    with failing_together(accelerator, f"{run_dir} cannot be used"):
        if accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            name = Path(tempfile.mkstemp(prefix=".tmp-shared-", dir=folder)[1]).name
    (name,) = broadcast_object_list([name])
    give_up_at = time.monotonic() + SHOWN_SECONDS
    while not (seen := (folder / name).exists()) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    nodes = gather_object([(node_name(), seen)])
    if accelerator.is_main_process:
        (folder / name).unlink()
    for node, seen in nodes:
        if not seen:
            raise UsageError(
                f"{run_dir} is not the same folder on {node} as on {nodes[0][0]}: give a folder "
                "on a file system that all nodes share, by its full path"
            )


def agree(accelerator: Accelerator, metrics: dict[str, Any]) -> dict[str, float]:
    """Return the main process's metrics, so that all processes decide alike which is best.

    Every process must call this. Raises RuntimeError on all of them if theirs are not nearly equal.
    """
    plain = {  # tensors and arrays of one number become numbers
        name: v.item() if math.prod(getattr(v, "shape", (0,))) == 1 else v
        for name, v in metrics.items()
    }
    everybody = gather_object([plain])
    for name, value in (pair for theirs in everybody for pair in theirs.items()):
        if name in ("step", "epoch") or not isinstance(value, int | float):
            raise RuntimeError(
                f"run.end_epoch(...) got {name}: {value!r}: a metric must be a number, and must "
                "not be called step or epoch"
            )
    for rank, others in enumerate(everybody):
        for name, value in everybody[0].items():
            other = others.get(name, math.nan)
            if value == value and not math.isclose(value, other, rel_tol=1e-2, abs_tol=1e-6):
                raise RuntimeError(
                    f"{name} is {value:.6g} on process 0 and {other:.6g} on process {rank}: first "
                    "combine what the processes have evaluated, with accelerator.reduce"
                )
    return everybody[0]


class AllGather(torch.autograd.Function):
    """Tensors of equal sizes of all processes, (processes, ...): each adds to their gradients."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor) -> torch.Tensor:
        shares = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(shares, own)
        return torch.stack(shares)

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> torch.Tensor:
        gradients = gradients.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(gradients)
        return gradients[torch.distributed.get_rank()]


def gather_rows(rows: torch.Tensor, nums: Sequence[int]) -> torch.Tensor:
    """The rows of all processes, `nums` of each, with gradients. Every process must call this."""
    if len(nums) == 1:
        return rows
    # All processes must send equally many rows, so shorter shares are padded with zeros.
    padded = torch.cat((rows, rows.new_zeros(max(nums) - len(rows), *rows.shape[1:])))
    shares = AllGather.apply(padded)
    return torch.cat([share[:num] for share, num in zip(shares, nums, strict=True)])


def describe_node() -> dict[str, str]:
    """What must be equal on all nodes for any script: launch, versions and source files."""
    sources = repr(sorted(hash_sources().items())).encode()
    return {
        "processes per node": os.environ.get("LOCAL_WORLD_SIZE", "1"),
        # What the launcher read from the YAML, such as mixed_precision.
        **{
            name: os.environ[name]
            for name in sorted(os.environ)
            if name.startswith(("ACCELERATE_", "PARALLELISM_CONFIG_DP_"))
        },
        **{name: importlib.metadata.version(name) for name in ("torch", "accelerate")},
        "md5 of the source files": hashlib.md5(sources, usedforsecurity=False).hexdigest(),
    }


def hash_sources() -> dict[str, str]:
    """The md5 of each file of the kit, of the script, and of what it has imported from its folder.

    This works without git and covers edits that are not committed.
    """
    script, kit = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parents[1]
    loaded = [getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]]
    above = f"{script.parent}{os.sep}"
    inside = [name for name in loaded if name.startswith(above) and "site-packages" not in name]
    hashes = {}
    for folder, names in ((kit.parent, kit.rglob("*.py")), (script.parent, [script, *inside])):
        for path in filter(Path.is_file, map(Path, names)):
            md5 = hashlib.md5(path.read_bytes(), usedforsecurity=False)
            hashes[path.relative_to(folder).as_posix()] = md5.hexdigest()
    return hashes


def node_name() -> str:
    """The node of this process, for messages. It has a number: two nodes may share a host."""
    return f"node {os.environ.get('GROUP_RANK', '0')} ({socket.gethostname()})"
