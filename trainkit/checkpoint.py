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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from trainkit.history import History, RunningSums
from trainkit.launch import RunFailure, UsageError, raise_together
from trainkit.rundir import remove_tree, sync_dir, write_durably

FORMAT = 1
STEP_NAME = re.compile(r"step-\d{10}")
FILE_NAME = re.compile(
    r"trainer\.json|state/(model\.safetensors|optimizer\.bin|scheduler\.bin|scaler\.pt"
    r"|random_states_\d+\.pkl)"
)


@dataclass
class Progress:
    """Position of a run.

    Attributes:
        step: optimizer steps since the start of the run.
        epoch: epochs completed.
        batch: batches of --batch-size samples done in this epoch.
        num_skipped: batches whose fp16 gradients overflowed, so that no step was made.
        metrics: the last row that an epoch wrote.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    num_skipped: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

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
    """

    def __init__(
        self,
        accelerator: Accelerator,
        run_dir: Path,
        history: History,
        sums: RunningSums,
        fingerprint: dict[str, Any],
        keep: int,
    ):
        self.accelerator = accelerator
        self.directory = run_dir / "checkpoints"
        self.history, self.sums = history, sums
        self.fingerprint = json.loads(json.dumps(fingerprint, default=str))
        self.keep = keep
        self.last_step = -1

    def save(self, progress: Progress) -> None:
        """Save a checkpoint of this step. Every process must call this, after an optimizer step.

        When it returns, the checkpoint survives a crash. Raises RunFailure on all processes if any
        of them fails; the older checkpoints are then untouched.
        """
        if progress.step == self.last_step:
            return  # the same position: an epoch ends where its last step was saved
        accelerator, main = self.accelerator, self.accelerator.is_main_process
        final = self.directory / f"step-{progress.step:010d}"
        temporary = self.directory / f".tmp-{final.name}"
        sums = self.sums.state()
        self._together(lambda: main and (temporary / "state").mkdir(parents=True), final)
        self._together(lambda: accelerator.save_state(temporary / "state"), final)
        self._together(lambda: main and self._commit(temporary, final, progress, sums), final)
        self.last_step = progress.step
        self._together(lambda: main and self._prune(), final)

    def resume(self, wanted: str | None) -> Progress:
        """Load the checkpoint that --resume names and return where the run stood.

        None: nothing. "auto": the newest whole one if there is any. "latest": the newest whole one.
        Otherwise a folder, which is taken or refused. Every process must call this. Raises
        UsageError on all of them, before any weight has changed.
        """
        accelerator = self.accelerator
        chosen, error, notices = None, None, []
        if accelerator.is_main_process:
            try:
                chosen = self._choose(wanted, notices)
                self.history.cut(chosen[1]["log_bytes"] if chosen else 0)
            except UsageError as problem:
                error = str(problem)
            except OSError as problem:
                error = f"cannot resume from {self.directory}: {problem}"
        raise_together(accelerator, error)
        chosen = broadcast_object_list([chosen])[0]
        for notice in notices:
            accelerator.print(notice, flush=True)
        if chosen is None:
            return Progress()
        path, trainer = chosen
        try:
            accelerator.load_state(path / "state")
        except Exception as problem:  # whatever a forged file makes a reader raise
            error = f"{path} cannot be loaded: {str(problem).strip().splitlines()[0]}"
        raise_together(accelerator, error)
        accelerator.step = 0  # saved between two accumulation windows, at whatever world size
        self.sums.load(trainer["sums"])
        self.last_step = trainer["progress"]["step"]
        self.history.log_timing({"resumed_at": self.last_step})  # plots.py marks the place
        return Progress(**trainer["progress"])

    def _choose(self, wanted: str | None, notices: list[str]) -> tuple[Path, dict] | None:
        """The folder to load and its trainer.json, or None for a fresh start."""
        for leftover in self.directory.glob(".tmp-*"):
            shutil.rmtree(leftover)
        if wanted is None:
            return None
        if wanted not in ("auto", "latest"):
            path = Path(wanted)
            if problem := verify(path):
                raise UsageError(f"--resume {wanted} is not a whole checkpoint: {problem}")
            trainer = self._read(path, notices)
            for newer in self._steps():
                if path.resolve().parent == self.directory.resolve() and newer.name > path.name:
                    aside = self._set_aside(newer, "abandoned")
                    notices.append(
                        f"{newer.name} is newer than --resume {wanted}: now {aside.name}"
                    )
            return path, trainer
        damaged = []
        for path in reversed(self._steps()):
            problem = verify(path)
            if problem is None:
                trainer = self._read(path, notices)
                for bad, why in damaged:
                    notices.append(f"passed over {bad}: {why}")
                    self._set_aside(bad, "damaged")
                notices.append(f"resuming from {path}")
                return path, trainer
            damaged.append((path, problem))
        if damaged:
            raise UsageError(
                f"every checkpoint in {self.directory} is damaged ("
                + "; ".join(f"{path.name}: {why}" for path, why in damaged)
                + "): start without --resume to train from the beginning"
            )
        if wanted == "latest":
            raise UsageError(f"--resume latest: there is no checkpoint in {self.directory}")
        notices.append(f"no checkpoint in {self.directory}: starting from the beginning")
        return None

    def _read(self, path: Path, notices: list[str]) -> dict[str, Any]:
        """trainer.json of a whole checkpoint, if it belongs to this run."""
        trainer = json.loads((path / "trainer.json").read_text())
        there = trainer["fingerprint"]
        for name in self.fingerprint | there:
            if there.get(name) != self.fingerprint.get(name):
                raise UsageError(
                    f"{path} belongs to another run: {name} is {there.get(name)!r} there and "
                    f"{self.fingerprint.get(name)!r} here"
                )
        before, now = trainer["world"], self._world()
        if now["mixed_precision"] == "fp16" and before["mixed_precision"] != "fp16":
            raise UsageError(
                f"{path} was saved with mixed_precision {before['mixed_precision']}, so it has no "
                "loss scale, which fp16 needs: resume with the YAML it was saved under"
            )
        for name in now:
            if before[name] != now[name]:
                notices.append(
                    f"{name} was {before[name]} and is {now[name]}: the run continues at the same "
                    "sample, but bits may differ from here"
                )
        return trainer

    def _world(self) -> dict[str, Any]:
        return {
            "num_processes": self.accelerator.num_processes,
            "mixed_precision": self.accelerator.mixed_precision,
            "device": self.accelerator.device.type,
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
        paths = [path for path in sorted(temporary.rglob("*")) if path.is_file()]
        with ThreadPoolExecutor(4) as pool:  # hashing and fsync both leave the interpreter's lock
            entries = dict(
                zip(
                    (path.relative_to(temporary).as_posix() for path in paths),
                    pool.map(_sync_and_describe, paths),
                    strict=True,
                )
            )
        manifest = {"format": FORMAT, "step": progress.step, "files": entries}
        manifest["sha256"] = _sha256_of_json(manifest)
        sync_dir(temporary / "state")
        write_durably(temporary / "MANIFEST.json", json.dumps(manifest, indent=2).encode())
        os.rename(temporary, final)
        sync_dir(self.directory)

    def _prune(self) -> None:
        for path in self._steps()[: -self.keep]:
            remove_tree(path)

    def _steps(self) -> list[Path]:
        return sorted(p for p in self.directory.glob("step-*") if STEP_NAME.fullmatch(p.name))

    def _set_aside(self, path: Path, why: str) -> Path:
        number = 0
        while (aside := path.with_name(f"{why}-{path.name}{f'.{number}' * bool(number)}")).exists():
            number += 1
        os.rename(path, aside)
        return aside

    def _together(self, action: Callable[[], Any], path: Path) -> None:
        """Run an action that may fail on one process, and fail on all of them if it does."""
        error, cause = None, None
        try:
            action()
        except Exception as problem:  # safetensors and torch raise their own kinds on a full disk
            free = shutil.disk_usage(self.directory).free // 2**20
            first_line = str(problem).strip().splitlines()[0]
            error = f"saving {path} failed: {first_line} ({free} MiB free on that disk)"
            cause = problem
        errors = gather_object([error]) if self.accelerator.num_processes > 1 else [error]
        first = next((message for message in errors if message), None)
        if first:
            raise RunFailure(f"{first}; the older checkpoints are untouched") from cause


def md5(*tensors: torch.Tensor) -> str:
    """Hexadecimal md5 of the bytes of CPU tensors: which data is this?"""
    digest = hashlib.md5(usedforsecurity=False)
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy())
    return digest.hexdigest()


