"""--mirror URL: copy checkpoints to where they outlive this machine, and fetch them from there.

The main process alone has a Mirror, because the run folder is one folder for all processes. The
mirror is laid out like the run folder. Once a checkpoint is durable, a thread copies it, compares
the sizes of what has arrived, and copies MANIFEST.json last: a checkpoint that has one is whole.
Each checkpoint also holds what else a run in an empty folder goes on with (BESIDE).

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
from trainkit.launch.processes import background, on_main
from trainkit.launch.run_folder import is_of_run
from trainkit.store.atomic import remove_tree, rename_free, replacing
from trainkit.store.manifest import (
    FILE_NAME,
    read_manifest,
    step_name,
    verify,
)
from trainkit.store.places import Missing, find_secret, open_store, shown, shown_url, trying
from trainkit.text import first_sentence

BESIDE = ("metrics.jsonl", "predictions.safetensors", "best.safetensors")
FILE = re.compile(rf"checkpoints/(step-\d{{10}})/(MANIFEST\.json|{FILE_NAME.pattern})")


class Damaged(Exception):
    """What the mirror holds is not what was written."""


class Mirror:
    """The copy of a run folder at --mirror. Nothing here communicates with other processes.

    Raises UsageError if fsspec cannot open the URL, for example because a package is missing.

    Attributes:
        listed: what _list() returned last.
        jobs: what copies each checkpoint, by its name, in order: each waits for the one before.
        problem: why something of the newest checkpoint or of the end was not copied.
    """

    def __init__(self, config: TrainingConfig):
        self.config = config
        self.url = shown_url(config.mirror or "")
        if problem := find_secret(config.mirror or ""):
            raise UsageError(f"--mirror {problem}")
        try:
            self.files, root = open_store(config.mirror or "")
        except Exception as problem:
            # The words of another error may hold a password.
            is_secret = "$" in (config.mirror or "") and not isinstance(problem, UsageError)
            reason = type(problem).__name__ if is_secret else shown(str(problem))
            raise UsageError(f"--mirror {self.url} cannot be used: {reason}") from None
        self.files.auto_mkdir = True  # if it is a folder
        self.root = root.rstrip("/")
        self.listed = defaultdict[str, dict[str, int]](dict)
        self.jobs: dict[str, Future] = {}
        self.problem = ""
        self.is_late = False

    def _do(self, name: str, call: Callable, *args: Any) -> Any:
        """Return call(*args), which is tried again if it fails. Its timeouts are fsspec's."""
        return trying(f"{self.url}/{name}", call, *args)

    def _put(self, name: str, path: Path) -> None:
        target = f"{self.root}/{name}"
        if "file" not in self.files.protocol:
            return self._do(name, self.files.put_file, str(path), target)
        # In a folder a kill would leave a part of a file; other stores take all of it or nothing.
        self._do(name, self.files.put_file, str(path), f"{target}.tmp")
        self._do(name, self.files.mv, f"{target}.tmp", target)

    def _remove(self, name: str) -> None:
        with suppress(Missing):
            self._do(name, self.files.rm, f"{self.root}/{name}", True)

    def _remove_checkpoints(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            self._remove(f"checkpoints/{name}/MANIFEST.json")  # first: what is left is not whole
            self._remove(f"checkpoints/{name}")

    def _list(self) -> defaultdict[str, dict[str, int]]:
        """By the names of checkpoints the sizes of their files by name; "" has all other files."""
        self.files.invalidate_cache()
        found: dict[str, dict[str, Any]] = {}
        with suppress(Missing):
            found = self._do("", lambda: self.files.find(self.root, detail=True))
        listed = defaultdict[str, dict[str, int]](dict)
        for path, info in found.items():
            name = path.removeprefix(f"{self.root}/")
            match = FILE.fullmatch(name)
            listed[match[1] if match else ""][match[2] if match else name] = info["size"]
        return listed

    def open(self) -> None:
        """List what is there.

        Raises UsageError if a new run would begin where another one is.
        """
        self.listed = self._list()
        beside = [name for name in self.listed[""] if is_of_run(name)]
        is_used = beside or self.listed.keys() - {""}
        if is_used and self.config.resume is None:
            raise UsageError(
                f"--mirror {self.url} holds a run: continue it with --resume auto, or choose "
                "another place"
            )

    def check_run(self, check: Callable[[Path], dict[str, Any]]) -> None:
        """Raise UsageError if the newest checkpoint of the mirror is one of another run.

        That run would lose it, as this one removes what it does not lead to.
        """
        readable = [name for name, files in self.listed.items() if "trainer.json" in files]
        for name in sorted(readable)[-1:]:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "trainer.json")
                try:
                    self._get(f"checkpoints/{name}/{path.name}", path)
                    json.loads(path.read_bytes())
                except (Damaged, ValueError):
                    return  # fetch() says so, and an older checkpoint is taken
                try:
                    check(path.parent)
                except UsageError as problem:
                    raise UsageError(f"--mirror {self.url}, {name}: {problem}") from None

    def _get(self, name: str, path: Path) -> None:
        """Download a file. Raises Damaged if the store finds that it is not what was written."""
        try:
            self._do(name, self.files.get_file, f"{self.root}/{name}", str(path))
        except LoneFailure as failure:
            if re.search("(?i)checksum|content-md5|digest|crc32", str(failure)):
                raise Damaged(str(failure)) from None
            raise  # such as no answer: an older checkpoint would be the wrong one

    def fetch(self, path: Path, check: Callable[[Path], dict[str, Any]]) -> str | None:
        """Download a checkpoint to `path`, and the best one before it; or say why it is not whole.

        check(folder) returns trainer.json, or raises UsageError; then `path` is not touched.
        """
        folder = path.with_name(f".tmp-{path.name}")
        (folder / "state").mkdir(parents=True)
        try:
            for file in self.listed[path.name]:
                self._get(f"checkpoints/{path.name}/{file}", folder / file)
            if problem := verify(folder):
                raise Damaged(f"in {self.url} {problem}")
        except Damaged as problem:
            remove_tree(folder)
            return str(problem)
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

        What this run no longer leads to, and parts that a kill left, are removed from the mirror.
        """
        newest = path.name if path else ""
        parts = self.listed.keys() - whole_checkpoints(self.listed) - {""}
        self._remove_checkpoints(parts | {name for name in self.listed if name > newest})
        if "DONE" in self.listed[""]:
            self._remove("DONE")
        if path and trainer["is_missing"]:
            self.copy(path, step_name(trainer["progress"].best_step))

    def take(self, folder: Path, has_best: bool) -> None:
        """Put what is beside a checkpoint into its folder, before it is made durable.

        has_best: best.safetensors is of an evaluation before this checkpoint.
        """
        for name in BESIDE[: 2 + has_best]:
            with suppress(FileNotFoundError):
                shutil.copyfile(self.config.run_dir / name, folder / name)

    def copy(self, folder: Path, best: str) -> None:
        """Copy a durable checkpoint in a thread, after those before it.

        best: the name of the checkpoint that is kept because it was the best.
        """
        before = [*self.jobs.values()][-1:]

        def copy() -> None:
            wait(before)
            self.problem = _failure(self._copy, folder)
            if self.problem:
                tqdm.write(f"{folder.name} was not mirrored: {self.problem}")
            elif problem := _failure(self._prune, folder, best):
                tqdm.write(f"old checkpoints were not removed from the mirror: {problem}")

        self.jobs[folder.name] = background(copy)

    def is_copying(self, name: str) -> bool:
        """Is this checkpoint still to be copied?"""
        return name in self.jobs and not self.jobs[name].done()

    def wait_if_late(self) -> None:
        """Wait while more than --keep checkpoints are not copied."""
        keep = self.config.keep
        late = [*self.jobs.values()][:-keep]
        if not self.is_late and not all(job.done() for job in late):
            self.is_late = True
            tqdm.write(
                f"--mirror {self.url} is more than --keep {keep} checkpoints behind: the training "
                "waits for it"
            )
        wait(late)

    def _copy(self, folder: Path) -> None:
        files = read_manifest(folder)
        for name in files:
            self._put(f"checkpoints/{folder.name}/{name}", folder / name)
        self.listed = self._list()
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

        Raises RunFailure with --mirror-must.
        """
        wait(self.jobs.values())
        problem = _failure(self._copy_rest)
        self.problem = self.problem or problem
        if not self.problem:
            return
        missing = (
            f"--mirror {self.url} lacks some of this run, which the same command with "
            f"--resume auto copies again: {self.problem}"
        )
        if self.config.mirror_must:
            raise RunFailure(missing)
        print(missing, flush=True)

    def _copy_rest(self) -> None:
        run_dir = self.config.run_dir
        for path in sorted(run_dir.rglob("*")):
            name = path.relative_to(run_dir).as_posix()
            if path.is_file() and name != "run.lock" and not name.startswith("checkpoints/"):
                self._put(name, path)
        if not self.problem:
            self._do("DONE", self.files.pipe_file, f"{self.root}/DONE", b"")

    def wait(self, seconds: float = math.inf) -> None:
        """Wait until all is copied, at most this long; print a line if the newest is not."""
        is_late = wait(self.jobs.values(), min(seconds, threading.TIMEOUT_MAX)).not_done
        self.jobs.clear()
        if is_late:
            tqdm.write(f"--mirror {self.url} does not have the newest checkpoint")

    def close(self) -> None:
        """Wait until all is copied: for --timeout at most, and not after a second Ctrl-C.

        It is for the end after an error, which it prints if it waits: the launcher may kill this
        process 30 s after the first one has ended.
        """
        error = sys.exception()
        limit = 0 if isinstance(error, KeyboardInterrupt) else self.config.timeout
        if limit and wait(self.jobs.values(), min(1, limit)).not_done:
            reason = first_sentence(error) if error else "the run is over"
            tqdm.write(f"{reason}: now waiting until --mirror {self.url} has the newest checkpoint")
        self.wait(limit)


def open_mirror(accelerator: Accelerator, config: TrainingConfig) -> Mirror | None:
    """Return the mirror on the main process; None on the others, and without --mirror.

    Every process must call this. Raises UsageError on all of them if it cannot be used, or if it
    holds a run and this one is new.
    """
    if not config.mirror:
        return None

    def make() -> Mirror:
        mirror = Mirror(config)
        if config.resume is None:
            mirror.open()
        return mirror

    made = on_main(accelerator, "--mirror cannot be used", make)
    return made[0] if made else None


def whole_checkpoints(listed: dict[str, dict[str, int]]) -> set[str]:
    """The names of the checkpoints that the mirror has whole."""
    return {name for name in listed if "MANIFEST.json" in listed[name]}


def _failure(call: Callable[..., object], *args: Any) -> str:
    try:
        call(*args)
    except Exception as problem:  # whatever it is, the run goes on
        return shown(str(problem))
    return ""
