"""Save checkpoints that are either complete and durable or absent, and resume from them exactly.

    checkpoints/step-0000000468/    gets this name only once it is complete and on the disk
        state/                      the files of parts.py, and what was registered
        trainer.json                position of the run, running sums, size of the log
        MANIFEST.json               size and hash of every file

save() calls accelerator.save_state and resume() calls accelerator.load_state, or for a sharded run
what parts.py has instead. Of what load_state restores three things are not used: random states, the
count of micro-batches, and the kernels ("fused", "foreach") of a parameter group.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch.serialization import safe_globals
from torch.utils.serialization import config as serialization

from trainkit.checkpoints import parts
from trainkit.checkpoints.commit import Commits
from trainkit.checkpoints.contents import Contents
from trainkit.checkpoints.mirror import Mirror, open_mirror
from trainkit.checkpoints.resume import (
    abandon_later,
    choose,
    read_same_run,
    what_differs,
    world_facts,
)
from trainkit.checkpoints.sharded import rows_of
from trainkit.checkpoints.state import State
from trainkit.config import TrainingConfig
from trainkit.errors import RunFailure
from trainkit.hashes import digest_file
from trainkit.launch.processes import failing_together, on_main, wait_for_all
from trainkit.numbers.means import RunningMeans
from trainkit.numbers.optim import keep_when_loading
from trainkit.numbers.orders import Progress
from trainkit.numbers.randoms import seed_host
from trainkit.repairs.private_names import prepared_models, prepared_optimizers
from trainkit.repairs.replaced import count_micro_batches_anew, without_loss_scale
from trainkit.store.atomic import sync
from trainkit.store.jsons import to_json
from trainkit.store.log import JsonlTracker
from trainkit.store.manifest import step_name
from trainkit.store.weights import read_weights


class Checkpoints:
    """The checkpoints of one run.

    Args:
        fingerprint: names and values that a checkpoint must share with this run to continue it.
        contents: what its checkpoints hold.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: TrainingConfig,
        fingerprint: dict[str, Any],
        tracker: JsonlTracker,
        means: RunningMeans,
        contents: Contents,
    ):
        self.accelerator = accelerator
        self.directory = config.run_dir / "checkpoints"
        self.tracker = tracker
        self.means = means
        self.contents = contents
        registered = {"accelerator.register_for_checkpointing(...)": contents.kinds}
        self.fingerprint = json.loads(to_json(fingerprint | registered, default=str))
        self.world = world_facts(accelerator, max(1, config.accumulate))
        self.time_limit = config.time_limit
        self.has_mirror = config.mirror is not None
        self.mirror = open_mirror(accelerator, config)  # on the main process
        self.commits = Commits(accelerator, tracker, config.keep, self.mirror)
        for optimizer in prepared_optimizers(accelerator):
            keep_when_loading(optimizer.optimizer)
        self.saved_step = -1  # the step of the newest checkpoint
        # Of a resume in the middle of an epoch: the checkpoint and its trainer.json.
        self.loaded: tuple[Path, dict[str, Any]] | None = None
        self.parts: parts.Parts = {}  # of the checkpoint that is being written or read
        before_save = partial(parts.before_save, lambda: self.parts, accelerator.is_main_process)
        accelerator.register_save_state_pre_hook(before_save)
        accelerator.register_load_state_pre_hook(partial(parts.before_load, lambda: self.parts))

    def save(self, progress: Progress) -> None:
        """Save a checkpoint of this step. Every process must call this, after an optimizer step.

        This returns when the files are written; the next save waits until they are durable. Raises
        RunFailure on all processes if any fails, or if the previous save did.
        """
        if progress.step == self.saved_step:
            return  # same weights; a resume repeats what was done since, for example an evaluation
        self.contents.check()
        self.commits.wait()
        self._with_mirror(Mirror.wait_if_late)
        started_at = time.monotonic()
        accelerator = self.accelerator
        final = self.directory / step_name(progress.step)
        temporary = self.directory / f".tmp-{final.name}"
        trainer = self._trainer(progress)
        self.parts = self.contents.parts()
        registered = self.contents.registered()
        what = f"saving {final} failed, the older checkpoints are untouched"
        with failing_together(accelerator, what, RunFailure):
            if accelerator.is_main_process:
                temporary.mkdir()  # without parents: the run folder may have been moved away
                (temporary / "state").mkdir()
                if self.mirror:
                    self.mirror.take(temporary, has_best=progress.best_step > 0)
        # A CRC-32 of each tensor is a quarter of the CPU time, and the manifest has hashes.
        without_crc = serialization.patch({"save.compute_crc32": False})
        with failing_together(accelerator, what, RunFailure), without_crc:
            try:
                if accelerator.is_fsdp2:
                    parts.write_shards(accelerator, self.parts, temporary / "state")
                else:
                    accelerator.save_state(temporary / "state")
                if accelerator.is_main_process:
                    parts.save_tree(registered, temporary / "state" / "registered.bin")
            finally:
                wait_for_all(accelerator, self.time_limit)  # a slow disk is no lost process
        self.commits.start(temporary, final, trainer, what, started_at)
        self.saved_step = progress.step

    def _trainer(self, progress: Progress) -> dict[str, Any]:
        """The content of trainer.json."""
        return {
            "progress": asdict(progress),
            "sums": self.means.state(),
            "rows": self.tracker.num_rows,
            "fingerprint": self.fingerprint,
            "world": self.world,
            "moved": [sorted(names) for names in self.contents.frozen.moved],
        }

    @property
    def state(self) -> State:
        """What the script carries: run.state."""
        return self.contents.state

    def restore(self) -> None:
        """Undo what the script did at the start of an epoch in whose middle this run was resumed.

        The run that saved the checkpoint had done that before. Every process must call this.
        """
        if self.loaded is None:
            return
        path, trainer = self.loaded
        self.loaded = None
        with failing_together(self.accelerator, f"{path} cannot be loaded"):
            self._load(path / "state", trainer)

    def wait_for_mirror(self, seconds: float) -> None:
        """Wait for the mirror to have all, at most this long. Every process must call this."""
        self._with_mirror(lambda mirror: mirror.wait(seconds))

    def finish_mirror(self) -> None:
        """Copy what else the run left to the mirror. Every process must call this."""
        self._with_mirror(Mirror.finish)

    def _with_mirror(self, call: Callable[[Mirror], object]) -> None:
        """Let the main process do this while the others wait for it, however long it takes."""
        if self.has_mirror:
            mirror = self.mirror
            on_main(self.accelerator, "--mirror", lambda: mirror and call(mirror))

    def resume(self, wanted: str | None, last_step: int = sys.maxsize) -> Progress:
        """Load the checkpoint that --resume names, and return the position of the run.

        None starts a new run; "auto" does so if there is no checkpoint, "latest" and a path fail.
        Every process must call this. Raises UsageError on all of them, before any weight changes.
        """
        accelerator = self.accelerator
        check = partial(read_same_run, now=self.fingerprint, last_step=last_step)
        path, trainer, said = choose(accelerator, self.directory, self.mirror, wanted, check)
        progress = trainer.get("progress", Progress())
        with failing_together(accelerator, f"{path} cannot be loaded"):
            if path:
                self._load(path / "state", trainer)
                self.means.load(trainer["sums"])
                self.saved_step = progress.step
                if progress.metrics_step != progress.step:
                    self.loaded = path, trainer
        with failing_together(accelerator, f"cannot resume from {self.directory}"):
            if accelerator.is_main_process:
                # The run continues from this checkpoint. Rows are truncated only after later
                # checkpoints are renamed: if this is killed halfway, "auto" can still resume.
                said += what_differs(trainer, self.world)
                said += abandon_later(self.directory, progress.step, path)
                self.tracker.truncate(trainer["rows"] if path else 0)
                sync(self.directory.parent)
        self._with_mirror(lambda mirror: mirror.go_on(path, progress.best_step))
        print(*said, sep="\n", end="\n" * bool(said), flush=True)
        if path:
            self.tracker.log_timing({"resumed_at": progress.step})  # the curves mark this step
        return progress

    def _load(self, folder: Path, trainer: dict[str, Any]) -> None:
        """Load what a checkpoint holds; a UsageError comes before any weight changes."""
        accelerator = self.accelerator
        self.contents.frozen.moved = [set(names) for names in trainer["moved"]]
        self.parts = self.contents.parts()
        if (folder / parts.REST).exists():  # a sharded run saved it
            parts.read_shards(self.parts, folder)
        elif accelerator.is_fsdp2:
            parts.read_whole(self.parts, folder)
        else:
            self._load_state(folder)
        self.contents.load_registered(folder)

    def _load_state(self, folder: Path) -> None:
        accelerator = self.accelerator
        is_new_scale = not (folder / "scaler.pt").exists()  # it was saved without fp16
        with without_loss_scale(accelerator, hide=is_new_scale), safe_globals(parts.SAFE):
            accelerator.load_state(
                folder.resolve(),  # load_state would expand a ~
                load_kwargs={"mmap": True, "weights_only": True},
                map_location="cpu",  # else a GPU would hold all optimizer state twice
                strict=False,  # checkpoints leave out frozen weights
            )
        seed_host(0)  # replaces what random_states_*.pkl set
        count_micro_batches_anew(accelerator)  # a checkpoint is between two optimizer steps


def start_from(accelerator: Accelerator, config: TrainingConfig) -> tuple[str, str]:
    """Load the weights of --start-from into the first model; return a line about it and its hash.

    Both are "" if it is not given. Every process must call this. Raises UsageError on all of them.
    """
    path = config.start_from
    if path is None:
        return "", ""
    model = prepared_models(accelerator)[0]
    with failing_together(accelerator, f"--start-from {path} cannot be read"):
        tensors, line = read_weights(path, model)
        fingerprint = digest_file(path)
    state = model.state_dict()
    rows = {name: rows_of(state[name], value) for name, value in tensors.items()}
    model.load_state_dict(rows, strict=False)
    return line, fingerprint
