"""A run folder belongs to one run at a time, and what is written into it survives a crash."""

import argparse
import contextlib
import functools
import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from filelock import BaseFileLock, FileLock, Timeout
from safetensors.torch import save

from trainkit.errors import RunFailure, UsageError, failing_together
from trainkit.world import describe_run

LOCK_WAIT_SECONDS = 10.0
# What a run writes, at its end and before.
END_OF_A_RUN = ("DONE", "*.safetensors", "curves.png")
RUN = ("run.json", "metrics.jsonl", "timing.jsonl", "checkpoints/step-*")


def open_run(accelerator: Accelerator, args: argparse.Namespace) -> BaseFileLock | None:
    """Lock --run-dir for this run until the returned lock is released or the process ends.

    An earlier run in the folder is moved aside to `RUN_DIR.1`, `.2`, ... without --resume, or if it
    is done and its checkpoints are gone; nothing is deleted. Every process must call this. Raises
    UsageError on all of them if the folder cannot be written or another process is using it.
    """
    run_dir, held, moved_to = args.run_dir, None, None
    with failing_together(accelerator, f"--run-dir {run_dir} cannot be used"):
        if accelerator.is_main_process:
            if Path.cwd().is_relative_to(run_dir.resolve()):
                raise UsageError(f"--run-dir {run_dir}: choose a folder that you are not in")
            if run_dir.is_symlink():  # it would be moved aside, and the lock would stay behind
                raise UsageError(
                    f"--run-dir {run_dir} is a symbolic link: give {run_dir.resolve()} itself"
                )
            held = lock(run_dir, LOCK_WAIT_SECONDS if args.resume is not None else 0.0)
            no_steps = not _holds(run_dir, "checkpoints/step-*")
            over = args.resume == "auto" and no_steps and _holds(run_dir, *END_OF_A_RUN)
            if over or (args.resume is None and _holds(run_dir, *END_OF_A_RUN, *RUN)):
                moved_to = rename_free(run_dir, run_dir.name)
            refuse_links(run_dir.glob("*"))
            (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
            sync(run_dir)
            sync(run_dir.parent)
    if moved_to:
        print(f"{run_dir} held an earlier run: moved to {moved_to}", flush=True)
    return held


def check_still_there(run_dir: Path) -> None:
    """Raise RunFailure if somebody moved or removed the run folder while the run wrote into it."""
    if not run_dir.exists():
        raise RunFailure(
            f"{run_dir} was moved or removed during the run: its checkpoints are whole where it is "
            "now, so give that place as --run-dir, with --resume auto"
        )


def lock(run_dir: Path, wait_seconds: float) -> BaseFileLock:
    """The lock of a run folder, held until it is released or the process ends.

    UsageError is raised if another process has it.

    It lies beside the folder, RUN_DIR.lock, so that the folder can be moved aside.
    """
    real = run_dir.resolve()  # whatever link it was reached by
    path = real.with_name(f"{real.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # Windows lets nobody else read a locked file
        locks = path.is_file() and re.match(r"process \d+ on |$", path.read_text(errors="replace"))
        if path.exists() and not locks:
            raise UsageError(
                f"--run-dir {run_dir} needs {path}, which is no lock: rename one of them"
            )
    held = FileLock(path)
    try:
        held.acquire(timeout=wait_seconds, poll_interval=0.2)
    except Timeout as problem:
        if not path.exists():
            raise UsageError(
                f"--run-dir {run_dir} cannot be used: no file can be made in {path.parent}"
            ) from problem
        holder = "another process"
        with contextlib.suppress(OSError):  # Windows lets nobody else read a locked file
            holder = path.read_text().strip() or holder
        raise UsageError(
            f"--run-dir {run_dir} is in use by {holder}: wait for it, stop it, or choose another "
            "folder"
        ) from problem
    with contextlib.suppress(PermissionError):
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    return held


def record_run(accelerator: Accelerator, args: argparse.Namespace) -> None:
    """Write run.json and take DONE away. Call after the resume, in every process.

    Not before: a resume that is refused leaves the earlier run as it was.
    """
    with failing_together(accelerator, f"--run-dir {args.run_dir} cannot be used"):
        if accelerator.is_main_process:
            (args.run_dir / "DONE").unlink(missing_ok=True)
            write_json(args.run_dir / "run.json", describe_run(accelerator, args))


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> None:
    """Write a safetensors file that loads in plain PyTorch.

    Its metadata have one entry, "trainkit", `metadata` as JSON: one, because safetensors writes
    several in random order.
    """
    write_durably(path, to_safetensors(tensors, metadata))


def to_safetensors(tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> bytes:
    """What write_tensors writes."""
    # Copied: safetensors refuses two names of one memory, which tied weights are.
    tensors = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    return save(tensors, metadata={"trainkit": json.dumps(metadata)})


def write_durably(path: Path, content: bytes) -> None:
    """Replace `path` in one step: after a crash it holds the old bytes or the new ones."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.unlink(missing_ok=True)  # it may be a link that somebody left there
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
    folder = path.is_dir()
    try:
        # Windows syncs no file that is open only for reading, and opens no folder.
        handle = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    except PermissionError:
        if folder:
            return
        raise
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
    if trash.is_symlink() or not trash.is_dir():
        trash.unlink()  # a link, never what it names
    else:
        delete = functools.partial(shutil.rmtree, ignore_errors=True)
        threading.Thread(target=delete, args=(trash,)).start()


def refuse_links(paths: Iterable[Path]) -> None:
    """Raise UsageError if one is a symbolic link: what a run writes stays in its own folder.

    Also if there is a folder, or a pipe, in the place of a file.
    """
    for path in paths:
        if path.is_symlink():
            raise UsageError(
                f"{path} is a symbolic link, and a run writes into its own folder "
                "alone: replace the link by what it names"
            )
        if path.suffix in (".jsonl", ".json", ".safetensors") and not path.is_file():
            raise UsageError(f"{path} is no file, and a run writes one there: remove it")


def _holds(run_dir: Path, *names: str) -> bool:
    return any(next(run_dir.glob(name), None) is not None for name in names)


def rename_free(path: Path, name: str) -> Path:
    """Rename to `name` in the same folder, or to the first of NAME.1, NAME.2, ... that is free."""
    new, number = path.with_name(name), 0
    while new.exists():
        number += 1
        new = path.with_name(f"{name}.{number}")
    os.rename(path, new)
    return new
