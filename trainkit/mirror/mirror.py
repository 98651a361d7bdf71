"""--mirror URL: copy checkpoints to where they outlive this machine, and fetch them from there.

The mirror is laid out like the run folder. A checkpoint is copied once it is durable: a thread of
each process copies what its process wrote, and the main process waits for the others as commit.py
does, compares the sizes of what has arrived, and copies MANIFEST.json last. A checkpoint that has
one is whole. Each checkpoint also holds what else a run in an empty folder goes on with (BESIDE).

No checkpoint is removed from the run folder before it was copied. The training waits, with its
newest checkpoint durable, only for a mirror that is more than --keep checkpoints behind.
"""

import json
import math
import os
import re
import shutil
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from trainkit.config import TrainingConfig
from trainkit.errors import LoneFailure, RunFailure, UsageError
from trainkit.files.atomic import remove_tree, rename_free, replacing
from trainkit.files.manifest import (
    FILE_NAME,
    read_manifest,
    read_part,
    step_name,
    verify,
    write_part,
    writer_of,
)
from trainkit.files.stores import find_secret, open_store, shown, trying
from trainkit.launch.together import background, failing_together, on_main, wait_together
from trainkit.text import first_sentence

BESIDE = ("metrics.jsonl", "predictions.safetensors", "best.safetensors")
FILE = re.compile(rf"checkpoints/(step-\d{{10}})/(MANIFEST\.json|{FILE_NAME.pattern})")
# A call that takes longer has failed: a store may take a file and never answer.
SECONDS, BYTES_PER_SECOND = 60.0, 2**20


