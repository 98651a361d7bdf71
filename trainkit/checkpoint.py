"""Checkpoints that are either whole and durable or not there, and a resume that is exact.

    checkpoints/step-0000000468/    has this name only when it is complete and on the disk
        state/                      what accelerator.save_state wrote
        trainer.json                position of the run, running sums, size of the log
        MANIFEST.json               size and SHA-256 of every file

save() calls accelerator.save_state and resume() calls accelerator.load_state. Around them stands
what these do not do: files that are durable, and compared with their hashes before anything is
read; the averages of --ema, and a refusal of files that are missing or left over (the two hooks in
shards.py). Four things of load_state are not used:

* Objects registered with Accelerate: it unpickles them without weights_only, which executes what a
  forged file asks for. A checkpoint with such a file is neither written nor read.
* Random states: load_state restores them, or passes over them in silence. Nothing depends on them
  (trainkit.loaders says what takes their place), and numpy believes a forged position, so the
  generators are seeded anew afterwards.
* accelerator.step, the count of micro-batches, which is 0 between two optimizer steps.
* The kernels ("fused", "foreach") in a saved parameter group: this run's YAML chooses them.

A sharded run calls neither, and no run calls load_state for a sharded checkpoint: shards.py says
why, and reads and writes these.
"""

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from trainkit import shards

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from trainkit.cli.text import check_json
from trainkit.config import TrainingConfig
from trainkit.errors import RunFailure, UsageError, as_usage_error, failing_together
from trainkit.fingerprint import check_same_run, compare_worlds, describe_world
from trainkit.kernels import keeping_kernels
from trainkit.loaders import num_used
from trainkit.metrics import RunningMeans
from trainkit.private import prepared_optimizers
from trainkit.rng import seed_host
from trainkit.run_dir.files import remove_tree, rename_free, sync
from trainkit.run_dir.log import JsonlTracker
from trainkit.run_dir.manifest import choose, steps_in, write_manifest


