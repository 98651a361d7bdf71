"""Check that this is the world that the YAML asks for, and that all its nodes are alike.

A run on machines that differ hangs, or silently trains wrong. A "node" is the group of all
processes that one launcher started.
"""

import importlib.metadata
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from trainkit.config import TrainingConfig, flag
from trainkit.errors import UsageError
from trainkit.hashes import digest, digest_file
from trainkit.launch.processes import failing_together, raise_together, wait_for_all
from trainkit.store.places import shown

SHOWN_SECONDS = 5.0  # a network file system may show a new file a little later


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


def first_on_each_node(
    accelerator: Accelerator, load: Callable[[], Any], timeout: timedelta
) -> Any:
    """Return load(), called first by one process per file system, so that it fills a cache once.

    Every process must call this. A UsageError on any of them is raised on all.
    """
    result = error = None
    # If machines share a disk, rank 0 goes first; if not, local rank 0 of each machine.
    turn = 2 - accelerator.is_main_process - accelerator.is_local_main_process
    for number in range(3):
        if number == turn:
            try:
                result = load()
            except UsageError as problem:  # raised later, because the other processes wait
                error = str(problem)
        wait_for_all(accelerator, timeout)
    raise_together(accelerator, error)
    return result


def check_nodes(accelerator: Accelerator, config: TrainingConfig) -> None:
    """Refuse a run whose nodes were started differently or do not share --run-dir.

    Every process must call this, before any other collective.
    """
    may_differ = config.nodes_may_differ
    flags = {flag(n): value for n, value in vars(config).items() if n not in may_differ}
    check_same(accelerator, describe_node() | flags)
    check_shared_folder(accelerator, config.run_dir)


def check_same(accelerator: Accelerator, described: dict[str, Any]) -> None:
    """Refuse a run whose nodes, or processes, differ in a value. Every process must call this."""
    described = {name: shown(str(value)) for name, value in described.items()}
    everybody = gather_object([(node_name(), described)])
    for name in dict.fromkeys(name for _, theirs in everybody for name in theirs):
        values = [(node, theirs.get(name, "not set")) for node, theirs in everybody]
        if len({value for _, value in values}) == 1:
            continue
        places: dict[str, str] = {}
        for rank, (node, value) in enumerate(values):
            places.setdefault(value, f"process {rank} of {node}")
        said = ", and ".join(f"{value} on {place}" for value, place in places.items())
        raise UsageError(
            f"the processes of this run differ: {name} is {said}: start all of them with the same "
            "command, code, packages and data, and let nothing depend on the rank or on an "
            "unsorted set"
        )


def check_shared_folder(accelerator: Accelerator, run_dir: Path) -> None:
    """Refuse a run folder that is not the same for all processes. Every process must call this."""
    if accelerator.num_processes == 1:
        return
    name, folder = "", run_dir.parent  # it may be moved aside
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


def describe_node() -> dict[str, str]:
    """What must be equal on all nodes for any script: launch, versions and source files."""
    by_launcher = ("ACCELERATE_", "PARALLELISM_CONFIG_DP_", "LOCAL_WORLD_SIZE")
    return {
        **{name: os.environ[name] for name in sorted(os.environ) if name.startswith(by_launcher)},
        **{name: importlib.metadata.version(name) for name in ("torch", "accelerate")},
        "hash of the source files": digest(repr(sorted(hash_sources().items()))),
    }


def hash_sources() -> dict[str, str]:
    """The hash of each file that this process has imported of the kit or from beside the script."""
    script = Path(sys.argv[0]).resolve()
    kit = Path(__file__).resolve().parents[1]
    # Texts, because thousands of modules are compared with them.
    of_kit, beside = f"{kit}{os.sep}", f"{script.parent}{os.sep}"
    folders = {str(script): script.parent}
    for module in [*sys.modules.values()]:
        name = getattr(module, "__file__", None) or ""
        if name.startswith(of_kit):
            folders[name] = kit.parent
        elif name.startswith(beside) and "site-packages" not in name:
            folders[name] = script.parent
    return {
        Path(name).relative_to(folder).as_posix(): digest_file(Path(name))
        for name, folder in folders.items()
        if Path(name).is_file()
    }


def node_name() -> str:
    """The node of this process, for messages. It has a number: two nodes may share a host."""
    return f"node {os.environ.get('GROUP_RANK', '0')} ({socket.gethostname()})"