class Mirror:
    """The copy of a run folder at --mirror.

    Raises UsageError if fsspec cannot open the URL, for example because a package is missing.
    """

    def __init__(self, accelerator: Accelerator, config: TrainingConfig):
        self.accelerator, self.config, self.leaving = accelerator, config, threading.Event()
        self.url = shown(config.mirror or "")
        if problem := find_secret(config.mirror or ""):
            raise UsageError(f"--mirror {problem}")
        try:
            self.files, root = open_store(config.mirror or "")
        except (UsageError, ImportError) as problem:
            raise UsageError(f"--mirror {self.url} cannot be used: {problem}") from None
        except Exception as problem:  # its words may hold a password
            reason = type(problem).__name__ if "$" in (config.mirror or "") else str(problem)
            raise UsageError(f"--mirror {self.url} cannot be used: {reason}") from None
        self.files.auto_mkdir = True  # if it is a folder
        self.root = root.rstrip("/")
        self.listed = defaultdict[str, dict[str, int]](dict)  # what _list() returned last
        # By the names of checkpoints what copies them, in order: each waits for the one before.
        self.jobs: dict[str, Future] = {}
        # Of the newest checkpoint: what waits for its name, and what copies this process's files.
        self.naming: list[Future] = []
        self.own: list[Future] = []
        self.problem = ""  # why something of the newest checkpoint or of the end was not copied
        self.is_late = False

    def _ask(self, name: str, num_bytes: int, call: Callable, *args: Any) -> Any:
        limit = SECONDS + num_bytes / BYTES_PER_SECOND

        def answer() -> Any:
            job = background(call, *args)
            if wait([job], limit).not_done:
                raise TimeoutError(f"no answer within {limit:.0f} s")
            return job.result()

        return trying(f"{self.url}/{name}", answer)

    def _put(self, name: str, path: Path) -> None:
        size, target = path.stat().st_size, f"{self.root}/{name}"
        if "file" in self.files.protocol:  # other stores take a file whole or not at all
            self._ask(name, size, self.files.put_file, str(path), f"{target}.tmp")
            self._ask(name, 0, self.files.mv, f"{target}.tmp", target)
        else:
            self._ask(name, size, self.files.put_file, str(path), target)

    def _remove(self, name: str) -> None:
        def remove() -> None:
            with suppress(FileNotFoundError):
                self.files.rm(f"{self.root}/{name}", recursive=True)

        self._ask(name, 0, remove)

    def _remove_checkpoints(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            self._remove(f"checkpoints/{name}/MANIFEST.json")  # first: what is left is not whole
            self._remove(f"checkpoints/{name}")

    def _list(self) -> defaultdict[str, dict[str, int]]:
        """By the names of checkpoints the sizes of their files by name; "" has all other files."""

        def find() -> dict[str, dict[str, Any]]:
            self.files.invalidate_cache()
            with suppress(FileNotFoundError):
                return self.files.find(self.root, detail=True)
            return {}

        listed = defaultdict[str, dict[str, int]](dict)
        for path, info in self._ask("", 0, find).items():
            name = path.removeprefix(f"{self.root}/")
            match = FILE.fullmatch(name)
            listed[match[1] if match else ""][match[2] if match else name] = info["size"]
        return listed

    def open(self) -> None:
        """List what is there. Main process only, as fetch.

        Raises UsageError if a new run would begin where another one is.
        """
        self.listed = self._list()
        if self.listed and self.config.resume is None:
            raise UsageError(
                f"--mirror {self.url} holds a run: continue it with --resume auto, or choose "
                "another place"
            )

    def check_run(self, check: Callable[[Path], dict[str, Any]]) -> None:
        """Raise UsageError if the newest checkpoint of the mirror is one of another run."""
        readable = [name for name, files in self.listed.items() if "trainer.json" in files]
        for name in sorted(readable)[-1:]:
            file = f"checkpoints/{name}/trainer.json"
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "trainer.json")
                self._ask(file, 0, self.files.get_file, f"{self.root}/{file}", str(path))
                try:
                    json.loads(path.read_bytes())
                except ValueError:
                    return  # it is damaged, which verify() finds
                try:
                    check(path.parent)
                except UsageError as problem:
                    raise UsageError(f"--mirror {self.url}, {name}: {problem}") from None

    def fetch(self, path: Path, check: Callable[[Path], dict[str, Any]]) -> str | None:
        """Download a checkpoint to `path`, and the best one before it; or say why it is not whole.

        check(folder) returns trainer.json, or raises UsageError; then `path` is not touched.
        """
        folder = path.with_name(f".tmp-{path.name}")
        (folder / "state").mkdir(parents=True)
        for file, size in self.listed[path.name].items():
            name = f"checkpoints/{path.name}/{file}"
            self._ask(name, size, self.files.get_file, f"{self.root}/{name}", str(folder / file))
        if problem := verify(folder):
            remove_tree(folder)
            return f"in {self.url} {problem}"
        best = path.with_name(step_name(check(folder)["progress"].best_step))
        if best.name in whole_checkpoints(self.listed) and best != path and not best.exists():
            self.fetch(best, check)
        for name in BESIDE:
            if (folder / name).exists():
                with replacing(self.config.run_dir / name) as temporary:
                    shutil.copyfile(folder / name, temporary)
        if path.exists():  # it is damaged
            rename_free(path, f"abandoned-{path.name}")
        os.rename(folder, path)
        print(f"copied {path.name} from {self.url}", flush=True)
        return None

    def go_on(self, path: Path | None, trainer: dict[str, Any]) -> None:
        """Let the mirror have what the run folder has, a checkpoint at `path` or none.

        Every process must call this. What this run no longer leads to, and parts that a kill left,
        are removed from the mirror.
        """
        with failing_together(self.accelerator, ""):
            if self.accelerator.is_main_process:
                newest = path.name if path else ""
                parts = self.listed.keys() - whole_checkpoints(self.listed) - {""}
                doomed = parts | {name for name in self.listed if name > newest}
                self._remove_checkpoints(doomed)
                if "DONE" in self.listed[""]:
                    self._remove("DONE")
        if path and trainer["is_missing"]:
            self.add(path, step_name(trainer["progress"].best_step))

    def wait_if_late(self) -> None:
        """Wait while more than --keep checkpoints are not copied. Every process must call this."""
        keep, main = self.config.keep, self.accelerator.is_main_process
        late = [*self.jobs.values()][:-keep]
        if main and not self.is_late and not all(job.done() for job in late):
            self.is_late = True
            tqdm.write(
                f"--mirror {self.url} is more than --keep {keep} checkpoints behind: the training "
                "waits for it"
            )
        wait_together(self.accelerator, late)

    def is_copying(self, name: str) -> bool:
        """Is this checkpoint still to be copied?"""
        return name in self.jobs and not self.jobs[name].done()

    def take(self, folder: Path, final: Path, best: str) -> None:
        """Copy a checkpoint in the thread, when `folder`, complete by then, has become `final`.

        It puts into the folder what is beside it.

        best: the name of the checkpoint that is kept because it was the best.
        """
        if self.accelerator.is_main_process:
            for name in BESIDE[: 2 + (best == final.name)]:
                with suppress(FileNotFoundError):
                    shutil.copyfile(self.config.run_dir / name, folder / name)
        self.add(final, best)

    def add(self, folder: Path, best: str) -> None:
        """Copy a checkpoint as soon as it has its name. Every process must call this."""
        own_before, before = self.own, [*self.jobs.values()][-1:]
        rank = self.accelerator.process_index
        parts = folder.with_name(f".tmp-mirror-{folder.name}")

        def see_name() -> None:
            while not folder.exists() and not self.leaving.wait(0.01):
                pass

        def copy_own() -> str | None:
            wait([*own_before, naming])
            return _failure(self._copy_own, folder) if folder.exists() else None

        def copy() -> None:
            wait(before)
            if (problem := own.result()) is None:
                return
            if rank != 0:
                parts.mkdir(exist_ok=True)
                write_part(parts, rank, {"problem": problem})
                return
            for other in range(1, self.accelerator.num_processes):
                try:
                    problem = read_part(parts, other, self.leaving)["problem"] or problem
                except RunFailure as failure:
                    problem = str(failure)
            self.problem = problem or _failure(self._complete, folder)
            if self.problem:
                tqdm.write(f"{folder.name} was not mirrored: {self.problem}")
            elif problem := _failure(self._prune, folder, best):
                tqdm.write(f"old checkpoints were not removed from the mirror: {problem}")
            if parts.exists():
                remove_tree(parts)

        naming = background(see_name)
        own = background(copy_own)
        self.naming, self.own = [naming], [own]
        self.jobs[folder.name] = background(copy)

    def _copy_own(self, folder: Path) -> None:
        for name in read_manifest(folder):
            # Modulo: more processes may have saved it than there are now.
            writer = writer_of(name) % self.accelerator.num_processes
            if writer == self.accelerator.process_index:
                self._put(f"checkpoints/{folder.name}/{name}", folder / name)

    def _complete(self, folder: Path) -> None:
        self.listed, files = self._list(), read_manifest(folder)
        sizes = {name: files[name]["bytes"] for name in files}
        if not sizes.items() <= self.listed[folder.name].items():
            raise LoneFailure(f"{self.url} does not have all of what it took")
        for path in (self.config.run_dir / "run.json", folder / "metrics.jsonl"):
            if path.exists():  # for people: a resume reads what the checkpoint holds
                self._put(path.name, path)
        self._put(f"checkpoints/{folder.name}/MANIFEST.json", folder / "MANIFEST.json")

    def _prune(self, folder: Path, best: str) -> None:
        kept = sorted(whole_checkpoints(self.listed) | {folder.name})[-self.config.keep :]
        names = self.listed.keys() - {*kept, best, ""}
        self._remove_checkpoints(name for name in names if name < folder.name)

    def finish(self) -> None:
        """Copy what is beside the checkpoints, DONE last, and say what the mirror lacks.

        Every process must call this. Raises RunFailure on all of them with --mirror-must.
        """
        earlier, missing = [*self.jobs.values()][-1:], ""

        def copy() -> None:
            wait(earlier)
            problem = _failure(self._copy_rest)
            self.problem = self.problem or problem

        if self.accelerator.is_main_process:
            self.jobs["DONE"] = background(copy)
        self.wait()
        if self.problem:
            missing = (
                f"--mirror {self.url} lacks some of this run, which the same command with "
                f"--resume auto copies again: {self.problem}"
            )
        with failing_together(self.accelerator, ""):
            if missing and self.config.mirror_must:
                raise RunFailure(missing)
        print(missing, end="\n" * bool(missing), flush=True)

    def _copy_rest(self) -> None:
        run_dir = self.config.run_dir
        for path in sorted(run_dir.rglob("*")):
            name = path.relative_to(run_dir).as_posix()
            if path.is_file() and not name.startswith("checkpoints/"):
                self._put(name, path)
        if not self.problem:
            self._ask("DONE", 0, self.files.pipe_file, f"{self.root}/DONE", b"")

    def wait(self, seconds: float = math.inf) -> None:
        """Wait so long at most until all processes have copied all. Every process must call this.

        What is still to be copied then is said, and not waited for again.
        """
        wait_together(self.accelerator, [*self.jobs.values()], seconds)
        self._end()

    def _end(self) -> None:
        is_late = not all(job.done() for job in self.jobs.values())
        self.jobs.clear()
        if is_late and self.accelerator.is_main_process:
            tqdm.write(f"--mirror {self.url} does not have the newest checkpoint")

    def close(self, seconds_for_others: float) -> None:
        """Wait until all is copied: for --timeout at most, and not after a second Ctrl-C.

        This does not communicate. It is for the end after an error, which it prints if it waits:
        the launcher may kill this process 30 s after the first one has ended. Others, which may be
        dead, get so many seconds more than this process.
        """
        error, jobs = sys.exception(), [*self.jobs.values()]
        interrupted, main = isinstance(error, KeyboardInterrupt), self.accelerator.is_main_process
        limit = 0 if interrupted else self.config.timeout
        if wait(jobs, min(1, limit)).not_done and main and not interrupted:
            reason = first_sentence(error) if error else "the run is over"
            tqdm.write(f"{reason}: now waiting until --mirror {self.url} has the newest checkpoint")
        if wait(self.naming, min(seconds_for_others, limit)).not_done:
            self.leaving.set()  # the first process, which gives the name, may be dead
        wait(self.own, limit)
        wait(jobs, min(seconds_for_others, limit))
        self.leaving.set()
        wait(jobs, limit)
        self._end()


def open_mirror(accelerator: Accelerator, config: TrainingConfig) -> Mirror | None:
    """Return the mirror, or None without --mirror. Every process must call this.

    Raises UsageError on all of them if it cannot be used, or if it holds a run and this one is new.
    """
    if config.mirror_must and not config.mirror:
        raise UsageError("--mirror-must needs --mirror URL")
    if not config.mirror:
        return None
    with failing_together(accelerator, "--mirror cannot be used"):
        mirror = Mirror(accelerator, config)
    if config.resume is None:
        on_main(accelerator, "--mirror cannot be used", mirror.open)
    return mirror


def whole_checkpoints(listed: dict[str, dict[str, int]]) -> set[str]:
    return {name for name in listed if "MANIFEST.json" in listed[name]}


def _failure(call: Callable[..., object], *args: Any) -> str:
    try:
        call(*args)
    except Exception as problem:  # whatever it is, the run goes on
        return shown(str(problem))
    return ""
