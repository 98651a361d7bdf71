"""Lock a run folder for one run at a time, and write files that survive a crash."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from filelock import BaseFileLock, FileLock, Timeout

from trainkit.config import TrainingConfig
from trainkit.errors import UsageError, failing_together

LOCK_WAIT_SECONDS = 10.0
# What a run writes at its end, and before that.
END_OF_A_RUN = ("DONE", "*.safetensors", "curves.png")
RUN = ("run.json", "metrics.jsonl", "timing.jsonl", "checkpoints/step-*")


def open_run(accelerator: Accelerator, config: TrainingConfig) -> BaseFileLock | None:
    """Lock --run-dir for this run until the returned lock is released or the process ends.

    Without --resume, or if an earlier run in the folder has ended and its checkpoints are gone,
    that run is moved aside to `RUN_DIR.1`, `.2`, ...; nothing is deleted. Every process must call
    this. Raises UsageError on all of them if the folder cannot be written or another process is
    using it.
    """
    run_dir = config.run_dir
    held = None
    moved_to = None
    with failing_together(accelerator, f"--run-dir {run_dir} cannot be used"):
        if accelerator.is_main_process:
            # It may be moved aside, and --run-dir .. would move the repository too.
            if Path.cwd().is_relative_to(run_dir.resolve()):
                raise UsageError(f"--run-dir {run_dir}: choose a folder that you are not in")
            no_steps = not _holds(run_dir, "checkpoints/step-*")
            if (
                config.resume == "latest" and no_steps and not config.mirror
            ):  # before anything is created
                raise UsageError(f"--resume latest: there is no checkpoint in {run_dir}")
            # Nothing was created until here.
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
    """Lock a run folder; the lock is held until it is released or the process ends.

    Its file is RUN_DIR.lock, beside the folder, so that the folder can be moved aside. Raises
    UsageError if another process holds the lock.
    """
    real = run_dir.resolve()  # the same path through any link
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


@contextmanager
def replacing(path: Path, tag: str = "") -> Iterator[Path]:
    """Yield the path of a file to write in the body, which then replaces `path` atomically.

    After a crash `path` holds either the old bytes or the new ones. If writing fails, nothing of it
    is left. tag: a part of the file's name, if several processes may write it at once.
    """
    temporary = path.with_name(f".tmp-{tag}{path.name}")
    temporary.unlink(missing_ok=True)  # it may be a link that somebody left there
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def write_durably(path: Path, content: bytes | Iterable[bytes | memoryview]) -> None:
    """Replace the content of `path` as replacing() does. The bytes may come in parts."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.writelines([content] if isinstance(content, bytes) else content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """write_durably for a JSON object."""
    write_durably(path, (json.dumps(content, indent=2, default=str) + "\n").encode())


def sync(path: Path) -> None:
    """Make the bytes of a file, or the names inside a folder, durable."""
    folder = path.is_dir()
    try:
        # Windows cannot sync a file that is open only for reading, and cannot open a folder.
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
    """Remove a folder so that after a crash either all of it is there or nothing has its name.

    The name of anything left over by a crash begins with .tmp-.
    """
    trash = path.with_name(f".tmp-del-{path.name.removeprefix('.tmp-')}")
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def _holds(run_dir: Path, *names: str) -> bool:
    return any(next(run_dir.glob(name), None) is not None for name in names)


def rename_free(path: Path, name: str) -> Path:
    """Rename to `name` in the same folder, or to the first free one of NAME.1, NAME.2, ..."""
    new = path.with_name(name)
    number = 0
    while new.exists():
        number += 1
        new = path.with_name(f"{name}.{number}")
    os.rename(path, new)
    return new
