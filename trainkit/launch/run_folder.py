"""The folder of a run: one run at a time uses it, and an earlier run in it is moved aside."""

import os
from fnmatch import fnmatch
from pathlib import Path

from accelerate import Accelerator
from filelock import BaseFileLock, FileLock, Timeout

from trainkit.config import TrainingConfig
from trainkit.errors import UsageError
from trainkit.launch.processes import failing_together
from trainkit.store.atomic import rename_free, sync

LOCK_WAIT_SECONDS = 10.0
# What a run writes at its end, and before that.
END_OF_A_RUN = ("DONE", "[!.]*.safetensors", "curves.png")
RUN = ("run.json", "metrics.jsonl", "timing.jsonl", "checkpoints/step-*")


def is_of_run(name: str) -> bool:
    """Is a file of this name, relative to a run folder, one that a run wrote?"""
    return any(fnmatch(name, pattern) for pattern in (*END_OF_A_RUN, *RUN))


def open_run(accelerator: Accelerator, config: TrainingConfig) -> BaseFileLock | None:
    """Lock --run-dir for this run until the returned lock is released or the process ends.

    Without --resume, or if an earlier run in the folder has ended and its checkpoints are gone,
    that run is moved aside to `RUN_DIR.1`, `.2`, ...; nothing is deleted. Every process must call
    this, and a UsageError is raised on all of them.
    """
    run_dir, held, moved_to = config.run_dir, None, None
    with failing_together(accelerator, f"--run-dir {run_dir} cannot be used"):
        if accelerator.is_main_process:
            real = run_dir.resolve()  # a link stays where it is, also if what it leads to is moved
            # It may be moved aside, and --run-dir .. would move the repository too.
            if Path.cwd().is_relative_to(real):
                raise UsageError(f"--run-dir {run_dir}: choose a folder that you are not in")
            no_steps = not _holds(real, "checkpoints/step-*")
            if config.resume == "latest" and no_steps and not config.mirror:
                raise UsageError(f"--resume latest: there is no checkpoint in {run_dir}")
            held = _lock(run_dir, LOCK_WAIT_SECONDS if config.resume is not None else 0.0)
            over = config.resume == "auto" and no_steps and _holds(real, *END_OF_A_RUN)
            if over or (config.resume is None and _holds(real, *END_OF_A_RUN, *RUN)):
                moved_to = _move_aside(run_dir, held)
                held = _lock(run_dir, 0.0)
            (real / "checkpoints").mkdir(parents=True, exist_ok=True)
            sync(real)
            sync(real.parent)
    if moved_to:
        beside = run_dir.with_name(moved_to.name)  # unless a link leads elsewhere
        moved_to = beside if beside.resolve() == moved_to else moved_to
        print(f"{run_dir} held an earlier run: moved to {moved_to}", flush=True)
    return held


def _lock(run_dir: Path, wait_seconds: float) -> BaseFileLock:
    path = run_dir.resolve() / "run.lock"  # the same path through any link
    path.parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(path)
    try:
        held.acquire(timeout=wait_seconds, poll_interval=0.2)
    except Timeout as problem:
        raise UsageError(
            f"--run-dir {run_dir} is in use by another process: wait for it, stop it (on "
            f"its machine `fuser {path}` names it), or choose another folder"
        ) from problem
    return held


def _move_aside(run_dir: Path, held: BaseFileLock) -> Path:
    """Rename the folder, without its lock, and return the new name."""
    real = run_dir.resolve()
    if os.path.ismount(real):
        raise UsageError(
            f"--run-dir {run_dir} holds an earlier run and cannot be moved aside, because "
            "something is mounted there: choose a folder inside it, or go on with --resume auto"
        )
    if os.name == "nt":  # where a folder with an open file cannot be renamed
        held.release()
    moved_to = rename_free(real, real.name)
    # Before the release: a process that waits for this file then tries the one of the new folder.
    (moved_to / "run.lock").unlink(missing_ok=True)
    held.release()
    return moved_to


def _holds(run_dir: Path, *names: str) -> bool:
    return any(next(run_dir.glob(name), None) is not None for name in names)
