"""Save checkpoints that are either complete and durable or absent, and resume from them exactly.

    checkpoints/step-0000000468/    gets this name only once it is complete and on the disk
        state/                      the files that accelerator.save_state writes, or the shards
        trainer.json                position of the run, running sums, size of the log; for a
                                    sharded run also that part of its state that is not tensors,
                                    as is that of what the script registered
        MANIFEST.json               size and hash of every file

save() calls accelerator.save_state and resume() calls accelerator.load_state. This module adds
three things to them: the files become durable while the training continues (durable.py); their
hashes are compared before any file is read; and two hooks in shards.py save the averages of --ema
and refuse missing and extra files. What was registered with Accelerate is saved by registered.py.
Four things that load_state restores are not used:

* Objects registered with Accelerate. It unpickles them without weights_only, so a forged file could
  execute code. A checkpoint with a file that it pickled is not read.
* Random states. load_state restores them, or skips them without a message. Nothing depends on them
  (trainkit/numbers/loaders.py says what is used instead). numpy does not check the position in a
  saved state, which could be forged, so the generators are seeded again afterwards.
* accelerator.step, the count of micro-batches. It is 0 between two optimizer steps.
* The kernels ("fused", "foreach") in a saved parameter group. This run's YAML chooses them.

A sharded run calls neither function. Sharded checkpoints are written and read by shards.py, which
explains why, whatever run reads them.
"""

import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.utils.serialization import config as serialization

from trainkit.checkpoints import sharded as shards
from trainkit.checkpoints.commit import Commits
from trainkit.checkpoints.contents import Contents
from trainkit.checkpoints.fingerprint import (
    compare_sources,
    compare_worlds,
    read_same_run,
    world_facts,
)
from trainkit.checkpoints.mirror import Mirror, open_mirror
from trainkit.checkpoints.resume import abandon_later, choose
from trainkit.config import TrainingConfig
from trainkit.errors import RunFailure
from trainkit.hashes import digest_file
from trainkit.launch.nodes import hash_sources
from trainkit.launch.processes import failing_together, on_main, wait_for_all
from trainkit.numbers.means import RunningMeans
from trainkit.numbers.optim import keep_when_loading
from trainkit.numbers.orders import Progress
from trainkit.numbers.randoms import seed_host
from trainkit.repairs.private_names import prepared_optimizers
from trainkit.repairs.replaced import count_micro_batches_anew, without_loss_scale
from trainkit.store.atomic import sync
from trainkit.store.jsons import to_json
from trainkit.store.log import JsonlTracker
from trainkit.store.manifest import FORMAT, step_name
from trainkit.store.weights import read_weights
from trainkit.text import check_json, shorten

