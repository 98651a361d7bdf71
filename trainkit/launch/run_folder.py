"""The folder of a run: one run at a time uses it, and an earlier run in it is moved aside."""

from fnmatch import fnmatch
from pathlib import Path

from accelerate import Accelerator
from filelock import BaseFileLock, FileLock, Timeout

from trainkit.config import TrainingConfig
from trainkit.errors import UsageError
from trainkit.files.atomic import rename_free, sync
from trainkit.launch.together import failing_together

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


def _holds(run_dir: Path, *names: str) -> bool:
    return any(next(run_dir.glob(name), None) is not None for name in names)