def verify(path: Path) -> str | None:
    """Why a checkpoint folder is not whole, or None if every byte is the one that was saved."""
    try:
        content = (path / "MANIFEST.json").read_bytes()
        manifest = json.loads(content)
        if json.dumps(manifest, indent=2).encode() != content:
            return "MANIFEST.json was changed"
        if manifest.pop("sha256") != _sha256_of_json(manifest) or manifest["format"] != FORMAT:
            return "MANIFEST.json was changed"
        entries = manifest["files"]
        names = {p.relative_to(path).as_posix() for p in path.rglob("*") if not p.is_dir()}
        if unexpected := sorted(names - {"MANIFEST.json"} - entries.keys()):
            return f"{unexpected[0]} does not belong there"
        for name, entry in entries.items():
            if not FILE_NAME.fullmatch(name):
                return f"{name} does not belong there"
            if name not in names or (path / name).is_symlink():
                return f"{name} is missing"
            if (path / name).stat().st_size != entry["bytes"]:
                return f"{name} has {(path / name).stat().st_size} bytes, not {entry['bytes']}"
            if _sha256(path / name) != entry["sha256"]:
                return f"{name} was changed"
        if "trainer.json" not in entries:
            return "trainer.json is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        return f"MANIFEST.json cannot be read ({type(problem).__name__})"
    return None


def _sync_and_describe(path: Path) -> dict[str, Any]:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_of_json(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
