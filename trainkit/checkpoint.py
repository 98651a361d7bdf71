"""Checkpoints that are either whole and durable or not there, and a resume that is exact.

    checkpoints/step-0000000468/    exists under this name only when complete and on the disk
        state/                      what accelerator.save_state wrote
        trainer.json                position of the run, running sums, size of the log
        MANIFEST.json               size and SHA-256 of every file, and of itself

Nothing is registered with Accelerate (it would be unpickled without weights_only), and nothing
relies on saved random states (trainkit.order says what takes their place).
"""

import hashlib
import json
import os
import re
import shutil
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from trainkit.history import History, RunningSums
from trainkit.launch import RunFailure, UsageError, explained, failing_together
from trainkit.manifest import verify, write_manifest
from trainkit.rundir import remove_tree, sync

STEP_NAME = re.compile(r"step-\d{10}")


@dataclass
class Progress:
    """Position of a run.

    Attributes:
        step: optimizer steps since the start of the run.
        epoch: epochs completed.
        batch: batches of --batch-size samples done in this epoch.
        num_skipped: batches whose fp16 gradients overflowed, so that no step was made.
        metrics: the last row that an epoch wrote.
        evaluated_at: the step of that row.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    num_skipped: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    evaluated_at: int = 0

    def advance(self, accelerator: Accelerator) -> bool:
        """Count the batch whose gradients were just used. True if an optimizer step was made."""
        if not accelerator.sync_gradients:
            return False  # inside an accumulation window
        self.batch += 1
        skipped = accelerator.optimizer_step_was_skipped
        self.step += not skipped
        self.num_skipped += skipped
        return not skipped


class Checkpoints:
    """The checkpoints of one run.

    Args:
        fingerprint: names and values that must be equal for a checkpoint to continue this run.
        keep: how many checkpoints to keep, at least 2.
        steps_per_epoch: batches of --batch-size samples in an epoch.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        run_dir: Path,
        history: History,
        sums: RunningSums,
        fingerprint: dict[str, Any],
        keep: int,
        steps_per_epoch: int,
    ):
        self.accelerator = accelerator
        self.directory = run_dir / "checkpoints"
        self.history, self.sums = history, sums
        self.fingerprint = json.loads(json.dumps(fingerprint, default=str))
        self.keep, self.steps_per_epoch = keep, steps_per_epoch
        self.last_step = -1

    def save(self, progress: Progress) -> None:
        """Save a checkpoint of this step. Every process must call this, after an optimizer step.

        When it returns, the checkpoint survives a crash. Raises RunFailure on all processes if any
        of them fails; the older checkpoints are then untouched.
        """
        if progress.step == self.last_step:
            return  # the same weights: whatever came after that step is repeated by a resume
        accelerator, main = self.accelerator, self.accelerator.is_main_process
        final = self.directory / f"step-{progress.step:010d}"
        temporary = self.directory / f".tmp-{final.name}"
        sums = self.sums.state()
        disk = next(path for path in self.directory.parents if path.exists())
        what = (
            f"saving {final} failed, the older checkpoints are untouched, "
            f"{shutil.disk_usage(disk).free // 2**20} MiB were free"
        )
        with failing_together(accelerator, what, RunFailure):
            if main:
                (temporary / "state").mkdir(parents=True)
        with failing_together(accelerator, what, RunFailure):
            accelerator.save_state(temporary / "state")
        with failing_together(accelerator, what, RunFailure):
            if main:
                self._commit(temporary, final, progress, sums)
        self.last_step = progress.step

    def resume(self, wanted: str | None, last_step: int = sys.maxsize) -> Progress:
        """Load the checkpoint that --resume names and return where the run stood.

        None: nothing. "auto": the newest whole one if there is any. "latest": the newest whole one.
        Otherwise a folder, which is taken or refused. Every process must call this. Raises
        UsageError on all of them; a damaged or foreign checkpoint, or one from behind the last step
        of this run, is found before a weight changes.
        """
        accelerator, main = self.accelerator, self.accelerator.is_main_process
        path, trainer, notices = None, {}, []
        with failing_together(accelerator, f"cannot resume from {self.directory}"):
            if main:
                for leftover in list(self.directory.glob(".tmp-*")):
                    remove_tree(leftover)
                path = self._choose(wanted, notices)
                trainer = self._read(path, notices, last_step) if path else {}
        path, trainer = broadcast_object_list([path, trainer])
        progress = Progress(**trainer.get("progress", {}))
        with failing_together(accelerator, f"{path} cannot be loaded"):
            if path:
                accelerator.load_state(path / "state")
                self.sums.load(trainer["sums"])
                self.last_step = progress.step
        with failing_together(accelerator, f"cannot resume from {self.directory}"):
            if main:
                # From here on the run continues: what it had done after this step is forgotten.
                self.history.cut(trainer.get("log_bytes", 0))
                sync(self.directory.parent)
                for newer in self._steps():
                    if newer.name >= f"step-{progress.step:010d}" and newer.name != path.name:
                        aside = self._set_aside(
                            newer, "damaged" if wanted in ("auto", "latest") else "abandoned"
                        )
                        notices.append(f"{newer.name} is now {aside.name}")
        accelerator.step = 0  # saved between two accumulation windows, at whatever world size
        for notice in notices:
            accelerator.print(notice, flush=True)
        if path:
            self.history.log_timing({"resumed_at": progress.step})  # plots.py marks the place
        return progress

    def _choose(self, wanted: str | None, notices: list[str]) -> Path | None:
        """The folder that --resume names, verified, or None for a fresh start."""
        if wanted is None:
            return None
        candidates = self._steps()
        if wanted not in ("auto", "latest"):
            candidates = [Path(wanted)]
            if candidates[0].resolve().parent != self.directory.resolve():
                raise UsageError(
                    f"--resume {wanted} is not in {self.directory}: a run continues in its own "
                    "folder, behind its own log; name that folder with --run-dir, or a copy of it"
                )
        damaged = []
        for path in reversed(candidates):
            if problem := verify(path):
                damaged.append(f"passed over {path}: {problem}")
                continue
            notices.extend([*damaged, f"resuming from {path}"])
            return path
        if damaged:
            raise UsageError(
                f"--resume {wanted}: no checkpoint is whole ({'; '.join(damaged)}); without "
                "--resume the run starts from the beginning and this folder is moved aside"
            )
        if wanted == "latest":
            raise UsageError(f"--resume latest: there is no checkpoint in {self.directory}")
        notices.append(f"no checkpoint in {self.directory}: starting from the beginning")
        return None

    def _read(self, path: Path, notices: list[str], last_step: int) -> dict[str, Any]:
        """trainer.json of a whole checkpoint, if it belongs to this run."""
        with explained(f"{path / 'trainer.json'} cannot be used"):
            trainer = json.loads((path / "trainer.json").read_text())
            before, now = trainer["fingerprint"], self.fingerprint
            for name in now | before:
                if before.get(name) != now.get(name):
                    raise UsageError(
                        f"{path} belongs to another run: {name} is {before.get(name)!r} there and "
                        f"{now.get(name)!r} here"
                    )
            before, now = trainer["world"], self._world()
            if now["mixed_precision"] == "fp16" != before["mixed_precision"]:
                raise UsageError(
                    f"{path} was saved with mixed_precision {before['mixed_precision']!r}, so it "
                    "has no loss scale, which fp16 needs: resume with the YAML it was saved under"
                )
            for name in now:
                if before[name] != now[name]:
                    notices.append(
                        f"{name} was {before[name]!r} and is {now[name]!r}: the run continues at "
                        "the same sample, but bits may differ from here"
                    )
            progress, totals = Progress(**trainer["progress"]), trainer["sums"]["totals"]
            counts = [progress.step, progress.epoch, progress.batch, progress.num_skipped]
            counts += [progress.evaluated_at, trainer["log_bytes"]]
            if any(type(count) is not int or count < 0 for count in counts):
                raise ValueError("a count is not a whole number")
            num_batches = progress.epoch * self.steps_per_epoch + progress.batch
            if (
                progress.batch > self.steps_per_epoch
                or progress.step + progress.num_skipped != num_batches
            ):
                raise ValueError("its counts contradict each other")
            ended = progress.step == progress.evaluated_at == last_step
            if progress.step >= last_step and not ended:
                raise UsageError(
                    f"{path} is of step {progress.step} and this run ends at step {last_step}: "
                    "raise --epochs or --stop-after-steps, or resume from an older checkpoint"
                )
            numbers = [*progress.metrics.values(), *totals.values()]
            if totals.keys() != self.sums.totals.keys() or {*map(type, numbers)} - {int, float}:
                raise ValueError("a sum or metric is not a number")
        return trainer

    def _world(self) -> dict[str, Any]:
        return {
            "num_processes": self.accelerator.num_processes,
            "mixed_precision": self.accelerator.mixed_precision,
            "micro_batches": self.accelerator.gradient_accumulation_steps,
            "device": self.accelerator.device.type,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }

    def _commit(self, temporary: Path, final: Path, progress: Progress, sums: dict) -> None:
        trainer = {
            "progress": asdict(progress),
            "sums": sums,
            "log_bytes": self.history.sync(),
            "fingerprint": self.fingerprint,
            "world": self._world(),
        }
        (temporary / "trainer.json").write_text(json.dumps(trainer, indent=2) + "\n")
        write_manifest(temporary, progress.step)
        os.rename(temporary, final)
        sync(self.directory)
        for old in self._steps()[: -self.keep]:
            remove_tree(old)

    def _steps(self) -> list[Path]:
        return sorted(p for p in self.directory.glob("step-*") if STEP_NAME.fullmatch(p.name))

    def _set_aside(self, path: Path, why: str) -> Path:
        aside, number = path.with_name(f"{why}-{path.name}"), 1
        while aside.exists():
            aside, number = path.with_name(f"{why}-{path.name}.{number}"), number + 1
        os.rename(path, aside)
        return aside


def md5(*tensors: torch.Tensor) -> str:
    """Hexadecimal md5 of the bytes of CPU tensors: which data is this?"""
    digest = hashlib.md5(usedforsecurity=False)
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy())
    return digest.hexdigest()
