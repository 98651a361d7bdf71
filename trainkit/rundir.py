"""A run folder belongs to one run at a time, and what is written into it survives a crash."""

import argparse
import fcntl
import json
import os
import shutil
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from accelerate import Accelerator
from safetensors.torch import save

from trainkit.launch import RunFailure, UsageError, describe_run, failing_together

LOCK_WAIT_SECONDS = 10.0


def open_run(accelerator: Accelerator, args: argparse.Namespace) -> TextIO | None:
    """Make --run-dir this run's own until the returned lock is closed or the process ends.

    An earlier run in the folder is moved aside to `RUN_DIR.1`, `.2`, ... without --resume, or if it
    is done and its checkpoints are gone; nothing is deleted. Every process must call this. Raises
    UsageError on all of them if the folder cannot be written or another process is using it.
    """
    run_dir, lock = args.run_dir, None
    with failing_together(accelerator, f"--run-dir {run_dir} cannot be used"):
        if accelerator.is_main_process:
            if Path.cwd().is_relative_to(run_dir.resolve()):
                raise UsageError(f"--run-dir {run_dir}: choose a folder that you are not in")
            lock = _lock(run_dir, wait=args.resume is not None)
            no_steps = next(run_dir.glob("checkpoints/step-*"), None) is None
            over = args.resume == "auto" and no_steps and (run_dir / "DONE").exists()
            if over or (args.resume is None and _holds_a_run(run_dir)):
                aside = _move_aside(run_dir)
                accelerator.print(f"{run_dir} held an earlier run: moved to {aside}", flush=True)
                lock.close()
                lock = _lock(run_dir, wait=False)
            (run_dir / "checkpoints").mkdir(exist_ok=True)
            sync(run_dir)
            sync(run_dir.parent)
    return lock


def record_run(accelerator: Accelerator, args: argparse.Namespace) -> None:
    """Write run.json and take DONE away. Call after the resume, in every process.

    Not before: a resume that is refused leaves the earlier run as it was.
    """
    with failing_together(accelerator, f"--run-dir {args.run_dir} cannot be used"):
        if accelerator.is_main_process:
            (args.run_dir / "DONE").unlink(missing_ok=True)
            write_json(args.run_dir / "run.json", describe_run(accelerator, args))


def close_run(lock: TextIO | None) -> None:
    """Give the folder back."""
    if lock is not None:
        lock.close()


def finish_run(
    accelerator: Accelerator, model: torch.nn.Module, run_dir: Path, metadata: dict[str, Any]
) -> None:
    """Write model.safetensors, which loads in plain PyTorch, and last of all DONE.

    Keys carry no `module.` and no `_orig_mod.`. The metadata of the file has one entry, "trainkit",
    `metadata` as JSON: one, because safetensors writes several in random order. Every process must
    call this. Raises RunFailure on all of them if the disk is full.
    """
    with failing_together(accelerator, f"{run_dir} cannot be written", RunFailure):
        if accelerator.is_main_process:
            # unwrap_model would import torch's compiler, a second, to ask if it made this model.
            bare = accelerator.num_processes == 1 and "torch._dynamo" not in sys.modules
            plain = model if bare else accelerator.unwrap_model(model, keep_torch_compile=False)
            weights = {name: value.cpu().contiguous() for name, value in plain.state_dict().items()}
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
    sync(path.parent)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """write_durably for a JSON object."""
    write_durably(path, (json.dumps(content, indent=2, default=str) + "\n").encode())


def sync(path: Path) -> None:
    """Make the bytes of a file, or the names inside a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_tree(path: Path) -> None:
    """Remove a folder so that a crash leaves either all of it or nothing under its name.

    Its name is gone at once; its bytes go while the caller works on, because freeing them takes as
    long as writing them. What a crash leaves has a name that begins with .tmp-.
    """
    trash = path.with_name(f".tmp-del-{os.getpid()}-{path.name.removeprefix('.tmp-')}")
    os.rename(path, trash)
    threading.Thread(target=shutil.rmtree, args=(trash,), kwargs={"ignore_errors": True}).start()


def _lock(run_dir: Path, wait: bool) -> TextIO:
    path = run_dir / "run.lock"
    deadline = time.monotonic() + (LOCK_WAIT_SECONDS if wait else 0.0)
    while True:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+")  # noqa: SIM115 (held open: it is the lock)
        try:
            # A record lock, not flock: loader workers are forked and must not inherit it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as problem:
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
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            return file
        file.close()  # another run moved the folder aside between the two lines: try again


def _holds_a_run(run_dir: Path) -> bool:
    names = ("run.json", "metrics.jsonl", "checkpoints/step-*")
    return any(next(run_dir.glob(name), None) is not None for name in names)


def _move_aside(run_dir: Path) -> Path:
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
        number += 1
    os.rename(run_dir, aside)
    return aside
