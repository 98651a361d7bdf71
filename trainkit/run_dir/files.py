"""A run folder belongs to one run at a time, and what is written into it survives a crash."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from filelock import BaseFileLock, FileLock, Timeout

from trainkit.config import TrainingConfig
from trainkit.errors import UsageError, failing_together

LOCK_WAIT_SECONDS = 10.0
# What a run writes, at its end and before.
END_OF_A_RUN = ("DONE", "*.safetensors", "curves.png")
RUN = ("run.json", "metrics.jsonl", "timing.jsonl", "checkpoints/step-*")


def open_run(accelerator: Accelerator, config: TrainingConfig) -> BaseFileLock | None:
    """Lock --run-dir for this run until the returned lock is released or the process ends.

    An earlier run in the folder is moved aside to `RUN_DIR.1`, `.2`, ... without --resume, or if it
    is done and its checkpoints are gone; nothing is deleted. Every process must call this. Raises
    UsageError on all of them if the folder cannot be written or another process is using it.
    """
    run_dir, held, moved_to = config.run_dir, None, None
    with failing_together(accelerator, f"--run-dir {run_dir} cannot be used"):
        if accelerator.is_main_process:
            # It may be moved aside: --run-dir .. would take the repository with it.
            if Path.cwd().is_relative_to(run_dir.resolve()):
                raise UsageError(f"--run-dir {run_dir}: choose a folder that you are not in")
            no_steps = not _holds(run_dir, "checkpoints/step-*")
            if config.resume == "latest" and no_steps:  # before anything is made
                raise UsageError(f"--resume latest: there is no checkpoint in {run_dir}")
            held = lock(run_dir, LOCK_WAIT_SECONDS if config.resume is not None else 0.0)
            over = config.resume == "auto" and no_steps and _holds(run_dir, *END_OF_A_RUN)
            if over or (config.resume is None and _holds(run_dir, *END_OF_A_RUN, *RUN)):
                moved_to = rename_free(run_dir, run_dir.name)
            (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
            sync(run_dir)
            sync(run_dir.parent)
    if moved_to:
        print(f"{run_dir} held an earlier run: moved to {moved_to}", flush=True)
    return held


def lock(run_dir: Path, wait_seconds: float) -> BaseFileLock:
    """The lock of a run folder, held until it is released or the process ends.

    It lies beside the folder, RUN_DIR.lock, so that the folder can be moved aside. UsageError is
    raised if another process has it.
    """
    real = run_dir.resolve()  # whatever link it was reached by
    path = real.with_name(f"{real.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(path)
    try:
        held.acquire(timeout=wait_seconds, poll_interval=0.2)
    except Timeout as problem:
        raise UsageError(
            f"--run-dir {run_dir} is in use by another process: wait for it, stop it (on its "
            f"machine `fuser {path}` names it), or choose another folder"
        ) from problem
    return held


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

    What a crash leaves has a name that begins with .tmp-.
    """
    trash = path.with_name(f".tmp-del-{path.name.removeprefix('.tmp-')}")
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


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