NUM_WATCHED = 3  # saves: every loop has then shown what it does after one


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
        self.fingerprint = json.loads(to_json(fingerprint, default=str))
        self.defaults = {field.name: field.default for field in fields(config)}
        self.sources = hash_sources()  # as this process has read them, whatever is edited later
        self.time_limit = config.time_limit
        self.has_mirror = config.mirror is not None
        self.mirror = open_mirror(accelerator, config)  # on the main process
        self.commits = Commits(accelerator, tracker, config.keep, self.mirror)
        for optimizer in prepared_optimizers(accelerator):
            keep_when_loading(optimizer.optimizer)
        self.saved_step = -1  # the step of the newest checkpoint
        self.num_watched = NUM_WATCHED  # saves, after which a change that they lack is refused
        # Of a resume in the middle of an epoch: the checkpoint, its trainer.json and run.state.
        self.loaded: tuple[Path, dict[str, Any], dict[str, Any]] | None = None
        self.parts: shards.Parts = {}  # of the checkpoint that is being written or read
        before_save = partial(shards.before_save, lambda: self.parts, accelerator.is_main_process)
        accelerator.register_save_state_pre_hook(before_save)
        accelerator.register_load_state_pre_hook(partial(shards.before_load, lambda: self.parts))

    def save(self, progress: Progress) -> None:
        """Save a checkpoint of this step. Every process must call this, after an optimizer step.

        This returns when the files are written. A thread makes them durable and gives the
        checkpoint its name; the next save waits for that, and so does commits.wait(). Raises
        RunFailure on all processes if any of them fails, or if the previous save did, and
        RuntimeError if run.state does not survive a round trip through JSON. Older checkpoints are
        not touched.
        """
        check_json("run.state", progress.state)
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
        save_state = accelerator.save_state
        if accelerator.is_fsdp2:
            trainer["state"], save_state = shards.writer(accelerator, self.parts)
        what = f"saving {final} failed, the older checkpoints are untouched"
        with failing_together(accelerator, what, RunFailure):
            if accelerator.is_main_process:
                temporary.mkdir()  # without parents: the run folder may have been moved away
                (temporary / "state").mkdir()
                if self.mirror:
                    self.mirror.take(temporary, has_best=progress.best_step > 0)
        # torch.save would compute a CRC-32 of each tensor, a quarter of the CPU time of a save (see
        # benchmarks/RECORDS.md). The manifest has a hash of each file instead.
        without_crc = serialization.patch({"save.compute_crc32": False})
        with failing_together(accelerator, what, RunFailure), without_crc:
            try:
                save_state(temporary / "state")
            finally:
                wait_for_all(accelerator, self.time_limit)  # a slow disk is no lost process
        self.commits.start(temporary, final, trainer, what, started_at)
        self.saved_step = progress.step
        if self.num_watched:
            self.contents.note()

    def _trainer(self, progress: Progress) -> dict[str, Any]:
        """The content of trainer.json; it chooses the parts of the checkpoint."""
        states, tensors = self.contents.registered.states()
        self.parts = self.contents.parts(tensors)
        return {
            "format": FORMAT,
            "progress": asdict(progress),
            "sums": self.means.state(),
            "log": self.tracker.state(),
            "fingerprint": self.fingerprint,
            "world": world_facts(self.accelerator),
            "sources": self.sources,
            "moved": [sorted(names) for names in self.contents.frozen.moved],
            "registered": {"kinds": self.contents.registered.kinds, "states": states},
        }

    def check_unchanged(self) -> None:
        """Refuse what a loop changes after run.save() and before its next batch: a resume lacks it.

        It is looked for after the first saves, in which every loop has shown it. Raises
        RuntimeError.
        """
        if self.num_watched:
            self.num_watched -= 1
            if names := self.contents.changed():
                raise RuntimeError(
                    f"{shorten(sorted(names))} was changed after run.save(), so the checkpoint "
                    "lacks the change: change it before run.end_step()"
                )

    def restore(self, progress: Progress) -> None:
        """Undo what the script did at the start of an epoch in whose middle this run was resumed.

        It does there what it does at the start of each epoch, such as copying a network, and the
        run that saved the checkpoint had done that before. Every process must call this.
        """
        if self.loaded is None:
            return
        path, trainer, state = self.loaded
        self.loaded = None
        progress.state.clear()
        progress.state.update(state)
        if not any(gather_object([bool(self.contents.changed())])):
            return
        with failing_together(self.accelerator, f"{path} cannot be loaded"):
            self._load(path / "state", trainer)

    def wait_for_mirror(self, seconds: float) -> None:
        """Wait until the mirror has the newest checkpoint, at most this long.

        Every process must call this.
        """
        self._with_mirror(lambda mirror: mirror.wait(seconds))

    def finish_mirror(self) -> None:
        """Copy what else the run left to the mirror. Every process must call this.

        Raises RunFailure on all of them with --mirror-must, if the mirror lacks something.
        """
        self._with_mirror(Mirror.finish)

    def _with_mirror(self, call: Callable[[Mirror], object]) -> None:
        """Let the main process do this while the others wait for it, however long it takes."""
        if self.has_mirror:
            mirror = self.mirror
            on_main(self.accelerator, "--mirror", lambda: mirror and call(mirror))

    def resume(self, wanted: str | None, last_step: int = sys.maxsize) -> Progress:
        """Load the checkpoint that --resume names, and return the position of the run.

        None starts a new run. "auto" loads the newest complete checkpoint, or starts a new run if
        there is no checkpoint. "latest" loads the newest complete checkpoint, or fails. A path
        loads exactly that checkpoint, or fails. Every process must call this. Raises UsageError on
        all of them, before any weight changes, if no checkpoint is complete, or if the checkpoint
        belongs to another run or is from after the last step of this run.
        """
        accelerator = self.accelerator
        main = self.accelerator.is_main_process
        notices: list[str] = []
        check = partial(
            read_same_run,
            now=self.fingerprint,
            last_step=last_step,
            defaults=self.defaults,
        )
        path, trainer = choose(self.directory, self.mirror, wanted, notices, check, accelerator)
        progress = trainer.get("progress", Progress())
        with failing_together(accelerator, f"{path} cannot be loaded"):
            if path:
                self._load(path / "state", trainer)
                self.means.load(trainer["sums"])
                self.saved_step = progress.step
                if progress.metrics_step != progress.step:
                    self.loaded = path, trainer, copy.deepcopy(progress.state)
                    self.contents.note()
        with failing_together(accelerator, f"cannot resume from {self.directory}"):
            if main:
                # The run continues from this checkpoint. Rows are truncated only after later
                # checkpoints are renamed: if this is killed halfway, "auto" can still resume.
                notices += compare_worlds(trainer.get("world", {}), world_facts(accelerator))
                notices += compare_sources(trainer, self.sources)
                notices.extend(abandon_later(self.directory, progress.step, path))
                notices += self.tracker.truncate(trainer.get("log"))
                sync(self.directory.parent)
        self._with_mirror(lambda mirror: mirror.go_on(path, trainer))
        count_micro_batches_anew(accelerator)  # a checkpoint is between two optimizer steps
        for notice in notices:
            print(notice, flush=True)
        if path:
            self.tracker.log_timing({"resumed_at": progress.step})  # the curves mark this step
        return progress

    def _load(self, folder: Path, trainer: dict[str, Any]) -> None:
        """Load what a checkpoint holds; a UsageError comes before any weight changes."""
        contents = self.contents
        registered = trainer.get("registered", {"kinds": [], "states": []})  # older ones lack both
        contents.registered.check_kinds(registered["kinds"])
        if moved := trainer.get("moved"):
            contents.frozen.set_moved(moved)
        states = registered["states"]
        tensors = contents.registered.places(states)
        self.parts = contents.parts(tensors)
        self._load_state(folder, trainer.get("state"))
        contents.registered.load(states, tensors)

    def _load_state(self, folder: Path, state: dict[str, Any] | None) -> None:
        accelerator = self.accelerator
        if state is not None:  # a sharded run saved it
            return shards.read(self.parts, folder, state)
        if accelerator.is_fsdp2:
            return shards.read_whole(self.parts, folder)
        is_new_scale = not (folder / "scaler.pt").exists()  # it was saved without fp16
        with without_loss_scale(accelerator, hide=is_new_scale):
            accelerator.load_state(
                folder.resolve(),  # load_state would expand a ~
                load_kwargs={"mmap": True, "weights_only": True},
                map_location="cpu",  # else a GPU would hold all optimizer state twice
                strict=False,  # checkpoints leave out frozen weights
            )
        seed_host(0)  # replaces what random_states_*.pkl set


def start_from(
    accelerator: Accelerator, config: TrainingConfig, model: torch.nn.Module
) -> tuple[str, str]:
    """Load the weights of --start-from; return a line about it and its hash, "" if not given.

    Every process must call this. Raises UsageError on all of them.
    """
    path = config.start_from
    if path is None:
        return "", ""
    with failing_together(accelerator, f"--start-from {path} cannot be read"):
        tensors, line = read_weights(path, model)
        fingerprint = digest_file(path)
    state = model.state_dict()
    rows = {name: shards.rows_of(state[name], value) for name, value in tensors.items()}
    model.load_state_dict(rows, strict=False)
    return line, fingerprint
