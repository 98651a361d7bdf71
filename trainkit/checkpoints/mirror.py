"""--mirror URL: copy checkpoints to where they outlive this machine, and fetch them from there.

The mirror is laid out like the run folder. Once a checkpoint is durable, a thread of the main
process copies it, compares the sizes of what has arrived, and copies MANIFEST.json last; until then
the run folder keeps it. It also holds what else a run in an empty folder goes on with (BESIDE).
"""

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from trainkit.config import TrainingConfig
from trainkit.errors import LoneFailure, RunFailure, UsageError, as_usage_error
from trainkit.launch.processes import background, on_main
from trainkit.launch.run_folder import is_of_run
from trainkit.store.atomic import remove_tree, rename_free, replacing
from trainkit.store.manifest import STEP_NAME, is_listed, read_manifest, step_name, verify
from trainkit.store.places import Missing, find_secret, open_store, shown, trying
from trainkit.text import first_sentence

BESIDE = ("metrics.jsonl", "predictions.safetensors", "best.safetensors")


class Mirror:
    """The copy of a run folder at --mirror. Nothing here communicates with other processes.

    Attributes:
        listed: the size of each file there, by its name, when it was last listed.
        jobs: what copies each checkpoint, by its name, in order: each waits for the one before.
        problem: why something of the newest checkpoint or of the end was not copied.
    """

    def __init__(self, config: TrainingConfig):
        self.config = config
        self.url = config.mirror or ""
        if problem := find_secret(self.url):
            raise UsageError(f"--mirror {problem}")
        with as_usage_error(f"--mirror {self.url} cannot be used"):
            self.files, root = open_store(self.url)
        self.files.auto_mkdir = True  # if it is a folder
        self.root = root.rstrip("/")
        self.listed: dict[str, int] = {}
        self.jobs: dict[str, Future] = {}
        self.problem = ""

    def _do(self, name: str, call: Callable, *args: Any) -> Any:
        return trying(f"{self.url}/{name}", call, *args)

    def _put(self, folder: Path, inside: str, names: Iterable[str]) -> None:
        """Copy these files of a local folder into one of the mirror, `inside` it."""
        pairs = [(str(folder / name), f"{self.root}/{inside}{name}") for name in names]
        self._do(inside, self.files.put, *map(list, zip(*pairs, strict=True)))

    def _get(self, folder: Path, inside: str, names: Iterable[str]) -> None:
        """Copy these files of a folder of the mirror into a local one."""
        pairs = [(f"{self.root}/{inside}{name}", str(folder / name)) for name in names]
        self._do(inside, self.files.get, *map(list, zip(*pairs, strict=True)))

    def _remove(self, *names: str) -> None:
        for name in names:
            with suppress(Missing):
                self._do(name, self.files.rm, f"{self.root}/{name}", True)

    def _remove_checkpoints(self, names: Iterable[str]) -> None:
        for folder in (f"checkpoints/{name}" for name in sorted(names)):
            self._remove(f"{folder}/MANIFEST.json", folder)  # what a kill leaves is not whole

    def look(self) -> None:
        """See what is there."""
        self.files.invalidate_cache()
        found: dict[str, dict[str, Any]] = {}
        with suppress(Missing):
            found = self._do("", lambda: self.files.find(self.root, detail=True))
        self.listed = {p.removeprefix(f"{self.root}/"): info["size"] for p, info in found.items()}

    def steps(self) -> set[str]:
        """The names of the checkpoints of which the mirror has anything."""
        folders = (path.split("/")[1] for path in self.listed if path.startswith("checkpoints/"))
        return {*filter(STEP_NAME.fullmatch, folders)}

    def whole(self) -> set[str]:
        """Those that the mirror has whole."""
        return {n for n in self.steps() if f"checkpoints/{n}/MANIFEST.json" in self.listed}

    def check_run(self, check: Callable[[Path], object]) -> None:
        """Raise what check(folder) says of the newest checkpoint: another run would lose it."""
        for name in sorted(self.whole())[-1:]:
            with tempfile.TemporaryDirectory() as folder:
                self._get(Path(folder), f"checkpoints/{name}/", ["trainer.json"])
                try:
                    check(Path(folder))
                except UsageError as problem:
                    raise UsageError(f"--mirror {self.url}, {name}: {problem}") from None

    def fetch(self, path: Path) -> str | None:
        """Download a checkpoint to `path`, or say why it is not whole."""
        folder, inside = path.with_name(f".tmp-{path.name}"), f"checkpoints/{path.name}/"
        names = [name.removeprefix(inside) for name in self.listed if name.startswith(inside)]
        self._get(folder, inside, [n for n in names if n == "MANIFEST.json" or is_listed(n)])
        if problem := verify(folder):
            remove_tree(folder)
            return f"in {self.url} {problem}"
        for name in BESIDE:
            if (folder / name).exists():
                with replacing(self.config.run_dir / name) as temporary:
                    shutil.copyfile(folder / name, temporary)
        if path.exists():  # it is damaged
            rename_free(path, f"abandoned-{path.name}")
        os.rename(folder, path)
        print(f"copied {path.name} from {self.url}", flush=True)
        return None

    def go_on(self, path: Path | None, best_step: int) -> None:
        """Remove from the mirror what this run no longer leads to, and what a kill left."""
        newest, whole = path.name if path else "", self.whole()
        self._remove_checkpoints(n for n in self.steps() if n > newest or n not in whole)
        self._remove(*{"DONE"} & self.listed.keys())
        # One that was saved without --mirror lacks what is beside it.
        if path and newest not in whole and (path / "metrics.jsonl").exists():
            self.copy(path, step_name(best_step))

    def take(self, folder: Path, has_best: bool) -> None:
        """Put what is beside a checkpoint into its folder; best.safetensors only if `has_best`."""
        for name in BESIDE[: 2 + has_best]:
            with suppress(FileNotFoundError):
                shutil.copyfile(self.config.run_dir / name, folder / name)

    def copy(self, folder: Path, best: str) -> None:
        """Copy a checkpoint in a thread, after those before it; `best` is the one that is kept."""
        before = [*self.jobs.values()][-1:]

        def copy() -> None:
            wait(before)
            self.problem = _failure(self._copy, folder)
            if self.problem:
                tqdm.write(f"{folder.name} was not mirrored: {self.problem}")
            elif problem := _failure(self._prune, folder.name, best):
                tqdm.write(f"old checkpoints were not removed from the mirror: {problem}")

        self.jobs[folder.name] = background(copy)

    def is_copying(self, name: str) -> bool:
        """Is this checkpoint still to be copied?"""
        return name in self.jobs and not self.jobs[name].done()

    def wait_if_late(self) -> None:
        """Wait while more than --keep checkpoints are not copied."""
        late = [*self.jobs.values()][: -self.config.keep]
        if not all(job.done() for job in late):
            tqdm.write(f"waiting for --mirror {self.url}, --keep {self.config.keep} behind")
        wait(late)

    def _copy(self, folder: Path) -> None:
        files = read_manifest(folder)
        inside = f"checkpoints/{folder.name}/"
        self._put(folder, inside, files)
        self.look()
        if not {inside + n: files[n]["bytes"] for n in files}.items() <= self.listed.items():
            raise LoneFailure(f"{self.url} does not have all of what it took")
        # A folder takes half a file if the machine is lost, and this one says that all is there.
        manifest, part = f"{self.root}/{inside}MANIFEST.json", f"{self.root}/{inside}MANIFEST.part"
        self._do(inside, self.files.put_file, str(folder / "MANIFEST.json"), part)
        with suppress(Missing):  # a call that failed afterwards has moved it
            self._do(inside, self.files.mv, part, manifest)

    def _prune(self, newest: str, best: str) -> None:
        kept = sorted(self.whole() | {newest})[-self.config.keep :]
        self._remove_checkpoints(n for n in self.steps() - {*kept, best} if n < newest)

    def finish(self) -> None:
        """Copy what is beside the checkpoints, DONE last, and say or raise what is lacking."""
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
        files = (p.relative_to(run_dir) for p in sorted(run_dir.rglob("*")) if p.is_file())
        names = [file.as_posix() for file in files if file.parts[0] != "checkpoints"]
        self._put(run_dir, "", [name for name in names if name != "run.lock"])
        if not self.problem:
            self._do("DONE", self.files.pipe_file, f"{self.root}/DONE", b"")

    def wait(self, seconds: float = threading.TIMEOUT_MAX) -> None:
        """Wait until all is copied, at most this long; print a line if the newest is not."""
        if wait(self.jobs.values(), min(1, seconds)).not_done:
            error = sys.exception()  # shown now: a launcher may kill this process in 30 s
            reason = first_sentence(error) if error else "the run is over"
            tqdm.write(f"{reason}: now waiting until --mirror {self.url} has the newest checkpoint")
        if wait(self.jobs.values(), seconds).not_done:
            tqdm.write(f"--mirror {self.url} does not have the newest checkpoint")
        self.jobs.clear()

    def close(self) -> None:
        """Wait until all is copied: for --timeout at most, and not after a second Ctrl-C."""
        self.wait(0 if isinstance(sys.exception(), KeyboardInterrupt) else self.config.timeout)


def open_mirror(accelerator: Accelerator, config: TrainingConfig) -> Mirror | None:
    """Return the mirror, on the main process alone. Every process must call this."""
    if not config.mirror:
        return None

    def make() -> Mirror:
        mirror = Mirror(config)
        if config.resume is None:
            mirror.look()
            if any(map(is_of_run, mirror.listed)):
                raise UsageError(
                    f"--mirror {mirror.url} holds a run: continue it with --resume auto, or choose "
                    "another place"
                )
        return mirror

    made = on_main(accelerator, "--mirror cannot be used", make)
    return made[0] if made else None


def _failure(call: Callable[..., object], *args: Any) -> str:
    try:
        call(*args)
    except Exception as problem:  # whatever it is, the run goes on
        return shown(str(problem))
    return ""
