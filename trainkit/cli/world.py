"""Describe the processes and hardware of a run, in words and for run.json."""

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from trainkit.config import TrainingConfig
from trainkit.launch.environment import num_copies
from trainkit.text import count


def describe_world(accelerator: Accelerator) -> str:
    """Return one line: number of processes, device, precision and threads."""
    device = accelerator.device.type
    threads = f", {count(torch.get_num_threads(), 'thread')} each" if device == "cpu" else ""
    if device == "cuda":
        device = torch.cuda.get_device_name(accelerator.device)
    precision = {"no": "float32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    processes = count(accelerator.num_processes, "process")
    sharded = ", sharded" if accelerator.is_fsdp2 else ""
    if (copies := num_copies(accelerator.num_processes)) > 1:
        sharded = f", {copies} copies, each sharded over {accelerator.num_processes // copies}"
    return f"{processes} on {device}, {precision}{threads}{sharded}"


def describe_run(accelerator: Accelerator, config: TrainingConfig) -> dict[str, Any]:
    """Return what a result depends on: arguments, versions, revision, world and hardware."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "accelerate")}
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "arguments": vars(config),
        "git_revision": git_revision(),
        "versions": {"python": platform.python_version(), **versions},
        "world": describe_world(accelerator),
        "num_processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def git_revision() -> str | None:
    """Return the commit of the script's folder, "-dirty" if files were edited; None without git."""
    git = ["git", "-C", str(Path(sys.argv[0]).resolve().parent), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):  # there is none
        output = subprocess.run(git, capture_output=True, check=False).stdout
        return output.decode(errors="replace").strip() or None
    return None
