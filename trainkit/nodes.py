"""Do all machines of this run have the same program, arguments, data and run folder?

Machines are installed and started one by one, so they can differ, and a run on machines that differ
hangs or, worse, trains. A "node" is what one launcher started.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import os
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from trainkit.launch import UsageError, git_revision

TOKEN_WAIT_SECONDS = 5.0  # a network file system may show a new file a little later


def check_nodes(accelerator: Accelerator, args: argparse.Namespace) -> None:
    """Refuse a run whose nodes were started differently or do not share --run-dir.

    Every process must call this, before any other collective. Raises UsageError on all of them.
    """
    # The data may lie elsewhere on another node: check_same compares what was read.
    arguments = {
        f"--{name.replace('_', '-')}": value
        for name, value in vars(args).items()
        if name not in ("dataset", "data")
    }
    check_same(accelerator, describe_node() | arguments)
    check_shared(accelerator, args.run_dir)


def check_same(accelerator: Accelerator, facts: dict[str, Any]) -> None:
    """Refuse a run whose nodes differ in one of these facts.

    Every process must call this. Raises UsageError, which names fact, nodes and values, on all.
    """
    if accelerator.num_processes == 1:
        return
    facts = {name: str(value) for name, value in facts.items()}
    if problems := find_differences(gather_object([{"node": node_name(), "facts": facts}])):
        raise UsageError(f"the nodes of this run differ: {'; '.join(problems)}")


def check_shared(accelerator: Accelerator, directory: Path) -> None:
    """Refuse a directory that is not one and the same for all processes; makes it if need be.

    Every process must call this. Raises UsageError on all of them.
    """
    if accelerator.num_processes == 1:
        return
    name, error, is_new = None, None, not directory.exists()
    if accelerator.is_main_process:
        name = f".tmp-token-{uuid.uuid4().hex}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / name).touch()
        except OSError as problem:
            error = f"{directory} cannot be used: {problem.strerror or problem}"
    name, error = broadcast_object_list([name, error])
    if error is not None:
        raise UsageError(error)
    seen = gather_object([{"node": node_name(), "seen": sees(directory / name)}])
    if accelerator.is_main_process:
        (directory / name).unlink(missing_ok=True)
        if is_new:
            with contextlib.suppress(OSError):  # not empty: another run just started in it
                directory.rmdir()  # open_run makes it again if the run is not refused
    if blind := sorted({rank["node"] for rank in seen if not rank["seen"]}):
        raise UsageError(
            f"{directory} is not the same folder on {' and '.join(blind)} as on {seen[0]['node']}: "
            "give a folder on a file system that all nodes share, by its full path"
        )


def sees(path: Path) -> bool:
    """True as soon as `path` exists here, False if it does not within TOKEN_WAIT_SECONDS."""
    deadline = time.monotonic() + TOKEN_WAIT_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def describe_node() -> dict[str, str]:
    """What must be equal on all nodes whatever the script: launch, versions, revision, source."""
    return {
        "processes per node": os.environ.get("LOCAL_WORLD_SIZE", "1"),
        # What the launcher read from the YAML, mixed_precision for one.
        **{name: os.environ[name] for name in sorted(os.environ) if name.startswith("ACCELERATE_")},
        **{name: importlib.metadata.version(name) for name in ("torch", "accelerate")},
        "git revision": str(git_revision()),
        "md5 of the source files": source_md5(),
    }


def source_md5() -> str:
    """md5 of the script and of this package: also where there is no git, and for edited files."""
    digest = hashlib.md5(usedforsecurity=False)
    for path in [Path(sys.argv[0]), *sorted(Path(__file__).parent.glob("*.py"))]:
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def node_name() -> str:
    """The node this process is on, for people: hosts are not enough, two nodes may share one."""
    return f"node {os.environ.get('GROUP_RANK', '0')} ({socket.gethostname()})"


def find_differences(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """One phrase for each fact that is not the same on all ranks.

    Args:
        ranks: for each rank "node", a name, and "facts", a dict of strings.
    """
    problems = []
    for fact in {name: None for rank in ranks for name in rank["facts"]}:
        values = [rank["facts"].get(fact, "not set") for rank in ranks]
        usual = Counter(values).most_common(1)[0][0]  # of equals the one that rank 0 has
        nodes: dict[str, list[str]] = {}
        for rank, value in zip(ranks, values, strict=True):
            if value != usual and rank["node"] not in nodes.setdefault(value, []):
                nodes[value].append(rank["node"])
        first = ranks[values.index(usual)]["node"]
        for value, names in nodes.items():
            who = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
            problems.append(f"{fact} is {value} on {who}, and {usual} on {first}")
    return problems
