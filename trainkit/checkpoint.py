"""Checkpoints that are either whole and durable or not there, and a resume that is exact.

    checkpoints/step-0000000468/    has this name only when it is complete and on the disk
        state/                      what accelerator.save_state wrote
        trainer.json                position of the run, running sums, size of the log
        MANIFEST.json               size and SHA-256 of every file

Nothing is registered with Accelerate, which would unpickle it without weights_only, and nothing
depends on saved random states (trainkit.loaders says what takes their place).
"""

import json
import os
import re
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
from trainkit.errors import RunFailure, UsageError, as_usage_error, failing_together
from trainkit.metrics import RunningMeans
from trainkit.private import prepared_models, prepared_optimizers
from trainkit.run_dir.files import remove_tree, rename_free, sync
from trainkit.run_dir.log import History
from trainkit.run_dir.manifest import verify, write_manifest

STEP_NAME = re.compile(r"step-\d{10}")


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


class Checkpoints:
    """The checkpoints of one run.

    Args:
        fingerprint: names and values that must be equal for a checkpoint to continue this run.
        keep: how many checkpoints to keep, at least 2.
        averages: for each model the average of its weights by name, of --ema.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        run_dir: Path,
        history: History,
        means: RunningMeans,
        fingerprint: dict[str, Any],
        keep: int,
        averages: Sequence[dict[str, torch.Tensor]] = (),
    ):
        self.accelerator, self.directory = accelerator, run_dir / "checkpoints"
        self.history, self.means, self.keep, self.averages = history, means, keep, averages
        self.fingerprint = json.loads(json.dumps(fingerprint, default=str))
        self.saved_step = -1  # of the newest checkpoint
        average_files = averages if accelerator.is_main_process else ()
        accelerator.register_save_state_pre_hook(partial(shards.before_save, average_files))

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
        sums, write = self.means.state(), accelerator.save_state
        if accelerator.is_fsdp2:
            write = shards.writer(accelerator, self._tensors())
        what = f"saving {final} failed, the older checkpoints are untouched"
        with failing_together(accelerator, what, RunFailure):
            if main:
                temporary.mkdir()  # not its parents: the run folder may have been moved away
                (temporary / "state").mkdir()
        with failing_together(accelerator, what, RunFailure):
            write(temporary / "state")
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
                path = self._choose(wanted, notices)
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
                for newer in reversed(self._steps()):
                    if newer.name >= f"step-{progress.step:010d}" and newer.name != path.name:
                        new = rename_free(newer, f"abandoned-{newer.name}")
                        notices.append(f"{newer.name} is now {new.name}")
                sync(self.directory)
                self.history.cut(trainer.get("log_bytes", 0))
                sync(self.directory.parent)
        accelerator.step = 0  # of micro-batches; a checkpoint lies between two optimizer steps
        for notice in notices:
            print(notice, flush=True)
        if path:
            self.history.log_timing({"resumed_at": progress.step})  # curves.py marks the place
        return progress

    def _load_state(self, folder: Path) -> None:
        """Load the state; the optimizers keep the kernels that this run's YAML chose.

        A saved parameter group also says whether it was fused, which depends on the precision it
        was saved under. The step counts of an optimizer that is not fused belong on the CPU, where
        reading them does not wait for the device.
        """
        optimizers = [wrapped.optimizer for wrapped in prepared_optimizers(self.accelerator)]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        kernels = [{n: g[n] for n in ("fused", "foreach", "capturable") if n in g} for g in groups]
        shards.read(self.accelerator, self._tensors(), folder)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                kernel = kernels.pop(0)
                group.update(kernel)
                on_device = kernel.get("fused") or kernel.get("capturable")
                for weight in group["params"]:
                    state = optimizer.state.get(weight, {})
                    for name, value in state.items():
                        shape = getattr(value, "shape", ())
                        # A fused kernel ignores strides and shapes, and may read beyond the end.
                        if shape == weight.shape:
                            state[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)
                        elif kernel.get("fused") and shape:
                            raise UsageError(
                                f"{folder}: {name} of an optimizer is {tuple(shape)} for a weight "
                                f"of {tuple(weight.shape)}"
                            )
                    if isinstance(state.get("step"), torch.Tensor):
                        state["step"] = state["step"].to(weight.device if on_device else "cpu")

    def _tensors(self) -> list[dict[str, torch.Tensor]]:
        """What a checkpoint holds of averages and models."""
        return [*self.averages, *map(shards.state_of, prepared_models(self.accelerator))]

    def _choose(self, wanted: str | None, notices: list[str]) -> Path | None:
        """The folder that --resume names, verified, or None for a fresh start."""
        if wanted is None:
            return None
        candidates = self._steps()
        if wanted not in ("auto", "latest"):
            candidates = [Path(wanted)]
            if candidates[0].resolve().parent != self.directory.resolve():
                raise UsageError(
                    f"--resume {wanted} is not in {self.directory}, and a run continues only in "
                    "its own folder: name that folder, or a copy of it, with --run-dir"
                )
        damaged: list[str] = []
        for path in reversed(candidates):
            problem = verify(path)
            if problem is None:
                notices.extend([*damaged, f"resuming from {path}"])
                return path
            damaged.append(f"passed over {path}: {problem}")
        if damaged:
            raise UsageError(
                f"--resume {wanted}: no checkpoint is whole ({'; '.join(damaged)}); without "
                "--resume a new run starts and this folder is renamed"
            )
        if wanted == "latest":
            raise UsageError(f"--resume latest: there is no checkpoint in {self.directory}")
        notices.append(f"no checkpoint in {self.directory}: starting from the beginning")
        return None

    def _read(self, path: Path, notices: list[str], last_step: int) -> dict[str, Any]:
        """trainer.json of a whole checkpoint, if it belongs to this run."""
        with as_usage_error(f"{path / 'trainer.json'} cannot be used"):
            trainer = json.loads((path / "trainer.json").read_text())
            before, now = trainer["fingerprint"], self.fingerprint
            # Files first: the name of one that is gone says more than a hash over all of them.
            for name in sorted(now | before, key=lambda name: not name.startswith("/")):
                if before.get(name) != now.get(name):
                    raise UsageError(
                        f"{path} belongs to another run: {name} is {before.get(name)!r} there and "
                        f"{now.get(name)!r} here"
                    )
            before, now = trainer["world"], self.world()
            for name in now:
                if before.get(name, now[name]) != now[name]:
                    notices.append(
                        f"{name} was {before[name]!r} and is {now[name]!r}: the run continues at "
                        "the same sample, but bits may differ from here"
                    )
            progress = Progress(**trainer["progress"])
            if progress.step > last_step:
                raise UsageError(
                    f"{path} is of step {progress.step} and this run ends at step {last_step}: "
                    "raise --epochs or --stop-after-steps, or resume from an older checkpoint"
                )
        return trainer

    def world(self) -> dict[str, Any]:
        """What may differ after a resume, but then changes rounding."""
        return {
            "num_processes": self.accelerator.num_processes,
            "sharded": self.accelerator.is_fsdp2,
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
            "world": self.world(),
        }
        (temporary / "trainer.json").write_text(json.dumps(trainer, indent=2) + "\n")
        write_manifest(temporary)
        os.rename(temporary, final)
        sync(self.directory)
        for old in self._steps()[: -self.keep]:
            if old.name != f"step-{progress.best_step:010d}":
                remove_tree(old)

    def _steps(self) -> list[Path]:
        return sorted(p for p in self.directory.glob("step-*") if STEP_NAME.fullmatch(p.name))
