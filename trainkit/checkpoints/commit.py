"""In a thread, sync a checkpoint to the disk and give it its name, while the training continues.

Each process syncs and hashes its own files and leaves their hashes beside them, in
hashes-00001.json. The main process waits for those, writes MANIFEST.json and renames the folder.
Nothing communicates but by files: a collective in a thread would mix with those of the training.
"""

import json
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from trainkit.checkpoints.mirror import Mirror
from trainkit.errors import RunFailure
from trainkit.launch.processes import failing_together, wait_together
from trainkit.store.atomic import remove_tree, sync
from trainkit.store.log import JsonlTracker
from trainkit.store.manifest import (
    await_hashes,
    leave_hashes,
    make_durable,
    step_name,
    steps_in,
    write_manifest,
)
from trainkit.text import first_sentence

# How long the main process waits, after an error, for the hashes of others, which may be dead.
LAST_SECONDS = 10.0


class Commits:
    """The thread of this process that makes its checkpoints durable, one at a time."""

    def __init__(
        self, accelerator: Accelerator, tracker: JsonlTracker, keep: int, mirror: Mirror | None
    ):
        self.accelerator = accelerator
        self.tracker = tracker
        self.keep = keep
        self.mirror = mirror  # a mirror on the main process alone
        self.what = ""
        self.thread = ThreadPoolExecutor(1, "checkpoint")  # the interpreter joins it at its end
        self.jobs: list[Future] = []
        self.leaving = threading.Event()

    def start(
        self, folder: Path, final: Path, trainer: dict[str, Any], what: str, started_at: float
    ) -> None:
        """Make `folder` durable in the thread, rename it to `final`, remove older checkpoints.

        Every process must call this, when all have written their files. `what` begins the message
        if this fails; started_at is of time.monotonic().
        """
        self.what = what
        rank = self.accelerator.process_index
        text = json.dumps(trainer, indent=2) + "\n"  # now: the training changes its values
        best = step_name(trainer["progress"]["best_step"])
        blocked = time.monotonic() - started_at

        def finish_own_files() -> dict[str, Any]:
            if rank == 0:
                (folder / "trainer.json").write_text(text)
                self.tracker.sync()
            files = make_durable(folder, rank)
            if rank != 0:
                leave_hashes(folder, rank, files)
            return files

        def commit() -> None:
            files = finishing.result()
            for other in range(1, self.accelerator.num_processes):
                files |= await_hashes(folder, other, self.leaving)
            write_manifest(folder, files)
            os.rename(folder, final)
            sync(final.parent)
            if self.mirror:
                self.mirror.copy(final, best)
            for old in steps_in(final.parent)[: -self.keep]:
                if old.name != best and not (self.mirror and self.mirror.is_copying(old.name)):
                    remove_tree(old)
            seconds = {"blocked_seconds": blocked, "save_seconds": time.monotonic() - started_at}
            self.tracker.log_timing({"saved": final.name, **seconds})

        finishing = self.thread.submit(finish_own_files)
        self.jobs = [finishing, self.thread.submit(commit if rank == 0 else finishing.result)]

    def failed(self) -> bool:
        """Has this process found that the newest checkpoint cannot be made durable?"""
        return any(job.done() and job.exception() is not None for job in self.jobs)

    def wait(self) -> None:
        """Wait until the newest checkpoint is durable. Every process must call this.

        Raises RunFailure on all of them if any has failed.
        """
        jobs = self.jobs
        self.jobs = []
        try:
            # The second job of the main process waits for what the first of each has written.
            for job in jobs:
                wait_together(self.accelerator, [job])
                with failing_together(self.accelerator, self.what, RunFailure):
                    job.result()
        except BaseException:  # also a second Ctrl-C, and gloo's word that a process has died
            self.leaving.set()
            raise

    def close(self) -> None:
        """At the end, wait for this process and shortly for the others, which may be dead."""
        wait(self.jobs[:1])
        if wait(self.jobs, LAST_SECONDS).not_done or self.failed():
            self.leaving.set()
        if self.mirror:
            self.mirror.close()
        self.thread.shutdown()
        for problem in filter(None, [job.exception() for job in self.jobs][-1:]):
            print(f"{self.what}: {first_sentence(problem)}", flush=True)