@dataclass
class Progress:
    """Position of a run.

    Attributes:
        step: optimizer steps since the start of the run.
        epoch: epochs completed.
        batch: batches of --batch-size samples done in this epoch.
        num_skipped: batches without a step, because their fp16 gradients overflowed.
        metrics: the metrics of the last evaluation.
        metrics_step: the step of that evaluation.
        best, best_step: the best value of the metric of --keep-best, and its step.
        best_name: that metric and its direction, "eval_loss:min".
        num_worse: evaluations since then.
        ended: run.stop() or --patience has ended the run, whatever is left of it.
        state: run.state, the script's own.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    num_skipped: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    metrics_step: int = 0
    best: float | None = None
    best_step: int = 0
    best_name: str | None = None
    num_worse: int = 0
    ended: bool = False
    state: dict[str, Any] = field(default_factory=dict)


class Length:
    """How long a run is, and where in it an evaluation comes.

    Attributes:
        num_used: samples that an epoch uses.
        steps_per_epoch: optimizer steps of an epoch.
        last_step: of the run, by --epochs and --stop-after-steps.
        log_every: steps between rows of metrics.jsonl.
    """

    def __init__(self, config: TrainingConfig, num_samples: int):
        self.config = config
        self.num_used = num_used(num_samples, config.batch_size, config.drop_last)
        self.steps_per_epoch = math.ceil(self.num_used / config.batch_size)
        num_steps = config.epochs * self.steps_per_epoch
        self.last_step = min(num_steps, config.stop_after_steps or num_steps)
        self.log_every = config.log_every or min(50, max(1, num_steps // 50))

    def num_done(self, progress: Progress) -> int:
        """Samples of this epoch trained on so far."""
        return min(progress.batch * self.config.batch_size, self.num_used)

    def is_over(self, progress: Progress) -> bool:
        """Is there nothing left to train?"""
        at_end = progress.epoch == self.config.epochs or progress.step == self.last_step
        return progress.ended or at_end

    def must_evaluate(self, progress: Progress) -> bool:
        """Is an evaluation due before the next step? Not if it was done before a resume."""
        every = self.config.eval_every
        due = progress.batch == self.steps_per_epoch or (every and progress.step % every == 0)
        due = due or self.is_over(progress)  # stopped in the last evaluation
        return bool(due) and progress.step > progress.metrics_step


class Checkpoints:
    """The checkpoints of one run.

    Args:
        fingerprint: names and values that must be equal for a checkpoint to continue this run.
        averages: for each model the average of its weights by name, of --ema.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: TrainingConfig,
        fingerprint: dict[str, Any],
        tracker: JsonlTracker,
        means: RunningMeans,
        averages: Sequence[dict[str, torch.Tensor]] = (),
    ):
        self.accelerator, self.directory = accelerator, config.run_dir / "checkpoints"
        self.tracker, self.means, self.keep = tracker, means, config.keep
        self.averages = averages
        self.fingerprint = json.loads(json.dumps(fingerprint, default=str))
        self.saved_step = -1  # of the newest checkpoint
        written = averages if accelerator.is_main_process else ()
        accelerator.register_save_state_pre_hook(partial(shards.before_save, written))
        accelerator.register_load_state_pre_hook(partial(shards.before_load, accelerator, averages))

    def save(self, progress: Progress) -> None:
        """Save a checkpoint of this step. Every process must call this, after an optimizer step.

        When it returns, the checkpoint survives a crash. Raises RunFailure on all processes if any
        of them fails, RuntimeError if JSON changes run.state; older checkpoints are untouched.
        """
        check_json("run.state", progress.state)
        if progress.step == self.saved_step:
            return  # same weights; a resume repeats whatever was done since, for example evaluating
        accelerator, main = self.accelerator, self.accelerator.is_main_process
        final = self.directory / f"step-{progress.step:010d}"
        temporary = self.directory / f".tmp-{final.name}"
        sums, write_shard = self.means.state(), None
        if accelerator.is_fsdp2:
            write_shard = shards.writer(accelerator, self.averages)
        what = f"saving {final} failed, the older checkpoints are untouched"
        with failing_together(accelerator, what, RunFailure):
            if main:
                temporary.mkdir()  # not its parents: the run folder may have been moved away
                (temporary / "state").mkdir()
        with failing_together(accelerator, what, RunFailure):
            if write_shard is not None:
                write_shard(temporary / "state")
            else:
                accelerator.save_state(temporary / "state")
        with failing_together(accelerator, what, RunFailure):
            if main:
                self._commit(temporary, final, progress, sums)
        self.saved_step = progress.step

    def resume(self, wanted: str | None, last_step: int = sys.maxsize) -> Progress:
        """Load the checkpoint that --resume names and return where the run stood.

        None: a new run. "auto": the newest whole checkpoint; a new run if there is no checkpoint.
        "latest": the newest whole checkpoint, or fail. A path: exactly that checkpoint, or fail.
        Every process must call this. Raises UsageError on all of them, before any weight changes,
        if none is whole, or it is of another run or from after the last step of this run.
        """
        accelerator, main = self.accelerator, self.accelerator.is_main_process
        path, trainer = None, {}
        notices: list[str] = []
        with failing_together(accelerator, f"cannot resume from {self.directory}"):
            if main:
                for leftover in list(self.directory.glob(".tmp-*")):
                    remove_tree(leftover)
                path = choose(self.directory, wanted, notices)
                trainer = self._read(path, notices, last_step) if path else {}
        path, trainer = broadcast_object_list([path, trainer])
        progress = Progress(**trainer.get("progress", {}))
        with failing_together(accelerator, f"{path} cannot be loaded"):
            if path:
                self._load_state(path / "state")
                self.means.load(trainer["sums"])
                self.saved_step = progress.step
        with failing_together(accelerator, f"cannot resume from {self.directory}"):
            if main:
                # The run continues here: later checkpoints are renamed, the last one first, then
                # later rows cut. So "auto" can go on wherever a kill ends this.
                for newer in reversed(steps_in(self.directory)):
                    if newer.name >= f"step-{progress.step:010d}" and newer.name != path.name:
                        new = rename_free(newer, f"abandoned-{newer.name}")
                        notices.append(f"{newer.name} is now {new.name}")
                sync(self.directory)
                self.tracker.cut(trainer.get("log_bytes", 0))
                sync(self.directory.parent)
        accelerator.step = 0  # of micro-batches; a checkpoint lies between two optimizer steps
        for notice in notices:
            print(notice, flush=True)
        if path:
            self.tracker.log_timing({"resumed_at": progress.step})  # the curves mark it
        return progress

    def _load_state(self, folder: Path) -> None:
        accelerator, scaler = self.accelerator, self.accelerator.scaler
        with keeping_kernels(prepared_optimizers(accelerator)):
            if accelerator.is_fsdp2 or (folder / "shard-00000.bin").exists():
                shards.read(accelerator, self.averages, folder)
                return
            if not (folder / "scaler.pt").exists():  # not saved under fp16: a new loss scale
                accelerator.scaler = None
            accelerator.load_state(
                folder.resolve(),  # it would expand a ~
                load_kwargs={"mmap": True, "weights_only": True},
                map_location="cpu",  # or a card would hold all moments twice
                strict=False,  # what is frozen is in no checkpoint
            )
        accelerator.scaler = scaler
        seed_host(0)  # else by random_states_*.pkl

    def _read(self, path: Path, notices: list[str], last_step: int) -> dict[str, Any]:
        """trainer.json of a whole checkpoint, if it belongs to this run."""
        with as_usage_error(f"{path / 'trainer.json'} cannot be used"):
            trainer = json.loads((path / "trainer.json").read_text())
            check_same_run(path, trainer["fingerprint"], self.fingerprint)
            notices.extend(compare_worlds(trainer["world"], describe_world(self.accelerator)))
            step = Progress(**trainer["progress"]).step
            if step > last_step:
                raise UsageError(
                    f"{path} is of step {step} and this run ends at step {last_step}: raise "
                    "--epochs or --stop-after-steps, or resume from an older checkpoint"
                )
        return trainer

    def _commit(self, temporary: Path, final: Path, progress: Progress, sums: dict) -> None:
        trainer = {
            "progress": asdict(progress),
            "sums": sums,
            "log_bytes": self.tracker.sync(),
            "fingerprint": self.fingerprint,
            "world": describe_world(self.accelerator),
        }
        (temporary / "trainer.json").write_text(json.dumps(trainer, indent=2) + "\n")
        write_manifest(temporary)
        os.rename(temporary, final)
        sync(self.directory)
        for old in steps_in(self.directory)[: -self.keep]:
            if old.name != f"step-{progress.best_step:010d}":
                remove_tree(old)
