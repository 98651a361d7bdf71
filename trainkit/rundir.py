"""A run folder belongs to one run at a time, and what is written into it survives a crash."""

import argparse
import fcntl
import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from accelerate import Accelerator
from safetensors.torch import save

from trainkit.launch import UsageError, describe_run, raise_together

LOCK_WAIT_SECONDS = 10.0


def open_run(accelerator: Accelerator, args: argparse.Namespace) -> TextIO | None:
    """Make --run-dir this run's own until the returned lock is closed or the process ends.

    Writes run.json. Without --resume, an earlier run in the folder is moved aside to `RUN_DIR.1`,
    `.2`, ...; nothing is deleted. Every process must call this. Raises UsageError on all of them if
    the folder cannot be written or another process is using it.
    """
    run_dir, lock, error = args.run_dir, None, None
    if accelerator.is_main_process:
        try:
            lock = _lock(run_dir, wait=args.resume is not None)
            if args.resume is None and (run_dir / "run.json").exists():
                aside = _move_aside(run_dir)
                accelerator.print(f"{run_dir} held an earlier run: moved to {aside}", flush=True)
                lock.close()
                lock = _lock(run_dir, wait=False)
            (run_dir / "DONE").unlink(missing_ok=True)
            write_json(run_dir / "run.json", describe_run(accelerator, args))
            (run_dir / "checkpoints").mkdir(exist_ok=True)
        except UsageError as problem:
            error = str(problem)
        except OSError as problem:
            error = f"--run-dir {run_dir} cannot be used: {problem.strerror or problem}"
    raise_together(accelerator, error)
    return lock


def close_run(lock: TextIO | None) -> None:
    """Give the folder back."""
    if lock is not None:
        lock.close()


def finish_run(
    accelerator: Accelerator, model: torch.nn.Module, run_dir: Path, metadata: dict[str, Any]
) -> None:
    """Write model.safetensors, which loads in plain PyTorch, and last of all DONE.

    Keys carry no `module.` and no `_orig_mod.`. The metadata of the file has one entry, "trainkit",
    `metadata` as JSON: one, because safetensors writes several in random order.
    """
    if not accelerator.is_main_process:
        return
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    weights = {name: tensor.cpu().contiguous() for name, tensor in plain.state_dict().items()}
    content = save(weights, metadata={"trainkit": json.dumps(metadata)})
    write_durably(run_dir / "model.safetensors", content)
    write_durably(run_dir / "DONE", b"")


def write_durably(path: Path, content: bytes) -> None:
    """Replace `path` in one step: after a crash it holds the old bytes or the new ones."""
    temporary = path.with_name(f".tmp-{path.name}")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_dir(path.parent)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """write_durably for a JSON object."""
    write_durably(path, (json.dumps(content, indent=2, default=str) + "\n").encode())


def sync_dir(directory: Path) -> None:
    """Make the names inside `directory` durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_tree(path: Path) -> None:
    """Remove a folder so that a crash leaves either all of it or nothing under its name."""
    trash = path.with_name(f".tmp-del-{path.name}-{os.getpid()}")
    os.rename(path, trash)
    shutil.rmtree(trash)


def _lock(run_dir: Path, wait: bool) -> TextIO:
    run_dir.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + (LOCK_WAIT_SECONDS if wait else 0.0)
    while True:
        file = open(run_dir / "run.lock", "a+")  # noqa: SIM115 (held open: it is the lock)
        try:
            # A record lock, not flock: loader workers are forked and must not inherit it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            if not isinstance(problem, BlockingIOError | PermissionError):
                file.close()
                raise
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            if time.monotonic() >= deadline:
                raise UsageError(
                    f"--run-dir {run_dir} is in use by {holder}: wait for it, stop it, or choose "
                    "another folder"
                ) from problem
            time.sleep(0.2)
            continue
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        return file


def _move_aside(run_dir: Path) -> Path:
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
        number += 1
    os.rename(run_dir, aside)
    return aside
